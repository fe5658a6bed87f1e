"""Faults at the steps of a live move: one move in a mesh in memory, one blow at one step, and what must hold after it.

Hosts, transfers, border guards, plan runner and front door are the real ones; engines and wires are fakes whose steps
can be watched. A `Saboteur` counts frames and engine calls of both ends, and strikes when the chosen step comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from typing import Any

from structlog.testing import capture_logs

from mesh.errors import MeshError, Overloaded
from mesh.kv.transfer_frames import Chunk, Commit, Done, Offer, Piece, Want
from mesh.node.engine import RunEvent, Tokens
from mesh.node.host import HostSettings
from mesh.node.host_frames import HostFrame, KvOpen
from mesh.v1 import admin_pb2 as admin
from placement.decide.moves import Tactic
from tests.fakes.fake_node import MemoryStream
from tests.fakes.mesh import MemoryMesh, MemoryNode, asking, request_of, settle, until

PATIENCE = HostSettings(idle_timeout_s=0.5, resume_timeout_s=0.1)
N_TOKENS = 150


class Step(Enum):
    """Steps of a move in the order in which they come. Frames are seen when they are sent; engine calls before they
    are made; `ran` and `spoke` are the target's run: ordered, and about to give its first token. A replay has but a
    `prefill` at the target before these."""

    OPEN = "open"
    OPEN_IMPORT = "open_import"
    WANT = "want"
    KV_TOKENS = "kv_tokens"
    OFFER = "offer"
    EXPORT = "export"
    CHUNK = "chunk"
    PIECE = "piece"
    WRITE = "write"
    PAUSE = "pause"
    LAST_CHUNK = "last_chunk"
    LAST_WRITE = "last_write"
    COMMIT = "commit"
    DONE = "done"
    PREFILL = "prefill"
    RAN = "ran"
    SPOKE = "spoke"


class Blow(Enum):
    """What happens. `cut`: the connections between the two break, and can be made anew; `part`: they cannot; `lose`: a
    frame does not arrive; `spoil`: it arrives changed; `refuse` and `bug`: the engine raises an error of ours, or one
    that is nobody's; `leave`: the client goes; `stop`: the entry stops."""

    KILL_SOURCE = "kill_source"
    KILL_TARGET = "kill_target"
    CUT = "cut"
    PART = "part"
    LOSE = "lose"
    SPOIL = "spoil"
    REFUSE = "refuse"
    BUG = "bug"
    LEAVE = "leave"
    STOP = "stop"


FRAMES: dict[type, Step] = {
    KvOpen: Step.OPEN, Want: Step.WANT, Offer: Step.OFFER, Chunk: Step.CHUNK, Piece: Step.PIECE, Commit: Step.COMMIT,
    Done: Step.DONE,
}  # fmt: skip
OF_FRAMES = {*FRAMES.values(), Step.LAST_CHUNK}
OF_ENGINES = set(Step) - OF_FRAMES
STEPS_OF = {
    Tactic.PRECOPY: tuple(step for step in Step if step is not Step.PREFILL),
    Tactic.STOP_AND_COPY: (Step.WANT, Step.PAUSE, Step.LAST_CHUNK, Step.LAST_WRITE, Step.COMMIT, Step.DONE, Step.RAN),
    Tactic.REPLAY: (Step.PREFILL, Step.RAN, Step.SPOKE),
}
PEERS = (("paris", "core-1"), ("core-1", "paris"), ("core-1", "core-2"))


@dataclass(frozen=True, slots=True)
class Case:
    """One fault. `source` and `target` are node ids."""

    source: str
    target: str
    step: Step
    blow: Blow
    tactic: Tactic = Tactic.PRECOPY

    def __str__(self) -> str:
        return f"{self.tactic.name.lower()}-{self.source}>{self.target}-{self.step.value}-{self.blow.value}"


