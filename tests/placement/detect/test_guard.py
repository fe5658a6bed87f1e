"""Detectors that fail or hang: the label goes up, nothing waits, nothing is quoted."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterable

import pytest

from placement.detect import catalogue
from placement.detect.catalogue import built_in
from placement.detect.guard import Guard
from placement.detect.label import raise_label
from placement.detect.scan import MAX_FINDINGS, scan
from placement.detect.types import Finding
from placement.policy.book import BUILTIN
from placement.policy.model import parse_policy

CARD = "pay with 4111 1111 1111 1111"


class Broken:
    name = "broken"
    kinds = frozenset({"acme.badge"})

    def find(self, text: str) -> Iterable[Finding]:
        raise ValueError(f"cannot read {text}")


class Hangs:
    name = "hangs"
    kinds = frozenset({"acme.badge"})

    def __init__(self) -> None:
        self.release = threading.Event()

    def find(self, text: str) -> Iterable[Finding]:
        self.release.wait(30.0)
        return []


async def test_findings_raise_the_label_and_never_lower_it() -> None:
    guard = Guard()
    raised = await raise_label(guard, BUILTIN, "public", CARD)
    assert (raised.label, [f.kind for f in raised.findings]) == ("confidential", ["payment_card"])
    assert (await raise_label(guard, BUILTIN, "restricted", CARD)).label == "restricted"
    assert (await raise_label(guard, BUILTIN, "public", "nothing here")).label == "public"


async def test_what_raises_is_told_without_the_text(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()
    detected = await guard.detect("secret words", [Broken()], trusted=False)
    assert detected.failure == "a detector failed (ValueError)"
    assert "secret" not in caplog.text


async def test_what_hangs_is_left_behind_and_later_texts_fail_at_once() -> None:
    guard, hangs = Guard(limit_s=0.05, n_threads=1), Hangs()
    first = await guard.detect("text", [hangs], trusted=False)
    assert "took more than" in first.failure
    second = await guard.detect("text", [hangs], trusted=False)
    assert second.failure == "detectors hang: restart this entry"
    # Ours, on a short text, need no thread and still work.
    assert (await guard.detect(CARD, [built_in()["identifiers"]], trusted=True)).findings
    hangs.release.set()


async def test_one_that_hangs_for_a_while_gives_its_slot_back() -> None:
    guard, hangs = Guard(limit_s=0.05, n_threads=1), Hangs()
    assert (await guard.detect("text", [hangs], trusted=False)).failure
    hangs.release.set()
    async with asyncio.timeout(10):
        while (await guard.detect("text", [hangs], trusted=False)).failure:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


def test_one_that_hangs_does_not_keep_the_process_from_ending() -> None:
    program = """
import asyncio, threading
from placement.detect.guard import Guard

class Hangs:
    name, kinds = "hangs", frozenset({"acme.badge"})
    def find(self, text):
        threading.Event().wait()

print(asyncio.run(Guard(limit_s=0.05).detect("text", [Hangs()], trusted=False)).failure)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, "took more than" in done.stdout) == (0, True), done.stderr


class Everything:
    """Finds each word as a kind of its name."""

    name = "everything"
    kinds = frozenset({"many", "rare"})

    def find(self, text: str) -> Iterable[Finding]:
        return [Finding(m.start(), m.end(), m.group()) for m in re.finditer("many|rare", text)]


def test_a_thousand_findings_hide_none_of_another_kind() -> None:
    text = "many " * 5_000 + "rare " + "many " * 100 + "rare"
    found = scan(text, [Everything()])
    assert [f.kind for f in found if f.kind == "rare"] == ["rare"]
    assert found[-1] == Finding(25_000, 25_004, "rare")
    assert len(found) == MAX_FINDINGS + 1


async def test_a_detector_that_is_not_installed_fails_closed() -> None:
    policy = parse_policy("version: 1\ndetectors: {raise_to: {acme.badge: internal}}\n", version=1)
    raised = await raise_label(Guard(), policy, "public", "text")
    assert raised.label == "restricted"
    assert "acme.badge" in raised.failure


async def test_a_broken_plug_in_raises_to_what_the_policy_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placement.detect.label.installed", lambda: {**built_in(), "broken": Broken()})
    text = "version: 1\ndetectors: {raise_to: {acme.badge: internal}, on_failure: confidential}\n"
    raised = await raise_label(Guard(), parse_policy(text, version=1), "public", "text")
    assert (raised.label, raised.failure) == ("confidential", "a detector failed (ValueError)")
    assert catalogue.installed().keys() == built_in().keys()


async def test_a_tenants_own_patterns() -> None:
    text = """\
version: 1
detectors:
  patterns:
    project: {regex: 'ZX-\\d{4}', raise_to: confidential}
"""
    policy = parse_policy(text, version=1)
    raised = await raise_label(Guard(), policy, "public", "about ZX-1234")
    assert (raised.label, [f.kind for f in raised.findings]) == ("confidential", ["pattern.project"])
    assert (await raise_label(Guard(), policy, "public", "about ZX-12")).label == "public"


async def test_a_thread_that_cannot_be_started_costs_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(n_threads=1)

    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        for _ in range(2):
            assert (await guard.detect("text", [Broken()], trusted=False)).failure == "a detector failed (RuntimeError)"
    assert (await guard.detect("text", [Broken()], trusted=False)).failure == "a detector failed (ValueError)"
