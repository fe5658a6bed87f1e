"""What goes into the plan runner (events) and what comes out of it (effects). Frozen values; no I/O.

The runner names runs, holds and transfers; whoever drives it executes effects in order over node ports and
reports what happens as events. Rules for the driver:

- `StartRun`, `MoveKv`: start a task, do not wait for it. Its outcome comes back as events: those of the run, and
  `KvMoved` or `KvFailed` of the transfer. A run whose stream ends without a last event is `RunFailed`.
- `CancelMove`: wait until the task has ended before the next effect, so that the `Release` behind it finds what a
  transfer that won the race has left. `CloseRun` and `Release` may be left to an owned task, in order per node;
  `Release` is best effort and often frees nothing.
- Events of a closed run or cancelled transfer may still be delivered; the runner knows what to do with them.
- `Finish` or `Fail` comes exactly once. Late events may ask for a `Release` even after it.
- Each `MoveRequested` is answered by exactly one `EmitMigration` or `MoveFailed` with its cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mesh.errors import MeshError
from mesh.identity.signing import SignedRecord
from mesh.node.engine import FinishReason, RunId
from mesh.node.port import KvReport
from placement.decide.moves import MoveWay
from placement.decide.types import Plan

Logprobs = tuple[tuple[float, tuple[tuple[int, float], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSpec:
    """One request and its plan. `prompt_ids` is not empty.

    `generated_ids` were made before, under another entry, and are not emitted again. `eos_token_ids` are those that end
    this request (empty if it ignores end of sequence): they tell, when a node dies right after its last token, that
    nothing is left to generate.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    plan: Plan
    min_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    generated_ids: tuple[int, ...] = ()


class MoveCause(Enum):
    """Why a request moved; the values are those of the wire."""

    PLAN = "plan"
    OPERATOR = "operator"
    DRAIN = "drain"
    OVERLOAD = "overload"
    LINK = "link"
    FALLBACK = "fallback"


class KvSourceKind(Enum):
    """Where the KV of a transfer comes from."""

    PREFILL = "prefill"  # the source has still to compute it (KvSource.prefill), under `source_run`
    RUNNING = "running"  # a run that goes on while it is shipped, then pauses (KvSource.pause)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request. `cached_tokens` of the prompt came from a cache when it was first prefilled."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


# Events


@dataclass(frozen=True, slots=True)
class Begin:
    """Start the plan. First, and once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrefilled:
    """As PortPrefilled."""

    run_id: RunId
    tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTokens:
    """As PortTokens."""

    run_id: RunId
    ids: tuple[int, ...]
    logprobs: Logprobs = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """As PortFinished: the last event of a run that ended by itself."""

    run_id: RunId
    reason: FinishReason
    stop_string: str | None
    leg: SignedRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeld:
    """As PortHeld: the last event of a run that became a hold."""

    run_id: RunId
    kv_tokens: int
    leg: SignedRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailed:
    """The run raised, or its stream broke; its memory is the node's to free."""

    run_id: RunId
    error: MeshError


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMoved:
    """The transfer is done: the KV is the target's hold `target_run`."""

    transfer_id: str
    report: KvReport


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFailed:
    """The transfer failed; nothing of it is left at the target, unless its last word was lost on the way."""

    transfer_id: str
    error: MeshError


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequested:
    """Move the running request. The caller has checked `target_node_id` against the request's policy. `way` None:
    pre-copy in the plan's codec."""

    target_node_id: str
    cause: MoveCause
    way: MoveWay | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client went away or aborted."""


@dataclass(frozen=True, slots=True)
class DeadlineExpired:
    """The request's time is over."""


Event = (
    Begin
    | RunPrefilled
    | RunTokens
    | RunFinished
    | RunHeld
    | RunFailed
    | KvMoved
    | KvFailed
    | MoveRequested
    | Cancelled
    | DeadlineExpired
)

# Effects


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRun:
    """Run at the node: prompt and generated tokens so far, on top of the hold `kv_from` if there is one.
    `prefill_only`: compute their KV and become a hold."""

    node_id: str
    run_id: RunId
    token_ids: tuple[int, ...]
    kv_from: RunId | None
    prefill_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseRun:
    """Close the run's stream, which cancels it at the node."""

    node_id: str
    run_id: RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveKv:
    """Move KV from one node to a hold `target_run` at another; which of them dials is the driver's to see.

    `token_ids` are those of the KV, as far as known: for a prefill exactly the tokens to compute (all but the
    last, which the target decodes), for a running source its tokens so far. `max_tokens`: most positions.
    `own_tokens`: the target computes so many of the first itself meanwhile.
    `stop_first`, `pace_s`: as in KvSource.
    """

    transfer_id: str
    source_node_id: str
    target_node_id: str
    source: KvSourceKind
    source_run: RunId
    target_run: RunId
    token_ids: tuple[int, ...]
    max_tokens: int
    codec: str
    own_tokens: int = 0
    stop_first: bool = False
    pace_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelMove:
    """Stop the transfer; one that had just ended may have left a hold, which the next Release frees."""

    transfer_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Free a hold, or cancel a run that may have become one."""

    node_id: str
    run_id: RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Tokens for the client; `offset_tokens` is the index of the first among the generated ones."""

    offset_tokens: int
    ids: tuple[int, ...]
    logprobs: Logprobs
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitMigration:
    """The request goes on at another node; precedes the first tokens from there.

    `recomputed`: tokens were replayed. The KV figures are 0 and `codec` is empty where no KV moved.
    `pause_s`: between the last token before and the first after; 0 if there was none before.
    """

    from_node_id: str
    to_node_id: str
    offset_tokens: int
    kv_wire_bytes: int
    kv_tokens: int
    codec: str
    cause: MoveCause
    pause_s: float
    transfer_s: float
    recomputed: bool
    own_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveFailed:
    """A move that was requested or planned did not happen; the request goes on (or has ended) without it."""

    target_node_id: str
    cause: MoveCause
    error: MeshError


@dataclass(frozen=True, slots=True, kw_only=True)
class LegDone:
    """A node's signed report of a leg, for the receipt."""

    node_id: str
    run_id: RunId
    record: SignedRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The request ended well. Times are from Begin, seconds; `ttft_s` is `total_s` if no token came."""

    reason: FinishReason
    stop_string: str | None
    usage: Usage
    ttft_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The request failed; what was emitted before stays true."""

    error: MeshError
    usage: Usage


Effect = (
    StartRun | CloseRun | MoveKv | CancelMove | Release | Emit | EmitMigration | MoveFailed | LegDone | Finish | Fail
)