def all_cases() -> list[Case]:
    """Each blow that can fall at each step, in each direction."""
    found = []
    for tactic, (source, target) in product(Tactic, PEERS):
        if tactic is Tactic.STOP_AND_COPY and source != "paris":
            continue  # its steps are those of pre-copy but for one
        for step in STEPS_OF[tactic]:
            for blow in Blow:
                if tactic is Tactic.REPLAY and blow in (Blow.CUT, Blow.PART):
                    continue  # no KV is shipped
                if blow in (Blow.LOSE, Blow.SPOIL) and step not in OF_FRAMES:
                    continue
                if blow in (Blow.REFUSE, Blow.BUG) and step not in OF_ENGINES:
                    continue
                if blow is Blow.SPOIL and step in (Step.OPEN, Step.WANT, Step.OFFER):
                    continue  # conformance and wire tests have those
                found.append(Case(source, target, step, blow, tactic))
    return found


class Saboteur:
    """Watches the move of `case` and strikes once."""

    def __init__(self, mesh: MemoryMesh, case: Case) -> None:
        self.mesh = mesh
        self.case = case
        self.armed = False
        self.struck = False
        self.paused = False
        self.leave: Callable[[], None] = lambda: None
        self.chores: list[asyncio.Task[Any]] = []
        mesh.network.on_pair = self._watch_streams
        self._watch_engine(mesh.nodes[case.source], is_source=True)
        self._watch_engine(mesh.nodes[case.target], is_source=False)

    # Seeing

    def _watch_streams(self, ours: MemoryStream, theirs: MemoryStream) -> None:
        for stream in (ours, theirs):
            stream.tamper = self._frame

    def _frame(self, frame: HostFrame) -> list[HostFrame]:
        step = FRAMES.get(type(frame))
        if step is Step.CHUNK and self.paused:
            step = Step.LAST_CHUNK
        if step is not self.case.step or not self._due():
            return [frame]
        match self.case.blow:
            case Blow.LOSE:
                return []
            case Blow.SPOIL:
                return [_spoilt(frame)]
        self._strike()
        return [frame]

    def _watch_engine(self, node: MemoryNode, *, is_source: bool) -> None:
        engine: Any = node.engine
        steps = {"kv_tokens": Step.KV_TOKENS, "export_kv": Step.EXPORT, "pause": Step.PAUSE}
        if not is_source:
            steps = {"open_import": Step.OPEN_IMPORT, "write_kv": Step.WRITE}
            engine.generate = self._watched_run(engine.generate)
        for name, step in steps.items():
            setattr(engine, name, self._watched(getattr(engine, name), step))

    def _watched(self, call: Callable[..., Any], step: Step) -> Callable[..., Any]:
        async def watched(*args: Any) -> Any:
            self._engine_step(Step.LAST_WRITE if step is Step.WRITE and self.paused else step)
            result = await call(*args)
            self.paused = self.paused or step is Step.PAUSE
            return result

        return watched

    def _watched_run(self, generate: Callable[..., AsyncIterator[RunEvent]]) -> Callable[..., AsyncIterator[RunEvent]]:
        async def watched(spec: Any) -> AsyncIterator[RunEvent]:
            self._engine_step(Step.PREFILL if spec.prefill_only else Step.RAN)
            events = generate(spec)
            try:
                async for event in events:
                    if isinstance(event, Tokens):
                        self._engine_step(Step.SPOKE)
                    yield event
            finally:
                await events.aclose()  # type: ignore[attr-defined]

        return watched

    def _engine_step(self, step: Step) -> None:
        if step is not self.case.step or not self._due():
            return
        match self.case.blow:
            case Blow.REFUSE:
                raise Overloaded("no room, says the test")
            case Blow.BUG:
                raise ZeroDivisionError("a bug, says the test")
        self._strike()

    def _due(self) -> bool:
        if not self.armed or self.struck:
            return False
        self.struck = True
        return True

    # Striking

    def _strike(self) -> None:
        source, target = self.mesh.nodes[self.case.source], self.mesh.nodes[self.case.target]
        match self.case.blow:
            case Blow.KILL_SOURCE:
                self._kill(source)
            case Blow.KILL_TARGET:
                self._kill(target)
            case Blow.CUT:
                self._cut()
            case Blow.PART:
                self.mesh.network.hosts.clear()
                self._cut()
            case Blow.LEAVE:
                self.leave()
            case Blow.STOP:
                self.chores.append(asyncio.create_task(self.mesh.door.drain(0.0)))

    def _kill(self, node: MemoryNode) -> None:
        """At once for all who look, as a crash is; tidying its memory up may take a little."""
        node.up = False
        self.mesh.network.hosts.pop(node.place.node_id, None)
        self._cut()
        self.chores.append(asyncio.create_task(node.kill()))

    def _cut(self) -> None:
        for ours, theirs in self.mesh.network.streams:
            if not (ours.closed or theirs.closed):
                ours.end()
                theirs.end()


