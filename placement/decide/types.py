"""Values that the decision core reads and returns. Frozen; no I/O, clock, protobuf or engine.

The snapshot is columnar: one numpy array per fact over all nodes, so that filters and scores work on whole
arrays and cost does not grow with Python objects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntFlag
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh.identity.place import Place, Tier
from placement.policy.places import PlaceColumns

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
AnyArray = NDArray[Any]
_LONGEST_CHAIN = 8  # of snapshots that nobody decided on; then all is worked out anew


class PlanShape(Enum):
    """What a plan looks like; the numbers are those of the wire."""

    LOCAL = 1  # the edge does all
    CORE = 2  # the core does all
    SPLIT = 3  # the core prefills, KV moves, the edge decodes
    OFFLOAD = 4  # the edge starts, KV moves, the core goes on
    DISAGGREGATED = 5  # one core node prefills, KV moves, another core node decodes


class Reason(IntFlag):
    """Why a node was refused; a node may have several."""

    MODEL = 1  # does not serve the model
    LABEL = 2  # policy does not allow the label there
    NOT_READY = 4  # disconnected, retired or unreachable
    DRAINING = 8
    STALE = 16  # nothing was heard of its load for long; a little stale counts as busy
    CAPACITY = 32  # its queue is full now, or its KV pool is and others wait for it already
    CONTEXT = 64  # prompt and output exceed its context
    WISH = 128  # the caller's placement wish excludes it
    UNREACHABLE_FROM_ENTRY = 256  # neither dialled nor attached
    EXCLUDED = 512  # tried before in this request and failed
    ROLE = 1024  # its role (prefill, decode) does half of a request, and no other node does the other half
    PLUGIN = 2048  # a filter of the operator's own refuses it


class Shipment(Enum):
    """What the receiver does while KV is on its way; the numbers are those of the wire."""

    SHIP = 1  # nothing: all of it comes
    BOTH = 2  # it prefills the head while the tail comes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodecTable:
    """Ways to write KV that some node declares, those that lose least first. A declaration that a node did not make
    is as good as none: it is not used there.

    `bytes_ratio` [n_codecs]: encoded bytes for a byte of f16. `loss_ratio` [n_codecs]: measured rise of perplexity,
    0.01 is 1 %. `encode_s`, `decode_s` [n_nodes, n_codecs]: seconds per token; infinite where the node lacks it.
    """

    names: tuple[str, ...]
    bytes_ratio: FloatArray
    loss_ratio: FloatArray
    encode_s: FloatArray
    decode_s: FloatArray

    def only(self, codecs: IntArray) -> CodecTable:
        """The table of these codecs, by number, in this order."""
        return CodecTable(
            names=tuple(self.names[i] for i in codecs),
            bytes_ratio=self.bytes_ratio[codecs],
            loss_ratio=self.loss_ratio[codecs],
            encode_s=self.encode_s[:, codecs],
            decode_s=self.decode_s[:, codecs],
        )

    @classmethod
    def plain(cls, n_nodes: int) -> CodecTable:
        """f16 everywhere, at no cost: what nodes can do that declare nothing."""
        none = np.zeros((n_nodes, 1))
        return cls(names=("f16",), bytes_ratio=np.ones(1), loss_ratio=np.zeros(1), encode_s=none, decode_s=none)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FitColumns:
    """Step times as each node fitted them to its own (mesh.node.latency_model.LatencyCurve), what is in its steps now,
    and what the entry found the node's answers to take over what was predicted (placement.predict.calibration). Arrays
    [n_nodes]; seconds, tokens, ratios. A fit of zeros: not measured."""

    prefill_base_s: FloatArray
    prefill_token_s: FloatArray
    prefill_growth_s: FloatArray
    decode_base_s: FloatArray
    decode_row_s: FloatArray
    decode_context_s: FloatArray
    error_ratio: FloatArray
    context_tokens: IntArray
    step_tokens: IntArray
    most_running: IntArray
    ttft_scale: FloatArray
    tpot_scale: FloatArray
    scale_error_ratio: FloatArray  # how far corrected predictions are off; 1: nothing is known


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Patch:
    """A snapshot is `origin` but for these rows. `depth`: how many before it are held by it."""

    origin: Snapshot
    rows: IntArray
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """All nodes at one moment as seen from one entry. Row i of every array is node i; rows sorted by node id.

    `entry_row` is the entry's own engine (-1 for an entry without one, the placement service).
    `rtt_s` and `goodput_bytes_per_s` are from the entry to the node; between two other nodes the planner takes
    the sum of round trips and the smaller goodput. NaN: not measured. Speeds of 0: not measured.
    `models`: bool [n_nodes, n_models], columns named by `model_ids`.
    """

    version: int
    places: tuple[Place, ...]
    entry_row: int
    model_ids: tuple[str, ...]
    models: BoolArray
    tier_edge: BoolArray
    ready: BoolArray
    draining: BoolArray
    reachable: BoolArray  # the entry can give it work
    age_s: FloatArray
    running: IntArray
    waiting: IntArray
    waiting_prefill_tokens: IntArray
    kv_free_tokens: IntArray
    kv_capacity_tokens: IntArray
    max_context_tokens: IntArray
    kv_bytes_per_token: IntArray  # f16
    prefill_tokens_per_s: FloatArray
    decode_tokens_per_s: FloatArray
    rtt_s: FloatArray
    goodput_bytes_per_s: FloatArray
    cached_tokens: IntArray  # prefix hit of this request where known, else 0
    prefills: BoolArray  # its role lets it prefill whole prompts
    decodes: BoolArray  # its role lets it generate
    codecs: CodecTable | None = None  # None: CodecTable.plain
    prefill_token_s: FloatArray | None = None  # of a token at position 0; 0: not measured, the speed counts
    prefill_growth_s: FloatArray | None = None  # and more for each position before it
    columns: PlaceColumns | None = None  # of `places`; None: made anew
    made_s: float = math.nan  # the time, on the clock of `now_s`, at which `age_s` was true; NaN: now
    fit: FitColumns | None = None  # of their step times; None: nobody tells one, the speeds count
    kept: dict[object, object] = field(init=False, default_factory=dict, repr=False)
    """What was worked out over it (placement.decide.compiled), and under `Patch` how it came from an earlier one."""

    @property
    def n_nodes(self) -> int:
        return len(self.places)

    def patched(
        self, rows: IntArray, columns: Mapping[str, AnyArray], fit: Mapping[str, AnyArray] | None = None, **facts: Any
    ) -> Snapshot:
        """One that differs in these rows of these columns and of these columns of `fit` ([len(rows)] each), and in
        other fields. Nothing of this one is written to, and what was worked out over it need only be worked out for the
        rows that differ."""
        changed: dict[str, Any] = {name: _with_rows(getattr(self, name), rows, new) for name, new in columns.items()}
        if fit and self.fit is not None:
            fits = {name: _with_rows(getattr(self.fit, name), rows, new) for name, new in fit.items()}
            changed["fit"] = replace(self.fit, **fits)
        made = replace(self, **changed, **facts)
        before = self.kept.get(Patch)
        depth = before.depth + 1 if isinstance(before, Patch) else 0
        if depth < _LONGEST_CHAIN:
            made.kept[Patch] = Patch(origin=self, rows=rows, depth=depth)
        return made

    def with_codecs(self, codecs: CodecTable) -> Snapshot:
        """One that differs in its codecs only: what was worked out over one of them holds for the other."""
        made = replace(self, codecs=codecs)
        object.__setattr__(made, "kept", self.kept)
        return made

    @property
    def all_do_both(self) -> bool:
        """Whether no node has a role of its own: all prefill and decode."""
        known = self.kept.get("all_do_both")
        if known is None:
            known = self.kept["all_do_both"] = bool((self.prefills & self.decodes).all())
        return bool(known)

    def __post_init__(self) -> None:
        if self.columns is None or self.columns.places is not self.places:
            object.__setattr__(self, "columns", PlaceColumns(self.places))

    @property
    def index(self) -> PlaceColumns:
        """What was worked out over the places, shared by all snapshots of the same ones."""
        assert self.columns is not None  # since __post_init__
        return self.columns

    def row_of(self, node_id: str) -> int:
        """Row of a node, -1 if unknown."""
        return self.index.row.get(node_id, -1)


def _with_rows(column: AnyArray, rows: IntArray, values: AnyArray) -> AnyArray:
    new = column.copy()
    new[rows] = values
    return new


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the caller asked for; checked like any other choice. Empty fields wish nothing."""

    shape: PlanShape | None = None
    node_id: str = ""
    site: str = ""
    tier: Tier | None = None
    codec: str = ""  # of a split; must be one that policy allows
    shipment: Shipment | None = None  # of a split


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """The features of a request that placement may look at; never its text."""

    tenant: str
    model: str
    label: str  # effective, after all raises
    prompt_tokens: int
    max_tokens: int
    expected_tokens: int  # guess of the output length; at most max_tokens
    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None
    ttft_deadline_s: float | None = None  # a first token that comes later is of no use
    wish: Wish = Wish()
    exclude: frozenset[str] = frozenset()  # node ids that failed this request already
    brings_kv: bool = False  # it runs already and its KV comes along: the target need not prefill
    cached: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Tokens of its prompt that nodes are thought to have KV of, by node id; beside the snapshot's column."""
    session_node_id: str = ""  # where the session that it continues was served last; empty: none, or not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """`prefill_row` and `decode_row` of a plan as places; equal for local and core."""

    kind: str  # "run", "prefill", "move_kv", "decode"
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One scored way. Seconds; `cost_s` includes price and is what is minimised. Where KV moves, it moves in `codec`,
    and the receiver computes positions [0, own_tokens) itself while the rest comes."""

    shape: PlanShape
    prefill: Place
    decode: Place
    cost_s: float
    ttft_s: float
    total_s: float
    codec: str = ""
    own_tokens: int = 0
    tpot_s: float = 0.0  # of the node that decodes to the end
    error_ratio: float = 1.0  # how far such predictions are off at these nodes, usually; 1: not known
    ttft_scale: float = 1.0  # corrections that are in it already
    tpot_scale: float = 1.0
    cached_tokens: int = 0  # of the prompt, thought to be at the node that prefills


@dataclass(frozen=True, slots=True, kw_only=True)
class ShipOption:
    """One way to get a prompt's KV to where it is decoded: in `codec`, or computed there if it is empty. `refused`
    says why it was not considered; then `ttft_s` may be infinite."""

    codec: str
    own_tokens: int
    ttft_s: float
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Nodes refused for one reason: how many, and the first few."""

    reason: Reason
    count: int
    node_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do: `choice`, then `fallbacks` in order, all filtered by the same policy. `rule` is the policy's
    rule that allowed the choice. `codec` of KV that an operator moves later. `shipping`: what was weighed between the
    best pair of nodes, `why` the same in words; empty where no KV could move."""

    choice: Candidate
    fallbacks: tuple[Candidate, ...]
    candidates: tuple[Candidate, ...]  # best first, the choice included
    refused: tuple[Refused, ...]
    rule: str
    policy_version: int
    codec: str = "f16"
    shipping: tuple[ShipOption, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """No plan. `permanent`: no node of the mesh could ever serve it (NoCapableNode, or PolicyDenied if the
    wish asked for what policy forbids); else some node that could is down or full now, and `missing` names it.
    `rule` names the policy's rule that left no other node."""

    permanent: bool
    denied: bool
    rule: str
    missing: tuple[str, ...]
    refused: tuple[Refused, ...]
    message: str
    overloaded: bool = False  # it would do but for capacity: back off
    late: bool = False  # it would be done too late everywhere: by now (with `overloaded`), or even on idle nodes
    retry_s: float = 0.0  # when to try again; 0: not known, or never
