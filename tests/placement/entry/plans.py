"""Plans and a player for plan runner tests: nodes are named by letters, tokens are their positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from mesh.identity.place import Place, Role, Tier
from mesh.identity.signing import SignedRecord
from mesh.node.engine import RunId
from mesh.node.port import KvReport
from placement.decide.types import Candidate, Plan, PlanShape
from placement.entry.runner import PlanRunner
from placement.entry.runner_types import Begin, Effect, Event, RunnerSpec

T = TypeVar("T")
PROMPT = (0, 1, 2, 3)
LEG = SignedRecord(body=b"{}", signature=b"", certificate=b"")


def place(node_id: str) -> Place:
    """Nodes whose name starts with "core" are core nodes, all others edges."""
    tier = "core" if node_id.startswith("core") else "edge"
    return Place(
        mesh="m", role=Role(tier), tier=Tier(tier), site=node_id, region="r", jurisdiction="j", node_id=node_id
    )


def way(text: str) -> Candidate:
    """ "edge" is local, "core" is core, "core>edge" a split, "edge>core" an offload."""
    first, _, then = text.partition(">")
    tiers = (place(first).tier, place(then or first).tier)
    shape = {
        (Tier.EDGE, Tier.EDGE): PlanShape.LOCAL,
        (Tier.CORE, Tier.CORE): PlanShape.CORE,
        (Tier.CORE, Tier.EDGE): PlanShape.SPLIT,
        (Tier.EDGE, Tier.CORE): PlanShape.OFFLOAD,
    }[tiers]
    return Candidate(shape=shape, prefill=place(first), decode=place(then or first), cost_s=1, ttft_s=1, total_s=1)


def plan(choice: str, *fallbacks: str) -> Plan:
    ways = [way(text) for text in (choice, *fallbacks)]
    return Plan(
        choice=ways[0], fallbacks=tuple(ways[1:]), candidates=tuple(ways), refused=(), rule="r", policy_version=1
    )


def spec(choice: str, *fallbacks: str, max_tokens: int = 8, eos: Sequence[int] = ()) -> RunnerSpec:
    return RunnerSpec(
        request_id="q", prompt_ids=PROMPT, max_tokens=max_tokens, plan=plan(choice, *fallbacks),
        eos_token_ids=frozenset(eos),
    )  # fmt: skip


def report(tokens: int, transfer_id: str = "q/kv0", leg: SignedRecord | None = None, skipped: int = 0) -> KvReport:
    return KvReport(
        transfer_id=transfer_id, tokens=tokens, skipped_tokens=skipped, wire_bytes=100 * tokens, codec="f16",
        duration_s=0.5, first_chunk_s=0.1, leg=leg,
    )  # fmt: skip


class Player:
    """Feeds events one second apart and keeps all effects."""

    def __init__(self, runner_spec: RunnerSpec) -> None:
        self.runner = PlanRunner(runner_spec)
        self.effects: list[Effect] = []
        self.now_s = 100.0

    def begin(self) -> tuple[Effect, ...]:
        return self(Begin())

    def __call__(self, event: Event) -> tuple[Effect, ...]:
        self.now_s += 1.0
        effects = self.runner.handle(event, self.now_s)
        self.effects.extend(effects)
        return effects

    def of(self, kind: type[T]) -> list[T]:
        return [e for e in self.effects if isinstance(e, kind)]


def run(number: int) -> RunId:
    return RunId(f"q/{number}")
