"""The six steps of `kvmesh demo`, each on the real mesh through the public client only.

A step returns facts and whether they are what they should be; it prints nothing and judges nothing by time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import TypeVar

from mesh.client import MeshClient
from mesh.errors import Code, MeshError, NodeUnreachable
from mesh.local.layout import TENANT
from mesh.local.local_mesh import MeshReady
from mesh.local.tour_facts import Facts, Step, Stream, Watch, facts_of
from mesh.v1 import admin_pb2

POLICY_FILE = "demo_policy.yaml"
CORE_NODE, PARIS, OSAKA = "core-1", "paris", "osaka"
TITLES = (
    "A core node, two sites and placement come up and register",
    "A public prompt from the core side is answered by the core",
    "A restricted prompt at paris is answered there and nowhere else",
    "A long internal prompt at osaka: the core prefills, its KV moves, osaka decodes",
    "A running generation moves from paris to the core in mid-stream",
    "The core is killed: paris still answers, and what needs the core is refused clearly",
)
LOG_DAYS = 52  # about 1,200 tokens of the demo model
ANSWER_TOKENS = 40
MOVED_TOKENS = 160
MOVE_AFTER_TOKENS = 24
WAIT_S = 60.0
_POLL_S = 0.2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """Connections to each entry, and the admin's to the core side."""

    admin: MeshClient
    core: MeshClient
    paris: MeshClient
    osaka: MeshClient

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, ready: MeshReady) -> AsyncIterator[Clients]:
        """Open inside the `async with`."""
        async with contextlib.AsyncExitStack() as stack:

            async def client(address: str, key: str) -> MeshClient:
                return await stack.enter_async_context(MeshClient(address, key))

            yield cls(
                admin=await client(ready.core.grpc, ready.admin_key),
                core=await client(ready.core.grpc, ready.api_key),
                paris=await client(ready.edges[PARIS].grpc, ready.api_key),
                osaka=await client(ready.edges[OSAKA].grpc, ready.api_key),
            )


async def step_1_the_mesh(clients: Clients) -> Step:
    """Every node is registered and ready, with the speeds that it measured; the policy is known everywhere."""
    expected = {CORE_NODE: "core", f"edge-{PARIS}": "edge", f"edge-{OSAKA}": "edge"}
    nodes = await _until(lambda: _ready_nodes(clients.admin, set(expected)))
    policy = (resources.files("mesh.local") / POLICY_FILE).read_text()
    version = await clients.admin.put_policy(TENANT, policy)
    for client in (clients.core, clients.paris, clients.osaka):
        await _until(partial(_knows_policy, client, version))
    rows: list[Facts] = [
        {
            "node_id": node.node_id,
            "tier": node.tier,
            "site": node.site,
            "region": node.region,
            "jurisdiction": node.jurisdiction,
            "weights": node.models[0].weights_dtype if node.models else "",
            "prefill_tokens_per_s": round(node.prefill_tokens_per_s, 1),
            "decode_tokens_per_s": round(node.decode_tokens_per_s, 1),
        }
        for node in nodes
    ]
    ok = {row["node_id"]: row["tier"] for row in rows} == expected and all(
        row["prefill_tokens_per_s"] > 0 and row["decode_tokens_per_s"] > 0 for row in rows
    )
    return Step(ok=ok, facts={"nodes": rows, "policy_version": version})


async def step_2_public(clients: Clients, ca_pem: bytes) -> Step:
    """A public prompt from the core side is answered by the core."""
    done = await clients.core.complete(
        _chat("Why is the sky blue? Answer in one sentence."), label="public", max_tokens=ANSWER_TOKENS, temperature=0.0
    )
    facts, receipt = facts_of(done, ca_pem)
    ok = done.decision.shape == "core" and set(receipt.body["saw_prompt"]) == {CORE_NODE}
    return Step(ok=ok and set(receipt.body["tokens_by_node"]) == {CORE_NODE}, facts=facts, text=done.text)


async def step_3_restricted(clients: Clients, ca_pem: bytes) -> Step:
    """A restricted prompt at paris is answered there and nowhere else; the receipt proves it."""
    prompt = _chat("Patient 4711 has a fever and a cough. What should the nurse ask next?")
    done = await clients.paris.complete(prompt, label="restricted", max_tokens=ANSWER_TOKENS, temperature=0.0)
    facts, receipt = facts_of(done, ca_pem)
    only = {f"edge-{PARIS}": PARIS}
    signers = {place.site for _, place in receipt.legs} | {receipt.entry.site}
    ok = receipt.body["saw_prompt"] == receipt.body["held_kv"] == only and signers == {PARIS}
    return Step(ok=ok, facts=facts, text=done.text)


async def step_4_split(clients: Clients, ca_pem: bytes) -> Step:
    """A long internal prompt at osaka: the core prefills, KV moves, osaka decodes. Then one like it all at osaka."""
    split = await clients.osaka.complete(
        _log_prompt("Osaka"), label="internal", max_tokens=ANSWER_TOKENS, temperature=0.0
    )
    # Another first line, so that no cache helps the comparison.
    local = await clients.osaka.complete(
        _log_prompt("Sakai"), label="internal", max_tokens=ANSWER_TOKENS, temperature=0.0, shape="local"
    )
    facts, receipt = facts_of(split, ca_pem)
    moves = [m for m in split.migrations if m.cause == "plan"]
    node = f"edge-{OSAKA}"
    ok = (
        split.decision.shape == "split"
        and len(moves) == 1
        and (moves[0].from_node_id, moves[0].to_node_id) == (CORE_NODE, node)
        and moves[0].kv_wire_bytes > 0
        and not moves[0].recomputed
        and set(receipt.body["tokens_by_node"]) == {node}
        and local.decision.shape == "local"
    )
    facts |= {
        "ttft_s": round(split.finish.ttft_s, 3),
        "local_ttft_s": round(local.finish.ttft_s, 3),
        "local_prompt_tokens": local.decision.prompt_tokens,
        "saved_s": round(local.finish.ttft_s - split.finish.ttft_s, 3),
    }
    return Step(ok=ok, facts=facts, text=split.text)


