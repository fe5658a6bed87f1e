"""NodeHost: runs, their checks, reports, deadlines, holds and drain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from mesh.errors import (
    AlreadyExists,
    Cancelled,
    Draining,
    Expired,
    Internal,
    InvalidRequest,
    KvIncompatible,
    MeshError,
    NodeUnreachable,
    NotFound,
    Overloaded,
    PolicyDenied,
    StalePlan,
    UnknownModel,
)
from mesh.node.engine import FinishReason, RunEvent, RunId, RunSpec
from mesh.node.host import HostSettings, NodeHost
from mesh.node.port import PortFinished, PortHeld, PortPrefilled, PortTokens
from tests.fakes.fake_engine import EOS, VOCAB, FakeEngine
from tests.fakes.fake_node import (
    CORE,
    EDGE,
    FakeGuard,
    FakeSigner,
    Outcome,
    collect,
    context_of,
    greedy,
    prompt,
    run_order,
    until,
)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(capacity_tokens=1030)
    yield engine
    await engine.check_integrity()
    await engine.close()


@pytest.fixture
def guard() -> FakeGuard:
    return FakeGuard()


@pytest.fixture
async def host(engine: FakeEngine, guard: FakeGuard) -> AsyncIterator[NodeHost]:
    host = NodeHost(engine, FakeSigner(CORE), guard, CORE)
    yield host
    await host.close()
    assert engine.hold_ids == []


async def test_times_to_tokens_are_counted_once_each(host: NodeHost) -> None:
    await collect(host, run_order("r", prompt(40), sampling=greedy(5)))
    held = await collect(host, run_order("p", prompt(41), prefill_only=True))
    assert isinstance(held.last, PortHeld)
    await collect(host, run_order("q", prompt(42), sampling=greedy(3), kv_from="p"))
    now = host.statistics()
    assert now.ttft.at_most[-1] == 1  # "q" went on from KV that was there: that is no time to first token
    assert now.inter_token.at_most[-1] == 4 + 2


async def test_a_run_and_its_signed_leg(host: NodeHost) -> None:
    outcome = await collect(host, run_order("r", prompt(40), sampling=greedy(5)))
    assert [type(e) for e in outcome.events] == [PortPrefilled, *[PortTokens] * 5, PortFinished]
    last = outcome.last
    assert isinstance(last, PortFinished)
    assert last.reason is FinishReason.LENGTH
    body = json.loads(last.leg.body)
    times = {body.pop("started_unix_s"), body.pop("ended_unix_s")}
    assert all(t > 1e9 for t in times)
    assert body == {
        "format": 1, "request_id": "req-1", "run_id": "r", "node": "core-1", "place": CORE.uri, "kind": "run",
        "model": "toy", "tenant": "acme", "label": "internal", "policy_version": 3, "prompt_tokens": 40,
        "entry_site": "",
        "generated_tokens": 5, "cached_tokens": 0, "kv_tokens": 44, "kv_in_bytes": 0, "kv_out_bytes": 0,
        "outcome": "length",
    }  # fmt: skip
    statistics = host.statistics()
    assert (statistics.runs_started_total, statistics.runs_finished_total, statistics.running) == (1, 1, 0)


async def test_prefill_then_a_run_on_the_hold(host: NodeHost) -> None:
    whole = await collect(host, run_order("w", prompt(40), context=context_of(salt=bytes(32))))
    held = await collect(host, run_order("h", prompt(40)[:-1], prefill_only=True))
    assert isinstance(held.last, PortHeld)
    assert held.last.kv_tokens == 39
    assert json.loads(held.last.leg.body)["kind"] == "prefill"
    outcome = await collect(host, run_order("r", prompt(40), kv_from=RunId("h")))
    assert outcome.ids == whole.ids
    assert outcome.events[0] == PortPrefilled(tokens=40, cached_tokens=39)
    assert isinstance(outcome.last, PortFinished)
    assert json.loads(outcome.last.leg.body)["kind"] == "decode"
    assert host.statistics().holds == 0


async def test_a_hold_goes_on_under_its_own_name(host: NodeHost) -> None:
    await collect(host, run_order("h", prompt(40)[:-1], prefill_only=True))
    outcome = await collect(host, run_order("h", prompt(40), kv_from=RunId("h")))
    assert len(outcome.ids) == 8


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"token_ids": ()}, InvalidRequest),
        ({"token_ids": (1, VOCAB)}, InvalidRequest),
        ({"token_ids": (-1, 5)}, InvalidRequest),
        ({"token_ids": prompt(1024), "prompt_tokens": 5}, InvalidRequest),
        ({"token_ids": prompt(1025), "prefill_only": True}, InvalidRequest),
        ({"prompt_tokens": 0}, InvalidRequest),
        ({"prompt_tokens": 41}, InvalidRequest),
        ({"prompt_tokens": 30, "sampling": greedy(10)}, InvalidRequest),
        ({"context": context_of(model="other")}, UnknownModel),
        ({"context": context_of(deadline_s=0.0)}, InvalidRequest),
        ({"context": context_of(deadline_s=float("nan"))}, InvalidRequest),
        ({"kv_from": RunId("ghost")}, NotFound),
    ],
)
async def test_bad_orders_are_refused_at_the_rim(
    host: NodeHost, engine: FakeEngine, change: dict[str, Any], error: type[MeshError]
) -> None:
    with pytest.raises(error):
        await collect(host, run_order("r", **{"token_ids": prompt(40), **change}))
    assert (await engine.load()).kv_used_tokens == 0
    assert host.statistics().run_failures == ((error.reason, 1),)
    assert len((await collect(host, run_order("r", prompt(40)))).ids) == 8


async def test_a_full_context_may_be_prefilled(host: NodeHost) -> None:
    held = await collect(host, run_order("h", prompt(1024), prefill_only=True))
    assert isinstance(held.last, PortHeld)


async def test_the_guard_is_asked_first(host: NodeHost, guard: FakeGuard, engine: FakeEngine) -> None:
    guard.no_prompt.add("core-1")
    with pytest.raises(PolicyDenied) as caught:
        await collect(host, run_order("r", (), context=context_of(model="other")))
    assert caught.value.details["rule"] == "test-prompt"
    assert guard.asked == [("prompt", "core-1")]


@pytest.mark.parametrize("field", ["tenant", "label", "salt", "entry_site"])
async def test_a_hold_of_another_owner_is_refused_and_stays(host: NodeHost, engine: FakeEngine, field: str) -> None:
    await collect(host, run_order("h", prompt(20), prefill_only=True))
    other = context_of(**{field: bytes(32) if field == "salt" else "other"})
    with pytest.raises(PolicyDenied) as caught:
        await collect(host, run_order("r", prompt(40), context=other, kv_from=RunId("h")))
    assert caught.value.details["rule"] == "kv-owner"
    assert engine.hold_ids == ["h"]
    assert len((await collect(host, run_order("r", prompt(40), kv_from=RunId("h")))).ids) == 8


async def test_a_hold_is_never_continued_with_other_tokens(host: NodeHost, engine: FakeEngine) -> None:
    await collect(host, run_order("h", prompt(20), prefill_only=True))
    with pytest.raises(KvIncompatible):
        await collect(host, run_order("r", prompt(40, seed=1), kv_from=RunId("h")))
    with pytest.raises(InvalidRequest, match="at least one more"):
        await collect(host, run_order("r", prompt(20), kv_from=RunId("h")))
    assert engine.hold_ids == ["h"]


async def test_names_in_use(host: NodeHost, engine: FakeEngine) -> None:
    await collect(host, run_order("h", prompt(20), prefill_only=True))
    await collect(host, run_order("i", prompt(20), prefill_only=True))
    with pytest.raises(AlreadyExists):
        await collect(host, run_order("h", prompt(40)))
    with pytest.raises(AlreadyExists):  # and the hold that it named is untouched
        await collect(host, run_order("i", prompt(40), kv_from=RunId("h")))
    assert sorted(engine.hold_ids) == ["h", "i"]


async def test_a_running_run_is_no_hold(host: NodeHost) -> None:
    seen = Outcome()
    task = asyncio.create_task(collect(host, run_order("r", prompt(20), sampling=greedy(200)), seen))
    await until(lambda: len(seen.ids) > 0)
    with pytest.raises(StalePlan):
        await collect(host, run_order("s", prompt(40), kv_from=RunId("r")))
    await host.release(RunId("r"))
    with pytest.raises(Cancelled):
        await task


async def test_closing_the_iterator_cancels(host: NodeHost, engine: FakeEngine) -> None:
    async with aclosing(host.run(run_order("r", prompt(20), sampling=greedy(900)))) as events:
        async for event in events:
            if isinstance(event, PortTokens):
                break
    load = await engine.load()
    assert (load.running, load.kv_used_tokens) == (0, 0)
    assert len((await collect(host, run_order("r", prompt(20)))).ids) == 8


async def test_cancelled_before_it_began(host: NodeHost, engine: FakeEngine) -> None:
    await collect(host, run_order("h", prompt(20), prefill_only=True))
    task = asyncio.create_task(collect(host, run_order("r", prompt(40), kv_from=RunId("h"))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.hold_ids == []  # claimed by the run, gone with it
    assert host.statistics().running == 0


async def test_the_deadline_ends_a_run(host: NodeHost, engine: FakeEngine) -> None:
    engine.step_delay_s = 0.01
    with pytest.raises(Expired):
        await collect(host, run_order("r", prompt(20), sampling=greedy(900), context=context_of(deadline_s=0.05)))
    assert (await engine.load()).kv_used_tokens == 0


async def test_a_bug_in_the_engine_is_internal(host: NodeHost, engine: FakeEngine) -> None:
    async def broken(spec: RunSpec) -> AsyncIterator[RunEvent]:
        raise ZeroDivisionError
        yield

    engine.generate = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(Internal):
        await collect(host, run_order("r", prompt(20)))
    assert host.statistics().running == 0


async def test_an_engine_that_is_down_hides_no_error(host: NodeHost, engine: FakeEngine) -> None:
    """Releasing fails too then; what the caller hears is why the run failed."""
    await collect(host, run_order("h", prompt(20), prefill_only=True))
    await collect(host, run_order("i", prompt(20), prefill_only=True))  # leaves no room for what follows
    release = engine.release

    async def down(run_id: RunId) -> None:
        raise NodeUnreachable("the engine's process is down")

    engine.release = down  # type: ignore[method-assign]
    with pytest.raises(Overloaded):
        await collect(host, run_order("r", prompt(900), kv_from=RunId("h"), sampling=greedy(900)))
    await host.release(RunId("h"))
    engine.release = release  # type: ignore[method-assign]
    await engine.release(RunId("h"))
    assert host.statistics().run_failures == (("OVERLOADED", 1),)


async def test_an_engine_that_ends_without_an_outcome_is_internal(host: NodeHost, engine: FakeEngine) -> None:
    async def mute(spec: RunSpec) -> AsyncIterator[RunEvent]:
        return
        yield

    engine.generate = mute  # type: ignore[method-assign, assignment]
    with pytest.raises(Internal):
        await collect(host, run_order("r", prompt(20)))


async def test_holds_expire(engine: FakeEngine, guard: FakeGuard) -> None:
    host = NodeHost(engine, FakeSigner(CORE), guard, CORE, settings=HostSettings(hold_timeout_s=0.05))
    await collect(host, run_order("h", prompt(20), prefill_only=True))
    while engine.hold_ids:  # noqa: ASYNC110 - the engine has no event for it
        await asyncio.sleep(0.01)
    assert host.statistics().holds_expired_total == 1
    with pytest.raises(NotFound):
        await collect(host, run_order("r", prompt(40), kv_from=RunId("h")))


async def test_drain_takes_nothing_new_and_waits(host: NodeHost, engine: FakeEngine) -> None:
    await collect(host, run_order("h", prompt(20), prefill_only=True))
    seen = Outcome()
    running = asyncio.create_task(collect(host, run_order("r", prompt(20), sampling=greedy(100)), seen))
    await until(lambda: len(seen.ids) > 0)
    draining = asyncio.create_task(host.drain())
    await asyncio.sleep(0)
    with pytest.raises(Draining):
        await collect(host, run_order("s", prompt(20)))
    on_hold = await collect(host, run_order("t", prompt(40), kv_from=RunId("h")))  # was taken before
    assert len(on_hold.ids) == 8
    assert not draining.done()
    await running
    await draining
    assert host.draining
    assert engine.hold_ids == []


async def test_stop_reasons(host: NodeHost) -> None:
    free = await collect(host, run_order("r", prompt(20), sampling=greedy(60)))
    stop = "".join(chr(97 + i % 26) for i in free.ids[10:14])
    outcome = await collect(host, run_order("r", prompt(20), sampling=greedy(60, stop=(stop,))))
    assert isinstance(outcome.last, PortFinished)
    assert (outcome.last.reason, outcome.last.stop_string) == (FinishReason.STOP, stop)
    assert json.loads(outcome.last.leg.body)["outcome"] == "stop"
    assert EOS not in outcome.ids


def test_the_identity_must_be_of_the_place(engine: FakeEngine, guard: FakeGuard) -> None:
    with pytest.raises(InvalidRequest):
        NodeHost(engine, FakeSigner(EDGE), guard, CORE)
