"""How client commands show things: tables and lines for people, JSON for programs."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mesh.client_types import Decision, Event, Finish, Migration, Tokens, shape_word
from mesh.errors import MeshError
from mesh.http.responses import receipt_json
from mesh.identity.receipt import verify_receipt
from mesh.v1 import admin_pb2, inference_pb2


def print_json(value: Any) -> None:
    """One JSON value on one line of stdout."""
    print(json.dumps(value, ensure_ascii=False, separators=(",", ":")), flush=True)


def message_json(message: Message) -> dict[str, Any]:
    """A mesh.v1 message with its own field names: numbers are numbers (protobuf's own JSON makes 64-bit ones strings),
    enums their names, bytes base64. Fields that can be absent and are, are left out."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        found[field.name] = [_json(field, v) for v in value] if field.is_repeated else _json(field, value)
    return found


def event_json(event: Event) -> dict[str, Any]:
    """An event of a generation as one object; `event` names it."""
    name = type(event).__name__.lower()
    if isinstance(event, Finish):
        facts = {
            "reason": event.reason.value,
            "usage": asdict(event.usage),
            "ttft_s": event.ttft_s,
            "total_s": event.total_s,
            "stop_string": event.stop_string,
            "receipt": receipt_json(event.receipt),
        }
        return {"event": name, **facts}
    return {"event": name, **asdict(event)}


def printable(text: str) -> str:
    """Model output for a terminal: control characters other than line breaks and tabs are shown, not obeyed."""
    return "".join(c if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") else "\ufffd" for c in text)


class AnswerPrinter:
    """Shows one answer as it comes, and at the end where it ran. Text to `out`, facts to `notes`."""

    def __init__(self, out: Console, notes: Console, receipt_ca: Path | None) -> None:
        self._out = out
        self._notes = notes
        self._receipt_ca = receipt_ca
        self._decision: Decision | None = None
        self._moves: list[Migration] = []
        self.text = ""

    def show(self, event: Event) -> None:
        """Print what the event brings."""
        match event:
            case Decision():
                self._decision = event
            case Tokens():
                self.text += event.text
                self._out.file.write(printable(event.text))
                self._out.file.flush()
            case Migration():
                self._moves.append(event)
            case Finish():
                self._out.print()
                self._notes.print(Text(self._summary(event), style="dim"), soft_wrap=True)

    def _summary(self, finish: Finish) -> str:
        parts: list[str] = []
        if (decision := self._decision) is not None:
            nodes = " → ".join(decision.node_ids)
            parts += [f"{decision.shape} {nodes}", f"label {decision.label}", f"request {decision.request_id}"]
        parts += [_move_words(m) for m in self._moves]
        usage = finish.usage
        cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
        parts.append(f"{usage.prompt_tokens}{cached} + {usage.completion_tokens} tokens")
        parts.append(f"TTFT {finish.ttft_s:.2f} s, total {finish.total_s:.2f} s")
        if (verdict := receipt_verdict(finish, self._receipt_ca)) is not None:
            parts.append(verdict)
        return f"[{' · '.join(parts)}]"


def receipt_verdict(finish: Finish, ca_file: Path | None) -> str | None:
    """What an offline check of the receipt says; None without a CA to check by."""
    if ca_file is None or not ca_file.is_file():
        return None
    try:
        verified = verify_receipt(finish.receipt, ca_file.read_bytes())
    except MeshError as error:
        return f"RECEIPT NOT VALID: {error.message}"
    return f"receipt signed by {verified.entry.node_id}, {len(verified.legs)} legs"


def explain_tables(response: inference_pb2.ExplainResponse) -> Iterable[Table | Text]:
    """What the filters said, what the scores are, and the plan."""
    nodes = Table("node", "site", "tier", "verdict", title="filters")
    for node in response.nodes:
        verdict = Text(", ".join(node.refused), style="red") if node.refused else Text("allowed", style="green")
        nodes.add_row(node.node_id, node.site, node.tier, verdict)
    yield nodes
    if not response.HasField("decision"):
        yield Text(f"no plan: {response.refusal} [{response.refusal_reason}]", style="bold red")
        return
    decision, plan = response.decision, response.decision.plan
    if plan.candidates:
        scores = Table("shape", "prefill", "decode", title="scores")
        for name in ("cost s", "TTFT s", "total s"):
            scores.add_column(name, justify="right")
        for c in plan.candidates:
            times = (f"{value:.3f}" for value in (c.cost_s, c.ttft_s, c.total_s))
            scores.add_row(shape_word(c.shape), c.prefill_node_id, c.decode_node_id, *times)
        yield scores
    yield Text(f"plan: {plan_words(plan)}", style="bold")
    if plan.why:
        yield Text(f"  {plan.why}")
    for fallback in plan.fallbacks:
        yield Text(f"  else {plan_words(fallback)}")
    yield Text(
        f"rule {plan.rule or '(none)'} of policy version {decision.policy_version} · label {decision.label} · "
        f"model {decision.model} · {decision.prompt_tokens} prompt tokens · "
        f"predicted TTFT {plan.predicted_ttft_s:.3f} s, total {plan.predicted_total_s:.3f} s · "
        f"snapshot {response.snapshot_age_s:.1f} s old"
    )


def plan_words(plan: inference_pb2.Plan) -> str:
    """ "split: prefill core-0, move_kv osaka-0, decode osaka-0"."""
    return f"{shape_word(plan.shape)}: {', '.join(map(_leg_words, plan.legs))}"


def _leg_words(leg: inference_pb2.PlanLeg) -> str:
    how = f" in {leg.codec}" if leg.codec else ""
    own = f", its first {leg.own_tokens} tokens computed there" if leg.own_tokens else ""
    return f"{leg.kind} {leg.node_id}{how}{own}"


def nodes_table(snapshot: admin_pb2.Snapshot) -> Table:
    """One row a node: running + waiting requests, share of KV in use, speeds in tokens/s, age of these figures. The
    role is shown where some node has one of its own."""
    # Fits 80 columns with the names of a local mesh; models are a line of their own, since most nodes share one.
    with_roles = any(n.role not in ("", "both") for n in snapshot.nodes)
    table = Table("node", "tier", "site", "state", box=None, padding=(0, 1, 0, 0))
    if with_roles:
        table.add_column("role")
    for name in ("load", "KV", "prefill", "decode", "RTT ms", "age s"):
        table.add_column(name, justify="right")
    for n in snapshot.nodes:
        state = "draining" if n.draining else n.state
        style = {"ready": "green", "disconnected": "red"}.get(state, "yellow")
        used = f"{n.kv_used_tokens / n.kv_capacity_tokens:.0%}" if n.kv_capacity_tokens else "-"
        table.add_row(
            n.node_id, n.tier, n.site, Text(state, style=style), *((n.role or "both",) if with_roles else ()),
            f"{n.running}+{n.waiting}", used,
            _measured(n.prefill_tokens_per_s, 0), _measured(n.decode_tokens_per_s, 1), _measured(n.rtt_s * 1000, 1),
            f"{n.age_s:.1f}",
        )  # fmt: skip
    return table


def model_lines(snapshot: admin_pb2.Snapshot) -> Iterable[str]:
    """ "smollm2 (Q4_1): edge-paris, edge-osaka", by model and precision."""
    nodes: dict[str, list[str]] = {}
    for node in snapshot.nodes:
        for model in node.models:
            nodes.setdefault(f"{model.id} ({model.weights_dtype})", []).append(node.node_id)
    return [f"{name}: {', '.join(ids)}" for name, ids in sorted(nodes.items())]


def simple_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of plain text."""
    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def size_words(n_bytes: int) -> str:
    """ "1.2 MB"."""
    value = float(n_bytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def _json(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return message_json(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else value
    return value


def _move_words(move: Migration) -> str:
    how = "recomputed" if move.recomputed else f"{size_words(move.kv_wire_bytes)} of KV"
    return f"moved {move.from_node_id} → {move.to_node_id} at token {move.offset_tokens} ({move.cause}, {how})"


def _measured(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if value else "-"