def _spoilt(frame: HostFrame) -> HostFrame:
    match frame:
        case Piece():
            return replace(frame, data=bytes([frame.data[0] ^ 1]) + frame.data[1:])
        case Chunk():
            return replace(frame, prefix_hash=bytes(32))
        case Commit():
            return replace(frame, digest=bytes(32))
        case Done():
            return replace(frame, tokens=frame.tokens + 1)
    raise AssertionError(f"nothing to spoil in {type(frame).__name__}")


async def play(case: Case) -> Saboteur:
    """One request, one move, one blow; then everything that must hold is checked. Raises AssertionError."""
    with capture_logs():  # tracebacks of bugs that are meant
        return await _play(case)


async def _play(case: Case) -> Saboteur:
    mesh = MemoryMesh("core-1", "core-2", "paris", entry="placement-1", step_delay_s=0.001, host_settings=PATIENCE)
    prompt = "a prompt of some length that is moved " * 9  # more than one chunk of KV
    mesh.speeds[case.source] = (1e6, 1e5)  # it is placed there, and may fall back elsewhere
    request = request_of(prompt, max_tokens=N_TOKENS)
    want = await _undisturbed(mesh, request)
    saboteur = Saboteur(mesh, case)
    async with asking(mesh.door, request, tokens=4) as (answer, task):
        assert answer.by_node[0] == case.source
        saboteur.leave = task.cancel
        saboteur.armed = True
        move = admin.MigrateRequest(request_id=answer.request_id, node_id=case.target, tactic=case.tactic.value)
        with suppress(MeshError):
            await mesh.door.migrate(None, move)
        await until(task.done)
        error = None if task.cancelled() else task.exception()
    await asyncio.gather(*saboteur.chores)
    if case.blow is Blow.LEAVE:
        assert task.cancelled() or not saboteur.struck
    elif case.blow is Blow.STOP:
        assert isinstance(error, MeshError) or answer.ids == want
    else:
        assert error is None, f"the request failed: {error!r}"
        assert answer.ids == want, "other tokens than without a fault"
    assert answer.ids == want[: len(answer.ids)]
    await until(lambda: mesh.door.running == 0)
    await nothing_left(mesh)
    return saboteur


async def _undisturbed(mesh: MemoryMesh, request: Any) -> list[int]:
    async with asking(mesh.door, request) as (answer, task):
        await task
    return answer.ids


async def nothing_left(mesh: MemoryMesh) -> None:
    """Every node that lives holds nothing, and its books agree with its engine."""
    for node in mesh.nodes.values():
        if not node.up:
            continue
        await settle(node)
        await until(lambda node=node: node.host.statistics().transfers == 0)  # type: ignore[misc]
        assert len(node.host._desk.ledger) == 0, f"{node.place.node_id} keeps books of what is gone"
        await node.host.close()
        await node.assert_idle()
        assert (await node.engine.load()).kv_used_tokens == 0
    await mesh.door.drain(0.0)
