"""Brings the receipts of all sites together: asks each attached agent for the entries of its audit log that are not
here yet, and keeps them (mesh.audit.replica). What is asked for next tells the agent what it may let go.

A site that was cut off is caught up with when it is back: it is asked within seconds of attaching, and then every now
and then. A log that does not continue what is here (a box that was set back to an older state) is not mixed in: it is
told in the log and counted, and stays as it is on the box.
"""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

from mesh.audit.replica import Replica
from mesh.errors import MeshError, PayloadCorrupt
from mesh.identity.place import Place
from mesh.telemetry.log import get_logger
from mesh.v1 import uplink_pb2
from placement.service.witnesses import Hub

log = get_logger(__name__)
PERIOD_S = 20.0
_LOOK_S = 1.0  # for sites that have just attached
_AT_ONCE = 8  # sites: a silent one must not hold the others up
_TIMEOUT_S = 15.0
_ANSWER_BYTES = 512 * 1024
_MOST_ANSWERS = 64  # of one site in one round: others wait behind it


class SiteLogs:
    """One per placement service. `period_s`: how often an attached site is asked."""

    def __init__(self, folder: Path, hub: Hub, *, period_s: float = PERIOD_S) -> None:
        self._folder = folder
        self._hub = hub
        self._period_s = period_s
        self._replicas: dict[str, Replica] = {}  # node id -> the copy of the log that it has now
        self._asked_s: dict[str, float] = {}  # of those attached, monotonic time
        self._told: set[str] = set()  # nodes whose log was said not to fit
        self._loop: asyncio.Task[None] | None = None
        self.merged_total = 0

    def start(self) -> None:
        """Begin; owned until `close`."""
        self._loop = asyncio.create_task(self._run(), name="site-logs")

    async def close(self) -> None:
        """What is not here yet is asked for by the next life."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop])

    async def _run(self) -> None:
        while True:
            try:
                await self.round()
            except Exception:  # a loop of the service must not end for good of one error
                log.exception("site_log_round_failed")
            await asyncio.sleep(min(self._period_s, _LOOK_S))

    async def round(self) -> None:
        """Catch up with the attached sites whose time it is."""
        now_s = time.monotonic()
        places = {edge.place.node_id: edge.place for edge in self._hub.attached()}
        self._asked_s = {node_id: at_s for node_id, at_s in self._asked_s.items() if node_id in places}
        due = [p for node_id, p in places.items() if now_s - self._asked_s.get(node_id, -math.inf) >= self._period_s]
        gate = asyncio.Semaphore(_AT_ONCE)
        await asyncio.gather(*(self._one(place, gate) for place in due))

    async def _one(self, place: Place, gate: asyncio.Semaphore) -> None:
        async with gate:
            self._asked_s[place.node_id] = time.monotonic()
            try:
                merged = await self._catch_up(place)
            except (MeshError, TimeoutError) as error:
                self._failed(place, error)
                return
            except Exception:  # the others are not left half asked
                log.exception("site_log_failed", peer=place.node_id)
                return
        self._told.discard(place.node_id)
        if merged:
            self.merged_total += merged
            log.info("site_log_merged", peer=place.node_id, count=merged)

    def _failed(self, place: Place, error: MeshError | TimeoutError) -> None:
        if isinstance(error, PayloadCorrupt):
            self._replicas.pop(place.node_id, None)
            if place.node_id not in self._told:
                self._told.add(place.node_id)
                log.error("site_log_does_not_fit", peer=place.node_id, error=error.message)
            return
        reason = error.reason if isinstance(error, MeshError) else "TIMEOUT"
        log.warning("site_log_not_merged", peer=place.node_id, reason=reason)

    async def _catch_up(self, place: Place) -> int:
        """Entries that are new here."""
        merged = 0
        for _ in range(_MOST_ANSWERS):
            replica = self._replicas.get(place.node_id)
            asked = 0 if replica is None else replica.next_seq
            chain = "" if replica is None else replica.chain
            answer = await self._ask(place, chain, asked)
            if replica is None or answer.chain != chain:
                replica = await asyncio.to_thread(Replica, self._folder, place, answer.chain)
                self._replicas[place.node_id] = replica
                continue
            merged += await asyncio.to_thread(replica.append, asked, list(answer.lines))
            if replica.next_seq > answer.head_seq:
                break
        return merged

    async def _ask(self, place: Place, chain: str, from_seq: int) -> uplink_pb2.AuditEntries:
        fetch = uplink_pb2.AuditFetch(chain=chain, from_seq=from_seq, max_bytes=_ANSWER_BYTES)
        result = await self._hub.command(place.node_id, uplink_pb2.Command(audit=fetch), timeout_s=_TIMEOUT_S)
        return result.audit
