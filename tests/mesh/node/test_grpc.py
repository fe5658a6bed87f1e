"""The Node service over real grpc.aio: runs, errors, load, and KV transfers in both directions."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import grpc.aio
import pytest

from mesh.errors import (
    Cancelled,
    InvalidRequest,
    MeshError,
    NodeUnreachable,
    NotFound,
    PolicyDenied,
    UnknownModel,
)
from mesh.node.engine import RunId
from mesh.node.grpc_port import GrpcPort
from mesh.node.host import NodeHost
from mesh.node.port import KvDirection, KvReport, KvSource, NodePort, Peer, PortHeld, PortTokens, RunOrder
from mesh.node.servicer import MAX_PROBE_BYTES
from mesh.node.wire import order_to_wire
from mesh.rpc.errors import from_rpc_error
from mesh.v1 import node_pb2
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_node import (
    CORE,
    EDGE,
    FakeGuard,
    FakeSigner,
    Outcome,
    collect,
    context_of,
    greedy,
    kv_order,
    place_of,
    prompt,
    run_order,
    until,
)
from tests.mesh.node.conftest import GrpcPair

PUSH, PULL = KvDirection.PUSH, KvDirection.PULL


async def collect_port(port: NodePort, order: RunOrder, into: Outcome | None = None) -> Outcome:
    outcome = into if into is not None else Outcome()
    async for event in port.run(order):
        outcome.events.append(event)
    return outcome


async def move(pair: GrpcPair, direction: KvDirection, token_ids: tuple[int, ...], source: KvSource) -> KvReport:
    order = kv_order(CORE, direction=direction, token_ids=token_ids, source=source, address=pair.address)
    return await pair.edge_port.move_kv(order)


async def undisturbed(token_ids: tuple[int, ...], n_tokens: int) -> tuple[int, ...]:
    host = NodeHost(FakeEngine(), FakeSigner(CORE), FakeGuard(), CORE)
    ids = (await collect(host, run_order("w", token_ids, sampling=greedy(n_tokens)))).ids
    await host.close()
    return ids


async def until_idle(host: NodeHost) -> None:
    """A cancelled call ends at the server a moment later."""
    await until(lambda: host.statistics().running == 0 and host.statistics().transfers == 0)


async def test_a_run_is_the_same_over_grpc(over_grpc: GrpcPair) -> None:
    order = run_order("r", prompt(40), sampling=greedy(8, temperature=1.0, logprobs=2, stop=("zzzzz",)))
    remote = await collect_port(over_grpc.core_port, order)
    local = await collect(over_grpc.edge, order)
    assert remote.ids == local.ids
    tokens = [e for e in remote.events if isinstance(e, PortTokens)]
    assert all(len(e.logprobs[0][1]) == 2 for e in tokens)
    assert over_grpc.core_port.place == CORE
    assert over_grpc.core_port.address == over_grpc.address
    assert over_grpc.edge_port.place == EDGE
    assert over_grpc.edge_port.address == ""


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (run_order("r", prompt(4), context=context_of(model="other")), UnknownModel),
        (run_order("r", (600,)), InvalidRequest),
        (run_order("r", ()), InvalidRequest),
        (run_order("r", prompt(4), context=context_of(salt=b"short")), InvalidRequest),
        (run_order("", prompt(4)), InvalidRequest),
        (run_order("r", prompt(4), kv_from=RunId("ghost")), NotFound),
    ],
)
async def test_errors_cross_the_wire(over_grpc: GrpcPair, order: RunOrder, error: type[MeshError]) -> None:
    with pytest.raises(error) as caught:
        await collect_port(over_grpc.core_port, order)
    assert caught.value.reason == error.reason


async def test_nobody_of_another_mesh(over_grpc: GrpcPair) -> None:
    over_grpc.caller[0] = place_of("spy", mesh="other")
    stub = over_grpc.stub
    calls = [
        stub.Release(node_pb2.ReleaseRequest(run_id="r")),
        stub.GetInfo(node_pb2.GetInfoRequest()),
        stub.Probe(node_pb2.ProbeRequest()),
        stub.Run(node_pb2.RunRequest(order=order_to_wire(run_order("r", prompt(4))))).read(),
        stub.WatchLoad(node_pb2.WatchLoadRequest()).read(),
        stub.TransferKv().read(),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        error = from_rpc_error(caught.value)
        assert isinstance(error, PolicyDenied)
        assert error.details["rule"] == "node_mesh"


async def test_closing_a_run_cancels_it_at_the_node(over_grpc: GrpcPair) -> None:
    over_grpc.core_engine.step_delay_s = 0.001
    order = run_order("r", prompt(4), sampling=greedy(900))
    async with aclosing(over_grpc.core_port.run(order)) as events:
        async for event in events:
            if isinstance(event, PortTokens):
                break
    await until_idle(over_grpc.core)
    assert (await over_grpc.core_engine.load()).kv_used_tokens == 0


async def test_release_cancels_and_is_idempotent(over_grpc: GrpcPair) -> None:
    over_grpc.core_engine.step_delay_s = 0.001
    seen = Outcome()
    task = asyncio.create_task(collect_port(over_grpc.core_port, run_order("r", prompt(4), sampling=greedy(900)), seen))
    await until(lambda: len(seen.ids) > 0)
    await over_grpc.core_port.release(RunId("r"))
    await over_grpc.core_port.release(RunId("r"))
    with pytest.raises(Cancelled):
        await task


async def test_a_node_that_is_gone_is_unreachable(over_grpc: GrpcPair) -> None:
    await over_grpc.server.stop(None)
    with pytest.raises(NodeUnreachable):
        await collect_port(over_grpc.core_port, run_order("r", prompt(4)))
    await over_grpc.core_port.release(RunId("r"))  # best effort
    with pytest.raises(NodeUnreachable):
        await move(over_grpc, PULL, prompt(4), KvSource(run_id=RunId("h")))


async def test_info_and_probe(over_grpc: GrpcPair) -> None:
    info = await over_grpc.stub.GetInfo(node_pb2.GetInfoRequest())
    assert (info.place.node_id, info.build) == ("core-1", "fake-engine 1")
    assert info.clock_unix_s > 1e9
    reply = await over_grpc.stub.Probe(node_pb2.ProbeRequest(payload=b"x" * 1000, reply_bytes=5000))
    assert len(reply.payload) == 5000
    for bad in (
        node_pb2.ProbeRequest(reply_bytes=MAX_PROBE_BYTES + 1),
        node_pb2.ProbeRequest(payload=bytes(MAX_PROBE_BYTES + 1)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await over_grpc.stub.Probe(bad)
        assert isinstance(from_rpc_error(caught.value), InvalidRequest)


async def test_load_is_told_at_once_and_at_each_change(over_grpc: GrpcPair) -> None:
    over_grpc.core_engine.step_delay_s = 0.001
    stream = over_grpc.stub.WatchLoad(node_pb2.WatchLoadRequest())
    assert (await stream.read()).load.running == 0
    task = asyncio.create_task(collect_port(over_grpc.core_port, run_order("r", prompt(4), sampling=greedy(900))))
    while (await stream.read()).load.running == 0:
        pass
    drain = asyncio.create_task(over_grpc.core.drain())
    while not (await stream.read()).load.draining:
        pass
    await over_grpc.core_port.release(RunId("r"))
    with pytest.raises(Cancelled):
        await task
    await drain
    stream.cancel()


@pytest.mark.parametrize("direction", [PUSH, PULL])
async def test_a_hold_travels(over_grpc: GrpcPair, direction: KvDirection) -> None:
    source, target = over_grpc.edge, over_grpc.core
    if direction is PULL:
        source, target = target, source
    ids = prompt(601)
    await collect(source, run_order("h", ids[:-1], prefill_only=True))
    report = await move(over_grpc, direction, ids[:-1], KvSource(run_id=RunId("h")))
    assert report.tokens == 600
    outcome = await collect(target, run_order("r", ids, kv_from=RunId("target")))
    assert outcome.ids == await undisturbed(ids, 8)
    await until_idle(over_grpc.core)


async def test_pull_of_a_prefill(over_grpc: GrpcPair) -> None:
    ids = prompt(601)
    prefill = run_order("p", ids[:-1], prefill_only=True)
    report = await move(over_grpc, PULL, ids[:-1], KvSource(run_id=RunId("p"), prefill=prefill))
    assert report.leg is not None
    outcome = await collect(over_grpc.edge, run_order("r", ids, kv_from=RunId("target")))
    assert outcome.ids == await undisturbed(ids, 8)
    await until_idle(over_grpc.core)
    assert over_grpc.core_engine.hold_ids == []


@pytest.mark.parametrize("direction", [PUSH, PULL])
async def test_moves_in_mid_stream(over_grpc: GrpcPair, direction: KvDirection) -> None:
    """Six at random points, both nodes driven through their ports as an entry does it."""
    rng = random.Random(10)
    over_grpc.edge_engine.step_delay_s = over_grpc.core_engine.step_delay_s = 0.001  # slower than their moves
    ports: list[NodePort] = [over_grpc.edge_port, over_grpc.core_port]
    source, target = ports if direction is PUSH else reversed(ports)
    for i in range(6):
        ids, after = prompt(rng.randint(1, 300), seed=i), rng.randint(1, 80)
        seen = Outcome()
        task = asyncio.create_task(collect_port(source, run_order("r", ids, sampling=greedy(600)), seen))
        await until(lambda seen=seen, after=after: len(seen.ids) >= after)  # type: ignore[misc]
        await move(over_grpc, direction, ids + seen.ids, KvSource(run_id=RunId("r"), pause=True))
        first = await task
        assert isinstance(first.last, PortHeld)
        n_tokens = len(first.ids) + 10
        order = run_order(
            "s", ids + first.ids, prompt_tokens=len(ids), sampling=greedy(n_tokens), kv_from=RunId("target")
        )
        rest = await collect_port(target, order)
        assert first.ids + rest.ids == await undisturbed(ids, n_tokens)
        await source.release(RunId("r"))
    await until_idle(over_grpc.core)


async def test_the_peer_hears_why(over_grpc: GrpcPair) -> None:
    """A refusal at the dialled side arrives as its own error, in both directions."""
    await collect(over_grpc.edge, run_order("h", prompt(40), prefill_only=True))
    await collect(over_grpc.core, run_order("h", prompt(40), prefill_only=True))
    over_grpc.core_guard.no_kv = {"core-1", "paris-1"}
    for direction in (PUSH, PULL):
        with pytest.raises(PolicyDenied):
            await move(over_grpc, direction, prompt(40), KvSource(run_id=RunId("h")))
    await until_idle(over_grpc.core)
    assert over_grpc.edge_engine.hold_ids == ["h"]
    assert over_grpc.core_engine.hold_ids == ["h"]


async def test_cancelling_a_move_frees_both_sides(over_grpc: GrpcPair) -> None:
    over_grpc.core_engine.step_delay_s = 0.001
    prefill = run_order("p", prompt(1000), prefill_only=True)
    task = asyncio.create_task(move(over_grpc, PULL, prompt(1000), KvSource(run_id=RunId("p"), prefill=prefill)))
    await until(lambda: bool(over_grpc.edge_engine.hold_ids))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_idle(over_grpc.core)
    await until_idle(over_grpc.edge)
    assert over_grpc.edge_engine.hold_ids == []


async def test_the_server_dies_in_a_transfer(over_grpc: GrpcPair) -> None:
    over_grpc.core_engine.step_delay_s = 0.001
    prefill = run_order("p", prompt(1000), prefill_only=True)
    task = asyncio.create_task(move(over_grpc, PULL, prompt(1000), KvSource(run_id=RunId("p"), prefill=prefill)))
    await until(lambda: bool(over_grpc.edge_engine.hold_ids))
    await over_grpc.server.stop(None)
    with pytest.raises(MeshError) as caught:
        await task
    assert caught.value.reason in ("NODE_UNREACHABLE", "CANCELLED")
    assert over_grpc.edge_engine.hold_ids == []


async def test_a_transfer_starts_with_open(over_grpc: GrpcPair) -> None:
    call = over_grpc.stub.TransferKv()
    await call.write(node_pb2.TransferKvRequest(frame=node_pb2.KvFrame(done=node_pb2.KvDone(tokens=1))))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert isinstance(from_rpc_error(caught.value), InvalidRequest)


def test_ports_are_ports(over_grpc: GrpcPair) -> None:
    port: NodePort = GrpcPort(over_grpc.channel, Peer(address="a:1", place=CORE))
    local: NodePort = over_grpc.edge_port
    assert port.place != local.place


async def test_an_edge_cannot_order_work_for_another_site(over_grpc: GrpcPair) -> None:
    """What a policy calls the own site is read from the caller's certificate, not from its word."""
    mine = run_order("mine", prompt(4), context=context_of(entry_site=EDGE.site), sampling=greedy(1))
    other = run_order("other", prompt(4), context=context_of(entry_site="elsewhere"), sampling=greedy(1))
    await collect_port(over_grpc.core_port, mine)
    with pytest.raises(PolicyDenied) as caught:
        await collect_port(over_grpc.core_port, other)
    assert caught.value.details["rule"] == "entry-site"


async def test_an_edge_cannot_end_work_of_another_site(over_grpc: GrpcPair) -> None:
    context = context_of(entry_site="elsewhere")
    await collect(over_grpc.core, run_order("theirs", prompt(20), context=context, prefill_only=True))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await over_grpc.stub.Release(node_pb2.ReleaseRequest(run_id="theirs"))
    assert from_rpc_error(caught.value).details["rule"] == "entry-site"
    assert over_grpc.core_engine.hold_ids == ["theirs"]
    await over_grpc.core.release(RunId("theirs"))
