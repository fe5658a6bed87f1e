"""KV transfers between two NodeHosts linked in memory: what a user of them gets when all goes well."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from mesh.errors import KvIncompatible
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.transfer_frames import Chunk, Commit, Want
from mesh.node.engine import RunId
from mesh.node.host import NodeHost
from mesh.node.host_frames import KvOpen
from mesh.node.port import KvDirection, KvReport, KvSource, PortHeld, PortPrefilled
from tests.fakes.fake_engine import GEOMETRY, FakeEngine, tokens_of
from tests.fakes.fake_node import (
    CORE,
    EDGE,
    FakeGuard,
    FakeSigner,
    MemoryNetwork,
    Outcome,
    collect,
    context_of,
    greedy,
    kv_order,
    prompt,
    run_order,
    until,
)

PUSH, PULL = KvDirection.PUSH, KvDirection.PULL


@dataclass(slots=True)
class Pair:
    """An edge and a core. The edge dials, as edges do."""

    edge: NodeHost
    core: NodeHost
    edge_engine: FakeEngine
    core_engine: FakeEngine
    edge_guard: FakeGuard
    core_guard: FakeGuard
    network: MemoryNetwork

    async def move(
        self, direction: KvDirection, token_ids: tuple[int, ...], source: KvSource, **kw: object
    ) -> KvReport:
        order = kv_order(CORE, direction=direction, token_ids=token_ids, source=source, **kw)  # type: ignore[arg-type]
        return await self.edge.move_kv(order, self.network.dial_from(EDGE))


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with make_pair() as pair:
        yield pair


class make_pair:
    """Two hosts; at the end nothing may be left in the engines."""

    def __init__(
        self,
        edge_dtype: KvDtype = KvDtype.F16,
        core_dtype: KvDtype = KvDtype.F16,
        geometry: KvGeometry = GEOMETRY,
    ) -> None:
        engines = (
            FakeEngine(kv_dtype=edge_dtype, geometry=geometry),
            FakeEngine(kv_dtype=core_dtype, geometry=geometry),
        )
        guards = FakeGuard(), FakeGuard()
        self.pair = Pair(
            edge=NodeHost(engines[0], FakeSigner(EDGE), guards[0], EDGE),
            core=NodeHost(engines[1], FakeSigner(CORE), guards[1], CORE),
            edge_engine=engines[0],
            core_engine=engines[1],
            edge_guard=guards[0],
            core_guard=guards[1],
            network=MemoryNetwork(),
        )
        self.pair.network.add(self.pair.edge)
        self.pair.network.add(self.pair.core)

    async def __aenter__(self) -> Pair:
        return self.pair

    async def __aexit__(self, *exc: object) -> None:
        for host, engine in ((self.pair.edge, self.pair.edge_engine), (self.pair.core, self.pair.core_engine)):
            await host.close()
            await engine.check_integrity()
            assert engine.hold_ids == []
            assert (await engine.load()).kv_used_tokens == 0


async def undisturbed(token_ids: tuple[int, ...], n_tokens: int) -> tuple[int, ...]:
    """The tokens of a run on an engine of its own."""
    host = NodeHost(FakeEngine(), FakeSigner(CORE), FakeGuard(), CORE)
    ids = (await collect(host, run_order("w", token_ids, sampling=greedy(n_tokens)))).ids
    await host.close()
    return ids


@pytest.mark.parametrize("n_tokens", [1, 2, 16, 17, 255, 256, 257, 700])
async def test_push_of_a_hold(pair: Pair, n_tokens: int) -> None:
    ids = prompt(n_tokens + 1)
    await collect(pair.edge, run_order("h", ids[:-1], prefill_only=True))
    report = await pair.move(PUSH, ids[:-1], KvSource(run_id=RunId("h")))
    assert (report.tokens, report.skipped_tokens) == (n_tokens, 0)
    assert report.wire_bytes == n_tokens * pair.core_engine.info.geometry.f16_bytes_per_token
    assert tokens_of(await pair.core_engine.export_kv(RunId("target"), 0, n_tokens)) == ids[:-1]
    outcome = await collect(pair.core, run_order("r", ids, kv_from=RunId("target")))
    assert outcome.ids == await undisturbed(ids, 8)
    assert outcome.events[0] == PortPrefilled(tokens=n_tokens + 1, cached_tokens=n_tokens)
    assert json.loads(outcome.last.leg.body)["kv_in_bytes"] == report.wire_bytes  # type: ignore[union-attr]
    assert pair.edge_engine.hold_ids == ["h"]  # a copy was sent; the source is its owner's to release


@pytest.mark.parametrize("codec", ["f16", "q8_0", "raw"])
@pytest.mark.parametrize("dtype", list(KvDtype))
async def test_pull_of_a_prefill_streams(codec: str, dtype: KvDtype) -> None:
    ids = prompt(601)
    async with make_pair(edge_dtype=dtype, core_dtype=dtype) as pair:
        prefill = run_order("p", ids[:-1], prefill_only=True)
        report = await pair.move(PULL, ids[:-1], KvSource(run_id=RunId("p"), prefill=prefill), codec=codec)
        assert report.tokens == 600
        assert 0 < report.first_chunk_s <= report.duration_s
        outcome = await collect(pair.edge, run_order("r", ids, kv_from=RunId("target")))
        assert outcome.ids == await undisturbed(ids, 8)
        theirs = pair.network.streams[0][1].sent
        assert pair.core_engine.hold_ids == []  # computed for this transfer alone
        assert report.leg is not None
        leg = json.loads(report.leg.body)
        assert (leg["kind"], leg["node"], leg["outcome"]) == ("prefill", "core-1", "held")
        assert (leg["prompt_tokens"], leg["kv_out_bytes"]) == (600, report.wire_bytes)
        assert [f.leg for f in theirs if isinstance(f, Commit)] == [report.leg]


async def test_chunks_travel_while_the_prefill_goes_on(pair: Pair) -> None:
    ids = prompt(601)
    pair.core_engine.gate = asyncio.Event()  # its second step waits
    prefill = run_order("p", ids[:-1], prefill_only=True)
    move = asyncio.create_task(pair.move(PULL, ids[:-1], KvSource(run_id=RunId("p"), prefill=prefill)))

    def shipped() -> list[Chunk]:
        return [f for _, theirs in pair.network.streams for f in theirs.sent if isinstance(f, Chunk)]

    await until(lambda: len(shipped()) == 1)
    assert (shipped()[0].start, shipped()[0].stop) == (0, 64)
    await until(lambda: pair.edge_engine._sequences[RunId("target")].kv == 64)  # and is in the engine there
    pair.core_engine.gate.set()
    assert (await move).tokens == 600


async def test_push_of_a_prefill_streams(pair: Pair) -> None:
    ids = prompt(301)
    prefill = run_order("p", ids[:-1], prefill_only=True)
    report = await pair.move(PUSH, ids[:-1], KvSource(run_id=RunId("p"), prefill=prefill))
    assert report.leg is not None
    assert json.loads(report.leg.body)["node"] == "paris-1"
    outcome = await collect(pair.core, run_order("r", ids, kv_from=RunId("target")))
    assert outcome.ids == await undisturbed(ids, 8)


@pytest.mark.parametrize(("edge", "core"), [(KvDtype.F16, KvDtype.BF16), (KvDtype.F32, KvDtype.F16)])
async def test_unlike_pools_meet_in_f16(edge: KvDtype, core: KvDtype) -> None:
    ids = prompt(101)
    async with make_pair(edge_dtype=edge, core_dtype=core) as pair:
        await collect(pair.core, run_order("h", ids[:-1], prefill_only=True))
        await pair.move(PULL, ids[:-1], KvSource(run_id=RunId("h")))
        outcome = await collect(pair.edge, run_order("r", ids, kv_from=RunId("target")))
        assert outcome.ids == await undisturbed(ids, 8)


async def test_only_missing_tokens_travel(pair: Pair) -> None:
    ids = prompt(301)
    await collect(pair.edge, run_order("warm", ids[:100], sampling=greedy(1)))
    prefill = run_order("p", ids[:-1], prefill_only=True)
    report = await pair.move(PULL, ids[:-1], KvSource(run_id=RunId("p"), prefill=prefill))
    assert (report.tokens, report.skipped_tokens) == (300, 96)
    assert report.wire_bytes == 204 * pair.core_engine.info.geometry.f16_bytes_per_token
    outcome = await collect(pair.edge, run_order("r", ids, kv_from=RunId("target")))
    assert outcome.ids == await undisturbed(ids, 8)
    assert pair.edge.statistics().kv_skipped_tokens_total == 96


@pytest.mark.parametrize("direction", [PUSH, PULL])
@pytest.mark.parametrize("n_tokens", [16, 300, 320])
async def test_a_receiver_that_has_it_all_costs_the_source_nothing(
    pair: Pair, direction: KvDirection, n_tokens: int
) -> None:
    """Less than a block is missing: no prefill, no KV; the target computes the rest with its last token."""
    source, target = (pair.edge, pair.core) if direction is PUSH else (pair.core, pair.edge)
    source_engine = pair.edge_engine if direction is PUSH else pair.core_engine
    ids = prompt(n_tokens + 1)
    await collect(target, run_order("warm", ids, sampling=greedy(1)))
    prefill = run_order("p", ids[:-1], prefill_only=True)
    report = await pair.move(direction, ids[:-1], KvSource(run_id=RunId("p"), prefill=prefill))
    cached = n_tokens // 16 * 16
    assert (report.tokens, report.skipped_tokens, report.wire_bytes, report.leg) == (cached, cached, 0, None)
    assert (await source_engine.load()).prompt_tokens_total == 0
    assert source.statistics().runs_started_total == 0
    outcome = await collect(target, run_order("r", ids, kv_from=RunId("target")))
    assert outcome.ids == await undisturbed(ids, 8)


async def test_a_missing_tail_makes_the_source_compute_what_it_has_not_cached(pair: Pair) -> None:
    """KV of the tail needs the head: the source computes it too, unless its own cache has it. Only the tail goes."""
    ids = prompt(301)
    await collect(pair.edge, run_order("warm", ids[:200], sampling=greedy(1)))
    for n, cached_at_source in enumerate((0, 288)):
        prefill = run_order(f"p{n}", ids[:-1], prefill_only=True)
        source = KvSource(run_id=prefill.run_id, prefill=prefill)
        report = await pair.move(PULL, ids[:-1], source, target=f"t{n}")
        assert report.skipped_tokens == 192
        assert report.leg is not None
        assert json.loads(report.leg.body)["cached_tokens"] == cached_at_source
        await pair.edge.release(RunId(f"t{n}"))


@pytest.mark.parametrize(
    ("edge", "core", "codec"),
    [
        (KvDtype.F32, KvDtype.F32, "raw"),
        (KvDtype.BF16, KvDtype.BF16, "raw"),
        (KvDtype.F16, KvDtype.BF16, "f16"),
        (KvDtype.F32, KvDtype.F16, "f16"),
    ],
)
@pytest.mark.parametrize("direction", [PUSH, PULL])
async def test_the_two_ends_settle_what_canonical_means(
    direction: KvDirection, edge: KvDtype, core: KvDtype, codec: str
) -> None:
    ids = prompt(101)
    async with make_pair(edge_dtype=edge, core_dtype=core) as pair:
        prefill = run_order("p", ids[:-1], prefill_only=True)
        source = KvSource(run_id=RunId("p"), prefill=prefill)
        report = await pair.move(direction, ids[:-1], source, codec="canonical")
        assert (report.codec, report.tokens) == (codec, 100)
        target, engine = (pair.core, pair.core_engine) if direction is PUSH else (pair.edge, pair.edge_engine)
        assert tokens_of(await engine.export_kv(RunId("target"), 0, 100)) == ids[:-1]
        await target.release(RunId("target"))


async def test_a_receiver_that_has_more_than_the_source(pair: Pair) -> None:
    ids = prompt(101)
    await collect(pair.edge, run_order("warm", ids, sampling=greedy(1)))
    await collect(pair.core, run_order("h", ids[:50], prefill_only=True))
    report = await pair.move(PULL, ids[:-1], KvSource(run_id=RunId("h")))
    assert (report.tokens, report.skipped_tokens, report.wire_bytes) == (96, 96, 0)
    outcome = await collect(pair.edge, run_order("r", ids, kv_from=RunId("target")))
    assert outcome.ids == await undisturbed(ids, 8)


async def test_another_namespace_shares_nothing(pair: Pair) -> None:
    ids = prompt(101)
    other = context_of(tenant="other", salt=bytes(32))
    await collect(pair.edge, run_order("warm", ids, sampling=greedy(1), context=other))
    prefill = run_order("p", ids[:-1], prefill_only=True)
    report = await pair.move(PULL, ids[:-1], KvSource(run_id=RunId("p"), prefill=prefill))
    assert report.skipped_tokens == 0


async def test_a_copy_of_a_running_run(pair: Pair) -> None:
    """Without pause the source ships what it has and goes on."""
    seen = Outcome()
    task = asyncio.create_task(collect(pair.edge, run_order("r", prompt(40), sampling=greedy(60)), seen))
    await until(lambda: len(seen.ids) > 5)
    report = await pair.move(PUSH, prompt(40), KvSource(run_id=RunId("r")))
    assert report.tokens >= 45
    assert len((await task).ids) == 60
    ids = prompt(40) + seen.ids
    rest = await collect(
        pair.core,
        run_order("s", ids[:-10], prompt_tokens=40, sampling=greedy(60), kv_from=RunId("target")),
    )
    assert rest.ids == seen.ids[-10:]


async def move_once(pair: Pair, direction: KvDirection, n_prompt: int, after: int) -> None:
    """A run on the source, moved in mid-stream: no token lost, none twice, all as if undisturbed."""
    source, target = (pair.edge, pair.core) if direction is PUSH else (pair.core, pair.edge)
    ids = prompt(n_prompt, seed=after)
    seen = Outcome()
    task = asyncio.create_task(collect(source, run_order("r", ids, sampling=greedy(600)), seen))
    await until(lambda: len(seen.ids) >= after)
    known = ids + seen.ids
    report = await pair.move(direction, known, KvSource(run_id=RunId("r"), pause=True))
    first = await task
    assert isinstance(first.last, PortHeld)
    assert report.tokens == first.last.kv_tokens
    n_tokens = len(first.ids) + 20
    order = run_order("s", ids + first.ids, prompt_tokens=n_prompt, sampling=greedy(n_tokens), kv_from=RunId("target"))
    rest = await collect(target, order)
    assert first.ids + rest.ids == await undisturbed(ids, n_tokens)
    prefilled = rest.events[0]
    assert isinstance(prefilled, PortPrefilled)
    assert prefilled.tokens - prefilled.cached_tokens == 1  # only the last token was computed again
    await source.release(RunId("r"))


@pytest.mark.parametrize("direction", [PUSH, PULL])
async def test_fifty_moves_at_random_points(direction: KvDirection) -> None:
    rng = random.Random(50)
    async with make_pair() as pair:
        for i in range(25):
            if i % 2:  # uneven steps, so that the points of pausing differ
                pair.core_engine.step_delay_s = pair.edge_engine.step_delay_s = rng.choice((0.0, 0.0001))
            await move_once(pair, direction, rng.randint(1, 400), rng.randint(1, 60))
            await move_once(pair, direction, rng.randint(1, 40), rng.randint(1, 100))


async def test_a_long_run_is_shipped_while_it_decodes(pair: Pair) -> None:
    ids = prompt(500)
    seen = Outcome()
    task = asyncio.create_task(collect(pair.core, run_order("r", ids, sampling=greedy(400)), seen))
    await until(lambda: len(seen.ids) >= 5)
    before = len(seen.ids)
    await pair.move(PULL, ids + seen.ids, KvSource(run_id=RunId("r"), pause=True))
    first = await task
    assert len(first.ids) > before  # it decoded on while its 500 tokens travelled
    assert len(first.ids) < 400


async def test_a_move_before_the_first_token(pair: Pair) -> None:
    ids = prompt(400)
    pair.core_engine.step_delay_s = 0.001
    seen = Outcome()
    task = asyncio.create_task(collect(pair.core, run_order("r", ids), seen))
    await until(lambda: pair.core.statistics().running == 1)
    report = await pair.move(PULL, ids, KvSource(run_id=RunId("r"), pause=True))
    first = await task
    assert isinstance(first.last, PortHeld)
    assert first.ids == ()
    assert report.tokens == first.last.kv_tokens < 400
    rest = await collect(pair.edge, run_order("s", ids, kv_from=RunId("target")))
    assert rest.ids == await undisturbed(ids, 8)


async def test_there_and_back(pair: Pair) -> None:
    """Edge to core to edge, each move in mid-stream."""
    ids, sampling = prompt(70), greedy(120)
    hosts = [pair.edge, pair.core, pair.edge]
    known, kv_from = ids, None
    for i, host in enumerate(hosts):
        run_id = f"r{i}"
        seen = Outcome()
        order = run_order(run_id, known, prompt_tokens=70, sampling=sampling, kv_from=kv_from)
        task = asyncio.create_task(collect(host, order, seen))
        await until(lambda seen=seen: len(seen.ids) >= 20)  # type: ignore[misc]
        if i == 2:
            known += (await task).ids
            break
        direction = PUSH if host is pair.edge else PULL
        await pair.move(direction, known + seen.ids, KvSource(run_id=RunId(run_id), pause=True), target=f"t{i}")
        known += (await task).ids
        kv_from = RunId(f"t{i}")
    assert known[70:] == await undisturbed(ids, 120)


async def test_a_node_is_told_no_tokens_that_it_does_not_need(pair: Pair) -> None:
    ids = prompt(40)
    await collect(pair.core, run_order("h", ids, prefill_only=True))
    await pair.move(PULL, ids, KvSource(run_id=RunId("h")))
    opening = pair.network.streams[0][0].sent[0]
    assert isinstance(opening, KvOpen)
    assert opening.token_ids == ()
    assert pair.edge_guard.asked == [("kv", "paris-1")] * 2  # nothing is asked about where the KV is already
    assert [type(f) for f in pair.network.streams[0][0].sent[1:2]] == [Want]


async def test_a_moved_hold_of_other_tokens_is_never_computed_on(pair: Pair) -> None:
    """A run moved further than its entry knew; then the entry asks to continue with other tokens."""
    seen = Outcome()
    task = asyncio.create_task(collect(pair.core, run_order("r", prompt(40), sampling=greedy(200)), seen))
    await until(lambda: len(seen.ids) >= 3)
    await pair.move(PULL, prompt(40), KvSource(run_id=RunId("r"), pause=True))
    ids = prompt(40) + (await task).ids
    wrong = (*ids[:41], (ids[41] + 1) % 500, *ids[42:])
    with pytest.raises(KvIncompatible):
        await collect(
            pair.edge,
            run_order("s", wrong, prompt_tokens=40, sampling=greedy(200), kv_from=RunId("target")),
        )
    rest = await collect(
        pair.edge, run_order("s", ids, prompt_tokens=40, sampling=greedy(200), kv_from=RunId("target"))
    )
    assert len(seen.ids) + len(rest.ids) == 200


async def test_a_hold_goes_on_to_a_third_node_only_with_known_tokens(pair: Pair) -> None:
    ids = prompt(60)
    await collect(pair.edge, run_order("h", ids, prefill_only=True))
    await pair.move(PUSH, ids, KvSource(run_id=RunId("h")))
    await pair.move(PULL, ids, KvSource(run_id=RunId("target")), target="back")
    assert tokens_of(await pair.edge_engine.export_kv(RunId("back"), 0, 60)) == ids


async def test_statistics(pair: Pair) -> None:
    await collect(pair.edge, run_order("h", prompt(40), prefill_only=True))
    report = await pair.move(PUSH, prompt(40), KvSource(run_id=RunId("h")))
    sent, received = pair.edge.statistics(), pair.core.statistics()
    assert (sent.transfers_sent_total, sent.kv_sent_bytes_total, sent.kv_sent_tokens_total) == (
        1,
        report.wire_bytes,
        40,
    )
    assert (received.transfers_received_total, received.kv_received_tokens_total) == (1, 40)
    assert (sent.holds, received.holds, sent.transfers, received.transfers) == (1, 1, 0, 0)
