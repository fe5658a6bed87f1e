"""Fetches from attached sites what they measured, also while they were cut off, and keeps it."""

from __future__ import annotations

import asyncio

from mesh.errors import MeshError
from mesh.process import background_loop
from mesh.rpc.uplink.hub import UplinkHub
from mesh.telemetry.history import TelemetryHistory
from mesh.telemetry.log import get_logger
from mesh.telemetry.spool import MAX_ANSWER_SAMPLES
from mesh.v1 import uplink_pb2

log = get_logger(__name__)
PERIOD_S = 10.0
_TIMEOUT_S = 10.0
_MOST_BATCHES = 20  # of one site in one round, so that one that was away for long does not hold up the others
_MOST_AT_ONCE = 16


class TelemetryCollector:
    """Owned by the placement service; `start` and `close` it."""

    def __init__(self, hub: UplinkHub, history: TelemetryHistory, *, period_s: float = PERIOD_S) -> None:
        self._hub = hub
        self._history = history
        self._period_s = period_s
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; returns at once."""
        self._loop = background_loop(self._run, "telemetry")

    async def close(self) -> None:
        """What was not fetched stays at the sites."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop])

    async def _run(self) -> None:
        while True:
            await self.round()
            await asyncio.sleep(self._period_s)

    async def round(self) -> None:
        """Ask every attached site once. One that fails, or is of an older version, is asked again next time."""
        few = asyncio.Semaphore(_MOST_AT_ONCE)

        async def one(node_id: str) -> None:
            async with few:
                try:
                    await self._fetch(node_id)
                except MeshError as error:
                    log.info("telemetry_not_fetched", node=node_id, reason=error.reason)
                except Exception:  # the others are not left half asked
                    log.exception("telemetry_failed", node=node_id)

        await asyncio.gather(*(one(edge.place.node_id) for edge in self._hub.attached()))

    async def _fetch(self, node_id: str) -> None:
        for _ in range(_MOST_BATCHES):
            spool, sequence = await asyncio.to_thread(self._history.newest, node_id)
            request = uplink_pb2.TelemetryRequest(
                kept_spool=spool, kept_sequence=sequence, most_samples=MAX_ANSWER_SAMPLES
            )
            command = uplink_pb2.Command(telemetry=request)
            answer = (await self._hub.command(node_id, command, timeout_s=_TIMEOUT_S)).telemetry
            taken = await asyncio.to_thread(self._history.take, node_id, answer)
            if taken < MAX_ANSWER_SAMPLES:
                return
