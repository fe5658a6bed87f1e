"""`kvmesh chat`: a conversation in the terminal, or over lines of standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing

from rich.console import Console

from mesh.cli.client_connection import Connection
from mesh.cli.client_output import AnswerPrinter, event_json, print_json
from mesh.client_sync import SyncMeshClient
from mesh.client_types import Decision, Options, Tokens
from mesh.errors import MeshError

_HELP = "/new starts over, /quit ends, Ctrl-C ends an answer"


def chat(
    connection: Connection, system: str | None, options: Options, *, as_json: bool, out: Console, notes: Console
) -> None:
    """Read messages until /quit or the end of input. Raises MeshError where it cannot connect at all."""
    first = [{"role": "system", "content": system}] if system is not None else []
    turns, continues = list(first), ""
    with connection.open() as mesh:
        if not as_json:
            notes.print(f"{connection.address}: {_HELP}", style="dim")
        for line in _lines(as_json):
            match line.strip():
                case "":
                    continue
                case "/quit" | "/exit":
                    return
                case "/new":
                    turns, continues = list(first), ""
                    continue
                case "/help":
                    notes.print(_HELP, style="dim")
                    continue
            turns.append({"role": "user", "content": line})
            options["continues"] = continues
            text, continues = _answer(
                mesh, turns, options, AnswerPrinter(out, notes, connection.receipt_ca), as_json, notes
            )
            if text is None:
                turns.pop()  # nothing came: the next message stands in its place
            else:
                turns.append({"role": "assistant", "content": text})


def _answer(
    mesh: SyncMeshClient,
    turns: list[dict[str, str]],
    options: Options,
    printer: AnswerPrinter,
    as_json: bool,
    notes: Console,
) -> tuple[str | None, str]:
    """Stream one answer: its text, also if it was cut short, or None if there is none; and what the next turn brings
    along, so that the conversation keeps its label."""
    text, continues = "", options.get("continues", "")
    try:
        with closing(mesh.generate(turns, **options)) as events:
            for event in events:
                if isinstance(event, Tokens):
                    text += event.text
                elif isinstance(event, Decision):
                    continues = event.continuation
                if as_json:
                    print_json(event_json(event))
                else:
                    printer.show(event)
    except KeyboardInterrupt:
        notes.print("\n(stopped)", style="dim")
    except MeshError as error:
        if as_json:
            print_json({"event": "error", "reason": error.reason, "message": error.message, "details": error.details})
        else:
            notes.print(f"\n{error.message} [{error.reason}]", style="red")
    return text or None, continues


def _lines(as_json: bool) -> Iterator[str]:
    """What the user typed, a line each; ends at the end of input, or at Ctrl-C in an empty prompt."""
    if as_json or not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
