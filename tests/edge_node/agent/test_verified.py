"""How old the mesh's last word is: over a cut, a restart, and clocks that were changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from edge_node.agent.verified import LastWord
from mesh.rpc.uplink.types import LinkState


@dataclass
class Clock:
    monotonic_s: float = 1000.0
    unix_s: float = 1.8e9

    def pass_s(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.unix_s += seconds


@dataclass
class Box:
    """A box with a disk, which can be started again."""

    file: Path
    clock: Clock
    heard_s: float | None = None
    heard_elsewhere_s: float | None = None  # over the second uplink

    def start(self) -> LastWord:
        word = LastWord(self.file, monotonic=lambda: self.clock.monotonic_s, unix=lambda: self.clock.unix_s)
        word._links = lambda: [link(self.heard_s), link(self.heard_elsewhere_s)]
        return word


def link(heard_s: float | None) -> LinkState:
    return LinkState(
        connected=heard_s is not None, since_monotonic_s=0.0, session_id="", heard_monotonic_s=heard_s, rtt_s=None,
        last_error=None,
    )  # fmt: skip


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path / "verified.json", Clock())


def test_it_grows_while_cut_off_and_is_young_while_connected(box: Box) -> None:
    word = box.start()
    assert word.age_s == float("inf")
    box.heard_s = box.clock.monotonic_s
    assert word.age_s == 0.0
    box.clock.pass_s(3)
    assert word.age_s == 3.0  # heartbeats are not answered
    box.heard_s = None
    box.clock.pass_s(60)
    assert word.age_s == 63.0
    box.heard_s = box.clock.monotonic_s - 0.5
    assert word.age_s == 0.5


def test_any_uplink_brings_the_word(box: Box) -> None:
    word = box.start()
    box.heard_s, box.heard_elsewhere_s = box.clock.monotonic_s, box.clock.monotonic_s
    box.clock.pass_s(60)
    box.heard_s, box.heard_elsewhere_s = box.clock.monotonic_s, None
    assert word.age_s == 0.0
    box.clock.pass_s(60)
    box.heard_s, box.heard_elsewhere_s = None, box.clock.monotonic_s
    assert word.age_s == 0.0


async def test_a_restart_does_not_make_it_young(box: Box) -> None:
    word = box.start()
    box.heard_s = box.clock.monotonic_s
    box.clock.pass_s(10)
    await word.close()
    box.heard_s = None
    box.clock.pass_s(100)
    box.clock.monotonic_s = 5.0  # a boot
    assert box.start().age_s == pytest.approx(110.0)


@pytest.mark.parametrize(("moved_s", "age_s"), [(-1e6, 0.0), (-50.0, 50.0), (1e6, 1e6 + 100)])
async def test_a_clock_that_was_changed_meanwhile(box: Box, moved_s: float, age_s: float) -> None:
    word = box.start()
    box.heard_s = box.clock.monotonic_s
    await word.close()
    box.heard_s = None
    box.clock.pass_s(100)
    box.clock.unix_s += moved_s
    assert box.start().age_s == pytest.approx(age_s)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"unix_s": "x"}', b"[]", b"null"])
def test_a_damaged_file_counts_as_no_word(box: Box, damage: bytes) -> None:
    box.file.write_bytes(damage)
    assert box.start().age_s == float("inf")
