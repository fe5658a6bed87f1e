"""The engine's load, read at a pace, for whoever needs it without waiting: metrics, decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mesh.errors import MeshError
from mesh.node.engine import EngineLoad
from mesh.node.host import NodeHost
from mesh.process import background


class LoadWatch:
    """`latest` is at most one period old while the engine answers. `on_load` is called with each reading."""

    def __init__(
        self, host: NodeHost, period_s: float, on_load: Callable[[EngineLoad], None] = lambda load: None
    ) -> None:
        self._host = host
        self._period_s = period_s
        self._on_load = on_load
        self._task: asyncio.Task[None] | None = None
        self.latest: EngineLoad | None = None

    async def start(self) -> None:
        """Read once, then at the pace."""
        self._take(await self._host.load())
        self._task = background(self._read_forever(), "load-watch")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _take(self, load: EngineLoad) -> None:
        self.latest = load
        self._on_load(load)

    async def _read_forever(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            try:
                self._take(await self._host.load())
            except MeshError:
                # The engine restarts; the last reading stays and ages with the next heartbeat that fails.
                continue
