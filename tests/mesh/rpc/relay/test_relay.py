"""KV and runs between two edges over a relay: what passes, what the relay sees, and what it cannot do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from mesh.errors import InvalidRequest, KvIncompatible, MeshError, NodeUnreachable, NotFound, PolicyDenied
from mesh.identity.place import Role
from mesh.node.engine import RunId
from mesh.node.local_port import LocalPort
from mesh.node.port import KvDirection, KvSource, Peer, PortHeld, RunOrder
from mesh.rpc.channel import node_channel
from mesh.rpc.errors import translate_rpc_errors
from mesh.rpc.relay.dialling import RelayPort, RelayTransport
from mesh.v1 import relay_pb2, relay_pb2_grpc
from tests.fakes.fake_engine import tokens_of
from tests.fakes.fake_node import Outcome, collect, context_of, greedy, kv_order, prompt, run_order, until
from tests.mesh.rpc.relay.conftest import Rig, Site, place_of

IDS = prompt(601)


def port_of(site: Site) -> LocalPort:
    return LocalPort(site.host, _no_way, relay=lambda direct: RelayTransport(direct, site.dialler))


def _no_way(peer: Peer) -> Any:
    raise AssertionError("an edge has no address to dial")


def order_to(site: Site, direction: KvDirection = KvDirection.PUSH, **changes: Any) -> Any:
    values: dict[str, Any] = {"token_ids": IDS[:-1], "source": KvSource(run_id=RunId("h"))}
    return kv_order(site.place, direction=direction, address="", **{**values, **changes})


async def hold_at(site: Site) -> None:
    await collect(site.host, run_order("h", IDS[:-1], prefill_only=True))


@pytest.mark.parametrize("direction", list(KvDirection))
async def test_kv_goes_over_and_the_relay_reads_none_of_it(rig: Rig, direction: KvDirection) -> None:
    paris, osaka = rig.sites["paris"], rig.sites["osaka"]
    source, target = (paris, osaka) if direction is KvDirection.PUSH else (osaka, paris)
    await hold_at(source)
    report = await port_of(paris).move_kv(order_to(osaka, direction))
    assert report.tokens == 600
    slab = await target.engine.export_kv(RunId("target"), 0, 600)
    assert tokens_of(slab) == IDS[:-1]
    rows = slab.k.tobytes()
    sealed = b"".join(rig.seen)
    assert len(sealed) > report.wire_bytes
    assert not any(rows[i : i + 32] in sealed for i in range(0, len(rows), 1024))
    assert b"acme" not in sealed, "not even whose it is"
    for site in (paris, osaka):
        assert ("relay", "") in site.guard.asked
        for name in ("h", "target"):
            await site.host.release(RunId(name))


async def test_a_running_request_moves_between_edges(rig: Rig) -> None:
    paris, osaka = rig.sites["paris"], rig.sites["osaka"]
    paris.engine.step_delay_s = 0.002
    seen = Outcome()
    task = asyncio.create_task(collect(paris.host, run_order("r", prompt(300), sampling=greedy(400)), seen))
    await until(lambda: len(seen.ids) >= 5)
    await port_of(paris).move_kv(order_to(osaka, source=KvSource(run_id=RunId("r"), pause=True), token_ids=prompt(300)))
    assert isinstance((await task).last, PortHeld)
    sampling = greedy(len(seen.ids) + 10)
    context = context_of()
    order = run_order(
        "s", prompt(300) + seen.ids, prompt_tokens=300, sampling=sampling, kv_from=RunId("target"), context=context
    )
    events = [event async for event in RelayPort(osaka.place, paris.dialler).run(order)]
    moved = seen.ids + Outcome(list(events)).ids
    paris.engine.step_delay_s = 0.0
    assert moved == (await collect(paris.host, run_order("w", prompt(300), sampling=sampling))).ids
    await paris.host.release(RunId("r"))


async def test_a_run_that_is_left_is_cancelled_there(rig: Rig) -> None:
    paris, osaka = rig.sites["paris"], rig.sites["osaka"]
    osaka.engine.step_delay_s = 0.002
    events = RelayPort(osaka.place, paris.dialler).run(run_order("r", prompt(50), sampling=greedy(900)))
    await anext(events)
    assert osaka.host.statistics().running == 1
    await events.aclose()
    await until_async(lambda: osaka.host.statistics().running == 0)


async def test_errors_come_through_with_their_details(rig: Rig) -> None:
    paris, osaka = rig.sites["paris"], rig.sites["osaka"]
    osaka.guard.no_prompt = {"osaka"}
    with pytest.raises(PolicyDenied) as caught:
        await run(rig, run_order("r", prompt(50)))
    assert caught.value.details["rule"] == "test-prompt"
    await hold_at(paris)
    osaka.guard.no_kv = {"osaka"}
    with pytest.raises(PolicyDenied):
        await port_of(paris).move_kv(order_to(osaka))
    osaka.guard.no_kv = set()
    osaka.engine._info = replace(osaka.engine.info, weights_lineage="another")
    with pytest.raises(KvIncompatible):
        await port_of(paris).move_kv(order_to(osaka))
    await paris.host.release(RunId("h"))


@pytest.mark.parametrize("end", ["paris", "osaka"])
async def test_a_policy_that_forbids_relays_is_kept_at_both_ends(rig: Rig, end: str) -> None:
    paris, osaka = rig.sites["paris"], rig.sites["osaka"]
    rig.sites[end].guard.no_relay = True
    await hold_at(paris)
    with pytest.raises(PolicyDenied) as caught:
        await port_of(paris).move_kv(order_to(osaka))
    assert caught.value.details["rule"] == "relay"
    assert bool(rig.seen) == (end == "osaka"), "the source does not even call"
    if end == "osaka":
        with pytest.raises(PolicyDenied):
            await run(rig, run_order("r", prompt(50)))
    await paris.host.release(RunId("h"))


async def test_no_site_speaks_for_another(rig: Rig) -> None:
    with pytest.raises(PolicyDenied) as caught:
        await run(rig, run_order("r", prompt(50), context=context_of(entry_site="rome")))
    assert caught.value.details["rule"] == "entry-site"


async def test_a_relay_that_puts_through_to_another_node_is_found_out(rig: Rig) -> None:
    rig.make("rome")
    rig.ringing["osaka"] = "rome"
    with pytest.raises(MeshError):
        await run(rig, run_order("r", prompt(50)))
    assert rig.sites["rome"].host.statistics().runs_started_total == 0


async def test_a_ticket_is_for_one_node(rig: Rig) -> None:
    assert rig.servicer is not None
    tickets: list[bytes] = []

    async def keep(node_id: str, ticket: bytes) -> None:
        tickets.append(ticket)

    rig.servicer._ring = keep
    calling = asyncio.create_task(run(rig, run_order("r", prompt(50))))
    await until_async(lambda: bool(tickets))
    answer = relay_pb2.RelayRequest(answer=relay_pb2.RelayAnswer(ticket=tickets[0]))
    with pytest.raises(PolicyDenied):
        await open_with(rig, rig.sites["paris"], answer)
    with pytest.raises(NotFound):
        await open_with(rig, rig.sites["osaka"], relay_pb2.RelayRequest(answer=relay_pb2.RelayAnswer(ticket=b"x" * 32)))
    with pytest.raises(NodeUnreachable):  # nobody came
        await calling


@pytest.mark.parametrize("nth", [0, 1, 2, 3, 4, 6, 9])
async def test_a_relay_that_changes_a_bit_breaks_the_connection_and_no_more(rig: Rig, nth: int) -> None:
    paris, osaka = rig.sites["paris"], rig.sites["osaka"]
    count = 0

    def flip(sealed: bytes) -> bytes:
        nonlocal count
        count += 1
        return sealed if count != nth + 1 else bytes([sealed[0] ^ 1]) + sealed[1:]

    rig.tamper = flip
    await hold_at(paris)
    with pytest.raises(MeshError):
        await port_of(paris).move_kv(order_to(osaka))
    await until_async(lambda: osaka.host.statistics().transfers == 0)
    assert osaka.engine.hold_ids == []
    assert paris.engine.hold_ids == ["h"]
    rig.tamper = bytes
    assert (await port_of(paris).move_kv(order_to(osaka))).tokens == 600
    await paris.host.release(RunId("h"))
    await osaka.host.release(RunId("target"))


async def test_a_node_that_is_not_attached(rig: Rig) -> None:
    with pytest.raises(NodeUnreachable, match="nowhere"):
        async with rig.sites["paris"].dialler.open(place_of("nowhere")):
            pass


async def test_who_can_be_dialled_needs_no_relay(rig: Rig) -> None:
    core = rig.authority.issue(place_of("core-1", Role.CORE))
    call = relay_pb2.RelayRequest(call=relay_pb2.RelayCall(node_id="osaka"))
    async with node_channel(rig.address, core, "relay-1") as channel:
        stream = relay_pb2_grpc.RelayStub(channel).Open()
        await stream.write(call)
        assert "node_role" in str(await trailing(stream))


async def test_a_connection_starts_with_a_call_or_an_answer(rig: Rig) -> None:
    with pytest.raises(InvalidRequest):
        await open_with(rig, rig.sites["paris"], relay_pb2.RelayRequest(sealed=b"hello"))


async def trailing(stream: Any) -> object:
    await stream.code()
    return await stream.trailing_metadata()


async def open_with(rig: Rig, site: Site, first: relay_pb2.RelayRequest) -> None:
    async with node_channel(rig.address, site.credentials, "relay-1") as channel:
        stream = relay_pb2_grpc.RelayStub(channel).Open()
        with translate_rpc_errors("relay-1"):
            await stream.write(first)
            await stream.read()


async def run(rig: Rig, order: RunOrder) -> Outcome:
    port = RelayPort(rig.sites["osaka"].place, rig.sites["paris"].dialler)
    return Outcome([event async for event in port.run(order)])


async def until_async(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
