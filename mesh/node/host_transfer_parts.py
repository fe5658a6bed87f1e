"""What sending and receiving of KV have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from mesh.identity.signing import SignedRecord
from mesh.node.engine import Engine, RunId
from mesh.node.host_frames import KvOpen
from mesh.node.host_ledger import Ledger
from mesh.node.host_room import ImportRoom
from mesh.node.legs import Clock, Signer
from mesh.node.port import BorderGuard, KvReport

_P = ParamSpec("_P")
_R = TypeVar("_R")
_INLINE_BYTES = 256 * 1024  # about a millisecond of encoding and hashing

Free = Callable[[RunId], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferParts:
    """What both directions work with; owned by the NodeHost. `free` releases a run id in engine and ledger, and
    finishes even if the caller is cancelled. `room`: where imports wait for KV blocks."""

    engine: Engine
    ledger: Ledger
    guard: BorderGuard
    signer: Signer
    clock: Clock
    kv_lifetime_s: float
    free: Free
    room: ImportRoom


async def computed(n_bytes: int, work: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """What `work` returns; off the event loop if it is long. The tail of a moving run is short, and a thread's
    turn would cost it more than the work."""
    if n_bytes <= _INLINE_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def make_report(
    order: KvOpen,
    *,
    codec: str,
    tokens: int,
    skipped_tokens: int,
    wire_bytes: int,
    duration_s: float,
    first_chunk_s: float | None,
    leg: SignedRecord | None,
    own_tokens: int = 0,
) -> KvReport:
    """The report of a transfer that is done; `first_chunk_s` is None if nothing had to travel."""
    return KvReport(
        transfer_id=order.transfer_id,
        tokens=tokens,
        skipped_tokens=skipped_tokens,
        wire_bytes=wire_bytes,
        codec=codec,
        duration_s=duration_s,
        first_chunk_s=duration_s if first_chunk_s is None else first_chunk_s,  # nothing had to travel
        leg=leg,
        own_tokens=own_tokens,
    )
