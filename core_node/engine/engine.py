"""CoreEngine: the asyncio face of the engine thread."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from functools import partial

from core_node.engine.core import EngineCore
from core_node.engine.loading import load_engine
from core_node.engine.settings import CoreEngineSettings
from core_node.engine.thread import EngineThread
from core_node.engine.weights import OnLoad
from mesh.errors import MeshError
from mesh.kv.slab import KvSlab
from mesh.node.engine import (
    EngineInfo,
    EngineLoad,
    Finished,
    Held,
    ImportSpec,
    Prefilled,
    RunEvent,
    RunId,
    RunSpec,
    SelfTest,
    Tokens,
)
from mesh.node.sampling import SamplingParams

_SELF_TEST_PREFILL_TOKENS = 256
_SELF_TEST_DECODE_TOKENS = 32


class CoreEngine:
    """Implements mesh.node.engine.Engine. All methods are for the event loop that called `start`.
    `on_load` is told, on the engine's thread, how many bytes of how many have been read."""

    def __init__(self, settings: CoreEngineSettings, on_load: OnLoad | None = None) -> None:
        self.settings = settings
        self._thread = EngineThread(partial(load_engine, settings, on_load))
        self._info: EngineInfo | None = None

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "the engine was not started"
        return self._info

    async def start(self) -> None:
        await self._thread.start()
        self._info = await self._thread.call(lambda core: core.info)

    async def close(self) -> None:
        await self._thread.close()

    async def generate(self, spec: RunSpec) -> AsyncIterator[RunEvent]:
        events = _Events(self._thread)
        ended = False
        try:
            await self._thread.call(lambda core: core.add_run(spec, events))
            while not ended:
                item = await events.queue.get()
                ended = isinstance(item, Finished | Held | MeshError)
                if isinstance(item, MeshError):
                    raise item
                yield item
        finally:
            if not ended:  # the consumer went away, or the run was refused (then there is nothing to cancel)
                self._thread.post(lambda core: core.cancel(spec.run_id, events))

    async def pause(self, run_id: RunId) -> None:
        await self._thread.call(lambda core: core.pause(run_id))

    async def release(self, run_id: RunId) -> None:
        await self._thread.call(lambda core: core.release(run_id))

    async def kv_tokens(self, run_id: RunId) -> int:
        return await self._thread.call(lambda core: core.kv_tokens(run_id))

    async def export_kv(self, run_id: RunId, start: int, stop: int) -> KvSlab:
        return await self._thread.call(lambda core: core.export_kv(run_id, start, stop))

    async def open_import(self, spec: ImportSpec) -> int:
        return await self._thread.call(lambda core: core.open_import(spec))

    async def write_kv(self, run_id: RunId, slab: KvSlab) -> None:
        await self._thread.call(lambda core: core.write_kv(run_id, slab))

    async def join_kv(self, run_id: RunId, head: RunId) -> None:
        await self._thread.call(lambda core: core.join_kv(run_id, head))

    async def cached_tokens(self, token_ids: tuple[int, ...], salt: bytes) -> int:
        return await self._thread.call(lambda core: core.cached_tokens(token_ids, salt))

    async def load(self) -> EngineLoad:
        return await self._thread.call(EngineCore.load)

    async def self_test(self) -> SelfTest:
        """A run of its own, under a salt that nobody else has."""
        load = await self.load()
        n_prefill = max(1, min(_SELF_TEST_PREFILL_TOKENS, self.info.max_context_tokens - _SELF_TEST_DECODE_TOKENS - 1))
        spec = RunSpec(
            run_id=RunId(f"self-test-{os.urandom(8).hex()}"),
            token_ids=tuple(i % self.info.vocab_size for i in range(n_prefill)),
            prompt_tokens=n_prefill,
            sampling=SamplingParams(max_tokens=_SELF_TEST_DECODE_TOKENS, seed=0, temperature=0.0, ignore_eos=True),
            salt=os.urandom(16),
        )
        started = prefilled = last = time.perf_counter()
        n_decoded = 0
        async for event in self.generate(spec):
            last = time.perf_counter()
            if isinstance(event, Prefilled):
                prefilled = last
            elif isinstance(event, Tokens):
                n_decoded += len(event.ids)
        busy = load.running + load.waiting
        return SelfTest(
            prefill_tokens_per_s=n_prefill / (prefilled - started),
            decode_tokens_per_s=(n_decoded - 1) / (last - prefilled),
            notes=(f"measured beside {busy} other requests",) if busy else (),
        )

    async def check_integrity(self) -> None:
        await self._thread.call(EngineCore.check_integrity)


class _Events:
    """A run's sink on the engine thread and its queue on the event loop."""

    def __init__(self, thread: EngineThread) -> None:
        self.queue: asyncio.Queue[RunEvent | MeshError] = asyncio.Queue()
        self._thread = thread

    def put(self, item: RunEvent | MeshError) -> None:
        self._thread.tell(self.queue.put_nowait, item)
