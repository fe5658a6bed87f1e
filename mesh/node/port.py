"""NodePort: how an entry sees a node, whether it is this process, a core node over gRPC, or an edge over its uplink.

An entry orchestrates legs over ports; it never touches an engine. Errors are of mesh.errors; a broken link is
NodeUnreachable.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from mesh.identity.place import Place
from mesh.identity.signing import SignedRecord
from mesh.node.engine import FinishReason, RunId
from mesh.node.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkContext:
    """Whose data a leg handles; travels with every leg and every KV transfer and is checked at each border."""

    request_id: str
    tenant: str
    label: str
    model: str
    salt: bytes  # cache namespace, derived at the entry
    policy_version: int
    deadline_s: float | None = None  # remaining time; None: no limit
    entry_site: str = ""  # site of the entry, what a policy's `own` means; empty: no site is `own`
    traceparent: str = field(default="", compare=False)  # see mesh.telemetry.traces; says nothing of whose data it is


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """Run a leg: see mesh.node.engine.RunSpec for the fields of the same name."""

    context: WorkContext
    run_id: RunId
    token_ids: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams
    priority: int = 0
    kv_from: RunId | None = None
    prefill_only: bool = False


@dataclass(frozen=True, slots=True)
class PortTokens:
    """Newly sampled tokens with optional log-probabilities (as engine.Tokens)."""

    ids: tuple[int, ...]
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PortPrefilled:
    """The prompt has KV; `cached_tokens` of it came from a cache or a hold."""

    tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFinished:
    """The run ended; `leg` is the node's signed report."""

    reason: FinishReason
    stop_string: str | None
    leg: SignedRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PortHeld:
    """The run became a hold under its run_id with KV of [0, kv_tokens)."""

    kv_tokens: int
    leg: SignedRecord


PortEvent = PortTokens | PortPrefilled | PortFinished | PortHeld


class KvDirection(Enum):
    """Seen from the node that dials: an edge always dials."""

    PUSH = "push"
    PULL = "pull"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSource:
    """What KV to move: a prefill that the source has still to do (`prefill`), or a run or hold that it has.

    A prefill starts when the receiver has said what it has, and not at all if that is all but less than one block.
    Otherwise the source computes the whole of it, as KV of later positions needs the earlier ones; what its own
    prefix cache holds of the head costs it nothing, and only what the receiver misses travels.

    With `run_id` of a running run and `pause`, the source ships what it has while it goes on decoding, then
    pauses the run, ships the rest and commits. `stop_first`: it pauses the run before it ships anything. `pace_s`:
    while it is shipped, the run makes a token at most this often; 0: as often as it can. A run whose move fails goes
    on at its own speed."""

    run_id: RunId
    prefill: RunOrder | None = None
    pause: bool = False
    stop_first: bool = False
    pace_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOrder:
    """Order to the dialling node: move KV between itself and `peer`; it arrives there (or here) as hold `target`.

    With `own_tokens` (a multiple of the block size below the known tokens; not for a running source) the receiver
    computes positions [0, own_tokens) itself while the rest comes."""

    context: WorkContext
    transfer_id: str
    direction: KvDirection
    peer: Peer
    source: KvSource
    target: RunId
    token_ids: tuple[int, ...]  # known so far
    max_tokens: int
    codec: str  # "f16", "q8_0", or mesh.kv.manifest.CANONICAL
    own_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A node that can be dialled, and who its certificate must say it is. No address: over the relay."""

    address: str
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class KvReport:
    """What a finished transfer moved. `wire_bytes` are codec bytes, `skipped_tokens` the receiver had already,
    or computed itself meanwhile: `own_tokens` of them.
    `leg` is the source's signed report where the source prefilled for this transfer (no run stream carries it)."""

    transfer_id: str
    tokens: int
    skipped_tokens: int
    wire_bytes: int
    codec: str
    duration_s: float
    first_chunk_s: float
    leg: SignedRecord | None = None
    own_tokens: int = 0


class NodePort(Protocol):
    """One node as an entry sees it."""

    @property
    def place(self) -> Place: ...

    @property
    def address(self) -> str:
        """Where its node listener can be dialled; empty for a node that only dials out."""
        ...

    def run(self, order: RunOrder) -> AsyncGenerator[PortEvent, None]:
        """Ends with PortFinished or PortHeld, or raises. Closing the iterator cancels the run at the node."""
        ...

    @property
    def can_dial(self) -> bool:
        """Whether the node can be ordered to dial another one for a transfer."""
        ...

    async def move_kv(self, order: KvOrder) -> KvReport:
        """Do a transfer as the dialling side. Raises KvIncompatible, PolicyDenied, NodeUnreachable,
        PayloadCorrupt ...; then nothing of it is left at the target, and a source run that was paused for it
        stays a hold at the source."""
        ...

    async def release(self, run_id: RunId) -> None:
        """Free a hold or cancel a run there. Best effort, idempotent."""


class BorderGuard(Protocol):
    """The policy check at a border; each node has one and every send and receive asks it. Fails closed."""

    def check_prompt(self, context: WorkContext, place: Place) -> None:
        """Raise PolicyDenied (with `rule`) unless a prompt of this tenant and label may be at `place`."""

    def check_kv(self, context: WorkContext, place: Place) -> None:
        """Raise PolicyDenied (with `rule`) unless KV of this tenant and label may be at `place`."""

    def check_relay(self, context: WorkContext) -> None:
        """Raise PolicyDenied (with `rule`) unless this tenant lets its data pass a relay, which cannot read it."""