async def step_5_move(clients: Clients, ca_pem: bytes, watch: Watch) -> Step:
    """A generation at paris moves to the core while it runs; the stream has no gap and nothing twice."""
    events = clients.paris.generate(
        _chat("Tell a long story about a lighthouse keeper and a whale."),
        label="internal", shape="local", max_tokens=MOVED_TOKENS, temperature=0.0, ignore_eos=True,
    )  # fmt: skip
    stream = Stream(watch)
    async with contextlib.aclosing(events), asyncio.TaskGroup() as tasks:
        moving: asyncio.Task[admin_pb2.MigrateResponse] | None = None
        async for event in events:
            stream.take(event)
            if moving is None and len(stream.ids) >= MOVE_AFTER_TOKENS and stream.decision is not None:
                moving = tasks.create_task(clients.paris.migrate(stream.decision.request_id, tier="core"))
    done = stream.completion()
    facts, _ = facts_of(done, ca_pem)
    moves = [m for m in done.migrations if m.cause == "operator"]
    after = [node for node, offset in stream.sources if moves and offset >= moves[0].offset_tokens]
    ok = (
        len(moves) == 1
        and (moves[0].from_node_id, moves[0].to_node_id) == (f"edge-{PARIS}", CORE_NODE)
        and stream.lost_tokens == stream.repeated_tokens == 0
        and len(done.ids) == MOVED_TOKENS
        and bool(after)
        and set(after) == {CORE_NODE}
    )
    facts |= {"tokens_lost": stream.lost_tokens, "tokens_twice": stream.repeated_tokens}
    return Step(ok=ok, facts=facts, text=done.text)


async def step_6_core_gone(clients: Clients, ca_pem: bytes, kill: Callable[[str], Awaitable[None]]) -> Step:
    """The core is killed: paris still answers; what only the core may do is UNAVAILABLE, with rule and node."""
    await kill(CORE_NODE)
    await _until(lambda: _is_gone(clients.admin, CORE_NODE))
    await _until(lambda: _is_refused(clients.paris, CORE_NODE))  # the site hears of it a moment later
    done = await clients.paris.complete(
        _chat("What is two plus two?"), label="internal", max_tokens=ANSWER_TOKENS, temperature=0.0
    )
    facts, receipt = facts_of(done, ca_pem)
    refusal: MeshError | None = None
    try:
        await clients.core.complete(_chat("Why is the sky blue?"), label="public", max_tokens=4)
    except MeshError as exc:
        refusal = exc
    ok = (
        set(receipt.body["saw_prompt"]) == {f"edge-{PARIS}"}
        and refusal is not None
        and refusal.code is Code.UNAVAILABLE
        and refusal.details.get("rule", "") != ""
        and CORE_NODE in refusal.details.get("node", "")
    )
    if refusal is not None:
        facts["refusal"] = {
            "code": refusal.code.name, "reason": refusal.reason, "message": refusal.message, **refusal.details,
        }  # fmt: skip
    return Step(ok=ok, facts=facts, text=done.text)


async def _ready_nodes(admin: MeshClient, expected: set[str]) -> list[admin_pb2.NodeView]:
    """The expected nodes, if all of them are ready; else none."""
    nodes = {n.node_id: n for n in (await admin.snapshot()).nodes if n.state == "ready"}
    return [nodes[name] for name in sorted(expected)] if expected <= nodes.keys() else []


async def _knows_policy(client: MeshClient, version: int) -> bool:
    return (await client.explain(_chat("Hello"), label="internal")).decision.policy_version >= version


async def _is_gone(admin: MeshClient, node_id: str) -> bool:
    return all(n.node_id != node_id or n.state != "ready" for n in (await admin.snapshot()).nodes)


async def _is_refused(entry: MeshClient, node_id: str) -> bool:
    """Whether an entry would not use a node, whatever policy says of it."""
    verdicts = (await entry.explain(_chat("Hello"), label="internal")).nodes
    return all(verdict.refused for verdict in verdicts if verdict.node_id == node_id)


async def _until(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again until the answer is a true value. Raises NodeUnreachable after WAIT_S."""
    try:
        async with asyncio.timeout(WAIT_S):
            while True:
                if answer := await ask():
                    return answer
                await asyncio.sleep(_POLL_S)
    except TimeoutError as exc:
        raise NodeUnreachable(f"the mesh did not get there within {WAIT_S:.0f} s") from exc


def _chat(text: str) -> list[Mapping[str, str]]:
    return [{"role": "user", "content": text}]


def _log_prompt(harbour: str) -> list[Mapping[str, str]]:
    """A harbour's log to sum up: long, and a person can see what it is."""
    winds = ("north", "north-east", "east", "south", "south-west", "west", "north-west")
    ships = ("a grain ship", "two ferries", "a tanker", "three trawlers", "a pilot boat", "no ship")
    days = [
        f"Day {n}: wind {winds[n % 7]}, {3 + n * 5 % 9} knots, {ships[n * 3 % 6]} came in, {n * 7 % 13} left."
        for n in range(1, LOG_DAYS + 1)
    ]
    return _chat("\n".join([f"The log of {harbour} harbour:", *days, "Sum up this log in two sentences."]))
