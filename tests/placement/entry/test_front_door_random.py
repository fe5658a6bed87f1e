"""Many requests at once with moves, lost clients, refusals and aborts at random points: every stream is exactly what
it would have been alone, every request has one outcome, and nothing is left at any node."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import pytest

from mesh.errors import Cancelled, InvalidRequest, MeshError, NodeUnreachable, NotFound, Overloaded, StalePlan
from mesh.v1 import admin_pb2 as admin
from mesh.v1 import inference_pb2 as pb
from tests.fakes.mesh import Answer, MemoryMesh, ask, principal, request_of, sample_of, settle, until
from tests.placement.entry.conftest import MakeMesh

SHAPES = (
    pb.PLAN_SHAPE_UNSPECIFIED,
    pb.PLAN_SHAPE_LOCAL,
    pb.PLAN_SHAPE_CORE,
    pb.PLAN_SHAPE_SPLIT,
    pb.PLAN_SHAPE_OFFLOAD,
)
MAY_HAPPEN = (StalePlan, NotFound, NodeUnreachable, Overloaded, InvalidRequest, Cancelled)


class Client:
    """One request whose reader comes and goes until it has everything, or aborts."""

    def __init__(self, mesh: MemoryMesh, rng: random.Random, number: int) -> None:
        self.mesh, self.rng = mesh, rng
        self.aborts = rng.random() < 0.15
        self.request = request_of(
            f"request number {number} " * rng.randint(1, 8), shape=rng.choice(SHAPES), max_tokens=rng.randint(5, 90),
            idempotency_key=f"k{number}",
        )  # fmt: skip
        self.ids: list[int] = []
        self.request_id = ""
        self.error: MeshError | None = None

    async def run(self) -> None:
        try:
            while not await self._read(self.rng.choice((3, 20, 1000))):  # noqa: ASYNC110 - a client that comes back
                await asyncio.sleep(self.rng.choice((0.0, 0.005)))
        except MeshError as error:
            self.error = error

    async def _read(self, most: int) -> bool:
        """Read at most so many tokens; True at the end."""
        self.request.resume_offset_tokens = len(self.ids)
        answer, count = Answer(start=len(self.ids)), 0
        async with aclosing(self.mesh.door.generate(principal(), self.request)) as responses:
            async for response in responses:
                answer.take(response)
                self.request_id = answer.request_id
                self.ids += response.tokens.ids
                count += len(response.tokens.ids)
                if self.aborts and len(self.ids) >= 4:
                    self.mesh.door.abort(principal(), self.request_id)
                if count >= most:
                    return False
        return answer.finish is not None


async def disturb(mesh: MemoryMesh, rng: random.Random, clients: list[Client]) -> None:
    while True:
        await asyncio.sleep(rng.random() * 0.01)
        node = rng.choice(list(mesh.nodes.values()))
        action = rng.random()
        if action < 0.6:
            running = [c for c in clients if c.request_id]
            if running:
                where = {"node_id": node.place.node_id} if rng.random() < 0.5 else {"tier": node.place.tier.value}
                move = admin.MigrateRequest(request_id=rng.choice(running).request_id, **where)
                try:
                    async with asyncio.timeout(rng.choice((0.002, 10.0))):  # some do not wait for the answer
                        await mesh.door.migrate(None, move)
                except (*MAY_HAPPEN, TimeoutError):
                    pass
        elif action < 0.8:
            node.refuse_runs.append(rng.choice((NodeUnreachable("lost"), StalePlan("stale"), Overloaded("full"))))
        else:  # an engine drops a run in the middle
            runs = [s.run_id for s in node.engine._sequences.values() if s.running]
            if runs:
                await node.engine.release(rng.choice(runs))


@pytest.mark.parametrize("seed", range(6))
async def test_anything_at_any_time(make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr("placement.entry.driver._STALE_PAUSE_S", 0.001)
    monkeypatch.setattr("placement.entry.driver._STALE_PATIENCE_S", 0.02)
    rng = random.Random(seed)
    mesh = make_mesh("core-1", "core-2", "paris", entry="paris", step_delay_s=0.0005)
    calm = MemoryMesh("paris", entry="paris")
    clients = [Client(mesh, rng, number) for number in range(8)]
    disturbing = asyncio.create_task(disturb(mesh, rng, clients))
    async with asyncio.timeout(60):
        await asyncio.gather(*(client.run() for client in clients))
    disturbing.cancel()
    await asyncio.gather(disturbing, return_exceptions=True)
    await until(lambda: mesh.door.running == 0)

    for client in clients:
        alone = pb.GenerateRequest()
        alone.CopyFrom(client.request)
        alone.ClearField("placement")
        alone.ClearField("idempotency_key")
        alone.ClearField("resume_offset_tokens")
        want = (await ask(calm.door, alone)).ids
        if client.error is None:
            assert client.ids == want
        else:
            assert isinstance(client.error, MAY_HAPPEN), client.error
            assert client.ids == want[: len(client.ids)]
    for node in mesh.nodes.values():
        node.refuse_runs.clear()
        await settle(node)
    ended = sum(
        sample.value
        for metric in mesh.metrics.registry.collect()
        if metric.name == "kvmesh_requests"
        for sample in metric.samples
        if sample.name == "kvmesh_requests_total"
    )
    again = sum(1 for client in clients if client.error is not None)
    assert len(clients) <= ended <= len(clients) + 8 * again + 8  # one that failed before its first token is done again
    assert sample_of(mesh.metrics, "kvmesh_requests_total", outcome="INTERNAL", shape="local") == 0
    await calm.close()
