"""Moves running requests away from nodes that drain, are overloaded, or are behind a link that got worse.

A thin rim: looks at the mesh at a pace, asks placement.decide.relocate who should leave, and has the front door move
them, by the same filters as any other move. One that may not go anywhere else stays where it is.
"""

from __future__ import annotations

import asyncio
import math
import time

from mesh.errors import MeshError
from mesh.process import background_loop
from mesh.telemetry.log import get_logger
from placement.decide.relocate import DEFAULT_RELOCATION, Departure, Pressure, RelocateSettings, Resident, departures
from placement.entry.front_door import FrontDoor
from placement.entry.live_request import LiveRequest
from placement.entry.runner_types import MoveCause
from placement.entry.world import World

log = get_logger(__name__)
_CAUSES = {
    Pressure.DRAIN: MoveCause.DRAIN,
    Pressure.OVERLOAD: MoveCause.OVERLOAD,
    Pressure.LINK: MoveCause.LINK,
}


class Relocator:
    """Owned by the entry's process; `start` and `close` it."""

    def __init__(
        self,
        door: FrontDoor,
        world: World,
        *,
        period_s: float = 0.5,
        settings: RelocateSettings = DEFAULT_RELOCATION,
    ) -> None:
        self._door = door
        self._world = world
        self._period_s = period_s
        self._settings = settings
        self._residence: dict[str, tuple[str, float]] = {}  # request -> node, round trip when it came there
        self._tried_s: dict[str, float] = {}  # request -> when it was last to leave
        self._node_tried_s: dict[str, float] = {}
        self._moves: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = background_loop(self._look_forever, "relocator")

    async def close(self) -> None:
        tasks = [*self._moves, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def look(self) -> int:
        """Look once, and start the moves that are due; returns how many."""
        snapshot, now_s = self._world.snapshot(), time.monotonic()
        live = {request.stream.request_id: request for request in self._door.live()}
        for known in (self._residence, self._tried_s):
            for request_id in known.keys() - live.keys():
                del known[request_id]
        residents = [self._resident(request, now_s) for request in live.values() if not request.driver.moving]
        found = departures(
            snapshot,
            residents,
            node_tried_ago_s={node_id: now_s - at_s for node_id, at_s in self._node_tried_s.items()},
            settings=self._settings,
        )
        for departure in found:
            request = live[departure.request_id]
            self._tried_s[departure.request_id] = self._node_tried_s[request.driver.node_id] = now_s
            task = asyncio.create_task(self._move(request, departure), name=f"relocate:{departure.request_id}")
            self._moves.add(task)
            task.add_done_callback(self._moves.discard)
        return len(found)

    def _resident(self, request: LiveRequest, now_s: float) -> Resident:
        request_id, node_id = request.stream.request_id, request.driver.node_id
        if self._residence.get(request_id, ("", 0.0))[0] != node_id:
            snapshot = self._world.snapshot()
            row = snapshot.row_of(node_id)
            self._residence[request_id] = (node_id, float(snapshot.rtt_s[row]) if row >= 0 else math.nan)
        return Resident(
            request_id=request_id,
            node_id=node_id,
            progress=request.progress,
            rtt_s=self._residence[request_id][1],
            tried_ago_s=now_s - self._tried_s.get(request_id, -math.inf),
        )

    async def _look_forever(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(self._period_s)

    async def _move(self, request: LiveRequest, departure: Departure) -> None:
        cause = _CAUSES[departure.pressure]
        try:
            moved = await self._door.relocate(request, departure.pressure, cause)
        except MeshError as error:
            # It stays. The metric counts moves that began; that there is no other place is for the log.
            log.info("request_stays", request_id=departure.request_id, cause=cause.value, reason=error.reason)
        else:
            log.info("request_left", request_id=departure.request_id, cause=cause.value, target=moved.to_node_id)
