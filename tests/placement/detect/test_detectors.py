"""What the detectors find, on the labelled set and where people hide things."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from placement.bench.detectors import CASES, read_cases, score_cases
from placement.detect.catalogue import built_in, kinds
from placement.detect.scan import OVERLAP_CHARS, WINDOW_CHARS, scan
from placement.detect.types import Finding
from tests.placement.detect.make_cases import cases

ALL = list(built_in().values())


def found(text: str) -> set[tuple[str, str]]:
    return {(f.kind, text[f.start : f.end]) for f in scan(text, ALL)}


def test_the_labelled_set_is_large_mixed_and_what_its_script_makes() -> None:
    read = read_cases(CASES)
    assert len(read) >= 500
    assert {case["lang"] for case in read} == {"en", "zh", "de"}
    assert sum(1 for case in read if not case["spans"]) >= 200, "hard negatives"
    assert read == json.loads(json.dumps(cases()))


def test_precision_and_recall_on_the_labelled_set() -> None:
    score = score_cases(read_cases(CASES), ALL)
    assert score.recall() >= 0.97
    assert score.precision() >= 0.97
    for kind in score.found | score.missed:
        assert score.recall(kind) >= 0.9, kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("card ４１１１ １１１１ １１１１ １１１１ ok", "payment_card"),
        ("card 4111\u200b1111\u200b1111\u200b1111 ok", "payment_card"),
        ("card 4111\u00a01111\u20111111\u20131111 ok", "payment_card"),
        ("卡号4111111111111111扣款", "payment_card"),
        ("card ٤١١١١١١١١١١١١١١١ ok", "payment_card"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE", "private_key"),
        ("postgres://bob:s3cret99@db.internal/x", "api_key"),
        ("我的手机号是13812345678。", "phone"),
        ("mail bob+tag@sub.mail.co.uk now", "email"),
        ("de89 3704 0044 0532 0130 00", "iban"),
    ],
)
def test_disguises(text: str, kind: str) -> None:
    assert kind in {f.kind for f in scan(text, ALL)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4111 1111 1111 1112",
        "write to someone@example.com",
        "0000 0000 0000 0000",
        "version 10.2.3 of 2024-01-02, build 1234567890",
        "the password is wrong",
        "password: ********",
        "3.14159265358979323846264338327950288",
        "550e8400-e29b-41d4-a716-446655440000",
    ],
)
def test_nothing_there(text: str) -> None:
    assert scan(text, ALL) == ()


def test_positions_are_those_of_the_original() -> None:
    assert ("payment_card", "4111\u200b1111 1111\u200b1111") in found("x\u200b é 4111\u200b1111 1111\u200b1111 é")


@pytest.mark.parametrize("shift", range(-600, 601, 60))
def test_nothing_is_lost_between_windows(shift: int) -> None:
    at = WINDOW_CHARS - OVERLAP_CHARS + shift
    text = "word " * (at // 5) + "Steuer-ID 86095742719 and 4111 1111 1111 1111 " + "word " * 2_000
    assert {kind for kind, _ in found(text)} == {"de_tax_id", "payment_card"}
    assert len(scan(text, ALL)) == 2, "those of the overlap are told of once"


def test_kinds_are_named_once() -> None:
    assert len(kinds()) == sum(len(d.kinds) for d in ALL)
    assert all("." not in kind for kind in kinds()), "a dot marks a plug-in's kind"


def test_a_detector_that_lies_about_its_place_is_an_error() -> None:
    class Liar:
        name = "liar"
        kinds = frozenset({"lie"})

        def find(self, text: str) -> list[Finding]:
            return [Finding(0, len(text) + 5, "lie")]

    with pytest.raises(Exception, match="cannot be"):
        scan("text", [Liar()])


def test_work_grows_with_the_text_and_not_faster() -> None:
    """Runs of digits, at-signs and quotes are where backtracking would show."""
    for piece in ("1", "1 ", "a@", "-", "://:", "a.", "A1", "password is ", "4-"):
        assert scan(piece * (20_000 // len(piece)), ALL) is not None


def test_the_set_lies_beside_its_script() -> None:
    assert Path(__file__).with_name("cases.jsonl") == CASES
