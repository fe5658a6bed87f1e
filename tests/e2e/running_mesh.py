"""A local mesh of real processes for end-to-end tests: clients of each entry, processes that are killed and started
again where they were, and streams whose offsets are checked as they come."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mesh.client import Completion, Decision, Finish, MeshClient, Migration, Tokens
from mesh.errors import MeshError
from mesh.local.commands import make_plan
from mesh.local.layout import TENANT, LocalPlan
from mesh.local.local_mesh import LocalMesh, MeshReady, ready_nodes
from mesh.local.process import NodeProcess
from mesh.model.catalogue import DEMO_MODEL

POLICY = """\
version: 1
rules:
  public: {tiers: [core]}
  internal:
    - {tiers: [core]}
    - {sites: [own]}
  confidential: {tiers: [core]}
  restricted: {sites: [own]}
# A site does what is short by itself, and has long prompts prefilled by the core.
price: {core_decode_per_s: 20.0, edge_prefill_per_s: 20.0}
"""
LONG_PROMPT = " ".join(f"Item {n} costs {n * 7 % 13} coins and weighs {n * 5 % 11} grams." for n in range(40))
KVMESH = (sys.executable, "-m", "mesh.cli.main")
WAIT_S = 60.0


@dataclass
class RunningMesh:
    """The mesh and its clients; `client(key, entry)` makes one for another key."""

    local: LocalMesh
    ready: MeshReady
    stack: AsyncExitStack
    clients: dict[str, MeshClient] = field(default_factory=dict)

    @property
    def plan(self) -> LocalPlan:
        return self.local.plan

    @property
    def core(self) -> MeshClient:
        return self.clients["core"]

    @property
    def paris(self) -> MeshClient:
        return self.clients["paris"]

    @property
    def osaka(self) -> MeshClient:
        return self.clients["osaka"]

    @property
    def admin(self) -> MeshClient:
        return self.clients["admin"]

    async def client(self, key: str, entry: str = "core") -> MeshClient:
        address = self.ready.core.grpc if entry == "core" else self.ready.edges[entry].grpc
        return await self.stack.enter_async_context(MeshClient(address, key))

    async def tenant(self, name: str, policy: str | None = None) -> str:
        """A new tenant's key, known at every entry."""
        await self.admin.create_tenant(name, sites=("*",))
        key = (await self.admin.issue_key(name)).api_key
        if policy is not None:
            await self.admin.put_policy(name, policy)
        for entry in ("core", *self.ready.edges):
            client = await self.client(key, entry)
            await eventually(lambda c=client: works(c.models()))  # type: ignore[misc]
        return key

    def process(self, node_id: str) -> NodeProcess:
        return self.local._processes[node_id]

    def folder(self, node_id: str) -> Path:
        return self.plan.folder_of(node_id)

    def log(self, node_id: str) -> str:
        return (self.folder(node_id) / "process.log").read_text()

    async def kill(self, node_id: str) -> None:
        await self.local.kill(node_id)

    async def terminate(self, node_id: str) -> int:
        """SIGTERM, and the exit code."""
        pid = self.process(node_id).pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        return await asyncio.wait_for(self.process(node_id).wait(), WAIT_S)

    async def start(self, node_id: str) -> None:
        """Start a process that ended, with its settings, at its addresses; returns when placement sees it."""
        old = self.process(node_id)
        facts: dict[str, Any] = json.loads((self.folder(node_id) / "state" / "ready.json").read_text())
        role = node_id.partition("-")[0]
        config = self.folder(node_id) / f"{role}.yaml"
        flags = {"public": facts.get("grpc"), "http": str(facts["http"]).removeprefix("http://")}
        if role == "placement":
            flags["node"] = facts["node"]
        command = [*KVMESH, role, "--config", str(config)]
        for name, address in flags.items():
            if address and not (role == "core" and name == "public"):
                command += [f"--listeners.{name}", str(address)]
        assert old.pid is None, "it still runs"
        process = NodeProcess(
            node_id=node_id,
            command=command,
            state_folder=self.folder(node_id) / "state",
            log_file=self.folder(node_id) / f"process-{len(list(self.folder(node_id).glob('process*.log')))}.log",
        )
        self.local._processes[node_id] = process
        await process.start()
        await self.until_ready()

    async def until_ready(self, *node_ids: str) -> None:
        """Until placement sees all nodes, or the given ones, as ready, and every edge sees the core."""
        wanted = set(node_ids) or {n for n in self.local._processes if n != "placement-1"}
        await eventually(lambda: self._sees(self.ready.core.grpc, wanted))
        if "core-1" in wanted:
            for entry in self.ready.edges.values():
                await eventually(lambda e=entry: self._sees(e.grpc, {"core-1"}))  # type: ignore[misc]

    async def until_gone(self, node_id: str) -> None:
        """Until placement and every other edge know that a node does not answer."""
        others = [e.grpc for site, e in self.ready.edges.items() if node_id != f"edge-{site}"]
        for address in (self.ready.core.grpc, *others):
            await eventually(lambda a=address: self._misses(a, node_id))  # type: ignore[misc]

    async def _sees(self, address: str, wanted: set[str]) -> bool:
        try:
            return wanted <= await ready_nodes(address, self.ready.admin_key)
        except MeshError:
            return False

    async def _misses(self, address: str, node_id: str) -> bool:
        return node_id not in await ready_nodes(address, self.ready.admin_key)


