"""The self-test turns whatever happens to its process into one line."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from edge_node.engine.selftest import SelfTestOutcome, interpret, run_command, run_self_test
from tests.edge_node.engine.engines import demo_model


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGILL, "amx_tile.h"),
        (signal.SIGKILL, "memory"),
        (signal.SIGBUS, "model file"),
        (signal.SIGSEGV, "fault in llama.cpp"),
        (signal.SIGABRT, "fault in llama.cpp"),
    ],
)
def test_a_crash_says_what_to_do(number: signal.Signals, words: str) -> None:
    result = interpret(-number, "", "")
    assert (result.outcome, result.ok) == (SelfTestOutcome.CRASHED, False)
    assert number.name in result.message
    assert words in result.message
    assert "\n" not in result.message


def test_a_real_crash_is_seen() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    assert run_command((sys.executable, "-c", code), 30).outcome is SelfTestOutcome.CRASHED


def test_a_hang_is_ended() -> None:
    result = run_command((sys.executable, "-c", "import time; time.sleep(60)"), 0.2)
    assert result.outcome is SelfTestOutcome.HUNG
    assert "0.2 s" in result.message


@pytest.mark.parametrize(
    ("code", "stdout", "outcome"),
    [
        (1, '{"outcome": "bad_model", "says": "no", "remedy": "other"}', SelfTestOutcome.BAD_MODEL),
        (1, '{"outcome": "failed", "says": "no", "remedy": "other"}', SelfTestOutcome.FAILED),
        (1, '{"outcome": "strange", "says": "no", "remedy": "other"}', SelfTestOutcome.FAILED),
        (1, "Traceback", SelfTestOutcome.FAILED),
        (0, "", SelfTestOutcome.FAILED),
        (0, '{"prefill_tokens_per_s": "x"}', SelfTestOutcome.FAILED),
        (0, "[]", SelfTestOutcome.FAILED),
        (0, '{"prefill_tokens_per_s": 10, "decode_tokens_per_s": 5}', SelfTestOutcome.OK),
    ],
)
def test_reports(code: int, stdout: str, outcome: SelfTestOutcome) -> None:
    result = interpret(code, stdout, "first\nImportError: the last line\n\n")
    assert result.outcome is outcome
    assert (result.remedy == "") == result.ok
    if outcome is SelfTestOutcome.FAILED and "{" not in stdout:
        assert "the last line" in result.message


def test_a_file_that_is_no_model_never_reaches_llama_cpp(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + b"\xff" * 100)
    assert run_self_test(bad, 1, 60).outcome is SelfTestOutcome.BAD_MODEL
    assert run_self_test(tmp_path / "absent.gguf", 1, 60).outcome is SelfTestOutcome.BAD_MODEL


@pytest.mark.model
def test_the_demo_model_passes() -> None:
    result = run_self_test(demo_model(), 1, 120)
    assert result.ok, result.message
    assert result.prefill_tokens_per_s > 0
    assert result.decode_tokens_per_s > 0
