"""The Engine interface: what the rest of a node may ask of the thing that computes tokens.

Two engines implement it: core_node.engine (torch, paged KV) and edge_node.engine (llama.cpp in a child
process). tests/conformance/engine_suite.py holds both to what is written here. Every method may be called from the
event loop only; an engine does its work on its own thread or process.

Positions are absolute: position i is token_ids[i]. A *run* computes tokens; a *hold* is KV that stays in the
engine's memory without a run (a paused run, a finished prefill, an import) until it is continued or released.
Runs and holds share one name space of `run_id`s: a run that pauses becomes a hold of the same id, and a run
whose spec names `kv_from` consumes that hold.

Several samples of one prompt are several runs that differ in `sampling.sample_index`. An engine that can shares their
KV: the core engine computes what they have in common once and copies a block only when one of them writes into it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType, Protocol

from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.slab import KvSlab
from mesh.node.latency_model import UNKNOWN, LatencyCurve
from mesh.node.sampling import SamplingParams

RunId = NewType("RunId", str)


class FinishReason(Enum):
    """Why a run ended by itself."""

    STOP = "stop"  # end-of-sequence token or stop string
    LENGTH = "length"  # max_tokens or the context is full


class Capability(Enum):
    """What an engine may declare beyond what the interface asks of all; the conformance suite holds it to that."""

    EXACT = "exact"  # a run's tokens and log-probabilities do not depend, to the bit, on its company
    LOSSLESS_KV = "lossless_kv"  # KV that is exported and imported again is the same to the bit


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Stable facts of one engine, fixed once it has started."""

    model_id: str
    geometry: KvGeometry
    weights_lineage: str  # equal for different precisions of one checkpoint
    weights_dtype: str  # for people: "bf16", "Q4_1"
    kv_dtype: KvDtype  # what export_kv gives and import takes without loss
    max_context_tokens: int
    kv_capacity_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    build: str  # engine and library versions, part of the manifest
    capabilities: frozenset[Capability] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """A moment's load. Speeds are moving averages of what was measured; 0.0 means nothing was measured yet."""

    running: int
    waiting: int
    waiting_prefill_tokens: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float  # of one sequence
    preempted_total: int = 0
    cached_tokens_total: int = 0
    prompt_tokens_total: int = 0
    prefill_token_s: float = 0.0  # of a token at position 0; 0.0: not measured
    prefill_growth_s: float = 0.0  # and more for each position before it
    curve: LatencyCurve = UNKNOWN  # how long its steps take, as fitted to them
    context_tokens: int = 0  # positions that the running sequences attend to
    step_tokens: int = 0  # most tokens of a step; 0: not told
    most_running: int = 0  # most sequences at once; 0: not told
    steps_total: int = 0
    step_seconds_total: tuple[tuple[str, float], ...] = ()  # pairs (part of a step, its seconds in all)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run. The engine may rely on the rim having checked lengths, ids and sampling ranges.

    `token_ids` are prompt and already generated tokens; `prompt_tokens` says how many of them are the prompt
    (penalties, min_tokens, stop strings and usage count from there, so a moved run continues exactly).
    `kv_from` names a hold whose KV covers a prefix of token_ids[:-1]; the engine computes what is missing.
    `salt` names the cache namespace (tenant and label).
    `predicted_tokens`: how many tokens somebody expects it to generate; a hint for the order of admissions.
    `prefill_only`: compute KV of all token_ids, yield progress, end in a hold; no token is sampled.
    """

    run_id: RunId
    token_ids: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams
    salt: bytes
    priority: int = 0  # smaller runs first
    kv_from: RunId | None = None
    prefill_only: bool = False
    predicted_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Positions [0, tokens) have KV now. Emitted per prefill chunk for `prefill_only` runs; for other runs
    once, when the prompt is done (before the first token). `cached` of them came from the prefix cache or hold."""

    tokens: int
    cached: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly sampled tokens, in order. `logprobs[i]` is (chosen, ((id, logprob), ... best first)) if asked for."""

    ids: tuple[int, ...]
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event: the run ended by itself and its KV went to the prefix cache. `stop_string` if one matched."""

    reason: FinishReason
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """Last event: the run became a hold (pause, or end of a prefill_only run) with KV of [0, kv_tokens).

    All sampled tokens were emitted before; the last one has no KV yet (it is decoded after a move)."""

    kv_tokens: int


