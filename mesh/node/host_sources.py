"""Where the KV of a transfer comes from, as one question: how far can it be shipped now, and is that the end?

Three kinds: KV that is there (a hold, or what a run has now), a prefill that goes on while its chunks are shipped,
and a run that decodes on while it is shipped and is paused when the rest is short.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from mesh.errors import NotFound, StalePlan
from mesh.identity.signing import SignedRecord
from mesh.kv.precopy import Precopy
from mesh.node.engine import Engine, Held
from mesh.node.host_ledger import Entry, Phase
from mesh.node.host_runs import HostRun

Report = Callable[[HostRun, Held], Awaitable[SignedRecord]]
"""Signs the leg of a run that became a hold, and keeps it in this node's log."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Positions below `stop` can be shipped; `last`: no more will come."""

    stop: int
    last: bool


class Source(Protocol):
    """One source, for one transfer. `count_tokens`: positions that are promised in the offer. `settles`: `next` is to
    be asked only when the receiver has all that was shipped before."""

    settles: bool
    entry: Entry
    count_tokens: int

    async def next(self, position: int) -> Ready:
        """Wait until something at or after `position` can be shipped, or nothing more will come. Raises what
        ended the run, or StalePlan if it finished before it could move."""
        ...

    async def leg(self) -> SignedRecord | None:
        """The signed report of what was computed for this transfer, at its end. Raises if it cannot be kept."""
        ...


class HeldSource:
    """KV that is there."""

    settles: bool = False

    def __init__(self, entry: Entry, kv_tokens: int) -> None:
        self.entry = entry
        self.count_tokens = kv_tokens

    async def next(self, position: int) -> Ready:
        return Ready(max(position, self.count_tokens), last=True)

    async def leg(self) -> SignedRecord | None:
        return None


class PrefillSource:
    """A prefill of this transfer's own."""

    settles: bool = False

    def __init__(self, run: HostRun, report: Report) -> None:
        self.entry = run.entry
        self.count_tokens = len(run.order.token_ids)
        self._run = run
        self._report = report
        self._leg: SignedRecord | None = None

    async def next(self, position: int) -> Ready:
        entry = self.entry
        while entry.phase is Phase.RUNNING and entry.kv_tokens <= position:
            await entry.changed.wait()
        if entry.phase is Phase.RUNNING:
            return Ready(entry.kv_tokens, last=False)
        return Ready(max(position, _held_tokens(entry)), last=True)

    async def leg(self) -> SignedRecord | None:
        if self._leg is None:
            self._leg = await self._report(self._run, Held(self.entry.kv_tokens))
        return self._leg


class MovingSource:
    """A run that goes on while it is shipped, round by round (mesh.kv.precopy), and is then paused; the rest is
    shipped from the hold that it becomes. `run` None: it is a hold already."""

    settles: bool = True

    def __init__(self, engine: Engine, entry: Entry, kv_tokens: int, precopy: Precopy, run: HostRun | None) -> None:
        self.entry = entry
        self.count_tokens = kv_tokens
        self._engine = engine
        self._precopy = precopy
        self._run = run

    async def next(self, position: int) -> Ready:
        if self.entry.phase is Phase.RUNNING:
            rest = await shippable_tokens(self._engine, self.entry) - position
            size = self._precopy.next_round(rest)
            if size:
                return Ready(position + size, last=False)
            await self._pause()
        return Ready(max(position, _held_tokens(self.entry)), last=True)

    async def leg(self) -> SignedRecord | None:
        return None  # the run's own stream carries it

    async def _pause(self) -> None:
        assert self._run is not None  # it runs
        try:
            await self._run.pause()
        except NotFound:
            pass  # it ended at this moment; the ledger is about to hear how
        while self.entry.phase is Phase.RUNNING:
            await self.entry.changed.wait()


def _held_tokens(entry: Entry) -> int:
    if entry.failed is not None:
        raise entry.failed
    if entry.phase is not Phase.HELD:
        raise StalePlan(f"run {entry.run_id!r} ended before its KV could be shipped", field="source")
    return entry.kv_tokens


async def shippable_tokens(engine: Engine, entry: Entry) -> int:
    """Positions of a run or hold that have KV and whose tokens the ledger has heard of. Raises NotFound."""
    if entry.phase is Phase.HELD:
        return entry.kv_tokens
    return min(await engine.kv_tokens(entry.run_id), entry.names.known_tokens)