@asynccontextmanager
async def running_mesh(folder: Path, *, edge: str = "paris,osaka", consul: str = "") -> AsyncIterator[RunningMesh]:
    plan = make_plan(core=1, edge=edge, state=folder, model=DEMO_MODEL, device="cpu", consul=consul)
    # A lease and drains that suit a busy machine are the plan's own; threads so that three engines share two cores.
    plan = replace(plan, core_threads=1, edge_threads=1)
    async with AsyncExitStack() as stack:
        local, ready = await stack.enter_async_context(LocalMesh.running(plan, lambda line: None))
        made = RunningMesh(local, ready, stack)
        made.clients["admin"] = await made.client(ready.admin_key)
        made.clients["core"] = await made.client(ready.api_key)
        for site in ready.edges:
            made.clients[site] = await made.client(ready.api_key, site)
        version = await made.admin.put_policy(TENANT, POLICY)
        for name in ("core", *ready.edges):
            await eventually(lambda c=made.clients[name]: _has_policy(c, version))  # type: ignore[misc]
        yield made


async def _has_policy(client: MeshClient, version: int) -> bool:
    return (await client.explain("hello", label="internal")).decision.policy_version >= version


async def eventually(ask: Callable[[], Awaitable[bool]], timeout_s: float = WAIT_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not await ask():  # noqa: ASYNC110 - what other processes bring about
            await asyncio.sleep(0.1)


async def works(call: Awaitable[object]) -> bool:
    try:
        await call
    except MeshError:
        return False
    return True


@dataclass
class Stream:
    """Events of one generation; a gap, or a token twice, fails at once."""

    decision: Decision | None = None
    ids: list[int] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    migrations: list[Migration] = field(default_factory=list)
    finish: Finish | None = None
    error: MeshError | None = None

    def take(self, event: object) -> None:
        assert self.finish is None, "something came after the finish"
        match event:
            case Decision():
                assert self.decision is None, "two decisions"
                self.decision = event
            case Tokens():
                if event.ids:
                    assert event.offset_tokens == len(self.ids), "a gap, or a token twice"
                self.ids += event.ids
                self.nodes += [event.node_id] * len(event.ids)
            case Migration():
                assert event.offset_tokens == len(self.ids)
                self.migrations.append(event)
            case Finish():
                self.finish = event

    @property
    def request_id(self) -> str:
        assert self.decision is not None
        return self.decision.request_id

    @property
    def outcomes(self) -> int:
        return (self.finish is not None) + (self.error is not None)


async def follow(client: MeshClient, prompt: str, into: Stream | None = None, **options: Any) -> Stream:
    """A whole generation, greedy and without an end of its own unless told otherwise; errors are kept in it."""
    stream = into if into is not None else Stream()
    options = {"temperature": 0.0, "ignore_eos": True, **options}
    try:
        async with aclosing(client.generate(prompt, **options)) as events:
            async for event in events:
                stream.take(event)
    except MeshError as error:
        stream.error = error
    return stream


@asynccontextmanager
async def following(
    client: MeshClient, prompt: str, *, tokens: int, **options: Any
) -> AsyncIterator[tuple[Stream, asyncio.Task[Stream]]]:
    """A generation under way, after its decision and so many tokens."""
    stream = Stream()
    task = asyncio.create_task(follow(client, prompt, stream, **options))
    try:
        async with asyncio.timeout(WAIT_S):
            while not ((stream.decision is not None and len(stream.ids) >= tokens) or task.done()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert stream.decision is not None, stream.error
        yield stream, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def assert_complete(done: Completion | Stream, max_tokens: int) -> None:
    assert len(done.ids) == max_tokens
    if isinstance(done, Stream):
        assert done.error is None, done.error
        assert done.outcomes == 1


def children_of(pid: int) -> list[int]:
    """Process ids of the direct children."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found
