"""What an entry decides: which requests it accepts, where they run, where a running one may move.

Reads policies, the mesh and salts at each call; starts nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from mesh.errors import Expired, InvalidRequest, MeshError, NoCapableNode, NoNodeNow, NotFound, Overloaded, PolicyDenied
from mesh.identity.place import Place, Tier
from mesh.identity.principal import Principal
from mesh.kv.hashing import block_hashes
from mesh.node.port import KvReport, WorkContext
from mesh.telemetry.metrics import Metrics
from mesh.v1 import admin_pb2 as admin
from mesh.v1 import inference_pb2 as pb
from placement.decide.decide import decide
from placement.decide.explain import explain_nodes
from placement.decide.moves import MoveWay, Progress, Tactic, choose_move, codecs_of_move, facts_of_move
from placement.decide.relocate import Pressure, is_relief
from placement.decide.settings import DEFAULTS, DecideSettings
from placement.decide.types import PlacementRequest, Plan, PlanShape, Refusal, Snapshot, Wish
from placement.detect.guard import Guard
from placement.entry import continuation
from placement.entry.copies import Copier
from placement.entry.in_flight import InFlight
from placement.entry.intake import Accepted, ServedModel, Terms, accept
from placement.entry.learned import CodecSavings, PrefixMemory
from placement.entry.orders import Work, needs_relay
from placement.entry.receipt import ReceiptKeeper, Signer
from placement.entry.refusal import REFUSALS, refusal_error
from placement.entry.wire import decision_to_wire
from placement.entry.world import NEVER_S, World
from placement.policy.book import PolicyBook
from placement.policy.model import DataKind
from placement.predict.in_flight import Placed
from placement.predict.measured import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontDoorDeps:
    """What an entry brings. `policies` and `salt` read the current state at each call; `salt(tenant, label,
    model)` raises PolicyDenied for a tenant whose secret this entry does not have. `policy_age_s`: since when the mesh
    has not confirmed the policies that are in force here; 0 while it does."""

    signer: Signer
    world: World
    models: Mapping[str, ServedModel]
    policies: Callable[[], PolicyBook]
    salt: Callable[[str, str, str], bytes]
    metrics: Metrics
    receipts: ReceiptKeeper
    copier: Copier | None = None  # the other entries, if there are any
    in_flight: InFlight = field(default_factory=InFlight)
    settings: DecideSettings = DEFAULTS
    policy_age_s: Callable[[], float] = lambda: 0.0


class Decisions:
    """Owned by the front door."""

    def __init__(self, deps: FrontDoorDeps, rng: random.Random) -> None:
        self._deps = deps
        self._rng = rng
        self._guard = Guard()
        self._prefixes = PrefixMemory()
        self._savings = CodecSavings()
        self._in_flight = deps.in_flight

    @property
    def _own(self) -> Place:
        return self._deps.signer.place

    async def accept(self, principal: Principal, request: pb.GenerateRequest) -> Accepted:
        """See placement.entry.intake."""
        policy = self._deps.policies().lookup(principal.tenant).policy
        policy.check_age(time.time())
        continued = ""
        if request.continues:
            continued = continuation.label_of(self._deps.salt, request.continues, tenant=principal.tenant)
        terms = Terms(
            models=self._deps.models,
            policy=policy,
            guard=self._guard,
            own=self._own,
            seed=self._rng.getrandbits(64),
            continued=continued,
        )
        return await accept(request, principal, terms)

    def continuation(self, accepted: Accepted) -> str:
        """What the next turn of its conversation brings along. Raises PolicyDenied without a cache namespace."""
        tenant, label, model = accepted.principal.tenant, accepted.placement.label, accepted.model.model_id
        return continuation.issue(self._deps.salt, tenant=tenant, label=label, model=model)

    async def plan_or_downgrade(self, accepted: Accepted, request: pb.GenerateRequest) -> tuple[Accepted, Plan]:
        """The plan; where no node can run the model now, that of a model which the policy permits in its place, with
        the request accepted anew for it. Raises what `plan` raises for the model that was asked for."""
        try:
            return accepted, self.plan(accepted)
        except (Overloaded, Expired, NoNodeNow, NoCapableNode):
            policy = self._deps.policies().lookup(accepted.principal.tenant).policy
            for model in policy.downgrade.get(accepted.model.model_id, ()):
                other = pb.GenerateRequest()
                other.CopyFrom(request)
                other.model = model
                with suppress(MeshError):  # the first refusal is the one to be told
                    found = await self.accept(accepted.principal, other)
                    left = replace(found.placement, deadline_s=accepted.placement.deadline_s)  # it has waited
                    found = replace(found, placement=left)
                    return found, self.plan(found)
            raise

    def plan(self, accepted: Accepted) -> Plan:
        """Raises UnknownNode, PolicyDenied, NoNodeNow, NoCapableNode or Overloaded, naming the rule."""
        self._check_age(accepted)
        return self._decide(accepted, accepted.placement)

    def _check_age(self, accepted: Accepted) -> None:
        """Raise NoNodeNow if the tenant's policy was not confirmed for longer than it allows."""
        found = self._deps.policies().lookup(accepted.principal.tenant)
        most_s, age_s = found.policy.offline_max_s, self._deps.policy_age_s()
        if most_s is not None and age_s > most_s:
            raise NoNodeNow(
                f"{self._own.site} has not heard from the mesh for {age_s:.0f} s, and policy version {found.version} "
                f"lets it go on alone for {most_s:.0f} s: nothing new until it is connected again",
                rule="offline_max_s",
                node=self._own.node_id,
            )

    def _decide(self, accepted: Accepted, request: PlacementRequest, *, guest: str = "") -> Plan:
        """`guest`: a node of another site that this entry may have been told of."""
        outcome = decide(
            self._snapshot(accepted, guest),
            self._with_hits(accepted, request),
            self._deps.policies().lookup(accepted.principal.tenant).policy,
            entry_site=self._own.site,
            now_s=time.monotonic(),
            rng=self._rng,
            settings=self._deps.settings,
        )
        if isinstance(outcome, Refusal):
            raise refusal_error(outcome, unheard=self._deps.world.snapshot_age_s() >= NEVER_S)
        return outcome

    def _snapshot(self, accepted: Accepted, guest: str = "") -> Snapshot:
        """The mesh now, with what this entry knows of codecs."""
        world = self._deps.world
        snapshot = world.snapshot_with(guest) if guest else world.snapshot()
        codecs = None if snapshot.codecs is None else self._savings.applied(snapshot.codecs)
        return snapshot if codecs is None or codecs is snapshot.codecs else snapshot.with_codecs(codecs)

    def sent(self, request_id: str, plan: Plan, prompt_tokens: int) -> None:
        """A request starts along its plan: for the other entries."""
        self._in_flight.decided(request_id, plan.choice.prefill.node_id, prompt_tokens, time.monotonic())

    def _with_hits(self, accepted: Accepted, request: PlacementRequest) -> PlacementRequest:
        """The request with what nodes are thought to have of its prompt; where the most is, its session was served."""
        hits = self._prefixes.tokens(self._blocks(accepted, accepted.token_ids), time.monotonic())
        if not hits:
            return request
        most = max(hits, key=lambda node_id: hits[node_id])
        known = hits[most] * 2 >= request.prompt_tokens and list(hits.values()).count(hits[most]) == 1
        return replace(request, cached=hits, session_node_id=most if known else "")

    def kv_at(self, node_id: str, accepted: Accepted, token_ids: tuple[int, ...]) -> None:
        """A leg ended at this node, which has KV of these tokens."""
        self._prefixes.saw(node_id, self._blocks(accepted, token_ids), time.monotonic())

    def transfer(self, accepted: Accepted, report: KvReport) -> None:
        """KV was moved."""
        self._savings.saw(report, accepted.model.description.geometry.f16_bytes_per_token)

    def placed(self, request_id: str, accepted: Accepted, plan: Plan) -> None:
        """A request goes along this plan now: the next decision counts it before any node does."""
        choice, now_s = plan.choice, time.monotonic()
        tokens = max(accepted.placement.prompt_tokens - choice.cached_tokens, 0)
        kv_tokens = accepted.placement.prompt_tokens
        apart = choice.prefill != choice.decode
        notes = self._deps.world.notes
        first = Placed(runs=int(not apart), prefill_tokens=tokens, kv_tokens=kv_tokens)
        notes.placed(choice.prefill.node_id, request_id, first, now_s)
        if apart:
            then = Placed(runs=1, prefill_tokens=0, kv_tokens=kv_tokens)
            notes.placed(choice.decode.node_id, request_id, then, now_s)

    def ended(self, request_id: str, plan: Plan, measured: Measured | None) -> None:
        """A request ended; `measured` if it ran as planned and ended well."""
        choice, notes = plan.choice, self._deps.world.notes
        for node_id in {choice.prefill.node_id, choice.decode.node_id}:
            notes.left(node_id, request_id)
        if measured is None:
            return
        for kind, error_ratio in measured.errors(choice):
            self._deps.metrics.predicted(kind, error_ratio)
        if choice.prefill == choice.decode:
            ttft_ratio, tpot_ratio = measured.ratios(choice)
            notes.answered(choice.decode.node_id, ttft_ratio=ttft_ratio, tpot_ratio=tpot_ratio, now_s=time.monotonic())

    def _blocks(self, accepted: Accepted, token_ids: tuple[int, ...]) -> list[bytes]:
        try:
            salt = self._deps.salt(accepted.principal.tenant, accepted.placement.label, accepted.model.model_id)
        except PolicyDenied:  # no namespace, so nothing of it is cached anywhere
            return []
        return block_hashes(accepted.model.description.geometry.layout_hash, salt, token_ids)

    def may_copy_to(self, accepted: Accepted, place: Place) -> bool:
        """Whether policy lets a copy of the prompt and of the answer be at another entry."""
        policy = self._deps.policies().lookup(accepted.principal.tenant).policy
        label = accepted.placement.label
        return policy.allows(label, place, entry_site=self._own.site, kind=DataKind.PROMPT) is not None

    def work(self, request_id: str, accepted: Accepted, plan: Plan, traceparent: str = "") -> Work:
        """What all orders of the request have in common. Raises PolicyDenied without a cache namespace."""
        tenant, label, model = accepted.principal.tenant, accepted.placement.label, accepted.model.model_id
        context = WorkContext(
            request_id=request_id,
            tenant=tenant,
            label=label,
            model=model,
            salt=self._deps.salt(tenant, label, model),
            policy_version=plan.policy_version,
            deadline_s=accepted.placement.deadline_s,
            entry_site=self._own.site,
            traceparent=traceparent,
        )
        return Work(
            context=context,
            prompt_tokens=len(accepted.token_ids),
            sampling=accepted.sampling,
            priority=self._deps.policies().lookup(tenant).policy.priority,
        )

    def way_of_move(
        self, accepted: Accepted, here: str, target: str, progress: Progress, tactic: Tactic | None
    ) -> MoveWay | None:
        """How a request that runs at `here` should move to `target`; None where one of them is not known any more."""
        snapshot = self._deps.world.snapshot_with(target)
        source_row, target_row = snapshot.row_of(here), snapshot.row_of(target)
        if source_row < 0 or target_row < 0:
            return None if tactic is None else MoveWay(tactic=tactic)
        policy = self._deps.policies().lookup(accepted.principal.tenant).policy
        codecs = codecs_of_move(
            snapshot,
            source_row,
            target_row,
            max_loss_ratio=policy.kv_max_loss_ratio,
            preferred=self._deps.settings.codec,
        )
        facts = facts_of_move(
            snapshot,
            source_row,
            target_row,
            progress,
            tpot_s=accepted.placement.tpot_s,
            settings=self._deps.settings,
        )
        return choose_move(facts, codecs, tactic=tactic)

    def target_of_move(self, accepted: Accepted, here: str, request: admin.MigrateRequest) -> str:
        """Node id of where a request that runs at `here` may move: filtered by its policy like any other choice.

        Raises InvalidRequest (no target, or it is there), UnknownNode, and what `plan` raises."""
        snapshot = self._deps.world.snapshot_with(request.node_id)
        if request.WhichOneof("target") == "node_id":
            row = snapshot.row_of(request.node_id)
            if row < 0:
                raise NotFound(f"no node {request.node_id[:100]!r} in the mesh", field="node_id")
            tier = snapshot.places[row].tier
            is_there = request.node_id == here
        else:
            tier, row = _tier(request.tier), snapshot.row_of(here)
            is_there = row >= 0 and snapshot.places[row].tier is tier
        if is_there:
            raise InvalidRequest(f"the request runs at {here} already", field=request.WhichOneof("target") or "")
        shape = PlanShape.LOCAL if tier is Tier.EDGE else PlanShape.CORE
        wish = Wish(shape=shape, node_id=request.node_id, tier=tier)
        wanted = replace(accepted.placement, wish=wish, exclude=frozenset({here}), brings_kv=True)
        plan = self._decide(accepted, wanted, guest=request.node_id)
        self._check_move(accepted, snapshot, here, plan.choice.decode)
        return plan.choice.decode.node_id

    def place_to_go(self, accepted: Accepted, here: str, progress: Progress, pressure: Pressure) -> str:
        """Node id of the best place for a running request that should leave `here`: by its policy and wish, like any
        other choice.

        Raises NoNodeNow if there is none that is better off, and what `plan` raises."""
        snapshot = self._deps.world.snapshot()
        wish = accepted.placement.wish
        if wish.shape is not None:
            wish = replace(wish, shape=_ONE_NODE[wish.shape])
        request = replace(
            accepted.placement,
            wish=wish,
            prompt_tokens=progress.tokens,
            max_tokens=progress.left_tokens,
            expected_tokens=min(accepted.placement.expected_tokens, progress.left_tokens),
            exclude=frozenset({here}),
            brings_kv=True,
        )
        source = snapshot.row_of(here)
        for candidate in self._decide(accepted, request).candidates:
            target = snapshot.row_of(candidate.decode.node_id)
            if candidate.shape in _ONE_NODE.values() and is_relief(snapshot, source, target, pressure):
                self._check_move(accepted, snapshot, here, candidate.decode)
                return candidate.decode.node_id
        raise NoNodeNow(f"no node is better off than {here} for this request", node=here)

    def _check_move(self, accepted: Accepted, snapshot: Snapshot, here: str, target: Place) -> None:
        """Raise PolicyDenied unless KV may be at the target and, where it has to, pass a relay."""
        self._check_kv(accepted, target)
        row = snapshot.row_of(here)
        if row >= 0 and needs_relay(snapshot.places[row], target):
            self._deps.policies().lookup(accepted.principal.tenant).policy.check_relay()

    def _check_kv(self, accepted: Accepted, target: Place) -> None:
        policy, label = self._deps.policies().lookup(accepted.principal.tenant).policy, accepted.placement.label
        if policy.allows(label, target, entry_site=self._own.site, kind=DataKind.KV) is None:
            raise PolicyDenied(
                f"KV with label {label} may not be at {target.node_id} (site {target.site}): "
                f"allowed is {policy.explain_rules(label, DataKind.KV)}",
                rule=policy.rules_of(label, DataKind.KV)[0].name,
                node=target.node_id,
            )

    async def explain(self, principal: Principal, request: pb.GenerateRequest) -> pb.ExplainResponse:
        """The plan, or why there is none, without running it."""
        accepted = await self.accept(principal, request)
        verdicts = explain_nodes(
            self._deps.world.snapshot(),
            accepted.placement,
            self._deps.policies().lookup(principal.tenant).policy,
            entry_site=self._own.site,
        )
        response = pb.ExplainResponse(
            snapshot_age_s=self._deps.world.snapshot_age_s(),
            nodes=[
                pb.NodeVerdict(node_id=v.place.node_id, site=v.place.site, tier=v.place.tier.value, refused=v.refused)
                for v in verdicts
            ],
        )
        try:
            response.decision.CopyFrom(decision_to_wire("", accepted, self.plan(accepted)))
        except REFUSALS as refusal:
            response.refusal, response.refusal_reason = refusal.message, refusal.reason
        return response


_ONE_NODE = {
    PlanShape.LOCAL: PlanShape.LOCAL,
    PlanShape.SPLIT: PlanShape.LOCAL,
    PlanShape.CORE: PlanShape.CORE,
    PlanShape.OFFLOAD: PlanShape.CORE,
}
"""The shape of a request that already runs, and needs one node to go on at."""


def tactic_of(number: int) -> Tactic | None:
    """Of the wire; None: whatever is best. Raises InvalidRequest."""
    if number == admin.MOVE_TACTIC_UNSPECIFIED:
        return None
    try:
        return Tactic(number)
    except ValueError:
        raise InvalidRequest(f"unknown tactic {number}", field="tactic") from None


def _tier(name: str) -> Tier:
    try:
        return Tier(name)
    except ValueError:
        raise InvalidRequest("the target is a node_id, or a tier: core or edge", field="tier") from None
