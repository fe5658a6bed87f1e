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
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

from mesh.errors import Draining, InvalidRequest, MeshError, NotFound, Overloaded
from mesh.identity.principal import AccessRole, Principal
from mesh.telemetry.log import get_logger, log_context
from mesh.telemetry.metrics import Shape
from mesh.v1 import admin_pb2 as admin
from mesh.v1 import inference_pb2 as pb
from placement.decide.moves import Tactic
from placement.decide.relocate import Pressure
from placement.decide.types import Plan
from placement.entry.admission import Admission, Admitted
from placement.entry.decisions import Decisions, FrontDoorDeps, tactic_of
from placement.entry.intake import Accepted, ServedModel, encode_prompt, pick_model
from placement.entry.live_request import LiveRequest
from placement.entry.orders import Work
from placement.entry.refused import RefusalReceipts, Refused
from placement.entry.request_log import RequestLog, RequestStream
from placement.entry.runner_types import EmitMigration, MoveCause

log = get_logger(__name__)
MAX_OPEN_REQUESTS = 512
MAX_ALONE_PER_TENANT = 16
"""Requests that go on for clients who are away; one more ends the one whose client left first."""
_LEAST_DEADLINE_S = 0.001
_GRACE_S = 30.0  # a request with an idempotency key goes on this long without a client


