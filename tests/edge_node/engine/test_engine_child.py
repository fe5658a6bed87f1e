"""The llama.cpp process may die, in any way and at any time; the agent may die too. Nothing is left, and it goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from edge_node.engine.engine import EdgeEngine
from mesh.errors import InvalidRequest, MeshError, NodeUnreachable, NotFound, Overloaded
from mesh.node.engine import RunId
from tests.conformance.engine_runs import Outcome, collect, greedy, hold_prefix, prompt_of, run, run_spec, until
from tests.edge_node.engine.engines import demo_model, edge_settings, started

pytestmark = pytest.mark.model


@pytest.fixture
async def engine() -> AsyncIterator[EdgeEngine]:
    async with started(EdgeEngine(edge_settings())) as engine:
        yield engine


def shared_memory_names() -> set[str]:
    return {p.name for p in Path("/dev/shm").iterdir()}


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_killed_child_fails_its_runs_and_is_replaced(engine: EdgeEngine, number: signal.Signals) -> None:
    prompt = prompt_of(engine, 30)
    want = await run(engine, run_spec("w", prompt, greedy(6)))
    await hold_prefix(engine, "h", prompt)
    seen = Outcome()
    task = asyncio.create_task(collect(engine.generate(run_spec("r", prompt, greedy(400))), seen))
    await until(lambda: len(seen.ids) > 2)
    first = engine.child_pid
    assert first is not None
    names = shared_memory_names()
    os.kill(first, number)
    with pytest.raises(NodeUnreachable, match=number.name) as caught:
        await task
    assert number.name in caught.value.details["cause"]
    again = await run(engine, run_spec("r", prompt, greedy(6)))  # waits for the next child
    assert again.ids == want.ids
    assert engine.child_pid != first
    with pytest.raises(NotFound):  # holds went with the child
        await engine.kv_tokens(RunId("h"))
    await engine.check_integrity()
    assert shared_memory_names() <= names


async def test_a_child_that_hangs_is_noticed_and_replaced() -> None:
    async with started(EdgeEngine(edge_settings(hang_timeout_s=4.0))) as engine:
        prompt = prompt_of(engine, 30)
        want = await run(engine, run_spec("w", prompt, greedy(6)))
        seen = Outcome()
        task = asyncio.create_task(collect(engine.generate(run_spec("r", prompt, greedy(400))), seen))
        await until(lambda: len(seen.ids) > 2)
        first = engine.child_pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(NodeUnreachable, match="did not answer for"):
            await task
        assert (await run(engine, run_spec("r", prompt, greedy(6)))).ids == want.ids
        assert engine.child_pid != first


async def test_a_call_in_flight_fails_too(engine: EdgeEngine) -> None:
    assert engine.child_pid is not None
    os.kill(engine.child_pid, signal.SIGSTOP)  # it will not answer
    calls = [asyncio.create_task(engine.load()), asyncio.create_task(engine.kv_tokens(RunId("r")))]
    await asyncio.sleep(0)
    os.kill(engine.child_pid, signal.SIGKILL)
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, NodeUnreachable)


async def test_an_export_given_up_does_not_spoil_the_next(engine: EdgeEngine) -> None:
    await hold_prefix(engine, "h", prompt_of(engine, 60))
    want = await engine.export_kv(RunId("h"), 0, 60)
    for _ in range(6):  # more than there are slots
        task = asyncio.create_task(engine.export_kv(RunId("h"), 0, 30))
        await asyncio.sleep(0)
        task.cancel()
    got = await engine.export_kv(RunId("h"), 0, 60)
    assert (got.k == want.k).all()
    assert (got.v == want.v).all()


async def test_while_it_is_down_calls_fail_at_once_and_runs_after_a_while() -> None:
    settings = edge_settings(restart_backoff_s=(30.0, 30.0), restart_wait_s=0.05)
    async with started(EdgeEngine(settings)) as engine:
        assert engine.child_pid is not None
        os.kill(engine.child_pid, signal.SIGKILL)
        await until(lambda: engine.child_pid is None)
        with pytest.raises(NodeUnreachable, match="SIGKILL"):
            await engine.load()
        with pytest.raises(NodeUnreachable, match="SIGKILL"):
            await run(engine, run_spec("r", prompt_of(engine, 5)))
        await engine.release(RunId("r"))  # there is nothing to free


async def test_a_model_that_is_gone_keeps_it_down_until_it_is_back(tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    copy.symlink_to(demo_model())
    async with started(EdgeEngine(edge_settings(model_path=copy, restart_wait_s=30.0))) as engine:
        assert engine.child_pid is not None
        copy.unlink()
        os.kill(engine.child_pid, signal.SIGKILL)
        await until(lambda: engine.child_pid is None)
        with pytest.raises(NodeUnreachable):
            await engine.load()
        copy.symlink_to(demo_model())
        assert len((await run(engine, run_spec("r", prompt_of(engine, 5), greedy(3)))).ids) == 3


async def test_the_child_goes_when_the_agent_is_killed() -> None:
    code = textwrap.dedent(
        f"""
        import asyncio
        from pathlib import Path
        from edge_node.engine.engine import EdgeEngine
        from edge_node.engine.settings import EdgeEngineSettings

        async def main() -> None:
            engine = EdgeEngine(EdgeEngineSettings(
                model_path=Path({str(demo_model())!r}), model_id="demo", n_threads=1, n_ctx_tokens=256))
            await engine.start()
            print(engine.child_pid, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
        """
    )
    agent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)  # noqa: ASYNC220
    assert agent.stdout is not None
    try:
        pid = int(await asyncio.to_thread(agent.stdout.readline))
        assert is_running(pid)
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()
    await until(lambda: not is_running(pid))


async def test_signals_to_the_whole_group_are_left_to_the_agent(engine: EdgeEngine) -> None:
    assert engine.child_pid is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(engine.child_pid, number)
    assert len((await run(engine, run_spec("r", prompt_of(engine, 5), greedy(3)))).ids) == 3


async def test_close_leaves_no_process() -> None:
    async with started(EdgeEngine(edge_settings())) as engine:
        pid = engine.child_pid
        assert pid is not None
    assert not is_running(pid)
    with pytest.raises(MeshError, match="closed"):
        await engine.load()


# --- bad starts -------------------------------------------------------------------------------------------------------


async def test_a_truncated_model_is_refused_before_llama_cpp(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(demo_model().read_bytes()[: 10 << 20])
    engine = EdgeEngine(edge_settings(model_path=cut))
    with pytest.raises(InvalidRequest):
        await engine.start()
    assert engine.child_pid is None
    await engine.close()


async def test_a_context_that_does_not_fit_is_refused_with_the_sum() -> None:
    engine = EdgeEngine(edge_settings(n_ctx_tokens=10**9))
    with pytest.raises(Overloaded, match=r"KV \d+ .* are free"):
        await engine.start()
    await engine.close()


async def test_a_child_that_is_too_slow_is_ended() -> None:
    engine = EdgeEngine(edge_settings(start_timeout_s=0.01))
    with pytest.raises(NodeUnreachable, match="within"):
        await engine.start()
    assert engine.child_pid is None
    await engine.close()


async def test_it_starts_once() -> None:
    async with started(EdgeEngine(edge_settings())) as engine:
        with pytest.raises(MeshError, match="once"):
            await engine.start()
    never = EdgeEngine(edge_settings())
    with pytest.raises(MeshError):
        await run(never, run_spec("r", (1, 2, 3)))
    await never.close()
