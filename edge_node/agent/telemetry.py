"""Takes a sample of this node every so often, into its spool: the mesh gets it when it next can."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from mesh.node.engine import EngineLoad
from mesh.process import background_loop
from mesh.rpc.uplink.wire import load_to_wire
from mesh.telemetry.metrics import RequestTotals
from mesh.telemetry.spool import TelemetrySpool
from mesh.v1 import uplink_pb2

PERIOD_S = 10.0


class TelemetrySampler:
    """Owned by the agent; `start` and `close` it."""

    def __init__(
        self,
        spool: TelemetrySpool,
        *,
        load: Callable[[], EngineLoad | None],
        totals: Callable[[], RequestTotals],
        connected: Callable[[], bool],
        period_s: float = PERIOD_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._spool = spool
        self._load = load
        self._totals = totals
        self._connected = connected
        self._period_s = period_s
        self._now = now
        self._loop: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()  # the spool has one user at a time

    def start(self) -> None:
        """Begin; returns at once."""
        self._loop = background_loop(self._run, "telemetry")

    async def close(self) -> None:
        """What was sampled stays on disk."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop])

    async def sample(self) -> None:
        """One, now."""
        load, totals = self._load(), self._totals()
        sample = uplink_pb2.TelemetrySample(
            unix_s=self._now(),
            connected=self._connected(),
            load=None if load is None else load_to_wire(load, draining=False),
            requests_ok_total=totals.ok,
            requests_failed_total=totals.failed,
            generated_tokens_total=totals.generated_tokens,
        )
        async with self._lock:
            await asyncio.to_thread(self._spool.append, sample)

    async def answer(self, request: uplink_pb2.TelemetryRequest) -> uplink_pb2.TelemetryResponse:
        """What placement does not have yet."""
        async with self._lock:
            return await asyncio.to_thread(self._spool.answer, request)

    async def _run(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(self._period_s)
