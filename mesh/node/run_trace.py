"""The spans of one run at a node: the leg, and in it the prefill and the decode."""

from __future__ import annotations

from mesh.errors import MeshError
from mesh.node.engine import Finished, Held, Prefilled, RunEvent, Tokens
from mesh.node.port import RunOrder
from mesh.telemetry.traces import Span, start_span


class RunTrace:
    """Owned by the run."""

    def __init__(self, order: RunOrder, node_id: str) -> None:
        self._leg = start_span(
            "node.run",
            parent=order.context.traceparent,
            request_id=order.context.request_id,
            node=node_id,
            model=order.context.model,
            tenant=order.context.tenant,
            label=order.context.label,
            prompt_tokens=order.prompt_tokens,
        )
        self._part: Span = start_span("node.prefill", parent=self._leg.traceparent, node=node_id)
        self._node_id = node_id
        self._prefilled = False
        self._tokens = 0

    def saw(self, event: RunEvent) -> None:
        """What the engine told."""
        match event:
            case Prefilled():
                if not self._prefilled:
                    self._prefilled = True
                    self._part.set(prompt_tokens=event.tokens, cached_tokens=event.cached)
                    self._part.end()
                    self._part = start_span("node.decode", parent=self._leg.traceparent, node=self._node_id)
            case Tokens():
                self._tokens += len(event.ids)
            case Held():
                self._leg.set(outcome="held", kv_tokens=event.kv_tokens)
            case Finished():
                self._leg.set(outcome=event.reason.value)

    def end(self, error: MeshError | None = None) -> None:
        """Once or more; the first error stands."""
        if self._prefilled:
            self._part.set(generated_tokens=self._tokens)
        self._part.end(error)
        self._leg.set(generated_tokens=self._tokens)
        self._leg.end(error)
