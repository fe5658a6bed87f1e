"""A mesh in memory: NodeHosts over FakeEngines, a World over them, a FrontDoor with a toy model.

Nodes are named by their ids: those that start with "core" are core nodes at site dc1, all others edges at a site of
their own name. Runs and KV transfers go through real NodeHosts, border guards and the real decision core; only
engines, tokenizer and wires are fakes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from mesh.errors import MeshError, NodeUnreachable
from mesh.identity.place import Place, Role, Tier
from mesh.identity.principal import AccessRole, Principal
from mesh.model.description import ModelDescription
from mesh.model.tokenizer import Tokenizer
from mesh.node.engine import EngineLoad, RunId
from mesh.node.host import HostSettings, NodeHost
from mesh.node.port import KvOrder, KvReport, NodePort, PortEvent, RunOrder
from mesh.telemetry.metrics import Metrics
from mesh.v1 import common_pb2 as common
from mesh.v1 import inference_pb2 as pb
from placement.decide.types import Snapshot
from placement.entry.decisions import FrontDoorDeps
from placement.entry.front_door import FrontDoor
from placement.entry.intake import ServedModel
from placement.entry.mesh_view import ModelFacts, NodeFacts, NodeState, build_snapshot
from placement.entry.notes import Notes
from placement.entry.receipt import Signer
from placement.policy.book import BookGuard, PolicyBook
from tests.fakes.fake_engine import EOS, GEOMETRY, VOCAB, FakeEngine, FakeTextStream
from tests.fakes.fake_node import FakeSigner, MemoryNetwork

TENANT = "acme"
POLICY = """\
version: 1
rules:
  public: {tiers: [core]}
  internal: {anywhere: true}
  confidential: {tiers: [core]}
  restricted: {sites: [own]}
"""
SPEEDS = {"core": (20_000.0, 200.0), "edge": (500.0, 40.0)}  # prefill and decode, tokens/s


def place_of(node_id: str) -> Place:
    if node_id.startswith("placement"):
        return _place(Role.PLACEMENT, Tier.CORE, "dc1", node_id)
    if node_id.startswith("core"):
        return _place(Role.CORE, Tier.CORE, "dc1", node_id)
    return _place(Role.EDGE, Tier.EDGE, node_id, node_id)


def _place(role: Role, tier: Tier, site: str, node_id: str) -> Place:
    return Place(mesh="toy", role=role, tier=tier, site=site, region="eu", jurisdiction="FR", node_id=node_id)


class FakeTokenizer:
    """One token per character."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(c) % (VOCAB - 3) for c in text if c != "\0"]

    def stream(self) -> FakeTextStream:
        return FakeTextStream()

    def decode(self, ids: Iterable[int]) -> str:
        """The characters, for those below the vocabulary's size."""
        return "".join(chr(i - 3) for i in ids if i >= 3)

    def token_bytes(self, token_id: int) -> bytes:
        return FakeTextStream().push(token_id).encode()


def toy_model(*, context_tokens: int = 1024, model_id: str = "toy") -> ServedModel:
    description = ModelDescription(
        model_id=model_id, path=Path("/toy.gguf"), architecture="toy", n_layers=2, hidden_size=64, n_heads=2,
        n_kv_heads=2, head_dim=32, ffn_size=64, rope_base=1e4, rope_scaling="none", norm_eps=1e-5, vocab_size=VOCAB,
        context_tokens=context_tokens, eos_token_ids=frozenset({EOS}), bos_token_id=None, add_bos=False,
        tied_embeddings=True, weights_dtype="toy", weights_lineage="toy-1", chat_template=None, geometry=GEOMETRY,
    )  # fmt: skip
    return ServedModel(description=description, tokenizer=cast(Tokenizer, FakeTokenizer()), chat=None)


