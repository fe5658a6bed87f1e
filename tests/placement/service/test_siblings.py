"""Two placement services over the same nodes: load that is shared, requests that one goes on with for the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc.aio
import pytest

from mesh.errors import Draining, Internal, InvalidRequest, NodeUnreachable, NotFound
from mesh.identity.place import Place
from mesh.node.port import Peer
from mesh.rpc.errors import ErrorInterceptor
from mesh.telemetry.metrics import Metrics
from mesh.v1 import inference_pb2 as pb
from mesh.v1 import sibling_pb2, sibling_pb2_grpc
from placement.entry import front_door as front_door_module
from placement.entry.copies import error_of
from placement.entry.front_door import FrontDoor
from placement.entry.in_flight import InFlight
from placement.entry.intake import Accepted
from placement.entry.request_log import RequestStream, TokenPiece
from placement.policy.book import PolicyBook
from placement.service import siblings as siblings_module
from placement.service import siblings_servicer as servicer_module
from placement.service.siblings import Siblings, StreamCopies
from placement.service.siblings_servicer import SiblingServicer
from tests.fakes.fake_node import FakeSigner
from tests.fakes.mesh import TENANT, Answer, MemoryMesh, ask, asking, place_of, request_of, settle, until

ONE, TWO = place_of("placement-1"), place_of("placement-2")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings_module, "_RETRY_S", 0.02)
    monkeypatch.setattr(siblings_module, "TELL_EVERY_S", 0.02)


@dataclass(eq=False)
class Service:
    """A placement service: its door, and its links to the other one. Plain text; who calls is in the metadata."""

    place: Place
    door: FrontDoor
    siblings: Siblings
    in_flight: InFlight
    server: grpc.aio.Server
    address: str

    def knows(self, *others: Service) -> None:
        self.siblings.update(Peer(address=other.address, place=other.place) for other in others)

    async def hears(self, *others: Service) -> None:
        self.knows(*others)
        await until(lambda: {each.place for each in self.siblings.up()} >= {other.place for other in others})

    async def kill(self) -> None:
        """As a crash: what it runs breaks, and nobody hears a word of it."""
        await self.siblings.close()
        await self.server.stop(0)
        for task in list(self.door._producers.values()):
            task.cancel()
        await asyncio.gather(*self.door._producers.values(), return_exceptions=True)


async def service(mesh: MemoryMesh, place: Place, caller: Place) -> Service:
    in_flight = InFlight(mesh.notes)
    siblings = Siblings(lambda peer: grpc.aio.insecure_channel(peer.address), in_flight)
    metrics = Metrics(node_id=place.node_id, role="placement")
    deps = replace(mesh.deps, signer=FakeSigner(place), copier=siblings, in_flight=in_flight, metrics=metrics)
    door = FrontDoor(deps)
    siblings.on_followed = door.followed_elsewhere
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    servicer = SiblingServicer(door, siblings, in_flight, lambda context: caller)
    sibling_pb2_grpc.add_SiblingServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return Service(place, door, siblings, in_flight, server, f"127.0.0.1:{port}")


@pytest.fixture
async def mesh() -> AsyncIterator[MemoryMesh]:
    made = MemoryMesh("core-1", "core-2", entry="placement-1", step_delay_s=0.002)
    yield made
    await made.close()


@pytest.fixture
async def pair(mesh: MemoryMesh) -> AsyncIterator[tuple[Service, Service]]:
    one, two = await service(mesh, ONE, TWO), await service(mesh, TWO, ONE)
    await one.hears(two)
    await two.hears(one)
    yield one, two
    for each in (one, two):
        await each.door.drain(0.0)
        await each.siblings.close()
        await each.server.stop(0)
    for node in mesh.nodes.values():
        await settle(node)


def resumed(request: pb.GenerateRequest, offset: int) -> pb.GenerateRequest:
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    again.resume_offset_tokens = offset
    return again


async def test_a_request_is_resumed_at_the_other_one_after_a_crash(
    pair: tuple[Service, Service], mesh: MemoryMesh
) -> None:
    one, two = pair
    request = request_of("once upon a time", max_tokens=60, idempotency_key="k", temperature=1.0)
    whole = await ask(one.door, request_of("once upon a time", max_tokens=60, temperature=1.0, seed=5))
    request.sampling.seed = 5
    async with asking(one.door, request, tokens=9) as (first, _):
        await one.kill()
        seen = len(first.ids)
        rest = await ask(two.door, resumed(request, seen))
    assert first.ids + rest.ids == whole.ids
    assert first.text + rest.text == whole.text
    assert rest.finish is not None
    assert [m.recomputed for m in rest.migrations] == [True]
    assert rest.decision is not None
    assert rest.decision.request_id == first.request_id


async def test_the_seed_that_was_drawn_goes_with_it(pair: tuple[Service, Service]) -> None:
    one, two = pair
    request = request_of("a draw", max_tokens=50, idempotency_key="k", temperature=1.5)
    async with asking(one.door, request, tokens=5) as (first, _):
        await one.kill()
        rest = await ask(two.door, resumed(request, len(first.ids)))
        again = await ask(two.door, request)  # the whole of it, from the copy
    assert again.ids == first.ids + rest.ids


async def test_a_client_that_comes_to_the_other_one_sees_what_still_runs(pair: tuple[Service, Service]) -> None:
    one, two = pair
    request = request_of("still there", max_tokens=80, idempotency_key="k")
    async with asking(one.door, request, tokens=5) as (first, task):
        assert one.door.running == 1
        rest = await ask(two.door, resumed(request, 3))
        assert two.door.running == 0, "it was not computed twice"
        await task
    assert first.ids[3:] == rest.ids
    assert rest.finish == first.finish


async def test_a_request_that_is_read_elsewhere_only_is_not_ended(
    pair: tuple[Service, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_door_module, "_GRACE_S", 0.0)
    one, two = pair
    request = request_of("read elsewhere", max_tokens=150, idempotency_key="k")
    async with (
        asking(one.door, request, tokens=2) as (_, task),
        asking(two.door, request, tokens=3) as (_, elsewhere),
    ):
        await until(lambda: bool(one.door._read_elsewhere))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        answer = await elsewhere
    assert len(answer.ids) == 150


async def test_a_request_whose_reader_was_at_one_that_died_waits_for_its_client_as_ever(
    pair: tuple[Service, Service],
) -> None:
    one, two = pair
    request = request_of("read elsewhere", max_tokens=900, idempotency_key="k")
    async with asking(one.door, request, tokens=2) as (_, task), asking(two.door, request, tokens=3):
        await until(lambda: bool(one.door._read_elsewhere))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not one.door._alone
        await two.kill()
        await until(lambda: bool(one.door._alone))
        assert not one.door._read_elsewhere


async def test_a_reader_at_the_other_one_goes_on_when_the_first_dies(pair: tuple[Service, Service]) -> None:
    one, two = pair
    request = request_of("two readers", max_tokens=60, idempotency_key="k")
    async with asking(one.door, request, tokens=2), asking(two.door, request, tokens=3) as (answer, task):
        await one.kill()
        await task
    assert len(answer.ids) == 60


async def test_what_had_ended_is_read_at_the_other_one(pair: tuple[Service, Service], mesh: MemoryMesh) -> None:
    one, two = pair
    request = request_of("ended", max_tokens=10, idempotency_key="k")
    first = await ask(one.door, request)
    await until(lambda: not two.door._copies)
    await one.kill()
    again = await ask(two.door, request)
    assert (again.ids, again.finish) == (first.ids, first.finish)
    assert len(mesh.receipts.kept) == 1


async def test_drained_requests_go_on_at_the_other_one(pair: tuple[Service, Service]) -> None:
    one, two = pair
    request = request_of("a restart", max_tokens=60, idempotency_key="k")
    answer = Answer()
    task = asyncio.create_task(ask(one.door, request, into=answer))
    await until(lambda: len(answer.ids) >= 4)
    await one.door.drain(0.0)
    with pytest.raises(Draining):
        await task
    await one.kill()
    rest = await ask(two.door, resumed(request, len(answer.ids)))
    assert len(answer.ids) + len(rest.ids) == 60


async def test_no_copy_where_policy_does_not_let_the_prompt_be(pair: tuple[Service, Service], mesh: MemoryMesh) -> None:
    one, two = pair
    mesh.book = PolicyBook.of([(TENANT, "version: 1\nrules: {internal: {nodes: [core-1, core-2]}}", 2)])
    request = request_of("stays", max_tokens=30, idempotency_key="k", label="internal")
    async with asking(one.door, request, tokens=2) as (first, _):
        assert not two.door._copies
        await one.kill()
        with pytest.raises(NotFound):
            await ask(two.door, resumed(request, len(first.ids)))


async def test_a_copy_is_told_in_the_receipt(pair: tuple[Service, Service], mesh: MemoryMesh) -> None:
    import json

    one, two = pair
    request = request_of("told", max_tokens=40, idempotency_key="k")
    async with asking(one.door, request, tokens=3) as (first, _):
        await one.kill()
        await ask(two.door, resumed(request, len(first.ids)))
    taken = next(b for b in (json.loads(r.record.body) for r in mesh.receipts.kept) if "taken_over" in b)
    assert taken["taken_over"]["entry"] == "placement-1"
    assert taken["taken_over"]["request_id"] == first.request_id
    ordinary = request_of("told", max_tokens=4, idempotency_key="k2")
    mesh.receipts.kept.clear()
    await two.hears()
    await ask(two.door, ordinary)
    assert "taken_over" not in json.loads(mesh.receipts.kept[0].record.body)


async def test_a_key_is_good_for_one_request_over_all_entries(pair: tuple[Service, Service]) -> None:
    one, two = pair
    async with asking(one.door, request_of("this", max_tokens=50, idempotency_key="k"), tokens=1):
        with pytest.raises(InvalidRequest, match="other contents"):
            await ask(two.door, request_of("that", max_tokens=50, idempotency_key="k"))


async def test_a_sibling_that_takes_nothing_does_not_hold_clients_up(
    pair: tuple[Service, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings_module, "LAG_S", 0.01)
    one, _ = pair

    def hang(self: SiblingServicer, origin: str, message: sibling_pb2.ShareRequest, streams: object) -> None:
        raise InvalidRequest("broken")

    monkeypatch.setattr(servicer_module.SiblingServicer, "_take", hang)
    answer = await ask(one.door, request_of("slow sibling", max_tokens=20, idempotency_key="k"))
    assert len(answer.ids) == 20


async def test_nobody_comes_for_a_request(pair: tuple[Service, Service], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_door_module, "KEEP_S", 0.01)
    one, two = pair
    request = request_of("forgotten", max_tokens=60, idempotency_key="k")
    async with asking(one.door, request, tokens=2) as (first, _):
        await one.kill()
    await until(lambda: not two.door._copies)
    with pytest.raises(NodeUnreachable, match="placement-1"):
        await ask(two.door, resumed(request, len(first.ids)))


async def test_what_one_sends_counts_at_the_other_with_its_age(pair: tuple[Service, Service], mesh: MemoryMesh) -> None:
    one, two = pair
    await ask(one.door, request_of("busy " * 10, max_tokens=3))
    await until(lambda: bool(two.in_flight._others.get("placement-1")))
    (sent,) = two.in_flight._others["placement-1"]
    assert sent.prefill_tokens == 50
    now_s = time.monotonic()

    def known(heard_s: float) -> tuple[int, int]:
        placed = mesh.notes._in_flight.at(sent.node_id, heard_s, now_s, grace_s=0.05)
        return placed.runs, placed.prefill_tokens

    mesh.notes.left(sent.node_id, sent.request_id)  # of the first door, which shares the world
    two.in_flight.lost("placement-1")
    two.in_flight.told("placement-1", [sent, sent])
    two.in_flight.told("placement-1", [sent])
    assert known(sent.at_s - 1.0) == (1, 50), "once, however often it is told"
    two.in_flight.lost("placement-1")
    assert known(sent.at_s - 1.0) == (0, 0)
    two.in_flight.told("placement-1", [sent])
    assert known(sent.at_s + 1.0) == (0, 0), "the node's own figures have it by then"
    await one.kill()
    await until(lambda: not two.in_flight._others)


def test_details_of_a_sibling_are_held_to_what_an_error_takes() -> None:
    end = sibling_pb2.CopiedEnd(request_id="r", error_reason="OVERLOADED", error_message="full")
    end.error_details.update({"message": "x", "rule": "y" * 10_000})
    error = error_of(end)
    assert error is not None
    assert error.message == "full"
    assert len(error.details["rule"]) <= 256


async def test_only_placement_services_share(mesh: MemoryMesh) -> None:
    from mesh.errors import PolicyDenied
    from mesh.rpc.errors import translate_rpc_errors

    made = await service(mesh, ONE, place_of("core-1"))
    async with grpc.aio.insecure_channel(made.address) as channel:
        with pytest.raises(PolicyDenied), translate_rpc_errors("placement-1"):
            async for _ in sibling_pb2_grpc.SiblingStub(channel).Share(iter([])):
                pass
    await made.server.stop(0)
    await made.siblings.close()


async def test_a_bug_in_a_take_over_ends_the_request(
    pair: tuple[Service, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    request = request_of("a bug", max_tokens=60, idempotency_key="k")
    async with asking(one.door, request, tokens=2):
        await one.kill()

    async def broken(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(two.door._decisions, "accept", broken)
    for _ in range(2):
        with pytest.raises(Internal):
            await ask(two.door, resumed(request, 1))
    assert two.door._admission._gate._inside == 0


async def test_a_client_that_leaves_during_a_take_over_does_not_keep_another_from_it(
    pair: tuple[Service, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    request = request_of("two come", max_tokens=60, idempotency_key="k")
    async with asking(one.door, request, tokens=2):
        await one.kill()
        await until(lambda: all(copy.orphan for copy in two.door._copies.values()))
    accept, going_on, asked = two.door._decisions.accept, asyncio.Event(), asyncio.Event()

    async def slow(*args: Any) -> Accepted:
        asked.set()
        await going_on.wait()
        return await accept(*args)

    monkeypatch.setattr(two.door._decisions, "accept", slow)
    leaves, stays = (asyncio.create_task(ask(two.door, request)) for _ in range(2))
    await asked.wait()
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    going_on.set()
    async with asyncio.timeout(20):
        assert len((await stays).ids) == 60


async def test_what_was_read_from_a_copy_is_forgotten_by_the_clock(pair: tuple[Service, Service]) -> None:
    one, two = pair
    two.door._log.keep_s = 0.0
    await ask(one.door, request_of("forgotten", max_tokens=5, idempotency_key="k"))
    await until(lambda: not two.door._copies)
    await until(lambda: not two.door._log._by_id)


async def test_a_sibling_that_sends_nonsense_is_not_listened_to(
    pair: tuple[Service, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pair

    def broken(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(servicer_module.SiblingServicer, "_take", broken)
    await until(lambda: not one.siblings.up())


async def test_a_sibling_that_takes_too_little_is_tried_anew(
    pair: tuple[Service, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings_module, "_MOST_UNTOLD", 2)
    one, _ = pair
    link, lost = one.siblings._links["placement-2"], list[object]()
    for _ in range(4):
        link.tell(sibling_pb2.ShareRequest(), lambda: None, lost.append)
    assert lost
    await until(lambda: not link.up)
    await until(lambda: link.up)


class _Link:
    """A sibling that is there, or gone."""

    def __init__(self, *, there: bool) -> None:
        self.place = TWO
        self.there = there
        self.told: list[sibling_pb2.ShareRequest] = []

    def tell(self, message: sibling_pb2.ShareRequest, on_taken: object, on_lost: Callable[[object], None]) -> None:
        if self.there:
            self.told.append(message)
        else:
            on_lost(self)


async def test_one_that_is_gone_does_not_cost_the_others_a_word() -> None:
    gone, there = _Link(there=False), _Link(there=True)
    stream = RequestStream("placement-1:1", TENANT, b"", "k")
    stream.copies = copies = StreamCopies(stream, cast(Any, [gone, there]))
    for token_id in range(3):
        stream.append(TokenPiece(token_id, "a", "core-1"))
    assert len(there.told) == 3
    copies.ended(None)


@pytest.mark.parametrize(("details", "told"), [({"node": "core-1"}, True), ({"entry": "placement-1"}, False)])
async def test_only_an_entry_that_stops_leaves_its_requests_open(details: dict[str, str], told: bool) -> None:
    link = _Link(there=True)
    stream = RequestStream("placement-1:1", TENANT, b"", "k")
    stream.copies = StreamCopies(stream, cast(Any, [link]))
    stream.end(1.0, Draining("it drains", **details))
    assert bool(link.told) is told
