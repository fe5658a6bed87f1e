"""An EngineCore over the list backend, with a clock that counts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from edge_node.engine.book import CoreLimits, KeyedEvent
from edge_node.engine.core import EngineCore
from mesh.errors import MeshError
from mesh.node.engine import Finished, Held, ImportSpec, Prefilled, RunEvent, RunId, RunSpec, Tokens
from mesh.node.sampling import SamplingParams
from tests.edge_node.engine.list_backend import EOS, LAYOUT, ListBackend

SALT, OTHER_SALT = b"a", b"b"


class LetterStream:
    """A token's text is one letter."""

    def push(self, token_id: int) -> str:
        return chr(ord("A") + token_id)

    def flush(self) -> str:
        return ""


class CoreDriver:
    """Drives a core by hand and sorts its events by submission."""

    def __init__(self, *, n_cells: int = 200, n_sequences: int = 8, **limits: int) -> None:
        self.backend = ListBackend(n_cells, n_sequences)
        sizes = {"max_context_tokens": 100, "max_running": 4, "max_step_tokens": 16, "max_waiting": 8} | limits
        self.core = EngineCore(
            self.backend,
            LAYOUT,
            CoreLimits(capacity_tokens=n_cells, max_sequences=n_sequences, max_stall_s=0.5, **sizes),
            eos_token_ids=frozenset({EOS}),
            new_stream=LetterStream,
            clock=itertools.count().__next__,
        )
        self.events: dict[int, list[RunEvent | MeshError]] = {}
        self._keys = itertools.count(1)

    def submit(self, token_ids: Sequence[int], run_id: str = "", **changes: Any) -> int:
        """Returns the key; the run's name is `run_id` or made of the key."""
        key = next(self._keys)
        self.core.book.submit(key, spec_of(token_ids, run_id or f"run{key}", **changes))
        self._take()
        return key

    def step(self) -> bool:
        """One step, with the books checked after it."""
        busy = self.core.step()
        self._take()
        self.core.check()
        return busy

    def drain(self) -> None:
        """Until nothing moves."""
        while self.step():
            pass

    def run(self, token_ids: Sequence[int], run_id: str = "", **changes: Any) -> int:
        key = self.submit(token_ids, run_id, **changes)
        self.drain()
        return key

    def take(self) -> None:
        """Collect events of commands."""
        self._take()

    def _take(self) -> None:
        taken: list[KeyedEvent] = self.core.book.take_events()
        for key, event in taken:
            self.events.setdefault(key, []).append(event)

    def ids(self, key: int) -> list[int]:
        return [i for e in self.events.get(key, []) if isinstance(e, Tokens) for i in e.ids]

    def prefilled(self, key: int) -> list[Prefilled]:
        return [e for e in self.events.get(key, []) if isinstance(e, Prefilled)]

    def last(self, key: int) -> RunEvent | MeshError:
        return self.events[key][-1]

    def ended(self, key: int) -> bool:
        return key in self.events and isinstance(self.last(key), Finished | Held | MeshError)


def spec_of(
    token_ids: Sequence[int],
    run_id: str,
    *,
    max_tokens: int = 5,
    prompt_tokens: int | None = None,
    salt: bytes = SALT,
    kv_from: str | None = None,
    prefill_only: bool = False,
    priority: int = 0,
    **sampling: Any,
) -> RunSpec:
    """A greedy run that does not stop at the end of sequence, unless told otherwise."""
    values: dict[str, Any] = {"max_tokens": max_tokens, "seed": 1, "temperature": 0.0, "ignore_eos": True} | sampling
    return RunSpec(
        run_id=RunId(run_id),
        token_ids=tuple(token_ids),
        prompt_tokens=len(token_ids) if prompt_tokens is None else prompt_tokens,
        sampling=SamplingParams(**values),
        salt=salt,
        priority=priority,
        kv_from=None if kv_from is None else RunId(kv_from),
        prefill_only=prefill_only,
    )


def import_of(run_id: str, token_ids: Sequence[int], max_tokens: int, salt: bytes = SALT) -> ImportSpec:
    return ImportSpec(run_id=RunId(run_id), token_ids=tuple(token_ids), max_tokens=max_tokens, salt=salt)
