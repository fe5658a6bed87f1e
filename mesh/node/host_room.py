"""Back-pressure between a node that prefills and the one that decodes.

At the receiver, an import whose KV has still to be computed waits for room, in the order of arrival, before it says
what it wants: until then the source computes nothing, so that two full nodes cannot wait for each other. At the
source, prefills that are computed, wait to be, or wait to move count against the pool; more are refused as overloaded
instead of preempting each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

from mesh.errors import Overloaded
from mesh.node.engine import Engine, ImportSpec

_LOOK_AGAIN_S = 0.05  # room also comes when nothing tells


class ImportRoom:
    """Imports that wait for room. Owned by the node's Moves."""

    def __init__(self, wait_change: Callable[[], Awaitable[None]], *, patience_s: float, most_waiting: int) -> None:
        self._wait_change = wait_change
        self._patience_s = patience_s
        self._most_waiting = most_waiting
        self._turn = asyncio.Lock()  # fair: first come, first served
        self.waiting = 0

    async def open(self, engine: Engine, spec: ImportSpec, still_wanted: Callable[[], None]) -> int:
        """As Engine.open_import, once there is room. `still_wanted` raises when it is not. Raises Overloaded when
        there is none for too long, too many wait already, or it could never fit."""
        if self.waiting >= self._most_waiting:
            raise Overloaded(f"{self.waiting} imports wait for KV blocks here, at most {self._most_waiting} may")
        self.waiting += 1
        try:
            give_up_s = asyncio.get_running_loop().time() + self._patience_s
            async with self._turn:
                return await self._at_its_turn(engine, spec, still_wanted, give_up_s)
        finally:
            self.waiting -= 1

    async def _at_its_turn(
        self, engine: Engine, spec: ImportSpec, still_wanted: Callable[[], None], give_up_s: float
    ) -> int:
        while True:
            still_wanted()
            try:
                return await engine.open_import(spec)
            except Overloaded:
                too_big = spec.max_tokens > engine.info.kv_capacity_tokens
                if too_big or asyncio.get_running_loop().time() >= give_up_s:
                    raise
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_AGAIN_S):
                    await self._wait_change()


class PrefillBacklog:
    """Tokens of prefills that were begun for transfers and have not left yet. Owned by the node's Moves."""

    def __init__(self, *, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self.tokens = 0

    @contextmanager
    def counted(self, tokens: int) -> Iterator[None]:
        """Count one while it is computed and shipped. Raises Overloaded if the others leave no room for it."""
        if self.tokens and self.tokens + tokens > self._most_tokens:
            raise Overloaded(
                f"{self.tokens} tokens of prefills are being computed or wait to move, at most {self._most_tokens} may"
            )
        self.tokens += tokens
        try:
            yield
        finally:
            self.tokens -= tokens
