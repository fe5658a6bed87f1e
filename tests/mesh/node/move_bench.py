"""A bench for transfers that go wrong: two hosts linked in memory, and what must be true after a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mesh.errors import MeshError
from mesh.node.engine import RunId
from mesh.node.host import HostSettings, NodeHost
from mesh.node.host_frames import HostFrame
from mesh.node.port import KvDirection, KvSource
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_node import CORE, EDGE, FakeGuard, FakeSigner, MemoryNetwork, collect, kv_order, prompt, run_order

PUSH, PULL = KvDirection.PUSH, KvDirection.PULL
IDS = prompt(601)


class Bench:
    """A hold of 600 tokens at the source, a move of it, and what must be true after it failed."""

    def __init__(self, direction: KvDirection) -> None:
        self.direction = direction
        self.network = MemoryNetwork()
        self.engines: dict[str, FakeEngine] = {}
        self.guards: dict[str, FakeGuard] = {}
        self.edge, self.core = self.make(EDGE), self.make(CORE)
        self.source, self.target = (self.edge, self.core) if direction is PUSH else (self.core, self.edge)

    def make(self, place: Any, **engine: Any) -> NodeHost:
        node = place.node_id
        self.engines[node] = FakeEngine(**engine)
        self.guards[node] = FakeGuard()
        settings = HostSettings(idle_timeout_s=5.0, resume_timeout_s=0.0)
        host = NodeHost(self.engines[node], FakeSigner(place), self.guards[node], place, settings=settings)
        self.network.add(host)
        return host

    def remake_target(self, **engine: Any) -> None:
        place = self.target.place
        self.target = self.make(place, **engine)
        if place == EDGE:
            self.edge = self.target
        else:
            self.core = self.target

    @property
    def source_engine(self) -> FakeEngine:
        return self.engines[self.source.place.node_id]

    @property
    def target_engine(self) -> FakeEngine:
        return self.engines[self.target.place.node_id]

    def order(self, **changes: Any) -> Any:
        values: dict[str, Any] = {"token_ids": IDS[:-1], "source": KvSource(run_id=RunId("h"))}
        return kv_order(CORE, direction=self.direction, **{**values, **changes})

    async def move(self, **changes: Any) -> Any:
        return await self.edge.move_kv(self.order(**changes), self.network.dial_from(EDGE))

    async def fails(self, error: type[MeshError] | tuple[type[MeshError], ...], **changes: Any) -> MeshError:
        with pytest.raises(error) as caught:
            await self.move(**changes)
        await self.nothing_left()
        return caught.value

    def tamper_sender(self, tamper: Callable[[HostFrame], list[HostFrame]]) -> None:
        self.network.on_pair = lambda ours, theirs: setattr(
            ours if self.direction is PUSH else theirs, "tamper", tamper
        )

    def tamper_receiver(self, tamper: Callable[[HostFrame], list[HostFrame]]) -> None:
        self.network.on_pair = lambda ours, theirs: setattr(
            theirs if self.direction is PUSH else ours, "tamper", tamper
        )

    async def nothing_left(self) -> None:
        assert self.target_engine.hold_ids == []
        assert (await self.target_engine.load()).kv_used_tokens == 0
        for engine in self.engines.values():
            await engine.check_integrity()
        for host in (self.source, self.target):
            assert host.statistics().transfers == 0

    async def still_good(self) -> None:
        """The source's hold survived, and another try works."""
        assert self.source_engine.hold_ids == ["h"]
        self.network.on_pair = lambda ours, theirs: None
        await self.move()
        outcome = await collect(self.target, run_order("r", IDS, kv_from=RunId("target")))
        assert len(outcome.ids) == 8


def nth(kind: type, n: int, change: Callable[[Any], list[Any]]) -> Callable[[HostFrame], list[HostFrame]]:
    """Change the n-th frame of a kind."""
    seen = 0

    def tamper(frame: HostFrame) -> list[HostFrame]:
        nonlocal seen
        if isinstance(frame, kind):
            seen += 1
            if seen == n + 1:
                return change(frame)
        return [frame]

    return tamper