@dataclass(eq=False)
class MemoryNode:
    """A node and its port. `kill` breaks all streams and refuses new ones; `refuse_runs` is raised by each new run."""

    place: Place
    engine: FakeEngine
    host: NodeHost
    network: MemoryNetwork
    up: bool = True
    draining: bool = False
    waiting: int = 0  # that it tells of
    rtt_s: float | None = None  # if it is not the mesh's
    refuse_runs: list[MeshError] = field(default_factory=list)
    orders: list[RunOrder | KvOrder] = field(default_factory=list)
    released: list[RunId] = field(default_factory=list)

    can_dial = True

    @property
    def address(self) -> str:
        return f"memory:{self.place.node_id}" if self.place.tier is Tier.CORE else ""

    async def run(self, order: RunOrder) -> AsyncGenerator[PortEvent, None]:
        self.orders.append(order)
        self._check_up()
        if self.refuse_runs:
            raise self.refuse_runs.pop(0)
        try:
            async with aclosing(self.host.run(order)) as events:
                async for event in events:
                    self._check_up()
                    yield event
        except MeshError:
            self._check_up()
            raise

    async def move_kv(self, order: KvOrder) -> KvReport:
        self.orders.append(order)
        self._check_up()
        # A task of its own, as it is at a node that is another process: if the node ends, its caller does not.
        work = asyncio.create_task(self.host.move_kv(order, self.network.dial_from(self.place)))
        try:
            await asyncio.wait((work,))
        finally:
            work.cancel()
            await asyncio.wait((work,))
        self._check_up()
        return work.result()

    async def release(self, run_id: RunId) -> None:
        self._check_up()
        self.released.append(run_id)
        await self.host.release(run_id)

    def _check_up(self) -> None:
        if not self.up:
            raise NodeUnreachable(f"node {self.place.node_id} is gone", node=self.place.node_id)

    async def kill(self) -> None:
        """As a crash: nobody can reach it, its runs and holds are gone."""
        self.up = False
        self.network.hosts.pop(self.place.node_id, None)
        await self.host.close()
        await self.engine.close()

    async def assert_idle(self) -> None:
        """Nothing runs, nothing is held."""
        await self.engine.check_integrity()
        load = await self.engine.load()
        assert (load.running, load.waiting) == (0, 0), f"{self.place.node_id} still computes"
        assert self.engine.hold_ids == [], f"{self.place.node_id} still holds KV"


class MemoryReceipts:
    """Keeps them in a list; `error` is raised instead."""

    def __init__(self) -> None:
        self.kept: list[common.Receipt] = []
        self.error: MeshError | None = None

    async def append_receipt(self, receipt: common.Receipt) -> None:
        await self.check()
        self.kept.append(receipt)

    async def check(self) -> None:
        if self.error is not None:
            raise self.error


class MemoryMesh:
    """All nodes, and one entry. It is the entry's World."""

    def __init__(
        self,
        *nodes: str,
        entry: str,
        policy: str = POLICY,
        signer_of: Callable[[Place], Signer] = FakeSigner,
        step_delay_s: float = 0.0,
        rtt_s: float = 0.001,
        context_tokens: int = 1024,
        host_settings: HostSettings | None = None,
    ) -> None:
        self._host_settings = host_settings
        self.speeds: dict[str, tuple[float, float]] = {}  # of nodes that are not as fast as their tier
        self.book = PolicyBook.of([(TENANT, policy, 1)])
        self.node_book: PolicyBook | None = None  # what border guards know, if it is not the entry's
        self.network = MemoryNetwork()
        self.entry = place_of(entry)
        self.rtt_s = rtt_s
        self.goodput_bytes_per_s = 1e8
        self.notes = Notes()
        self.transfers: list[tuple[str, str, KvReport]] = []
        self.metrics = Metrics(node_id=entry, role=self.entry.role.value)
        self.nodes = {name: self._make(place_of(name), signer_of, step_delay_s) for name in nodes}
        self.receipts = MemoryReceipts()
        self.deps = FrontDoorDeps(
            signer=signer_of(self.entry),
            world=self,
            models={"toy": toy_model(context_tokens=context_tokens)},
            policies=lambda: self.book,
            salt=lambda tenant, label, model: f"{tenant}/{label}/{model}".encode().ljust(32, b".")[:32],
            metrics=self.metrics,
            receipts=self.receipts,
        )
        self.door = FrontDoor(self.deps)

    def _make(self, place: Place, signer_of: Callable[[Place], Signer], step_delay_s: float) -> MemoryNode:
        engine = FakeEngine(step_delay_s=step_delay_s, prefill_chunk_tokens=32)
        host = NodeHost(engine, signer_of(place), BookGuard(lambda: self.node_book or self.book), place,
                        settings=self._host_settings)  # fmt: skip
        self.network.add(host)
        return MemoryNode(place, engine, host, self.network)

    # The entry's World

    def snapshot(self) -> Snapshot:
        facts = [self._facts(node) for node in self.nodes.values()]
        return build_snapshot(facts, entry_node_id=self.entry.node_id, version=1)

    def _facts(self, node: MemoryNode) -> NodeFacts:
        prefill, decode = self.speeds.get(node.place.node_id, SPEEDS[node.place.tier.value])
        info = node.engine.info
        load = EngineLoad(
            running=0, waiting=node.waiting, waiting_prefill_tokens=0, kv_used_tokens=0, kv_capacity_tokens=4096,
            prefill_tokens_per_s=prefill, decode_tokens_per_s=decode,
        )  # fmt: skip
        return NodeFacts(
            place=node.place, address=node.address, state=NodeState.READY if node.up else NodeState.DISCONNECTED,
            models=(replace(ModelFacts.of(info, "0" * 64), kv_bytes_per_token=256),), load=load,
            draining=node.draining, reachable=node.up, rtt_s=self.rtt_s if node.rtt_s is None else node.rtt_s,
            goodput_bytes_per_s=self.goodput_bytes_per_s, role=node.host.role,
        )  # fmt: skip

    def snapshot_age_s(self) -> float:
        return 0.0

    def snapshot_with(self, node_id: str) -> Snapshot:
        return self.snapshot()

    relay_node_id = "placement-1"

    def port(self, node_id: str) -> NodePort:
        if node_id not in self.nodes:
            raise NodeUnreachable(f"node {node_id} is not known here", node=node_id)
        return self.nodes[node_id]

    def saw_transfer(self, source_node_id: str, target_node_id: str, report: KvReport) -> None:
        self.transfers.append((source_node_id, target_node_id, report))

    async def close(self) -> None:
        """Drain the door, then see that nothing is left anywhere."""
        await self.door.drain(0.0)
        for node in self.nodes.values():
            if node.up:
                await settle(node)
                await node.host.close()
                await node.assert_idle()


