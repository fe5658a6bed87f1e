"""Engines as processes: what a failing, lying or hanging driver does to the benchmark."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from core_node.bench.engines.fleet import EngineProcess
from core_node.bench.engines.installed import EngineCommand, Kind
from core_node.bench.engines.work import at_once
from mesh.errors import Internal

WORK = at_once([(1, 2, 3), (4, 5)], 3)


@asynccontextmanager
async def fake(mode: str, folder: Path, *, work_timeout_s: float = 60.0) -> AsyncIterator[EngineProcess]:
    command = (sys.executable, str(Path(__file__).parent / "fake_driver.py"), mode)
    engine = EngineCommand(name="fake", kind=Kind.LIBRARY, ours=False, command=command)
    process = EngineProcess(engine, folder, work_timeout_s=work_timeout_s)
    try:
        yield process
    finally:
        await process.stop()


def state(pid: int) -> str:
    """The state letter of a process; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


async def test_work_is_answered(tmp_path: Path) -> None:
    async with fake("answers", tmp_path) as process:
        await process.start()
        answer = await process.work(WORK)
        assert (answer.wall_s, answer.first_s, answer.last_s) == (2.0, (0.5, 0.5), (1.5, 1.5))
        assert answer.ids == ((1, 2, 2), (1, 2, 2))
        assert process.running


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_pause_stops_all_of_an_engine_and_a_stop_ends_it(tmp_path: Path) -> None:
    async with fake("has a child", tmp_path) as process:
        await process.start()
        child = int(json.loads(process.said)["child"])
        process.pause()
        while state(child) != "T":
            pass
        process.resume()
        assert (await process.work(WORK)).wall_s == 2.0
        process.pause()
        await process.stop()
        while state(child) not in ("", "Z"):
            pass


async def test_an_engine_that_does_not_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    async with fake("no start", tmp_path) as process:
        with pytest.raises(Internal, match=r"(?s)fake ended.*no such device"):
            await process.start()
        assert not process.running


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("dies", r"(?s)fake ended.*out of luck"),
        ("garbles", "gave an answer that is not to be read"),
        ("stops early", "did not give the tokens"),
    ],
)
async def test_a_wrong_answer_ends_the_engine(mode: str, said: str, tmp_path: Path) -> None:
    async with fake(mode, tmp_path) as process:
        await process.start()
        with pytest.raises(Internal, match=said):
            await process.work(WORK)
        assert not process.running


async def test_a_hung_engine_is_killed_at_its_time_limit(tmp_path: Path) -> None:
    async with fake("hangs", tmp_path, work_timeout_s=0.2) as process:
        await process.start()
        with pytest.raises(Internal, match="gave no answer within 0 s"):
            await process.work(WORK)
        assert not process.running
