"""The ledger of a node: whose each run, hold and import is, what tokens its KV is of, and when it is let go.

The engine knows run ids only. The ledger is what keeps one tenant's KV from being continued or shipped for
another, and KV from being continued with tokens that it is not of. One owner: the NodeHost, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from mesh.errors import AlreadyExists, InvalidRequest, KvIncompatible, MeshError, NotFound, PolicyDenied, StalePlan
from mesh.kv.chunks import PrefixNames
from mesh.node.engine import RunId
from mesh.node.port import RunOrder, WorkContext


class Owner(NamedTuple):
    """Whose KV it is; all must be equal to continue or ship it. The entry's site counts too: else a node could ask
    for the KV of another site's request, and have a policy's `own` mean itself."""

    tenant: str
    label: str
    salt: bytes
    model: str
    entry_site: str

    @classmethod
    def of(cls, context: WorkContext) -> Owner:
        return cls(context.tenant, context.label, context.salt, context.model, context.entry_site)


class Phase(Enum):
    """RUNNING: an engine run. IMPORTING: a hold that a transfer fills. HELD: complete, waits to be continued.
    GONE: ended, failed, continued or released."""

    RUNNING = "running"
    IMPORTING = "importing"
    HELD = "held"
    GONE = "gone"


class Pulse:
    """Wakes all who wait when something changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def beat(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """One run, import or hold.

    `names` knows the token ids (of an import perhaps only the first ones). `kv_tokens` is the progress of a
    prefill, and of a hold what it has. `prefix` names the tokens of a hold's KV. `failed` is set if the run raised.
    """

    run_id: RunId
    owner: Owner
    phase: Phase
    names: PrefixNames
    kv_tokens: int = 0
    prefix: bytes = b""
    kv_in_bytes: int = 0
    kv_out_bytes: int = 0
    pins: int = 0
    failed: MeshError | None = None
    changed: Pulse = field(default_factory=Pulse)
    timer: asyncio.TimerHandle | None = None

    def check_owner(self, context: WorkContext) -> None:
        """Raise PolicyDenied unless it belongs to this tenant, label, namespace, model and entry's site."""
        if self.owner != Owner.of(context):
            raise PolicyDenied("the KV belongs to another tenant, label, namespace, model or entry", rule="kv-owner")


class Ledger:
    """All entries by run id. `expire(run_id)` is called for a hold that nobody used for `hold_timeout_s`."""

    def __init__(self, *, layout_hash: str, hold_timeout_s: float, expire: Callable[[RunId], None]) -> None:
        self._layout_hash = layout_hash
        self._hold_timeout_s = hold_timeout_s
        self._expire = expire
        self._entries: dict[RunId, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def count(self, phase: Phase) -> int:
        return sum(entry.phase is phase for entry in self._entries.values())

    def of_phase(self, phase: Phase) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.phase is phase]

    def check_free(self, run_id: RunId) -> None:
        """Raise AlreadyExists if the name is in use."""
        if run_id in self._entries:
            raise AlreadyExists(f"run id {run_id!r} is in use", field="run_id")

    def open(self, run_id: RunId, context: WorkContext, phase: Phase, token_ids: tuple[int, ...]) -> Entry:
        """A new entry. Raises AlreadyExists."""
        self.check_free(run_id)
        names = PrefixNames(self._layout_hash, context.salt, token_ids)
        entry = Entry(run_id=run_id, owner=Owner.of(context), phase=phase, names=names)
        self._entries[run_id] = entry
        return entry

    def detached(self, order: RunOrder) -> Entry:
        """An entry for KV of the order's tokens that another node has; not in the ledger."""
        context = order.context
        names = PrefixNames(self._layout_hash, context.salt, order.token_ids)
        return Entry(run_id=order.run_id, owner=Owner.of(context), phase=Phase.HELD, names=names)

    def get(self, run_id: RunId, context: WorkContext) -> Entry:
        """Raises NotFound, or PolicyDenied if it is another's."""
        entry = self._entries.get(run_id)
        if entry is None:
            raise NotFound(f"there is no run or hold {run_id!r} here", field="run_id")
        entry.check_owner(context)
        return entry

    def hold(self, entry: Entry, kv_tokens: int, prefix: bytes) -> None:
        """It is a complete hold of `kv_tokens` positions from now on; its time runs unless it is pinned."""
        entry.phase, entry.kv_tokens, entry.prefix = Phase.HELD, kv_tokens, prefix
        self._arm(entry)
        entry.changed.beat()

    def claim(self, run_id: RunId, context: WorkContext, token_ids: tuple[int, ...]) -> Entry:
        """Take a hold out, to continue it with a run over `token_ids`.

        Raises NotFound, PolicyDenied, StalePlan (not a hold now, or being shipped), InvalidRequest (no token left
        to compute) or KvIncompatible (its KV is not of these tokens)."""
        entry = self.get(run_id, context)
        if entry.phase is not Phase.HELD or entry.pins:
            raise StalePlan(f"{run_id!r} is {entry.phase.value} or being shipped, it cannot be continued now")
        if entry.kv_tokens >= len(token_ids):
            raise InvalidRequest(
                f"the hold has KV of {entry.kv_tokens} tokens; a run on it needs at least one more", field="kv_from"
            )
        names = PrefixNames(self._layout_hash, context.salt, token_ids[: entry.kv_tokens])
        if names.prefix(entry.kv_tokens) != entry.prefix:
            raise KvIncompatible("the hold's KV is of other tokens than the run's", field="prefix_hash")
        self.close(entry)
        return entry

    def pin(self, entry: Entry) -> None:
        """Keep a hold while it is shipped."""
        entry.pins += 1
        self._disarm(entry)

    def unpin(self, entry: Entry) -> None:
        """End of shipping: its time starts anew."""
        entry.pins -= 1
        if entry.phase is Phase.HELD:
            self._arm(entry)

    def close(self, entry: Entry) -> None:
        """It is gone from the engine, or about to be. Idempotent."""
        self._disarm(entry)
        if self._entries.get(entry.run_id) is entry:
            del self._entries[entry.run_id]
        entry.phase = Phase.GONE
        entry.changed.beat()

    def find(self, run_id: RunId) -> Entry | None:
        """Without an owner's check: for release and expiry."""
        return self._entries.get(run_id)

    def _arm(self, entry: Entry) -> None:
        self._disarm(entry)
        if not entry.pins:
            loop = asyncio.get_running_loop()
            entry.timer = loop.call_later(self._hold_timeout_s, self._expire, entry.run_id)

    def _disarm(self, entry: Entry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
