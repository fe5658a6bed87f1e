"""What the steps of the tour find out, as facts: plain JSON, from events of the client and verified receipts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mesh.client import Completion, Decision, Finish, Migration, Tokens
from mesh.errors import Internal
from mesh.identity.receipt import VerifiedReceipt, verify_receipt

Facts = dict[str, Any]
Watch = Callable[[Tokens | Migration], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step found. `facts` are plain JSON; `text` is what the model said, for people."""

    ok: bool
    facts: Facts
    text: str = ""


class Stream:
    """Collects the events of one generation and counts what would be missing or double."""

    def __init__(self, watch: Watch) -> None:
        self.decision: Decision | None = None
        self.ids: list[int] = []
        self.sources: list[tuple[str, int]] = []  # node and offset of each token
        self.lost_tokens = 0
        self.repeated_tokens = 0
        self._watch = watch
        self._texts: list[str] = []
        self._migrations: list[Migration] = []
        self._finish: Finish | None = None

    def take(self, event: Decision | Tokens | Migration | Finish) -> None:
        """One event, in order."""
        match event:
            case Decision():
                self.decision = event
            case Tokens():
                expected = len(self.ids)
                if event.ids:
                    self.lost_tokens += max(0, event.offset_tokens - expected)
                    self.repeated_tokens += max(0, expected - event.offset_tokens)
                self.sources += [(event.node_id, event.offset_tokens + i) for i in range(len(event.ids))]
                self.ids += event.ids
                self._texts.append(event.text)
                self._watch(event)
            case Migration():
                self._migrations.append(event)
                self._watch(event)
            case Finish():
                self._finish = event

    def completion(self) -> Completion:
        """All of it. Raises Internal if the stream had no decision or finish."""
        if self.decision is None or self._finish is None:
            raise Internal("the stream ended without its decision or finish")
        return Completion(
            text="".join(self._texts), ids=tuple(self.ids), decision=self.decision,
            migrations=tuple(self._migrations), finish=self._finish,
        )  # fmt: skip


def facts_of(done: Completion, ca_pem: bytes) -> tuple[Facts, VerifiedReceipt]:
    """What a finished request tells, its receipt verified against the mesh's authority. Raises MeshError if the
    receipt does not hold."""
    receipt = verify_receipt(done.finish.receipt, ca_pem)
    facts: Facts = {
        "request_id": done.decision.request_id,
        "shape": done.decision.shape,
        "label": done.decision.label,
        "rule": done.decision.rule,
        "nodes": list(done.decision.node_ids),
        "prompt_tokens": done.finish.usage.prompt_tokens,
        "generated_tokens": done.finish.usage.completion_tokens,
        "cached_tokens": done.finish.usage.cached_tokens,
        "finish": done.finish.reason.value,
        "ttft_s": round(done.finish.ttft_s, 3),
        "total_s": round(done.finish.total_s, 3),
        "receipt": {
            "verified": True,
            "entry": receipt.entry.node_id,
            "signed_legs": [place.node_id for _, place in receipt.legs],
            **{key: receipt.body[key] for key in ("saw_prompt", "held_kv", "tokens_by_node", "policy_version")},
        },
    }
    if done.migrations:
        move = done.migrations[-1]
        facts["move"] = {
            "from": move.from_node_id,
            "to": move.to_node_id,
            "at_token": move.offset_tokens,
            "kv_tokens": move.kv_tokens,
            "kv_wire_bytes": move.kv_wire_bytes,
            "codec": move.codec,
            "cause": move.cause,
            "pause_s": round(move.pause_s, 4),
            "transfer_s": round(move.transfer_s, 4),
        }
    return facts, receipt
