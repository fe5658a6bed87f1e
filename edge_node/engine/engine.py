"""The edge's Engine (mesh.node.engine): a facade over a llama.cpp process that it keeps alive.

Model files are checked here in pure Python and loaded in the child only. When the child dies, its runs end with
NodeUnreachable naming the cause and its holds are gone; a new child is started after a pause that grows with each
early death, and runs that come meanwhile wait for it for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any, Final

import numpy as np

from edge_node.engine.arena import SLOTS, slot_bytes_for
from edge_node.engine.blob import BlobLayout
from edge_node.engine.child import Child
from edge_node.engine.convert import f16_rows
from edge_node.engine.memory import MemoryNeed
from edge_node.engine.messages import (
    CachedTokens,
    CheckIntegrity,
    Export,
    GetLoad,
    Join,
    KvTokens,
    OpenImport,
    Pause,
    Release,
    Request,
    RunSelfTest,
    Start,
    Write,
)
from edge_node.engine.settings import EdgeEngineSettings
from mesh.errors import Internal, InvalidRequest, MeshError, NodeUnreachable
from mesh.kv.geometry import KvDtype
from mesh.kv.slab import KvSlab
from mesh.machine import available_bytes
from mesh.model.description import ModelDescription, describe
from mesh.node.engine import EngineInfo, EngineLoad, ImportSpec, RunEvent, RunId, RunSpec, SelfTest
from mesh.telemetry.log import get_logger

_log: Final = get_logger(__name__)
_SETTLED_S: Final = 60.0  # a child that lived this long did not die of starting


class EdgeEngine:
    """Implements mesh.node.engine.Engine; see there for what each method promises."""

    def __init__(self, settings: EdgeEngineSettings) -> None:
        self._settings = settings
        self._info: EngineInfo | None = None
        self._layout: BlobLayout | None = None
        self._start_message: Start | None = None
        self._child: Child | None = None
        self._child_up = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False
        self._down_because = "it was not started"

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise Internal("the engine has no info before it is started")
        return self._info

    @property
    def child_pid(self) -> int | None:
        """Process id of the llama.cpp process, None while there is none."""
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        if self._start_message is not None or self._closed:
            raise Internal("an engine is started once")
        model = await asyncio.to_thread(describe, self._settings.model_path, model_id=self._settings.model_id)
        start = _start_message(self._settings, model)
        await asyncio.to_thread(_check_memory, self._settings, model, start)
        self._start_message, self._layout = start, BlobLayout.of(model.geometry)
        child = await Child.spawn(start, self._settings.start_timeout_s, self._settings.hang_timeout_s)
        if self._closed:  # meanwhile
            await child.close()
            raise self._down()
        self._use(child)
        self._info = EngineInfo(
            model_id=model.model_id,
            geometry=model.geometry,
            weights_lineage=model.weights_lineage,
            weights_dtype=model.weights_dtype,
            kv_dtype=KvDtype.F16,
            max_context_tokens=start.max_context_tokens,
            kv_capacity_tokens=start.n_ctx_tokens,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            build=child.build,
        )
        self._keeper = asyncio.create_task(self._keep_alive(), name="llama.cpp keeper")

    async def close(self) -> None:
        self._closed = True
        self._down_because = "it was closed"
        self._child_up.set()  # whoever waits for a child learns that there will be none
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._child is not None:
            child, self._child = self._child, None
            await child.close()

    async def generate(self, spec: RunSpec) -> AsyncIterator[RunEvent]:
        child = await self._wait_for_child()
        async with aclosing(child.run(spec)) as events:
            async for event in events:
                yield event

    async def pause(self, run_id: RunId) -> None:
        await self._call(Pause(run_id))

    async def release(self, run_id: RunId) -> None:
        with suppress(NodeUnreachable):  # without a child there are no runs and no holds
            await self._call(Release(run_id))

    async def kv_tokens(self, run_id: RunId) -> int:
        return int(await self._call(KvTokens(run_id)))

    async def export_kv(self, run_id: RunId, start: int, stop: int) -> KvSlab:
        child, layout = self._live_child(), self._blob_layout()
        if not 0 <= start < stop <= self.info.max_context_tokens:
            raise InvalidRequest(f"[{start}, {stop}) is no range of positions", field="stop")
        k, v = (np.empty(layout.shape(stop - start), np.float16) for _ in range(2))
        for a, b in _pieces(start, stop, child.arena.tokens_per_slot(layout)):
            async with _Slot(child) as slot:
                await slot.call(Export(run_id, a, b, slot.index))
                part_k, part_v = child.arena.rows(slot.index, layout, b - a)
                k[:, a - start : b - start], v[:, a - start : b - start] = part_k, part_v
        return KvSlab(start=start, dtype=KvDtype.F16, k=k, v=v)

    async def open_import(self, spec: ImportSpec) -> int:
        return int(await self._call(OpenImport(spec)))

    async def write_kv(self, run_id: RunId, slab: KvSlab) -> None:
        child, layout = self._live_child(), self._blob_layout()
        slab.check(self.info.geometry)
        if slab.n_tokens == 0 or slab.start < 0:
            raise InvalidRequest(f"KV of {slab.n_tokens} tokens from position {slab.start}", field="start")
        k, v = await asyncio.to_thread(f16_rows, slab)
        for a, b in _pieces(slab.start, slab.stop, child.arena.tokens_per_slot(layout)):
            async with _Slot(child) as slot:
                part_k, part_v = child.arena.rows(slot.index, layout, b - a)
                part_k[:], part_v[:] = k[:, a - slab.start : b - slab.start], v[:, a - slab.start : b - slab.start]
                try:
                    await slot.call(Write(run_id, a, b, slot.index))
                except MeshError:
                    if a > slab.start:  # half of a slab is not what the hold was
                        await self.release(run_id)
                    raise

    async def join_kv(self, run_id: RunId, head: RunId) -> None:
        await self._call(Join(run_id, head))

    async def cached_tokens(self, token_ids: tuple[int, ...], salt: bytes) -> int:
        return int(await self._call(CachedTokens(token_ids, salt)))

    async def load(self) -> EngineLoad:
        """Raises NodeUnreachable while the llama.cpp process is down."""
        load: EngineLoad = await self._call(GetLoad())
        return load

    async def self_test(self) -> SelfTest:
        """Raises Overloaded if the engine is not idle."""
        result: SelfTest = await self._call(RunSelfTest())
        return result

    async def check_integrity(self) -> None:
        trouble = await self._call(CheckIntegrity())
        assert trouble is None, trouble

    # --- the child ------------------------------------------------------------------------------------------------

    async def _call(self, request: Request) -> Any:
        return await self._live_child().call(request)

    def _blob_layout(self) -> BlobLayout:
        if self._layout is None:
            raise Internal("the engine was not started")
        return self._layout

    def _live_child(self) -> Child:
        if self._child is None:
            raise self._down()
        return self._child

    def _down(self) -> NodeUnreachable:
        return NodeUnreachable(f"the engine is down: {self._down_because}", cause=self._down_because)

    async def _wait_for_child(self) -> Child:
        """The child, or the one that is about to be. Raises NodeUnreachable after `restart_wait_s`."""
        if self._child is None and self._keeper is not None and not self._closed:
            try:
                async with asyncio.timeout(self._settings.restart_wait_s):
                    await self._child_up.wait()
            except TimeoutError:
                raise self._down() from None
        return self._live_child()

    def _use(self, child: Child) -> None:
        self._child = child
        self._child_up.set()

    async def _spawn_again(self) -> Child:
        assert self._start_message is not None
        return await Child.spawn(self._start_message, self._settings.start_timeout_s, self._settings.hang_timeout_s)

    async def _keep_alive(self) -> None:
        """Replace the child whenever it ends. A child that dies young makes the next pause longer."""
        assert self._start_message is not None
        first_s, longest_s = self._settings.restart_backoff_s
        pause_s, clock = first_s, asyncio.get_running_loop().time
        while True:
            born_s = clock()
            self._down_because = await asyncio.shield(self._live_child().ended)
            self._child = None
            self._child_up.clear()
            _log.warning("the llama.cpp process ended", cause=self._down_because)
            if clock() - born_s > _SETTLED_S:
                pause_s = first_s
            while self._child is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
                try:
                    self._use(await self._spawn_again())
                except MeshError as error:
                    self._down_because = error.message
                    _log.warning("the llama.cpp process could not be restarted", cause=error.message)


class _Slot:
    """A slot of the arena for one call. It is free again when the call was answered, even if its caller was
    cancelled before: until then the child may be writing to it."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._answer: asyncio.Future[Any] | None = None
        self.index = -1

    async def __aenter__(self) -> _Slot:
        self.index = await self._child.free_slots.get()
        return self

    async def call(self, request: Request) -> None:
        self._answer = self._child.start_call(request)
        await asyncio.shield(self._answer)

    async def __aexit__(self, *_: object) -> None:
        if self._answer is None or self._answer.done():
            self._child.free_slots.put_nowait(self.index)
        else:
            self._answer.add_done_callback(lambda _: self._child.free_slots.put_nowait(self.index))


