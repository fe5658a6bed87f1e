"""What a node of each role takes, and that a change of role loses nothing that was taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from mesh.errors import InvalidRequest, WrongRole
from mesh.identity.place import Role
from mesh.node.engine import RunId
from mesh.node.grpc_port import GrpcPort
from mesh.node.host import NodeHost
from mesh.node.port import KvDirection, KvSource
from mesh.node.serving_role import ServingRole, serving_role
from mesh.node.wire import load_from_wire
from mesh.v1 import node_pb2
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_node import (
    CORE,
    EDGE,
    FakeGuard,
    FakeSigner,
    MemoryNetwork,
    collect,
    kv_order,
    place_of,
    prompt,
    run_order,
    until,
)
from tests.mesh.node.conftest import GrpcPair

OTHER = place_of("core-2")
IDS = prompt(101)


@pytest.fixture
async def host() -> AsyncIterator[NodeHost]:
    made = NodeHost(FakeEngine(step_delay_s=0.001), FakeSigner(CORE), FakeGuard(), CORE)
    yield made
    await made.close()


def test_roles_are_words() -> None:
    assert [serving_role(word) for word in ("", "both", "prefill", "decode")] == [
        ServingRole.BOTH,
        ServingRole.BOTH,
        ServingRole.PREFILL,
        ServingRole.DECODE,
    ]
    with pytest.raises(InvalidRequest, match="both, prefill, decode"):
        serving_role("compute")


async def test_a_prefill_node_prefills_and_does_not_decode(host: NodeHost) -> None:
    host.set_role(ServingRole.PREFILL)
    await collect(host, run_order("p", IDS, prefill_only=True))
    with pytest.raises(WrongRole, match="does not decode"):
        await collect(host, run_order("r", IDS))
    assert host.statistics().runs_held_total == 1


@pytest.mark.parametrize("tokens", [1, 16])
async def test_a_decode_node_computes_one_block_at_most(host: NodeHost, tokens: int) -> None:
    host.set_role(ServingRole.DECODE)
    assert len((await collect(host, run_order("r", IDS[:tokens]))).ids) == 8
    with pytest.raises(WrongRole, match="at most 16 tokens"):
        await collect(host, run_order("long", IDS[:17]))
    with pytest.raises(WrongRole, match="does not prefill for others"):
        await collect(host, run_order("p", IDS[:4], prefill_only=True))


async def test_a_hold_that_lacks_more_than_a_block_is_not_continued_at_a_decode_node(host: NodeHost) -> None:
    await collect(host, run_order("h", IDS[:50], prefill_only=True))
    host.set_role(ServingRole.DECODE)
    with pytest.raises(WrongRole, match="not 51"):
        await collect(host, run_order("r", IDS, kv_from=RunId("h")))
    assert len((await collect(host, run_order("r", IDS[:60], kv_from=RunId("h")))).ids) == 8  # it is there still


async def test_a_running_request_outlives_a_change_of_role(host: NodeHost) -> None:
    order = run_order("r", IDS)
    want = (await collect(host, order)).ids
    for role in (ServingRole.PREFILL, ServingRole.DECODE):
        running = asyncio.create_task(collect(host, order))
        await until(lambda: host.statistics().running == 1)
        host.set_role(role)
        assert (await running).ids == want
        host.set_role(ServingRole.BOTH)


async def test_what_was_paused_goes_on_at_a_node_that_prefills_now(host: NodeHost) -> None:
    await collect(host, run_order("h", IDS[:-1], prefill_only=True))
    host.set_role(ServingRole.PREFILL)
    assert len((await collect(host, run_order("r", IDS, kv_from=RunId("h")))).ids) == 8


@pytest.mark.parametrize("at", ["source", "target"])
async def test_a_transfer_against_a_role_is_refused_before_anything_is_computed(at: str) -> None:
    network = MemoryNetwork()
    engines = {place.node_id: FakeEngine() for place in (CORE, OTHER)}
    hosts = [NodeHost(engines[p.node_id], FakeSigner(p), FakeGuard(), p) for p in (CORE, OTHER)]
    for node in hosts:
        network.add(node)
    source, target = hosts
    if at == "source":
        source.set_role(ServingRole.DECODE)
    else:
        target.set_role(ServingRole.PREFILL)
    prefill = run_order("p", IDS[:-1], prefill_only=True)
    order = kv_order(
        CORE, direction=KvDirection.PULL, token_ids=IDS[:-1], source=KvSource(run_id=RunId("p"), prefill=prefill)
    )
    with pytest.raises(WrongRole):
        await target.move_kv(order, network.dial_from(OTHER))
    for node, engine in zip(hosts, engines.values(), strict=True):
        load = await engine.load()
        assert (load.kv_used_tokens, load.prompt_tokens_total, engine.hold_ids) == (0, 0, [])
        await node.close()


async def test_placement_gives_roles_and_nobody_else(over_grpc: GrpcPair) -> None:
    request = node_pb2.SetRoleRequest(role="prefill")
    with pytest.raises(Exception, match="cannot give roles"):
        await over_grpc.stub.SetRole(request)
    over_grpc.caller[0] = place_of("placement-1")
    assert over_grpc.caller[0].role is Role.CORE  # another core node may not either
    with pytest.raises(Exception, match="cannot give roles"):
        await over_grpc.stub.SetRole(request)
    assert over_grpc.core.role is ServingRole.BOTH


async def test_a_new_role_is_told_at_once_to_who_watches_the_load(over_grpc: GrpcPair) -> None:
    stream = over_grpc.stub.WatchLoad(node_pb2.WatchLoadRequest())
    first = await stream.read()
    assert (first.load.role, load_from_wire(first.load).running) == ("both", 0)
    assert over_grpc.core.set_role(ServingRole.DECODE) is ServingRole.BOTH
    assert (await stream.read()).load.role == "decode"
    stream.cancel()
    port = over_grpc.core_port
    assert isinstance(port, GrpcPort)
    with pytest.raises(WrongRole):  # over the wire as it is here
        async for _ in port.run(run_order("r", IDS)):
            pass
    assert EDGE.role is Role.EDGE
