"""What the offline benchmark makes of what its clients saw."""

from __future__ import annotations

from edge_node.bench.offline import PHASES, Asked, report


def asked(phase: int, label: str, request_id: str = "", reason: str = "", took_s: float = 0.1) -> Asked:
    return Asked(phase=PHASES[phase], label=label, request_id=request_id, reason=reason, took_s=took_s, message="why")


SEEN = [
    asked(0, "confidential", "a"), asked(0, "public", "b"), asked(1, "confidential", "c"),
    asked(1, "public", reason="NO_NODE_NOW", took_s=0.2), asked(1, "public", reason="NODE_UNREACHABLE", took_s=4.0),
    asked(2, "confidential", "d"), asked(2, "public", reason="NO_NODE_NOW"), asked(3, "public", "e"),
]  # fmt: skip


def goals(receipts: dict[str, int], problems: list[str]) -> dict[str, float]:
    return {goal.name: goal.value for goal in report(SEEN, receipts, problems, 1.5).goals}


def test_each_finished_request_has_its_receipt_once() -> None:
    whole = dict.fromkeys("abcde", 1)
    assert goals({**whole, "of somebody who left": 1}, []) == {
        "served while cut off": 2, "receipts missing": 0, "receipts doubled": 0, "problems in the merged log": 0,
    }  # fmt: skip
    assert goals({**whole, "c": 0}, [])["receipts missing"] == 1
    assert goals({**whole, "d": 2}, [])["receipts doubled"] == 1
    assert goals(whole, ["torn"])["problems in the merged log"] == 1


def test_refusals_are_told_by_phase_with_their_words() -> None:
    result = report(SEEN, dict.fromkeys("abcde", 1), [], 1.5)
    cut = next(row for row in result.rows if (row["phase"], row["prompts"]) == ("cut", "need the core"))
    assert (cut["asked"], cut["finished"], cut["refused_worst_s"]) == (2, 0, 4.0)
    assert cut["reasons"] == "NO_NODE_NOW 1, NODE_UNREACHABLE 1"
    assert any("why" in note for note in result.notes)
