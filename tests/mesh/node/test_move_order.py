"""A node with a listener that is ordered to move KV: MoveKv over real grpc, core to core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import grpc.aio
import pytest

from mesh.errors import KvIncompatible, MeshError, NodeUnreachable, NotFound, NotImplementedHere, PolicyDenied
from mesh.identity.place import Place, Role
from mesh.kv.geometry import KvDtype
from mesh.node.engine import RunId
from mesh.node.grpc_port import GrpcPort
from mesh.node.grpc_port_transfer import GrpcTransport
from mesh.node.host import NodeHost
from mesh.node.port import KvDirection, KvOrder, KvSource, Peer, PortHeld
from mesh.node.servicer import NodeServicer
from mesh.rpc.errors import ErrorInterceptor
from mesh.v1 import node_pb2_grpc
from tests.fakes.fake_engine import FakeEngine, tokens_of
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

CORE_2 = place_of("core-2")
PLACEMENT = replace(place_of("placement-1"), role=Role.PLACEMENT)
IDS = prompt(301)


@dataclass(slots=True)
class Node:
    place: Place
    host: NodeHost
    engine: FakeEngine
    guard: FakeGuard
    address: str
    port: GrpcPort
    caller: list[Place]


@pytest.fixture
async def cores() -> AsyncIterator[tuple[Node, Node]]:
    """core-1 has the KV and is dialled by core-2, which takes orders."""
    async with AsyncExitStack() as stack:
        first = await listening(stack, CORE, caller=CORE_2)
        second = await listening(stack, CORE_2, caller=PLACEMENT)
        yield first, second
    for node in (first, second):
        await node.host.close()
        await node.engine.check_integrity()
        assert node.engine.hold_ids == []


async def listening(stack: AsyncExitStack, place: Place, *, caller: Place, dials: bool = True) -> Node:
    engine, guard, callers = FakeEngine(kv_dtype=KvDtype.BF16), FakeGuard(), [caller]
    host = NodeHost(engine, FakeSigner(place), guard, place)
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    transport = GrpcTransport(lambda peer: grpc.aio.insecure_channel(peer.address)) if dials else None
    node_pb2_grpc.add_NodeServicer_to_server(NodeServicer(host, lambda context: callers[0], transport), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    stack.push_async_callback(server.stop, None)
    stack.push_async_callback(host.close)
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
    return Node(place, host, engine, guard, address, GrpcPort(channel, Peer(address=address, place=place)), callers)


def order_from(source: Node, what: KvSource, token_ids: tuple[int, ...] = IDS[:-1], **changes: object) -> KvOrder:
    values = {"codec": "raw", **changes}
    return kv_order(
        source.place,
        direction=KvDirection.PULL,
        token_ids=token_ids,
        source=what,
        address=source.address,
        **values,  # type: ignore[arg-type]
    )


async def test_core_to_core_is_lossless(cores: tuple[Node, Node]) -> None:
    first, second = cores
    await collect(first.host, run_order("h", IDS[:-1], prefill_only=True))
    report = await second.port.move_kv(order_from(first, KvSource(run_id=RunId("h"))))
    assert (report.tokens, report.codec, report.leg) == (300, "raw", None)
    slab = await second.engine.export_kv(RunId("target"), 0, 300)
    assert slab.dtype is KvDtype.BF16
    assert tokens_of(slab) == IDS[:-1]


async def test_a_running_request_moves_between_cores(cores: tuple[Node, Node]) -> None:
    first, second = cores
    first.engine.step_delay_s = 0.001
    seen = Outcome()
    task = asyncio.create_task(collect(first.host, run_order("r", prompt(40), sampling=greedy(300)), seen))
    await until(lambda: len(seen.ids) >= 10)
    source = KvSource(run_id=RunId("r"), pause=True)
    await second.port.move_kv(order_from(first, source, prompt(40) + seen.ids))
    assert isinstance((await task).last, PortHeld)
    n_tokens = len(seen.ids) + 5
    sampling = greedy(n_tokens)
    rest = run_order("s", prompt(40) + seen.ids, prompt_tokens=40, sampling=sampling, kv_from=RunId("target"))
    moved = seen.ids + (await collect(second.host, rest)).ids
    first.engine.step_delay_s = 0.0
    assert moved == (await collect(first.host, run_order("w", prompt(40), sampling=sampling))).ids


async def test_a_prefill_for_another_core_carries_its_leg(cores: tuple[Node, Node]) -> None:
    first, second = cores
    source = KvSource(run_id=RunId("p"), prefill=run_order("p", IDS[:-1], prefill_only=True))
    report = await second.port.move_kv(order_from(first, source))
    assert report.leg is not None
    assert first.engine.hold_ids == []


async def test_unlike_pools_refuse_raw(cores: tuple[Node, Node]) -> None:
    first, second = cores
    await collect(first.host, run_order("h", IDS[:-1], prefill_only=True))
    second.engine._info = replace(second.engine.info, kv_dtype=KvDtype.F16)
    with pytest.raises(KvIncompatible):
        await second.port.move_kv(order_from(first, KvSource(run_id=RunId("h"))))
    assert second.engine.hold_ids == []


async def test_errors_of_the_ordered_node_and_of_its_peer_arrive(cores: tuple[Node, Node]) -> None:
    first, second = cores
    with pytest.raises(NotFound):
        await second.port.move_kv(order_from(first, KvSource(run_id=RunId("ghost"))))
    second.guard.no_kv = {"core-2"}
    with pytest.raises(PolicyDenied):
        await second.port.move_kv(order_from(first, KvSource(run_id=RunId("h"))))


async def test_the_peer_is_gone(cores: tuple[Node, Node]) -> None:
    first, second = cores
    order = replace(order_from(first, KvSource(run_id=RunId("h"))), peer=Peer(address="127.0.0.1:1", place=first.place))
    with pytest.raises(NodeUnreachable):
        await second.port.move_kv(order)
    assert second.engine.hold_ids == []


@pytest.mark.parametrize(
    ("caller", "entry_site", "allowed"),
    [
        (PLACEMENT, "", True),
        (PLACEMENT, "anywhere", True),
        (EDGE, EDGE.site, True),
        (EDGE, "site-elsewhere", False),
        (EDGE, "", False),
        (CORE, CORE.site, True),
        (CORE, EDGE.site, False),
    ],
)
async def test_who_may_order(cores: tuple[Node, Node], caller: Place, entry_site: str, allowed: bool) -> None:
    """Placement may order any move, others only those of requests that entered at their own site."""
    first, second = cores
    context = context_of(entry_site=entry_site)
    await collect(first.host, run_order("h", IDS[:-1], prefill_only=True, context=context))
    second.caller[0] = caller
    order = order_from(first, KvSource(run_id=RunId("h")), context=context)
    if allowed:
        assert (await second.port.move_kv(order)).tokens == 300
        return
    with pytest.raises(PolicyDenied) as caught:
        await second.port.move_kv(order)
    assert caught.value.details["rule"] == "mover"
    assert second.engine.hold_ids == []


async def test_nobody_of_another_mesh_orders(cores: tuple[Node, Node]) -> None:
    first, second = cores
    second.caller[0] = place_of("spy", mesh="other")
    with pytest.raises(PolicyDenied):
        await second.port.move_kv(order_from(first, KvSource(run_id=RunId("h"))))


async def test_cancelling_the_order_cancels_the_move(cores: tuple[Node, Node]) -> None:
    first, second = cores
    first.engine.step_delay_s = 0.001
    source = KvSource(run_id=RunId("p"), prefill=run_order("p", prompt(1000), prefill_only=True))
    task = asyncio.create_task(second.port.move_kv(order_from(first, source, prompt(1000))))
    await until(lambda: bool(second.engine.hold_ids))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for node in (first, second):
        await until(lambda node=node: node.host.statistics().transfers == 0)  # type: ignore[misc]
    await until(lambda: first.host.statistics().running == 0)
    assert second.engine.hold_ids == []


async def test_a_node_that_does_not_dial() -> None:
    async with AsyncExitStack() as stack:
        node = await listening(stack, CORE_2, caller=PLACEMENT, dials=False)
        with pytest.raises(NotImplementedHere) as caught:
            await node.port.move_kv(order_from(node, KvSource(run_id=RunId("h"))))
        assert isinstance(caught.value, MeshError)