RunEvent = Prefilled | Tokens | Finished | Held


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSpec:
    """Announces KV that will be written. `token_ids` are those that the KV is of (known so far: a moving run
    may write beyond them, up to `max_tokens` positions).

    `first_position`: only KV from there on comes, a multiple of the block size below the known tokens; what is below
    is another hold's, which `join_kv` adds. Until then the import has no leading positions."""

    run_id: RunId
    token_ids: tuple[int, ...]
    max_tokens: int
    salt: bytes
    first_position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """Measured by running the model: speeds of one sequence, alone."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    notes: tuple[str, ...] = field(default=())


class Engine(Protocol):
    """See the module's docstring. Errors are of mesh.errors; after one, the run is gone and its memory free."""

    @property
    def info(self) -> EngineInfo: ...

    async def start(self) -> None:
        """Load the model. Raises InvalidRequest (bad model file) or Overloaded (does not fit, with the sum)."""

    async def close(self) -> None:
        """Stop at once; open runs end with Cancelled. Idempotent."""

    def generate(self, spec: RunSpec) -> AsyncIterator[RunEvent]:
        """Run it. Ends with Finished or Held, or raises. Closing the iterator cancels and frees at once.

        Raises NotFound (kv_from unknown), Overloaded (could never fit, or queue full), AlreadyExists (run_id)."""
        ...

    async def pause(self, run_id: RunId) -> None:
        """Ask a run to become a hold after its current step; its iterator then ends with Held (or Finished, if
        it ended first). Raises NotFound if there is no such run."""

    async def release(self, run_id: RunId) -> None:
        """Free a hold or cancel a run. Unknown ids are fine (idempotent)."""

    async def kv_tokens(self, run_id: RunId) -> int:
        """How many leading positions of a run or hold have KV now. Raises NotFound."""
        ...

    async def export_kv(self, run_id: RunId, start: int, stop: int) -> KvSlab:
        """KV of positions [start, stop) of a run (while it runs) or hold, in `info.kv_dtype`.

        Raises NotFound, or InvalidRequest if stop > kv_tokens(run_id)."""
        ...

    async def open_import(self, spec: ImportSpec) -> int:
        """Start a hold to be filled by write_kv; returns how many leading tokens the prefix cache gave it
        already (a multiple of the block size; the sender skips them). Raises Overloaded, AlreadyExists.

        With `first_position` the cache gives nothing, and that position is returned."""
        ...

    async def write_kv(self, run_id: RunId, slab: KvSlab) -> None:
        """Append: slab.start must equal what the hold has so far. Raises InvalidRequest on a gap or wrong
        shape, NotFound, Overloaded. A failed write leaves the hold as it was, or gone (then NotFound after)."""

    async def join_kv(self, run_id: RunId, head: RunId) -> None:
        """Put hold `head`, which has KV of exactly [0, first_position), in front of an import: it is one hold then,
        and `head` is gone. Raises NotFound, or InvalidRequest (other tokens, namespace or length) with both as they
        were."""

    async def cached_tokens(self, token_ids: tuple[int, ...], salt: bytes) -> int:
        """How many leading tokens the prefix cache holds now. No side effects."""
        ...

    async def load(self) -> EngineLoad:
        """The load now."""
        ...

    async def self_test(self) -> SelfTest:
        """Measure prefill and decode speed on the idle engine (a few hundred tokens)."""
        ...

    async def check_integrity(self) -> None:
        """Raise AssertionError if memory accounting is off. Cheap enough to call when idle."""
