"""The front door of an entry: accept, decide, run the plan, stream, receipt.

Speaks mesh.v1 messages, so that the gRPC servicer and the HTTP app are thin. One task per request owns its
driver; clients read from the request's stream and may come back for the rest of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace

from mesh.errors import Draining, MeshError, NotFound, Overloaded, PolicyDenied
from mesh.identity.place import Place, Tier
from mesh.identity.principal import AccessRole, Principal
from mesh.node.port import WorkContext
from mesh.telemetry.log import get_logger, log_context
from mesh.telemetry.metrics import Metrics, Shape
from mesh.v1 import admin_pb2 as admin
from mesh.v1 import inference_pb2 as pb
from placement.decide.decide import decide
from placement.decide.explain import explain_nodes
from placement.decide.types import Plan, PlanShape, Refusal, Wish
from placement.entry.driver import Work
from placement.entry.intake import Accepted, ServedModel, accept, encode_prompt, pick_model
from placement.entry.live_request import LiveRequest
from placement.entry.receipt import Signer
from placement.entry.refusal import REFUSALS, refusal_error
from placement.entry.request_log import RequestLog, RequestStream
from placement.entry.runner_types import MoveCause
from placement.entry.wire import decision_to_wire
from placement.entry.world import World
from placement.policy.book import PolicyBook
from placement.policy.model import DataKind

log = get_logger(__name__)
MAX_OPEN_REQUESTS = 512
_GRACE_S = 30.0  # a request with an idempotency key goes on this long without a client


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontDoorDeps:
    """What an entry brings. `policies` and `salt` read the current state at each call; `salt(tenant, label,
    model)` raises PolicyDenied for a tenant whose secret this entry does not have."""

    signer: Signer
    world: World
    models: Mapping[str, ServedModel]
    policies: Callable[[], PolicyBook]
    salt: Callable[[str, str, str], bytes]
    metrics: Metrics


class FrontDoor:
    """All requests of one entry."""

    def __init__(self, deps: FrontDoorDeps, *, rng: random.Random | None = None) -> None:
        self._deps = deps
        self._rng = rng or random.Random(secrets.randbits(64))
        self._log = RequestLog()
        self._live: dict[str, LiveRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def draining(self) -> bool:
        """It takes nothing new."""
        return self._draining

    @property
    def served_models(self) -> Mapping[str, ServedModel]:
        """Models that this entry tokenises for, by name."""
        return self._deps.models

    async def generate(self, principal: Principal, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        """One request as a stream. Leaving the iterator cancels the request, unless it has an idempotency key:
        then it goes on for a while, so that the client can come back."""
        stream = await self._open(principal, request)
        stream.readers += 1
        try:
            async for response in stream.read(request.resume_offset_tokens):
                yield response
        finally:
            stream.readers -= 1
            if not stream.readers and not stream.ended:
                self._client_left(stream, grace_s=_GRACE_S if request.idempotency_key else 0.0)

    async def _open(self, principal: Principal, request: pb.GenerateRequest) -> RequestStream:
        fingerprint = _fingerprint(principal, request)
        if request.idempotency_key:
            known = self._log.find(principal.tenant, request.idempotency_key, fingerprint)
            if known is not None:
                return known
        if request.resume_offset_tokens:
            raise NotFound("no request with this idempotency_key is here to resume", field="idempotency_key")
        if self._draining:
            raise Draining(f"{self._deps.signer.place.node_id} is draining: use another entry")
        if len(self._live) >= MAX_OPEN_REQUESTS:
            raise Overloaded(f"{len(self._live)} requests are open here, the most is {MAX_OPEN_REQUESTS}")
        try:
            accepted = await self._accept(principal, request)
            plan = self._decide(accepted)
        except MeshError as error:
            self._deps.metrics.request_ended(outcome=error.reason, shape=Shape.NONE)
            raise
        stream = RequestStream(self._new_id(), principal.tenant, fingerprint)
        self._log.add(stream, request.idempotency_key, time.monotonic())
        self._start(accepted, plan, stream)
        return stream

    async def _accept(self, principal: Principal, request: pb.GenerateRequest) -> Accepted:
        policy = self._deps.policies().lookup(principal.tenant).policy
        seed = self._rng.getrandbits(64)
        return await accept(request, principal, models=self._deps.models, policy=policy, seed=seed)

    def _decide(self, accepted: Accepted, wish: Wish | None = None, exclude: frozenset[str] = frozenset()) -> Plan:
        """Raises PolicyDenied, NoNodeNow, NoCapableNode or Overloaded, naming the rule."""
        entry = self._deps.policies().lookup(accepted.principal.tenant)
        request = accepted.placement
        if wish is not None:
            request = replace(request, wish=wish, exclude=exclude)
        outcome = decide(
            self._deps.world.snapshot(),
            request,
            entry.policy,
            entry_site=self._deps.signer.place.site,
            now_s=time.monotonic(),
            rng=self._rng,
        )
        if isinstance(outcome, Refusal):
            raise refusal_error(outcome)
        return outcome

    def _start(self, accepted: Accepted, plan: Plan, stream: RequestStream) -> None:
        tenant, label = accepted.principal.tenant, accepted.placement.label
        entry = self._deps.policies().lookup(tenant)
        context = WorkContext(
            request_id=stream.request_id,
            tenant=tenant,
            label=label,
            model=accepted.model.model_id,
            salt=self._deps.salt(tenant, label, accepted.model.model_id),
            policy_version=plan.policy_version,
            deadline_s=accepted.placement.deadline_s,
            entry_site=self._deps.signer.place.site,
        )
        work = Work(
            context=context,
            prompt_tokens=len(accepted.token_ids),
            sampling=accepted.sampling,
            priority=entry.policy.priority,
        )
        with log_context(request_id=stream.request_id):
            live = LiveRequest(
                accepted=accepted,
                plan=plan,
                work=work,
                stream=stream,
                world=self._deps.world,
                signer=self._deps.signer,
                metrics=self._deps.metrics,
            )
            log.info("request_accepted", shape=plan.choice.shape.name, label=label, rule=plan.rule)
            task = asyncio.create_task(live.run(), name=f"request:{stream.request_id}")
        self._live[stream.request_id] = live
        stream.producer = task
        task.add_done_callback(lambda _: self._live.pop(stream.request_id, None))

    def _client_left(self, stream: RequestStream, *, grace_s: float) -> None:
        async def end_if_still_alone() -> None:
            await asyncio.sleep(grace_s)
            live = self._live.get(stream.request_id)
            if live is not None and not stream.readers:
                live.driver.cancel()

        task = asyncio.create_task(end_if_still_alone(), name=f"grace:{stream.request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _new_id(self) -> str:
        # The entry's node id comes first, so that any node can tell which entry owns a request.
        return f"{self._deps.signer.place.node_id}:{secrets.token_hex(8)}"

    async def explain(self, principal: Principal, request: pb.GenerateRequest) -> pb.ExplainResponse:
        """The plan, or why there is none, without running it."""
        accepted = await self._accept(principal, request)
        verdicts = explain_nodes(
            self._deps.world.snapshot(),
            accepted.placement,
            self._deps.policies().lookup(principal.tenant).policy,
            entry_site=self._deps.signer.place.site,
        )
        response = pb.ExplainResponse(
            snapshot_age_s=self._deps.world.snapshot_age_s(),
            nodes=[
                pb.NodeVerdict(node_id=v.place.node_id, site=v.place.site, tier=v.place.tier.value, refused=v.refused)
                for v in verdicts
            ],
        )
        try:
            response.decision.CopyFrom(decision_to_wire("", accepted, self._decide(accepted)))
        except REFUSALS as refusal:
            response.refusal, response.refusal_reason = refusal.message, refusal.reason
        return response

    async def tokenize(self, principal: Principal, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Ids as the model would see them."""
        policy = self._deps.policies().lookup(principal.tenant).policy
        ids = await encode_prompt(request, pick_model(request.model, self._deps.models, policy))
        response = pb.TokenizeResponse()
        response.tokens.ids.extend(ids)
        return response

    def models(self, principal: Principal) -> list[pb.ModelInfo]:
        """Models that this entry knows and the tenant may use, with the nodes that serve each."""
        policy = self._deps.policies().lookup(principal.tenant).policy
        snapshot = self._deps.world.snapshot()
        found = []
        for model_id, model in sorted(self._deps.models.items()):
            if not policy.model_allowed(model_id):
                continue
            column = snapshot.model_ids.index(model_id) if model_id in snapshot.model_ids else None
            rows = [] if column is None else [i for i in range(snapshot.n_nodes) if snapshot.models[i, column]]
            context = max((int(snapshot.max_context_tokens[i]) for i in rows), default=model.description.context_tokens)
            nodes = [snapshot.places[i].node_id for i in rows]
            found.append(pb.ModelInfo(id=model_id, max_context_tokens=context, node_ids=nodes))
        return found

    def abort(self, principal: Principal, request_id: str) -> bool:
        """End a request; False if it had ended. Raises NotFound, for other tenants' requests too."""
        self._log.get(request_id, _scope(principal))
        live = self._live.get(request_id)
        if live is None:
            return False
        live.driver.cancel()
        return True

    async def migrate(self, principal: Principal | None, request: admin.MigrateRequest) -> admin.MigrateResponse:
        """Move a running request to a node, or to the best node of a tier; returns once it runs there.

        `principal` None: the mesh itself asks. Raises NotFound, StalePlan (it ended or is moving), and what
        `_decide` raises: the target is filtered by the request's policy like any other choice."""
        self._log.get(request.request_id, None if principal is None else _scope(principal))
        live = self._live.get(request.request_id)
        if live is None:
            raise NotFound(f"request {request.request_id!r} has ended", field="request_id")
        target = self._pick_target(live, request)
        moved = await live.driver.move(target, MoveCause.OPERATOR)
        return admin.MigrateResponse(
            from_node_id=moved.from_node_id,
            to_node_id=moved.to_node_id,
            kv_wire_bytes=moved.kv_wire_bytes,
            kv_tokens=moved.kv_tokens,
            pause_s=moved.pause_s,
        )

    def _pick_target(self, live: LiveRequest, request: admin.MigrateRequest) -> str:
        snapshot = self._deps.world.snapshot()
        here = live.driver.node_id
        if request.WhichOneof("target") == "node_id":
            row = snapshot.row_of(request.node_id)
            if row < 0:
                raise NotFound(f"no node {request.node_id[:100]!r} in the mesh", field="node_id")
            tier = snapshot.places[row].tier
        else:
            tier = _tier(request.tier)
        shape = PlanShape.LOCAL if tier is Tier.EDGE else PlanShape.CORE
        wish = Wish(shape=shape, node_id=request.node_id, tier=tier)
        plan = self._decide(live.accepted, wish, frozenset({here}))
        target = plan.choice.decode
        self._check_kv(live.accepted, target)
        return target.node_id

    def _check_kv(self, accepted: Accepted, target: Place) -> None:
        policy = self._deps.policies().lookup(accepted.principal.tenant).policy
        label, site = accepted.placement.label, self._deps.signer.place.site
        if policy.allows(label, target, entry_site=site, kind=DataKind.KV) is None:
            raise PolicyDenied(
                f"KV with label {label} may not be at {target.node_id} (site {target.site}): "
                f"allowed is {policy.explain_rules(label, DataKind.KV)}",
                rule=policy.rules_of(label, DataKind.KV)[0].name,
                node=target.node_id,
            )

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, wait for what runs, then end the rest."""
        self._draining = True
        producers = [live.stream.producer for live in self._live.values() if live.stream.producer is not None]
        if producers:
            _, late = await asyncio.wait(producers, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()


def _scope(principal: Principal) -> str | None:
    """Whose requests a caller may touch: its tenant's, an operator any."""
    return None if principal.role >= AccessRole.OPERATOR else principal.tenant


def _tier(name: str) -> Tier:
    try:
        return Tier(name)
    except ValueError:
        raise NotFound("target must be a node_id, or a tier: core or edge", field="tier") from None


def _fingerprint(principal: Principal, request: pb.GenerateRequest) -> bytes:
    """Names a request's content, so that a key cannot be used for two requests."""
    bare = pb.GenerateRequest()
    bare.CopyFrom(request)
    bare.ClearField("resume_offset_tokens")
    return hashlib.sha256(principal.tenant.encode() + b"\0" + bare.SerializeToString(deterministic=True)).digest()
