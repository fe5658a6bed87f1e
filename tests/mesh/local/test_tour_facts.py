"""What the tour makes of a stream, and how it is shown."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from mesh.client import Decision, Finish, Migration, Tokens, Usage
from mesh.errors import Internal, NodeUnreachable
from mesh.local.demo import Show, lines_of
from mesh.local.tour import TITLES
from mesh.local.tour_facts import Facts, Step, Stream
from mesh.node.engine import FinishReason
from mesh.v1 import common_pb2

DECISION = Decision(
    request_id="r", model="m", shape="local", legs=(), label="internal", rule="x", policy_version=1, prompt_tokens=3,
    predicted_ttft_s=0.1, predicted_total_s=1.0,
)  # fmt: skip
FINISH = Finish(
    reason=FinishReason.LENGTH, usage=Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=0),
    receipt=common_pb2.Receipt(), ttft_s=0.1, total_s=0.2, stop_string="",
)  # fmt: skip
MOVE = Migration(
    from_node_id="edge-paris", to_node_id="core-1", offset_tokens=2, kv_wire_bytes=1_200_000, kv_tokens=50, codec="f16",
    cause="operator", pause_s=0.02, transfer_s=0.1, recomputed=False,
)  # fmt: skip
FACTS: Facts = {
    "shape": "split", "nodes": ["core-1", "edge-osaka"], "rule": "rules.internal", "prompt_tokens": 1200,
    "generated_tokens": 40, "ttft_s": 1.0, "total_s": 2.0, "saved_s": -0.5, "local_ttft_s": 0.5,
    "local_prompt_tokens": 1200,
    "move": {
        "from": "core-1", "to": "edge-osaka", "at_token": 0, "kv_tokens": 1199, "kv_wire_bytes": 27_600_000,
        "codec": "f16", "cause": "plan", "pause_s": 0.0, "transfer_s": 0.9,
    },
    "receipt": {
        "saw_prompt": {"core-1": "dc1"}, "held_kv": {}, "signed_legs": ["core-1", "edge-osaka"], "entry": "edge-osaka",
    },
}  # fmt: skip


def tokens(offset: int, *ids: int, node_id: str = "edge-paris") -> Tokens:
    return Tokens(offset_tokens=offset, ids=ids, text="x" * len(ids), node_id=node_id)


def shown(*lines: object) -> str:
    console = Console(file=io.StringIO(), width=300)
    for line in lines:
        console.print(line)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_stream_without_gaps() -> None:
    seen: list[Tokens | Migration] = []
    stream = Stream(seen.append)
    late = replace(tokens(3), text="!")  # text that was held back, without an id
    for event in (DECISION, tokens(0, 1, 2), MOVE, tokens(2, 3, node_id="core-1"), late, FINISH):
        stream.take(event)
    done = stream.completion()
    assert (done.ids, done.text, done.migrations) == ((1, 2, 3), "xxx!", (MOVE,))
    assert stream.lost_tokens == stream.repeated_tokens == 0
    assert stream.sources == [("edge-paris", 0), ("edge-paris", 1), ("core-1", 2)]
    assert len(seen) == 4


def test_gaps_and_repetitions_are_counted() -> None:
    stream = Stream(lambda event: None)
    for event in (tokens(0, 1, 2), tokens(4, 5), tokens(2, 3)):
        stream.take(event)
    assert (stream.lost_tokens, stream.repeated_tokens) == (2, 1)
    with pytest.raises(Internal):
        stream.completion()


def test_facts_are_told_in_words() -> None:
    text = shown(*lines_of(FACTS))
    assert "plan split on core-1, edge-osaka, allowed by rules.internal" in text
    assert "KV of 1199 tokens (27.6 MB, f16) went from core-1 to edge-osaka while it was computed" in text
    assert "so the split lost 0.50 s" in text
    assert "KV held by nobody" in text
    operator = {"move": FACTS["move"] | {"cause": "operator", "at_token": 27, "pause_s": 0.03}}
    assert "at token 27, 0.90 s; pause between two tokens 30 ms" in shown(*lines_of(operator))


def test_json_has_one_object_a_line_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    show = Show(as_json=True)
    show.progress("starting")
    show.begin(2)
    show.step(2, Step(ok=True, facts={"shape": "core"}, text="hello"), 1.0)
    show.token(tokens(0, 1))
    show.failed(3, NodeUnreachable("gone"), 0.5)
    show.end([True, False], 2.0)
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        f'{{"step": 2, "ok": true, "title": "{TITLES[1]}", "took_s": 1.0, "shape": "core"}}',
        f'{{"step": 3, "ok": false, "title": "{TITLES[2]}", "took_s": 0.5, "error": "NODE_UNREACHABLE", '
        '"message": "gone"}',
    ]
    assert "1 of 6 steps ok" in printed.err


def test_people_see_titles_verdicts_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    show = Show(as_json=False)
    show.begin(2)
    show.step(2, Step(ok=False, facts={"finish": "length"}, text="hello\nthere"), 1.0)
    show.failed(3, NodeUnreachable("it is [gone]"), 0.5)
    printed = capsys.readouterr().out
    for part in (f"2/6 {TITLES[1]}", "hello there ...", "FAILED  1.0 s", "NODE_UNREACHABLE: it is [gone]"):
        assert part in printed
