"""`kvmesh bench transfer`: how much of a KV transfer's time does the prefill hide?

Two core engines with one thread each, joined over mutual TLS through a link of known rate and delay. Three things are
timed on fresh random prompts, in turn: the prefill alone, the transfer of KV that is there, and a transfer that ships
chunks while the prefill makes them. If the overlap is right, the last takes as long as the longer of the other two
and one chunk more; without any it would take their sum.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from core_node.engine.engine import CoreEngine
from core_node.engine.settings import CoreEngineSettings
from mesh.bench.link import Direction, LinkProxy, LinkShape
from mesh.bench.types import BenchContext, BenchResult, Cell, Goal
from mesh.errors import InvalidRequest
from mesh.identity.ca import CertificateAuthority
from mesh.identity.place import Place, Role, Tier
from mesh.identity.signing import NodeIdentity
from mesh.kv.chunks import CHUNK_TOKENS
from mesh.model.catalogue import DEMO_MODEL, find_model
from mesh.node.engine import RunId
from mesh.node.grpc_port_transfer import GrpcTransport
from mesh.node.host import NodeHost
from mesh.node.port import KvDirection, KvOrder, KvReport, KvSource, Peer, RunOrder, WorkContext
from mesh.node.sampling import SamplingParams
from mesh.node.servicer import NodeServicer
from mesh.rpc.channel import node_channel
from mesh.rpc.peer import peer_place
from mesh.rpc.server import node_server
from mesh.v1 import node_pb2_grpc

_MESH = "bench"
_VOCAB_RANGE = (1000, 40_000)  # ordinary tokens of the demo model
_TARGET = RunId("target")


class TransferBench:
    """See the module's docstring."""

    name = "transfer"
    question = (
        "Prefill and KV transfer at once: exposed time against max(prefill, transfer) + last chunk, and their sum?"
    )
    defaults: Mapping[str, Cell] = {
        "prompt_tokens": 1024,
        "link_mbit_per_s": "20,100,1000",
        "round_trip_ms": "2,40,150",
        "codec": "f16",
        "rounds": 3,
        "goal_ratio": 1.1,
        "seed": 1,
    }

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; about five minutes with the defaults on two cores."""
        links = [
            (mbit, rtt) for mbit in _numbers(context, "link_mbit_per_s") for rtt in _numbers(context, "round_trip_ms")
        ]
        rng = random.Random(context.count("seed"))
        rows: list[Mapping[str, Cell]] = []
        async with _two_nodes() as nodes:
            await nodes.measure(_prompt(CHUNK_TOKENS, rng), context.text("codec"))  # the first run is slower
            for number, (mbit, rtt_ms) in enumerate(links):
                context.progress(number, len(links), f"{mbit:g} Mbit/s, {rtt_ms:g} ms")
                shape = LinkShape(rate_bit_per_s=mbit * 1e6, delay_s=rtt_ms / 2000)
                for direction in Direction:
                    nodes.link.reshape(direction, shape)
                times = [
                    await nodes.measure(_prompt(context.count("prompt_tokens"), rng), context.text("codec"))
                    for _ in range(context.count("rounds"))
                ]
                rows.append(_row(mbit, rtt_ms, context.count("prompt_tokens"), times))
        goals = tuple(
            Goal(
                name=f"both / (max + last chunk), {row['link_mbit_per_s']} Mbit/s, {row['round_trip_ms']} ms",
                value=float(str(row["ratio"])),
                goal=context.number("goal_ratio"),
            )
            for row in rows
        )
        return BenchResult(rows=tuple(rows), goals=goals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """One round, seconds and bytes."""

    prefill_s: float
    transfer_s: float
    both_s: float
    wire_bytes: int


@dataclass(slots=True)
class _Nodes:
    """The source, the receiver that pulls from it, and the link between them."""

    source: NodeHost
    receiver: NodeHost
    transport: GrpcTransport
    link: LinkProxy
    model: str
    count: int = 0

    async def measure(self, token_ids: tuple[int, ...], codec: str) -> Times:
        """One of each, on prompts that nobody has seen."""
        other = tuple(reversed(token_ids))
        prefill = self._prefill(token_ids)
        started_s = time.perf_counter()
        async for _ in self.source.run(prefill):
            pass
        prefill_s = time.perf_counter() - started_s
        moved = await self._pull(KvSource(run_id=prefill.run_id), token_ids, codec)
        await self.source.release(prefill.run_id)
        order = self._prefill(other)
        both = await self._pull(KvSource(run_id=order.run_id, prefill=order), other, codec)
        return Times(
            prefill_s=prefill_s, transfer_s=moved.duration_s, both_s=both.duration_s, wire_bytes=both.wire_bytes
        )

    async def _pull(self, source: KvSource, token_ids: tuple[int, ...], codec: str) -> KvReport:
        order = KvOrder(
            context=self._context(),
            transfer_id=f"transfer-{self.count}",
            direction=KvDirection.PULL,
            peer=Peer(address=self.link.address, place=self.source.place),
            source=source,
            target=_TARGET,
            token_ids=token_ids,
            max_tokens=len(token_ids),
            codec=codec,
        )
        self.count += 1
        report = await self.receiver.move_kv(order, self.transport.dial)
        await self.receiver.release(_TARGET)
        return report

    def _prefill(self, token_ids: tuple[int, ...]) -> RunOrder:
        self.count += 1
        return RunOrder(
            context=self._context(),
            run_id=RunId(f"prefill-{self.count}"),
            token_ids=token_ids,
            prompt_tokens=len(token_ids),
            sampling=SamplingParams(max_tokens=1, seed=0, temperature=0.0),
            prefill_only=True,
        )

    def _context(self) -> WorkContext:
        return WorkContext(
            request_id="bench", tenant="bench", label="public", model=self.model, salt=bytes(32), policy_version=0
        )


class _AllowAll:
    """The border guard of two nodes that hold nothing but random tokens."""

    def check_prompt(self, context: WorkContext, place: Place) -> None:
        return

    def check_relay(self, context: WorkContext) -> None:
        return

    def check_kv(self, context: WorkContext, place: Place) -> None:
        return


@asynccontextmanager
async def _two_nodes() -> AsyncIterator[_Nodes]:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-bench-"))
        authority = await asyncio.to_thread(CertificateAuthority.create_or_load, Path(folder), _MESH)
        places = [_place(node_id) for node_id in ("core-1", "core-2")]
        credentials = [await asyncio.to_thread(authority.issue, place) for place in places]
        hosts = []
        for place, credential in zip(places, credentials, strict=True):
            engine = CoreEngine(CoreEngineSettings(model_path=find_model(DEMO_MODEL), model_id=DEMO_MODEL, n_threads=1))
            stack.push_async_callback(engine.close)
            await engine.start()
            host = NodeHost(engine, NodeIdentity(place, credential), _AllowAll(), place)
            stack.push_async_callback(host.close)
            hosts.append(host)
        listener = node_server("127.0.0.1:0", credentials[0])
        servicer = NodeServicer(hosts[0], lambda context: peer_place(context, mesh=_MESH))
        node_pb2_grpc.add_NodeServicer_to_server(servicer, listener.server)
        await listener.server.start()
        stack.push_async_callback(listener.server.stop, None)
        address, _, port = listener.address.rpartition(":")
        link = await stack.enter_async_context(LinkProxy(address, int(port)))
        transport = GrpcTransport(lambda peer: node_channel(peer.address, credentials[1], peer.place))
        yield _Nodes(hosts[0], hosts[1], transport, link, DEMO_MODEL)


def _place(node_id: str) -> Place:
    return Place(
        mesh=_MESH, role=Role.CORE, tier=Tier.CORE, site="dc1", region="local", jurisdiction="XX", node_id=node_id
    )


def _row(mbit: float, rtt_ms: float, tokens: int, times: list[Times]) -> Mapping[str, Cell]:
    prefill_s, transfer_s, both_s = (
        statistics.median(values)
        for values in zip(*((t.prefill_s, t.transfer_s, t.both_s) for t in times), strict=True)
    )
    last_chunk_s = transfer_s * min(CHUNK_TOKENS, tokens) / tokens
    ideal_s = max(prefill_s, transfer_s) + last_chunk_s
    return {
        "link_mbit_per_s": mbit,
        "round_trip_ms": rtt_ms,
        "wire_bytes": times[0].wire_bytes,
        "prefill_s": round(prefill_s, 3),
        "transfer_s": round(transfer_s, 3),
        "both_s": round(both_s, 3),
        "max_and_last_chunk_s": round(ideal_s, 3),
        "sum_s": round(prefill_s + transfer_s, 3),
        "ratio": round(both_s / ideal_s, 3),
        "of_sum_ratio": round(both_s / (prefill_s + transfer_s), 3),
    }


def _numbers(context: BenchContext, key: str) -> list[float]:
    text = context.text(key)
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(f"{key} is a list of numbers like 20,100; got {text!r}", field="set") from None
    if any(not 0 <= value < 1e6 for value in values) or (key == "link_mbit_per_s" and not all(values)):
        raise InvalidRequest(f"{key} is out of range: {text!r}", field="set")
    return values


def _prompt(tokens: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(*_VOCAB_RANGE) for _ in range(tokens))


BENCH = TransferBench()
"""Entry point of `kvmesh.benches`."""
