"""One request while it runs: turns the driver's effects into what the client sees and what the receipt says.

Owned by the request's producer task. Text is made here: the engine sends ids, the entry detokenises and trims at
stop strings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Protocol

from mesh.errors import Draining, Internal, MeshError
from mesh.identity.place import Place, Tier
from mesh.node.port import KvReport
from mesh.node.stop import StopMatcher
from mesh.telemetry.log import get_logger
from mesh.telemetry.metrics import Metrics, Shape
from mesh.telemetry.metrics import MoveCause as MoveLabel
from mesh.v1 import inference_pb2 as pb
from placement.decide.moves import Progress
from placement.decide.types import Plan
from placement.entry import runner_types as rt
from placement.entry.copies import ENTRY_STOPS
from placement.entry.driver import RequestDriver
from placement.entry.intake import Accepted
from placement.entry.orders import Work, needs_relay
from placement.entry.receipt import ReceiptDraft, ReceiptKeeper, Signer
from placement.entry.request_log import RequestStream, TokenPiece
from placement.entry.runner import PlanRunner
from placement.entry.wire import decision_to_wire, finish_to_wire, logprobs_to_wire, migration_to_wire
from placement.entry.world import World
from placement.predict.measured import Measured

log = get_logger(__name__)
_NEWEST_WEIGHT = 0.1  # of one interval; a few stalled ones must not look like a slow engine


class TokenPace:
    """Interval of a request's tokens at the node where it is, as a moving average in seconds; 0: not known yet."""

    def __init__(self) -> None:
        self.token_s = 0.0
        self._node_id = ""
        self._last_s = 0.0

    def saw(self, node_id: str, n_tokens: int, now_s: float) -> None:
        """So many tokens came from the node."""
        if node_id == self._node_id:
            token_s = (now_s - self._last_s) / n_tokens
            self.token_s = token_s if not self.token_s else self.token_s + _NEWEST_WEIGHT * (token_s - self.token_s)
        else:
            self._node_id, self.token_s = node_id, 0.0
        self._last_s = now_s