class FrontDoor:
    """All requests of one entry."""

    def __init__(self, deps: FrontDoorDeps, *, rng: random.Random | None = None) -> None:
        self._deps = deps
        self._decisions = Decisions(deps, rng or random.Random(secrets.randbits(64)))
        self._log = RequestLog()
        self._live: dict[str, LiveRequest] = {}
        self._producers: dict[str, asyncio.Task[None]] = {}
        self._alone: dict[str, asyncio.TimerHandle] = {}  # requests whose client is away, longest away first
        self._draining = False
        self._admission = Admission(deps.world, deps.signer.place.tier)
        self._admitted: dict[str, Admitted] = {}
        self._refusals = RefusalReceipts(deps.signer, deps.receipts)
        deps.metrics.watch_waiting(lambda: self._admission.waiting)

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

    async def generate(self, principal: Principal, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse]:
        """One request as a stream. Leaving the iterator cancels the request, unless it has an idempotency key:
        then it goes on for a while, so that the client can come back."""
        stream = await self._open(principal, request)
        stream.readers += 1
        self._client_is_back(stream.request_id)
        try:
            async for response in stream.read(request.resume_offset_tokens):
                yield response
        finally:
            stream.readers -= 1
            if not stream.readers and not stream.ended:
                self._client_left(stream)

    async def _open(self, principal: Principal, request: pb.GenerateRequest) -> RequestStream:
        known = self._known(principal, request)
        if known is not None:
            return known
        if request.resume_offset_tokens and not request.idempotency_key:
            raise InvalidRequest("resume_offset_tokens needs an idempotency_key", field="resume_offset_tokens")
        if request.resume_offset_tokens:
            raise NotFound("no request with this idempotency_key is here to resume", field="idempotency_key")
        return await self._take(principal, request)

    async def _take(self, principal: Principal, request: pb.GenerateRequest) -> RequestStream:
        """A new request. One that is refused leaves a receipt, whose id the error names."""
        request_id, started_unix_s = self._new_id(), time.time()
        accepted: Accepted | None = None
        try:
            self._refuse_if_full()
            await self._deps.receipts.check()
            policy = self._deps.policies().lookup(principal.tenant).policy
            self._admission.count(principal.tenant, policy)
            accepted = await self._decisions.accept(principal, request)
            since_s = time.monotonic()
            admitted = await self._admission.enter(
                principal.tenant,
                policy,
                prompt_tokens=len(accepted.token_ids),
                max_tokens=accepted.sampling.max_tokens,
                deadline_s=accepted.placement.deadline_s,
            )
            accepted = _after_waiting(accepted, time.monotonic() - since_s)
            return await self._run(request_id, accepted, admitted, request)
        except MeshError as error:
            self._deps.metrics.request_ended(outcome=error.reason, shape=Shape.NONE)
            error.details["request_id"] = request_id
            refused = Refused(
                request_id=request_id,
                tenant=principal.tenant,
                key_id=principal.key_id,
                model=request.model,
                claimed_label=request.label,
                policy_version=self._deps.policies().lookup(principal.tenant).version,
                started_unix_s=started_unix_s,
                error=error,
                raised=None if accepted is None else accepted.raised,
            )
            await self._refusals.keep(refused)
            raise

    async def _run(
        self, request_id: str, accepted: Accepted, admitted: Admitted, request: pb.GenerateRequest
    ) -> RequestStream:
        """Plan an admitted request and start it."""
        principal = accepted.principal
        try:
            accepted, plan = await self._decisions.plan_or_downgrade(accepted, request)
            # Others were served meanwhile: the same key may have come in on another connection.
            known = self._known(principal, request)
            if known is None:
                self._refuse_if_full()
                work = self._decisions.work(request_id, accepted, plan)
        except BaseException:
            self._admission.leave(admitted, None)
            raise
        if known is not None:
            self._admission.leave(admitted, None)
            return known
        self._admitted[request_id] = admitted
        return self._start(accepted, plan, work, _fingerprint(principal, request))

    def _known(self, principal: Principal, request: pb.GenerateRequest) -> RequestStream | None:
        """The request that has this key. One that failed is done again for a client that has nothing of it."""
        if not request.idempotency_key:
            return None
        known = self._log.find(principal.tenant, request.idempotency_key, _fingerprint(principal, request))
        return None if known is not None and known.failed and not request.resume_offset_tokens else known

    def _refuse_if_full(self) -> None:
        if self._draining:
            raise Draining(f"{self._deps.signer.place.node_id} is draining: use another entry")
        if len(self._live) >= MAX_OPEN_REQUESTS:
            raise Overloaded(f"{len(self._live)} requests are open here, the most is {MAX_OPEN_REQUESTS}")

    def _start(self, accepted: Accepted, plan: Plan, work: Work, fingerprint: bytes) -> RequestStream:
        request_id, tenant = work.context.request_id, accepted.principal.tenant
        stream = RequestStream(request_id, tenant, fingerprint, accepted.idempotency_key)
        with log_context(request_id=request_id):
            live = LiveRequest(
                accepted=accepted,
                plan=plan,
                work=work,
                stream=stream,
                world=self._deps.world,
                signer=self._deps.signer,
                metrics=self._deps.metrics,
                learn=self._decisions,
                receipts=self._deps.receipts,
                continuation=self._decisions.continuation(accepted),
            )
            log.info("request_accepted", shape=plan.choice.shape.name, label=work.context.label, rule=plan.rule)
            task = asyncio.create_task(live.run(), name=f"request:{request_id}")
        self._log.add(stream, time.monotonic())
        self._live[request_id] = live
        self._producers[request_id] = task
        task.add_done_callback(lambda _: self._ended(request_id))
        return stream

    def _ended(self, request_id: str) -> None:
        used_tokens = self._live.pop(request_id).driver.usage.completion_tokens
        del self._producers[request_id]
        self._admission.leave(self._admitted.pop(request_id), used_tokens)
        self._client_is_back(request_id)
        # What was answered goes by the clock, not with the next request.
        asyncio.get_running_loop().call_later(self._log.keep_s + 1.0, lambda: self._log.expire(time.monotonic()))

    def _client_left(self, stream: RequestStream) -> None:
        live = self._live.get(stream.request_id)
        if live is None:
            return
        if not stream.idempotency_key:
            live.driver.cancel()
            return

        alone = [r for r in self._alone if (other := self._live.get(r)) and other.stream.tenant == stream.tenant]
        if len(alone) >= MAX_ALONE_PER_TENANT:
            self._live[alone[0]].driver.cancel()  # the one that has been waiting longest
            self._client_is_back(alone[0])
        loop = asyncio.get_running_loop()
        self._alone[stream.request_id] = loop.call_later(_GRACE_S, live.driver.cancel)

    def _client_is_back(self, request_id: str) -> None:
        timer = self._alone.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def _new_id(self) -> str:
        # The entry's node id comes first, so that any node can tell which entry owns a request.
        return f"{self._deps.signer.place.node_id}:{secrets.token_hex(8)}"

    async def explain(self, principal: Principal, request: pb.GenerateRequest) -> pb.ExplainResponse:
        """The plan, or why there is none, without running it."""
        return await self._decisions.explain(principal, request)

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
        live = self._running(request_id)
        if live is None:
            return False
        live.driver.cancel()
        return True

    async def migrate(self, principal: Principal | None, request: admin.MigrateRequest) -> admin.MigrateResponse:
        """Move a running request to a node, or to the best node of a tier; returns once it runs there.

        `principal` None: the mesh itself asks. Raises NotFound, StalePlan (it ended or is moving), and what
        Decisions.target_of_move raises."""
        self._log.get(request.request_id, None if principal is None else _scope(principal))
        live = self._running(request.request_id)
        if live is None:
            raise NotFound(f"request {request.request_id!r} has ended", field="request_id")
        tactic = tactic_of(request.tactic)
        target = self._decisions.target_of_move(live.accepted, live.driver.node_id, request)
        moved = await self._move(live, target, MoveCause.OPERATOR, tactic)
        return admin.MigrateResponse(
            from_node_id=moved.from_node_id,
            to_node_id=moved.to_node_id,
            kv_wire_bytes=moved.kv_wire_bytes,
            kv_tokens=moved.kv_tokens,
            pause_s=moved.pause_s,
        )

    def live(self) -> tuple[LiveRequest, ...]:
        """Requests that have not ended."""
        return tuple(live for live in self._live.values() if not live.stream.ended)

    async def relocate(self, live: LiveRequest, pressure: Pressure, cause: MoveCause) -> EmitMigration:
        """Move a request of this entry to wherever it is best off; returns once it runs there. Raises what
        Decisions.place_to_go raises, and StalePlan."""
        target = self._decisions.place_to_go(live.accepted, live.driver.node_id, live.progress, pressure)
        return await self._move(live, target, cause)

    async def _move(
        self, live: LiveRequest, target: str, cause: MoveCause, tactic: Tactic | None = None
    ) -> EmitMigration:
        way = self._decisions.way_of_move(live.accepted, live.driver.node_id, target, live.progress, tactic)
        if way is not None:
            log.info(
                "request_moves",
                request_id=live.stream.request_id,
                target=target,
                cause=cause.value,
                tactic=way.tactic.name,
                codec=way.codec,
                pace_s=round(way.pace_s, 4),
                predicted_pause_s=round(way.pause_s, 4),
            )
        return await live.driver.move(target, cause, way)

    def _running(self, request_id: str) -> LiveRequest | None:
        live = self._live.get(request_id)
        return None if live is None or live.stream.ended else live

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, wait for what runs, then end the rest."""
        self._draining = True
        producers = list(self._producers.values())
        if producers:
            _, late = await asyncio.wait(producers, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


def _after_waiting(accepted: Accepted, waited_s: float) -> Accepted:
    """The request with what is left of its deadline."""
    deadline_s = accepted.placement.deadline_s
    if deadline_s is None:
        return accepted
    left_s = max(_LEAST_DEADLINE_S, deadline_s - waited_s)
    return replace(accepted, placement=replace(accepted.placement, deadline_s=left_s))


def _scope(principal: Principal) -> str | None:
    """Whose requests a caller may touch: its tenant's, an operator any."""
    return None if principal.role >= AccessRole.OPERATOR else principal.tenant


def _fingerprint(principal: Principal, request: pb.GenerateRequest) -> bytes:
    """Names a request's content, so that a key cannot be used for two requests."""
    bare = pb.GenerateRequest()
    bare.CopyFrom(request)
    bare.ClearField("resume_offset_tokens")
    return hashlib.sha256(principal.tenant.encode() + b"\0" + bare.SerializeToString(deterministic=True)).digest()