def _pieces(start: int, stop: int, most: int) -> list[tuple[int, int]]:
    """[start, stop) in pieces of at most `most` positions."""
    return [(at, min(at + most, stop)) for at in range(start, stop, most)]


def _start_message(settings: EdgeEngineSettings, model: ModelDescription) -> Start:
    layout = BlobLayout.of(model.geometry)
    limits = (settings.max_context_tokens, model.context_tokens, settings.n_ctx_tokens)
    return Start(
        model_path=str(settings.model_path),
        n_threads=settings.n_threads,
        n_ctx_tokens=settings.n_ctx_tokens,
        max_context_tokens=min(n for n in limits if n is not None),
        max_running=settings.max_running,
        max_sequences=settings.max_sequences,
        max_step_tokens=settings.max_step_tokens,
        max_waiting=settings.max_waiting,
        max_stall_s=settings.max_stall_s,
        slot_bytes=slot_bytes_for(layout, settings.transfer_bytes),
        n_layers=layout.n_layers,
        n_kv_heads=layout.n_kv_heads,
        head_dim=layout.head_dim,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(sorted(model.eos_token_ids)),
    )


def _check_memory(settings: EdgeEngineSettings, model: ModelDescription, start: Start) -> None:
    need = MemoryNeed(
        weights_bytes=settings.model_path.stat().st_size,
        kv_bytes=settings.n_ctx_tokens * model.geometry.f16_bytes_per_token,
        logits_bytes=settings.max_sequences * model.vocab_size * 4,
        transfer_bytes=start.slot_bytes * SLOTS,
    )
    need.check(available_bytes())
