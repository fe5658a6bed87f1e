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
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import replace
from functools import partial

from mesh.errors import Cancelled, Draining, Internal, InvalidRequest, MeshError, NodeUnreachable, NotFound, Overloaded
from mesh.identity.place import Place
from mesh.identity.principal import AccessRole, Principal
from mesh.process import background
from mesh.telemetry.log import get_logger, log_context
from mesh.telemetry.metrics import Shape
from mesh.telemetry.traces import Span, incoming, span, start_span
from mesh.v1 import admin_pb2 as admin
from mesh.v1 import inference_pb2 as pb
from mesh.v1 import sibling_pb2
from placement.decide.moves import Tactic
from placement.decide.relocate import Pressure
from placement.decide.types import Plan
from placement.entry.admission import Admission, Admitted
from placement.entry.copies import KEEP_S, MOST_COPIES, Copy
from placement.entry.decisions import Decisions, FrontDoorDeps, tactic_of
from placement.entry.intake import Accepted, ServedModel, encode_prompt, pick_model
from placement.entry.live_request import LiveRequest, TakenOver
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
        self._copies: dict[str, Copy] = {}  # requests of other entries, by their id there
        self._read_elsewhere: set[str] = set()  # requests of this entry that a client follows at another one
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
        self._tell_followed(stream, True)
        try:
            async for response in stream.read(request.resume_offset_tokens):
                yield response
        finally:
            stream.readers -= 1
            if not stream.readers and not stream.ended:
                self._tell_followed(stream, False)
                self._client_left(stream)

    async def _open(self, principal: Principal, request: pb.GenerateRequest) -> RequestStream:
        known = self._known(principal, request)
        if known is not None:
            copy = self._copies.get(known.request_id)
            if copy is not None and copy.orphan:
                self._begin_take_over(copy, principal)
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
        root = start_span("request", parent=incoming(), node=self._deps.signer.place.node_id, tenant=principal.tenant)
        try:
            self._refuse_if_full()
            await self._deps.receipts.check()
            policy = self._deps.policies().lookup(principal.tenant).policy
            self._admission.count(principal.tenant, policy)
            with span("intake", parent=root.traceparent) as intake:
                accepted = await self._decisions.accept(principal, request)
                intake.set(prompt_tokens=len(accepted.token_ids), raised=len(accepted.raised.findings))
            since_s = time.monotonic()
            admitted = await self._admission.enter(
                principal.tenant,
                policy,
                prompt_tokens=len(accepted.token_ids),
                max_tokens=accepted.sampling.max_tokens,
                deadline_s=accepted.placement.deadline_s,
            )
            accepted = _after_waiting(accepted, time.monotonic() - since_s)
            return await self._run(request_id, accepted, admitted, request, root)
        except asyncio.CancelledError:  # its client left
            self._not_taken(Cancelled("the client left before the request was taken"), root)
            raise
        except Exception as exc:
            error = exc if isinstance(exc, MeshError) else _by_bug(exc)
            self._not_taken(error, root)
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
            if error is exc:
                raise
            raise error from exc

    def _not_taken(self, error: MeshError, root: Span) -> None:
        root.end(error)
        self._deps.metrics.request_ended(outcome=error.reason, shape=Shape.NONE)

    async def _run(
        self, request_id: str, accepted: Accepted, admitted: Admitted, request: pb.GenerateRequest, root: Span
    ) -> RequestStream:
        """Plan an admitted request and start it."""
        principal = accepted.principal
        try:
            with span("decision", parent=root.traceparent) as decision:
                accepted, plan = await self._decisions.plan_or_downgrade(accepted, request)
                decision.set(candidates=len(plan.candidates), policy_version=plan.policy_version)
            # Others were served meanwhile: the same key may have come in on another connection.
            known = self._known(principal, request)
            if known is None:
                self._refuse_if_full()
                work = self._decisions.work(request_id, accepted, plan, root.traceparent)
                return self._open_stream(accepted, plan, work, admitted, request, root)
        except BaseException:
            self._admission.leave(admitted, None)
            raise
        self._admission.leave(admitted, None)
        root.end()
        return known

    def _open_stream(
        self, accepted: Accepted, plan: Plan, work: Work, admitted: Admitted, request: pb.GenerateRequest, root: Span
    ) -> RequestStream:
        request_id, principal = work.context.request_id, accepted.principal
        stream = RequestStream(request_id, principal.tenant, _fingerprint(principal, request), accepted.idempotency_key)
        try:
            copied = self._copy_out(stream, accepted, request)
            return self._start(accepted, plan, work, stream, root, admitted, copied=copied)
        except Exception:  # entries that have a copy hear that it ended
            stream.end(time.monotonic(), Internal("the entry could not start the request; its log has it"))
            raise

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

    def _start(
        self,
        accepted: Accepted,
        plan: Plan,
        work: Work,
        stream: RequestStream,
        root: Span,
        admitted: Admitted,
        *,
        copied: tuple[Place, ...] = (),
        taken_over: TakenOver | None = None,
    ) -> RequestStream:
        """Once it returns, the end of the request's task settles what was admitted; if it raises, the caller does."""
        request_id = work.context.request_id
        self._decisions.sent(request_id, plan, len(accepted.token_ids))
        root.set(
            request_id=request_id,
            model=accepted.model.model_id,
            label=accepted.placement.label,
            shape=plan.choice.shape.name.lower(),
            prompt_tokens=len(accepted.token_ids),
        )
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
                taken_over=taken_over,
            )
            live.copied_to(copied)
            log.info("request_accepted", shape=plan.choice.shape.name, label=work.context.label, rule=plan.rule)
            if taken_over is None:
                self._log.add(stream, time.monotonic())
            task = asyncio.create_task(live.run(), name=f"request:{request_id}")
        self._admitted[request_id] = admitted
        self._live[request_id] = live
        self._producers[request_id] = task
        task.add_done_callback(lambda _: self._ended(request_id, root))
        return stream

    def _ended(self, request_id: str, root: Span) -> None:
        live = self._live.pop(request_id)
        used_tokens = live.driver.usage.completion_tokens
        root.set(generated_tokens=used_tokens)
        root.end(live.error)
        del self._producers[request_id]
        self._read_elsewhere.discard(request_id)
        self._admission.leave(self._admitted.pop(request_id), used_tokens)
        self._client_is_back(request_id)
        self._forget_later()

    def _forget_later(self) -> None:
        """What was answered goes by the clock, not with the next request."""
        asyncio.get_running_loop().call_later(self._log.keep_s + 1.0, lambda: self._log.expire(time.monotonic()))

    def _client_left(self, stream: RequestStream) -> None:
        live = self._live.get(stream.request_id)
        if live is None or stream.request_id in self._read_elsewhere:
            return
        if not stream.idempotency_key:
            live.driver.cancel()
            return

        alone = [r for r in self._alone if (other := self._live.get(r)) and other.stream.tenant == stream.tenant]
        if len(alone) >= MAX_ALONE_PER_TENANT:
            self._live[alone[0]].driver.cancel()  # the one that has been waiting longest
            self._client_is_back(alone[0])
        loop = asyncio.get_running_loop()
        self._client_is_back(stream.request_id)  # it may be said twice
        self._alone[stream.request_id] = loop.call_later(_GRACE_S, live.driver.cancel)

    def _client_is_back(self, request_id: str) -> None:
        timer = self._alone.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def _new_id(self) -> str:
        # The entry's node id comes first, so that any node can tell which entry owns a request.
        return f"{self._deps.signer.place.node_id}:{secrets.token_hex(8)}"

    # Requests that other entries know of

    def _copy_out(self, stream: RequestStream, accepted: Accepted, request: pb.GenerateRequest) -> tuple[Place, ...]:
        """Tell other entries of a request that its client may come back for, where policy lets them know of it."""
        if self._deps.copier is None or not stream.idempotency_key:
            return ()
        opened = sibling_pb2.CopiedRequest(
            request_id=stream.request_id,
            tenant=stream.tenant,
            fingerprint=stream.fingerprint,
            request=request,
            label=accepted.placement.label,
            seed=accepted.sampling.seed,
        )
        opened.request.model = accepted.model.model_id  # it may have been downgraded
        return self._deps.copier.copy(opened, stream, lambda place: self._decisions.may_copy_to(accepted, place))

    def _tell_followed(self, stream: RequestStream, followed: bool) -> None:
        copy = self._copies.get(stream.request_id)
        if copy is not None and self._deps.copier is not None and not copy.orphan:
            self._deps.copier.followed(copy.origin, stream.request_id, followed)

    def take_copy(self, origin: str, opened: sibling_pb2.CopiedRequest) -> RequestStream:
        """A request that began at another entry; its events are appended to what this returns. Raises Overloaded."""
        if len(self._copies) >= MOST_COPIES:
            raise Overloaded(f"{len(self._copies)} requests of other entries are kept here, which is the most")
        key = opened.request.idempotency_key
        stream = RequestStream(opened.request_id, opened.tenant, opened.fingerprint, key)
        copy = Copy(origin=origin, request=opened.request, label=opened.label, seed=opened.seed, stream=stream)
        self._copies[opened.request_id] = copy
        self._log.add(stream, time.monotonic())
        return stream

    def copy_ended(self, request_id: str, error: MeshError | None) -> None:
        """A request of another entry came to its end; it can be read here for a while."""
        copy = self._copies.pop(request_id, None)
        if copy is not None:
            copy.stream.end(time.monotonic(), error)
            self._forget_later()

    def origin_lost(self, request_ids: Iterable[str]) -> None:
        """The entry of these is gone. They are taken over where a client asks for them, or waits here."""
        for copy in [copy for request_id in request_ids if (copy := self._copies.get(request_id)) is not None]:
            copy.orphan = True
            if copy.stream.readers:
                self._begin_take_over(copy, None)
            asyncio.get_running_loop().call_later(KEEP_S, self._nobody_came, copy)

    def _begin_take_over(self, copy: Copy, principal: Principal | None) -> None:
        """No client's own: one that leaves meanwhile must not keep others from the rest."""
        request_id = copy.stream.request_id
        if request_id in self._producers or self._copies.pop(request_id, None) is not copy:
            return  # somebody else just did
        task = background(self._take_over(copy, principal), f"take-over:{request_id}")
        self._producers[request_id] = task
        task.add_done_callback(partial(self._taken_over, request_id, copy.stream))

    def _taken_over(self, request_id: str, stream: RequestStream, task: asyncio.Task[None]) -> None:
        self._producers.pop(request_id, None)
        if task.cancelled() and stream.request_id == request_id and not stream.ended:
            stopped = Draining(f"{self._deps.signer.place.node_id} stopped before it went on with the request")
            stream.end(time.monotonic(), stopped)

    def _nobody_came(self, copy: Copy) -> None:
        gone = NodeUnreachable(f"the entry {copy.origin} is gone, and nobody asked for its request", node=copy.origin)
        if self._copies.get(copy.stream.request_id) is copy:
            self.copy_ended(copy.stream.request_id, gone)

    async def _take_over(self, copy: Copy, principal: Principal | None) -> None:
        """Go on with a request whose entry is gone, under an id of this entry. What keeps it from that ends it."""
        before = copy.stream.request_id
        who = principal or Principal(tenant=copy.stream.tenant, role=AccessRole.TENANT, key_id="")
        try:
            self._refuse_if_full()
            await self._deps.receipts.check()
            accepted = await self._decisions.accept(who, copy.to_go_on())
            admitted = await self._admission.enter(
                who.tenant,
                self._deps.policies().lookup(who.tenant).policy,
                prompt_tokens=len(accepted.token_ids),
                max_tokens=accepted.sampling.max_tokens,
                deadline_s=accepted.placement.deadline_s,
            )
            try:
                self._refuse_if_full()
                plan = self._decisions.plan(accepted)
                root = start_span("request", node=self._deps.signer.place.node_id, tenant=who.tenant, kind="taken_over")
                work = self._decisions.work(self._new_id(), accepted, plan, root.traceparent)
                self._log.rename(copy.stream, work.context.request_id)
                taken_over = TakenOver(request_id=before, entry=copy.origin)
                self._start(accepted, plan, work, copy.stream, root, admitted, taken_over=taken_over)
            except BaseException:
                self._admission.leave(admitted, None)
                raise
        except Exception as exc:
            error = exc if isinstance(exc, MeshError) else _by_bug(exc)
            self._deps.metrics.request_ended(outcome=error.reason, shape=Shape.NONE)
            copy.stream.end(time.monotonic(), error)
            self._forget_later()
            return
        log.info("request_taken_over", request_id=before, origin=copy.origin, tokens=len(copy.stream.token_ids))
        if not copy.stream.readers:
            self._client_left(copy.stream)

    def followed_elsewhere(self, request_id: str, followed: bool) -> None:
        """A client follows a request of this entry at another one, or does so no longer."""
        live = self._running(request_id)
        if live is None:
            return
        if followed:
            self._read_elsewhere.add(request_id)
            self._client_is_back(request_id)
        else:
            self._read_elsewhere.discard(request_id)
            if not live.stream.readers:
                self._client_left(live.stream)

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
        live = self._running(self._log.get(request_id, _scope(principal)).request_id)
        if live is None:
            return False
        live.driver.cancel()
        return True

    async def migrate(self, principal: Principal | None, request: admin.MigrateRequest) -> admin.MigrateResponse:
        """Move a running request to a node, or to the best node of a tier; returns once it runs there.

        `principal` None: the mesh itself asks. Raises NotFound, StalePlan (it ended or is moving), and what
        Decisions.target_of_move raises."""
        stream = self._log.get(request.request_id, None if principal is None else _scope(principal))
        live = self._running(stream.request_id)
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


def _by_bug(error: Exception) -> MeshError:
    log.error("request_failed_by_bug", exc_info=error)
    return Internal(f"the entry failed: {type(error).__name__}; its log has it")


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
