"""`kvmesh demo`: bring a local mesh up, take the tour, take it down. Printing only; the steps are in tour.py."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mesh.client import Migration, Tokens
from mesh.errors import MeshError
from mesh.local import tour
from mesh.local.layout import LocalPlan
from mesh.local.local_mesh import NODE_COMMAND, LocalMesh
from mesh.local.tour import Clients
from mesh.local.tour_facts import Step

STEPS = 6


class Show:
    """Prints steps: for people on stdout, or one JSON object a line."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._console = Console(highlight=False, stderr=as_json)
        self.live = not as_json

    def progress(self, line: str) -> None:
        """What goes on between steps; not part of the JSON."""
        self._console.print(line, style="dim", markup=False)

    def step(self, step: Step, took_s: float) -> None:
        """A finished step."""
        if self._as_json:
            record = {"step": step.number, "ok": step.ok, "title": step.title, "took_s": round(took_s, 3), **step.facts}
            print(json.dumps(record), flush=True)
            return
        verdict = Text("ok", style="bold green") if step.ok else Text("FAILED", style="bold red")
        self._console.print(Text.assemble((f"\n{step.number}/{STEPS} ", "bold"), step.title, "  ", verdict))
        for line in self._lines(step):
            self._console.print(Padding(line, (0, 0, 0, 4)))

    def failed(self, number: int, error: MeshError, took_s: float) -> None:
        """A step that could not be done."""
        facts = {"error": error.reason, "message": error.message}
        self.step(Step(number=number, title=f"{error.reason}: {error.message}", ok=False, facts=facts), took_s)

    def token(self, event: Tokens | Migration) -> None:
        """The stream of step 5 as it comes, coloured by node."""
        if not self.live:
            return
        if isinstance(event, Migration):
            self._console.print(
                f" [{event.from_node_id} -> {event.to_node_id}] ", style="bold yellow", end="", markup=False
            )
            return
        style = "magenta" if event.node_id == tour.CORE_NODE else "cyan"
        self._console.print(event.text, style=style, end="", markup=False)

    def end(self, passed: Sequence[bool], took_s: float) -> None:
        """The last line."""
        if not self._as_json:
            self._console.print(f"\n{sum(passed)} of {STEPS} steps ok, {took_s:.0f} s in all")

    def _lines(self, step: Step) -> list[RenderableType]:
        facts, lines = step.facts, list[RenderableType]()
        if "nodes" in facts and step.number == 1:
            lines.append(_nodes_table(facts["nodes"]))
        if "shape" in facts:
            lines.append(
                f"plan {facts['shape']} by rule {facts['rule']}: {', '.join(facts['nodes'])}; "
                f"{facts['prompt_tokens']} prompt tokens, {facts['generated_tokens']} generated, "
                f"first after {facts['ttft_s']:.2f} s, all after {facts['total_s']:.2f} s"
            )
        if move := facts.get("move"):
            lines.append(
                f"KV of {move['kv_tokens']} tokens moved from {move['from']} to {move['to']}: "
                f"{move['kv_wire_bytes'] / 1e6:.1f} MB ({move['codec']}) in {move['transfer_s']:.2f} s, "
                f"pause between two tokens {move['pause_s'] * 1000:.0f} ms"
            )
        if "saved_s" in facts:
            word = "saved" if facts["saved_s"] >= 0 else "lost"
            lines.append(
                f"osaka alone, {facts['local_prompt_tokens']} tokens like these: first after "
                f"{facts['local_ttft_s']:.2f} s; the split {word} {abs(facts['saved_s']):.2f} s"
            )
        if "tokens_lost" in facts:
            lines.append(f"tokens lost: {facts['tokens_lost']}, tokens twice: {facts['tokens_twice']}")
        if receipt := facts.get("receipt"):
            lines.append(
                f"receipt verified: prompt seen by {_nodes(receipt['saw_prompt'])}; KV held by "
                f"{_nodes(receipt['held_kv'])}; signed by {', '.join([*receipt['signed_legs'], receipt['entry']])}"
            )
        if refusal := facts.get("refusal"):
            lines.append(f"{refusal['code']}: {refusal['message']}")
        if step.text and not (self.live and step.number == 5):
            lines.append(Text(" ".join(step.text.split()), style="italic"))
        return lines


async def demo(plan: LocalPlan, *, as_json: bool, node_command: Sequence[str] = NODE_COMMAND) -> int:
    """Run the tour; returns 0 only if all six steps are ok. Raises MeshError if the mesh does not come up."""
    show, started_s = Show(as_json=as_json), time.monotonic()
    passed: list[bool] = []
    async with LocalMesh.running(plan, show.progress, node_command) as (mesh, ready):
        ca_pem = ready.ca_file.read_bytes()
        async with Clients.connected(ready) as clients:
            for number, run in enumerate(_steps(clients, ca_pem, mesh, show), start=1):
                begun_s = time.monotonic()
                try:
                    step = await run()
                except MeshError as exc:
                    passed.append(False)
                    show.failed(number, exc, time.monotonic() - begun_s)
                    if number == 1:  # nothing else can be shown
                        break
                    continue
                passed.append(step.ok)
                show.step(step, time.monotonic() - begun_s)
    show.end(passed, time.monotonic() - started_s)
    return 0 if passed == [True] * STEPS else 1


def _steps(clients: Clients, ca_pem: bytes, mesh: LocalMesh, show: Show) -> tuple[Callable[[], Awaitable[Step]], ...]:
    return (
        lambda: tour.step_1_the_mesh(clients),
        lambda: tour.step_2_public(clients, ca_pem),
        lambda: tour.step_3_restricted(clients, ca_pem),
        lambda: tour.step_4_split(clients, ca_pem),
        lambda: tour.step_5_move(clients, ca_pem, show.token),
        lambda: tour.step_6_core_gone(clients, ca_pem, mesh.kill),
    )


def _nodes(nodes: dict[str, str]) -> str:
    return ", ".join(sorted(nodes)) or "nobody"


def _nodes_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column, justify in (
        ("node", "left"), ("tier", "left"), ("site", "left"), ("region", "left"), ("jurisdiction", "left"),
        ("weights", "left"), ("prefill tok/s", "right"), ("decode tok/s", "right"),
    ):  # fmt: skip
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        speeds = (f"{row['prefill_tokens_per_s']:,.0f}", f"{row['decode_tokens_per_s']:,.1f}")
        names = (row["node_id"], row["tier"], row["site"], row["region"], row["jurisdiction"], row["weights"])
        table.add_row(*names, *speeds)
    return table
