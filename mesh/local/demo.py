"""`kvmesh demo`: bring a local mesh up, take the tour, take it down. Printing only; the steps are in tour.py."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from mesh.local.tour import TITLES, Clients
from mesh.local.tour_facts import Facts, Step
from mesh.node.engine import FinishReason

_LOG_WIDTH = 110  # of a stream that is no terminal
_STREAMED_STEP = 5  # its text was shown while it came


class Show:
    """Prints steps: for people on stdout, or one JSON object a line there and progress on stderr."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        console = Console(highlight=False, stderr=as_json)
        width = None if console.is_terminal else _LOG_WIDTH
        self._console = Console(highlight=False, stderr=as_json, width=width)

    def progress(self, line: str) -> None:
        """What goes on between steps; not part of the JSON."""
        self._console.print(line, style="dim", markup=False)

    def begin(self, number: int) -> None:
        """A step begins."""
        if not self._as_json:
            self._console.print(f"\n[bold]{number}/{len(TITLES)} {TITLES[number - 1]}[/]")

    def step(self, number: int, step: Step, took_s: float) -> None:
        """A finished step."""
        if self._as_json:
            head = {"step": number, "ok": step.ok, "title": TITLES[number - 1], "took_s": round(took_s, 3)}
            print(json.dumps(head | step.facts), flush=True)
            return
        if step.text and number != _STREAMED_STEP:
            cut = " ..." if step.facts.get("finish") == FinishReason.LENGTH.value else ""
            self._indented(Text(" ".join(step.text.split()) + cut, style="italic"))
        for line in lines_of(step.facts):
            self._indented(line)
        verdict = ("ok", "bold green") if step.ok else ("FAILED", "bold red")
        self._indented(Text.assemble(verdict, (f"  {took_s:.1f} s", "dim")))

    def failed(self, number: int, error: MeshError, took_s: float) -> None:
        """A step that could not be done."""
        facts = {"error": error.reason, "message": error.message}
        self.step(number, Step(ok=False, facts=facts), took_s)

    def token(self, event: Tokens | Migration) -> None:
        """A stream as it comes, coloured by node."""
        if self._as_json:
            return
        if isinstance(event, Migration):
            text, style = f" [{event.from_node_id} -> {event.to_node_id}] ", "bold yellow"
        else:
            text, style = event.text, "magenta" if event.node_id == tour.CORE_NODE else "cyan"
        self._console.print(text, style=style, end="", markup=False, soft_wrap=True)

    def stream_ends(self) -> None:
        """The stream is over: go on on a line of its own."""
        if not self._as_json:
            self._console.print()

    def end(self, passed: Sequence[bool], took_s: float) -> None:
        """The last line."""
        self.progress(f"\n{sum(passed)} of {len(TITLES)} steps ok, {took_s:.0f} s in all")

    def _indented(self, line: RenderableType) -> None:
        # Plain strings hold names and messages: never markup.
        self._console.print(Padding(Text(line) if isinstance(line, str) else line, (0, 0, 0, 4)))


async def demo(plan: LocalPlan, *, as_json: bool, node_command: Sequence[str] = NODE_COMMAND) -> int:
    """Run the tour; returns 0 only if all six steps are ok. Raises MeshError if the mesh does not come up."""
    show, started_s = Show(as_json=as_json), time.monotonic()
    passed: list[bool] = []
    async with LocalMesh.running(plan, show.progress, node_command) as (mesh, ready):
        ca_pem = ready.ca_file.read_bytes()
        async with Clients.connected(ready) as clients:
            for number, run in enumerate(_steps(clients, ca_pem, mesh, show), start=1):
                show.begin(number)
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
                show.step(number, step, time.monotonic() - begun_s)
    show.end(passed, time.monotonic() - started_s)
    return 0 if passed == [True] * len(TITLES) else 1


def _steps(clients: Clients, ca_pem: bytes, mesh: LocalMesh, show: Show) -> tuple[Callable[[], Awaitable[Step]], ...]:
    async def streamed() -> Step:
        try:
            return await tour.step_5_move(clients, ca_pem, show.token)
        finally:
            show.stream_ends()

    return (
        lambda: tour.step_1_the_mesh(clients),
        lambda: tour.step_2_public(clients, ca_pem),
        lambda: tour.step_3_restricted(clients, ca_pem),
        lambda: tour.step_4_split(clients, ca_pem),
        streamed,
        lambda: tour.step_6_core_gone(clients, ca_pem, mesh.kill),
    )


def lines_of(facts: Facts) -> list[RenderableType]:
    """The facts of a step as a person reads them. Pure."""
    lines: list[RenderableType] = []
    if "message" in facts:
        lines.append(f"{facts['error']}: {facts['message']}")
    if "policy_version" in facts:
        lines.append(_nodes_table(facts["nodes"]))
    if "shape" in facts:
        lines.append(
            f"plan {facts['shape']} on {', '.join(facts['nodes'])}, allowed by {facts['rule']}: "
            f"{facts['prompt_tokens']} prompt tokens, first token after {facts['ttft_s']:.2f} s, "
            f"{facts['generated_tokens']} tokens after {facts['total_s']:.2f} s"
        )
    if move := facts.get("move"):
        lines.append(_move_line(move))
    if "saved_s" in facts:
        word = "saved" if facts["saved_s"] >= 0 else "lost"
        lines.append(
            f"osaka alone, {facts['local_prompt_tokens']} tokens like these: first token after "
            f"{facts['local_ttft_s']:.2f} s, so the split {word} {abs(facts['saved_s']):.2f} s"
        )
    if "tokens_lost" in facts:
        lines.append(f"tokens lost: {facts['tokens_lost']}, tokens twice: {facts['tokens_twice']}")
    if receipt := facts.get("receipt"):
        lines.append(
            f"receipt verified: prompt seen by {_names(receipt['saw_prompt'])}; KV held by "
            f"{_names(receipt['held_kv'])}; legs signed by {', '.join(receipt['signed_legs'])}; "
            f"the whole by {receipt['entry']}"
        )
    if refusal := facts.get("refusal"):
        lines.append(f"{refusal['code']}: {refusal['message']}")
    return lines


def _move_line(move: Mapping[str, Any]) -> str:
    what = f"KV of {move['kv_tokens']} tokens ({move['kv_wire_bytes'] / 1e6:.1f} MB, {move['codec']})"
    way = f"from {move['from']} to {move['to']}"
    if move["cause"] == "plan":
        return f"{what} went {way} while it was computed, {move['transfer_s']:.2f} s"
    return (
        f"{what} went {way} at token {move['at_token']}, {move['transfer_s']:.2f} s; "
        f"pause between two tokens {move['pause_s'] * 1000:.0f} ms"
    )


def _names(nodes: Mapping[str, str]) -> str:
    return ", ".join(sorted(nodes)) or "nobody"


def _nodes_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("node", "tier", "site", "region", "jurisdiction", "weights"):
        table.add_column(column, no_wrap=True)
    for column in ("prefill tok/s", "decode tok/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        names = (row["node_id"], row["tier"], row["site"], row["region"], row["jurisdiction"], row["weights"])
        table.add_row(*names, f"{row['prefill_tokens_per_s']:,.0f}", f"{row['decode_tokens_per_s']:,.1f}")
    return table
