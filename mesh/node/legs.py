"""A node's signed report of one leg: what it computed for whom, in what namespace of policy, and how it ended.

The record goes into the request's receipt. It holds counts, names and times; never text or token ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from mesh.identity.place import Place
from mesh.identity.signing import SignedRecord
from mesh.node.port import WorkContext

LEG_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Clock:
    """The two clocks of a host: `unix_s` for records that others read, `monotonic_s` for durations."""

    unix_s: Callable[[], float] = time.time
    monotonic_s: Callable[[], float] = time.monotonic


class Signer(Protocol):
    """What signs for a node: mesh.identity.signing.NodeIdentity."""

    @property
    def place(self) -> Place: ...

    def sign(self, body: dict[str, Any]) -> SignedRecord: ...


class LegKind(Enum):
    """What a leg was."""

    RUN = "run"  # prefilled and decoded
    PREFILL = "prefill"  # KV only
    DECODE = "decode"  # went on from KV that was there


class LegKeeper(Protocol):
    """Where a node keeps its own legs for the audit: mesh.audit.log."""

    async def append_leg(self, leg: SignedRecord) -> object:
        """Returns once it is kept. Raises MeshError if it is not."""
        ...

    async def check(self) -> None:
        """Raises MeshError while legs cannot be kept, so that no work is taken that could leave none."""
        ...


class LegOutcome(Enum):
    """How a leg ended. One that failed or was cancelled is kept by its node and not reported to the entry."""

    STOP = "stop"
    LENGTH = "length"
    HELD = "held"
    FAILED = "failed"  # or was cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """`kv_in_bytes` are the encoded bytes of the hold that it went on from; `kv_out_bytes` those that were sent
    from it up to its end (a run that was paused for a move ships its last tokens after that; the move's report
    has them all)."""

    context: WorkContext
    run_id: str
    kind: LegKind
    outcome: LegOutcome
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    kv_tokens: int
    kv_in_bytes: int
    kv_out_bytes: int
    started_unix_s: float
    ended_unix_s: float


def sign_leg(leg: Leg, signer: Signer) -> SignedRecord:
    """The leg as canonical JSON, signed by this node."""
    place = signer.place
    return signer.sign(
        {
            "format": LEG_FORMAT,
            "request_id": leg.context.request_id,
            "run_id": leg.run_id,
            "node": place.node_id,
            "place": place.uri,
            "kind": leg.kind.value,
            "model": leg.context.model,
            "tenant": leg.context.tenant,
            "label": leg.context.label,
            "entry_site": leg.context.entry_site,
            "policy_version": leg.context.policy_version,
            "prompt_tokens": leg.prompt_tokens,
            "generated_tokens": leg.generated_tokens,
            "cached_tokens": leg.cached_tokens,
            "kv_tokens": leg.kv_tokens,
            "kv_in_bytes": leg.kv_in_bytes,
            "kv_out_bytes": leg.kv_out_bytes,
            "started_unix_s": leg.started_unix_s,
            "ended_unix_s": leg.ended_unix_s,
            "outcome": leg.outcome.value,
        }
    )