async def settle(node: MemoryNode) -> None:
    """Wait until a node has nothing to do (releases are sent without waiting)."""
    async with asyncio.timeout(10):
        while node.engine.hold_ids or (await node.engine.load()).running:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.001)


def principal(tenant: str = TENANT, role: AccessRole = AccessRole.TENANT) -> Principal:
    return Principal(tenant=tenant, role=role, key_id="k")


def request_of(prompt: str = "tell me", **fields: Any) -> pb.GenerateRequest:
    """A greedy request. Sampling fields by name, `shape`, `node_id`, `site` of the wish, all else of the request."""
    request = pb.GenerateRequest(text=prompt)
    request.sampling.max_tokens = 12
    request.sampling.temperature = 0.0
    request.sampling.ignore_eos = True
    for name, value in fields.items():
        if name in ("shape", "node_id", "site", "codec", "shipment"):
            setattr(request.placement, name, value)
        elif name in ("ttft_s", "tpot_s", "deadline_s"):
            setattr(request.latency, name, value)
        elif name == "stop":
            request.sampling.stop.extend(value)
        elif name in pb.GenerateRequest.DESCRIPTOR.fields_by_name:
            setattr(request, name, value)
        else:
            setattr(request.sampling, name, value)
    return request


@dataclass(slots=True)
class Answer:
    """What came out of one stream. Offsets are checked as they come."""

    start: int = 0
    decision: pb.Decision | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""
    by_node: list[str] = field(default_factory=list)  # node of each token
    migrations: list[pb.Migration] = field(default_factory=list)
    finish: pb.Finish | None = None

    def take(self, response: pb.GenerateResponse) -> None:
        assert self.finish is None, "something came after the finish"
        match response.WhichOneof("event"):
            case "decision":
                assert self.decision is None
                self.decision = response.decision
            case "tokens":
                assert self.decision is not None, "tokens before the decision"
                assert response.tokens.offset_tokens == self.start + len(self.ids), "a gap, or a token twice"
                self.ids.extend(response.tokens.ids)
                self.text += response.tokens.text
                self.by_node += [response.tokens.node_id] * len(response.tokens.ids)
            case "migration":
                # A resumed stream tells of all moves, those before its start too.
                assert max(response.migration.offset_tokens, self.start) == self.start + len(self.ids)
                self.migrations.append(response.migration)
            case "finish":
                self.finish = response.finish

    @property
    def request_id(self) -> str:
        assert self.decision is not None
        return self.decision.request_id


async def ask(
    door: FrontDoor, request: pb.GenerateRequest, who: Principal | None = None, into: Answer | None = None
) -> Answer:
    """The whole stream of one request; raises its error."""
    answer = into if into is not None else Answer()
    answer.start = request.resume_offset_tokens
    async with aclosing(door.generate(who or principal(), request)) as responses:
        async for response in responses:
            answer.take(response)
    assert answer.finish is not None
    return answer


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.001)


async def until_true(ask_again: Callable[[], Awaitable[bool]], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await ask_again():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def asking(
    door: FrontDoor, request: pb.GenerateRequest, who: Principal | None = None, *, tokens: int = 1
) -> AsyncGenerator[tuple[Answer, asyncio.Task[Answer]]]:
    """A request that runs, `tokens` of which have come; it is cancelled at the end if it still runs."""
    answer = Answer()
    task = asyncio.create_task(ask(door, request, who, answer))
    try:
        await until(lambda: len(answer.ids) >= tokens or task.done())
        yield answer, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def sample_of(metrics: Metrics, name: str, **labels: str) -> float:
    """The value of one series, 0 if there is none."""
    return metrics.registry.get_sample_value(name, labels) or 0.0


def names(nodes: Iterable[MemoryNode]) -> list[str]:
    return sorted(node.place.node_id for node in nodes)