class Learn(Protocol):
    """Takes what a request showed of the mesh, for the predictions of later ones."""

    def kv_at(self, node_id: str, accepted: Accepted, token_ids: tuple[int, ...]) -> None:
        """A leg ended at this node, which has KV of these tokens."""

    def transfer(self, accepted: Accepted, report: KvReport) -> None:
        """KV was moved."""

    def placed(self, request_id: str, accepted: Accepted, plan: Plan) -> None:
        """The request goes along its plan now."""

    def ended(self, request_id: str, plan: Plan, measured: Measured | None) -> None:
        """The request ended; `measured` if it ran as planned and ended well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenOver:
    """What a request goes on from: its id at the entry that is gone."""

    request_id: str
    entry: str  # node id


class LiveRequest:
    """Drives one accepted request along its plan into its stream."""

    def __init__(
        self,
        *,
        accepted: Accepted,
        plan: Plan,
        work: Work,
        stream: RequestStream,
        world: World,
        signer: Signer,
        metrics: Metrics,
        learn: Learn,
        receipts: ReceiptKeeper,
        continuation: str,
        taken_over: TakenOver | None = None,
    ) -> None:
        """`stream` of a request that is taken over has its tokens so far."""
        self.accepted = accepted
        self._learn = learn
        self._generated: list[int] = list(stream.token_ids)
        self.started_s = time.monotonic()
        self.work = work
        self.stream = stream
        self._world = world
        self._signer = signer
        self._metrics = metrics
        self._receipts = receipts
        self.shape = Shape[plan.choice.shape.name]
        self._text = accepted.model.tokenizer.stream()
        self._matcher = StopMatcher(accepted.sampling.stop)
        self._draft = ReceiptDraft(
            request_id=stream.request_id,
            tenant=accepted.principal.tenant,
            model=accepted.model.model_id,
            claimed_label=accepted.claimed_label,
            raised=accepted.raised,
            plan=plan,
            started_unix_s=time.time(),
        )
        if taken_over is not None:
            self._draft.taken_over = {**asdict(taken_over), "tokens": len(self._generated)}
            for token_id in self._generated:
                self._matcher.push(self._text.push(token_id))
        self._error: MeshError | None = None
        self._finished: rt.Finish | None = None
        self._ttft_s: float | None = None
        self._pace = TokenPace()
        eos = frozenset[int]() if accepted.sampling.ignore_eos else accepted.model.description.eos_token_ids
        spec = rt.RunnerSpec(
            request_id=stream.request_id,
            prompt_ids=accepted.token_ids,
            max_tokens=accepted.sampling.max_tokens,
            min_tokens=accepted.sampling.min_tokens,
            eos_token_ids=eos,
            plan=plan,
            generated_ids=tuple(self._generated),
        )
        self.driver = RequestDriver(
            runner=PlanRunner(spec), work=work, world=world, on_effect=self._on_effect, on_report=self._on_report
        )
        learn.placed(stream.request_id, accepted, plan)
        if taken_over is None:
            decision = decision_to_wire(stream.request_id, accepted, plan, continuation=continuation)
            stream.append(pb.GenerateResponse(decision=decision))
        else:  # its client had a decision before; what changes for it is where the tokens come from
            stream.append(pb.GenerateResponse(migration=migration_to_wire(_taken_up(stream, plan))))

    @property
    def error(self) -> MeshError | None:
        """What it ended with, if that was none of the good ends."""
        return self._error

    def copied_to(self, places: Iterable[Place]) -> None:
        """These entries keep a copy of it."""
        self._draft.copies.update({place.node_id: place.site for place in places})

    @property
    def progress(self) -> Progress:
        """How far it is now."""
        usage = self.driver.usage
        return Progress(
            tokens=usage.prompt_tokens + usage.completion_tokens,
            left_tokens=max(1, self.accepted.sampling.max_tokens - usage.completion_tokens),
            token_s=self._pace.token_s,
        )

    async def run(self) -> None:
        """To the outcome; the stream has ended after it, whatever happens. The receipt is on disk before the client
        is told of the outcome; if it cannot be kept, that is the outcome."""
        error: MeshError | None = None
        try:
            await self.driver.run()
            error = self._error
            if error is None and self._finished is None:
                error = Internal("the request ended without an outcome")
        except MeshError as exc:
            error = exc
        except Exception as exc:
            log.exception("request_failed")
            error = Internal(f"the entry failed: {type(exc).__name__}")
        except asyncio.CancelledError:
            # Only an entry that stops cancels its requests; their clients may try another one.
            node_id = self._signer.place.node_id
            error = Draining(f"{node_id} stopped before the request had ended", **{ENTRY_STOPS: node_id})
            raise
        finally:
            await self._end(error)

    async def _end(self, error: MeshError | None) -> None:
        """End the stream, even if keeping the receipt fails by a bug or is cancelled: no client waits for ever."""
        told: MeshError | None = Internal("the entry could not conclude the request; its log has it")
        try:
            told = await self._conclude(error)
        except Exception:
            log.exception("receipt_failed")
        finally:
            self.stream.end(time.monotonic(), told)
            outcome = "OK" if told is None else told.reason
            self._count(outcome)
            log.info("request_ended", outcome=outcome, generated_tokens=self.driver.usage.completion_tokens)

    async def _conclude(self, error: MeshError | None) -> MeshError | None:
        """Sign and keep the receipt, then tell of the finish. The outcome's error."""
        finished = self._finished
        self._learn.ended(self.stream.request_id, self._draft.plan, self._measured(error))
        if error is not None:
            outcome = error.reason
        else:
            assert finished is not None, "run() makes an error of it"
            outcome = finished.reason.value
        receipt = self._draft.sign(
            self._signer,
            outcome=outcome,
            ended_unix_s=time.time(),
            usage=asdict(self.driver.usage),
        )
        try:
            await self._receipts.append_receipt(receipt)
        except MeshError as exc:
            log.error("receipt_not_kept", reason=exc.reason, error=exc.message)
            return error or type(exc)(f"the answer is complete, but its receipt could not be kept: {exc.message}")
        if error is None and finished is not None:
            self.stream.append(pb.GenerateResponse(finish=finish_to_wire(finished, receipt)))
        return error

    def _measured(self, error: MeshError | None) -> Measured | None:
        """What it took; None if it did not run as planned."""
        moved = len(self._draft.migrations) - (self._draft.plan.choice.prefill != self._draft.plan.choice.decode)
        if error is not None or self._finished is None or moved or self._draft.fallbacks:
            return None
        usage = self.driver.usage
        self._draft.measured = Measured(
            ttft_s=self._finished.ttft_s,
            total_s=self._finished.total_s,
            tokens=usage.completion_tokens,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
        )
        return self._draft.measured

    def _on_effect(self, effect: rt.Effect) -> None:
        match effect:
            case rt.Emit():
                self._emit(effect)
            case rt.StartRun(node_id=node_id):
                self._touch(node_id)
            case rt.MoveKv():  # its order names the tokens, to both ends
                source, target = self._touch(effect.source_node_id), self._touch(effect.target_node_id)
                if source is not None and target is not None and needs_relay(source, target):
                    self._draft.relays.add(self._world.relay_node_id)
            case rt.EmitMigration():
                self._migrated(effect)
            case rt.MoveFailed():
                self._metrics.request_moved(cause=MoveLabel(effect.cause.value), outcome=effect.error.reason)
            case rt.LegDone(node_id=node_id, record=record):
                self._draft.legs.append(record)
                self._learn.kv_at(node_id, self.accepted, (*self.accepted.token_ids, *self._generated))
            case rt.Finish():
                self._finish(effect)
            case rt.Fail(error=error):
                self._error = error

    def _on_report(self, report: KvReport) -> None:
        self._learn.transfer(self.accepted, report)

    def _emit(self, effect: rt.Emit) -> None:
        self._generated += effect.ids
        self._draft.tokens_by_node[effect.node_id] += len(effect.ids)
        self._pace.saw(effect.node_id, len(effect.ids), time.monotonic())
        for i, token_id in enumerate(effect.ids):
            text = self._matcher.push(self._text.push(token_id))
            logprobs = logprobs_to_wire(token_id, effect.logprobs[i]) if effect.logprobs else None
            self.stream.append(TokenPiece(token_id, text, effect.node_id, logprobs))

    def _migrated(self, effect: rt.EmitMigration) -> None:
        facts = {**asdict(effect), "cause": effect.cause.value}
        if self._is_follow(effect):
            facts["shape"] = "follow"
        self._draft.migrations.append({k: round(v, 6) if isinstance(v, float) else v for k, v in facts.items()})
        self._draft.fallbacks += effect.cause is rt.MoveCause.FALLBACK
        self._metrics.request_moved(cause=MoveLabel(effect.cause.value), outcome="OK", pause_s=effect.pause_s)
        self.stream.append(pb.GenerateResponse(migration=migration_to_wire(effect)))

    def _is_follow(self, effect: rt.EmitMigration) -> bool:
        """Whether the request went from one site to another."""
        ends = [self._place_of(node_id) for node_id in (effect.from_node_id, effect.to_node_id)]
        return all(end is not None and end.tier is Tier.EDGE for end in ends)

    def _place_of(self, node_id: str) -> Place | None:
        try:
            return self._world.port(node_id).place
        except MeshError:
            return None

    def _finish(self, effect: rt.Finish) -> None:
        rest = self._matcher.push(self._text.flush()) + self._matcher.flush()
        if rest:
            node_id = self.driver.node_id
            delta = pb.TokenDelta(offset_tokens=self.driver.usage.completion_tokens, text=rest, node_id=node_id)
            self.stream.append(pb.GenerateResponse(tokens=delta))
        self._ttft_s = effect.ttft_s
        self._finished = effect

    def _count(self, outcome: str) -> None:
        usage = self.driver.usage
        self._metrics.request_ended(
            outcome=outcome,
            shape=self.shape,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            generated_tokens=usage.completion_tokens,
            ttft_s=self._ttft_s,
        )

    def _touch(self, node_id: str) -> Place | None:
        try:
            port = self._world.port(node_id)
        except MeshError:  # it is gone, so it will not see anything either: the order fails at once
            return None
        self._draft.touched(port.place)
        if not port.can_dial:  # a node of another site, which only the relay reaches
            self._draft.relays.add(self._world.relay_node_id)
        return port.place


def _taken_up(stream: RequestStream, plan: Plan) -> rt.EmitMigration:
    """The request goes on along a new plan, with its tokens replayed."""
    return rt.EmitMigration(
        from_node_id=stream.last_node_id,
        to_node_id=plan.choice.prefill.node_id,
        offset_tokens=len(stream.token_ids),
        kv_wire_bytes=0,
        kv_tokens=0,
        codec="",
        cause=rt.MoveCause.FALLBACK,
        pause_s=0.0,
        transfer_s=0.0,
        recomputed=True,
    )
