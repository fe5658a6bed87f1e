"""Placement's audit log and those of attached sites and dialled nodes vouch for one another: heads are exchanged."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from mesh.audit.chain import EntryKind, Head
from mesh.audit.log import AuditLog
from mesh.audit.witness import WitnessDesk
from mesh.errors import MeshError
from mesh.identity.place import Place
from mesh.rpc.auth import current_principal
from mesh.rpc.errors import translate_rpc_errors
from mesh.telemetry.log import get_logger
from mesh.v1 import audit_pb2_grpc, uplink_pb2

log = get_logger(__name__)
PERIOD_S = 30.0
_TIMEOUT_S = 10.0
_KEEPERS = 3
"""Sites that get our head in one round, drawn anew: one honest one that answers is enough."""


class Attached(Protocol):
    @property
    def place(self) -> Place: ...


class Hub(Protocol):
    """What is used of mesh.rpc.uplink.hub."""

    def attached(self) -> tuple[Attached, ...]: ...

    async def command(
        self, node_id: str, command: uplink_pb2.Command, *, timeout_s: float
    ) -> uplink_pb2.CommandResult: ...


@dataclass(frozen=True, slots=True)
class Dialled:
    """A node that can be dialled, and the channel to it."""

    place: Place
    channel: grpc.aio.Channel


class Circle:
    """Attached sites, asked over their uplink, and nodes that are dialled: one Hub."""

    def __init__(self, hub: Hub, dialled: Callable[[], Sequence[Dialled]]) -> None:
        self._hub = hub
        self._dialled = dialled

    def attached(self) -> tuple[Attached, ...]:
        return (*self._hub.attached(), *self._dialled())

    async def command(self, node_id: str, command: uplink_pb2.Command, *, timeout_s: float) -> uplink_pb2.CommandResult:
        """See UplinkHub.command; of a dialled node `witness` only."""
        found = next((each for each in self._dialled() if each.place.node_id == node_id), None)
        if found is None:
            return await self._hub.command(node_id, command, timeout_s=timeout_s)
        with translate_rpc_errors(node_id):
            answer = await audit_pb2_grpc.AuditStub(found.channel).Witness(command.witness, timeout=timeout_s)
        return uplink_pb2.CommandResult(witness=answer)


class Witnesses:
    """Asks all attached sites for their heads, and gives ours to a few. A site that fails is asked again next time."""

    def __init__(
        self, audit: AuditLog, hub: Hub, ca_pem: bytes, *, period_s: float = PERIOD_S, rng: random.Random | None = None
    ) -> None:
        self._audit = audit
        self._hub = hub
        self._desk = WitnessDesk(audit, ca_pem)
        self._period_s = period_s
        self._rng = rng or random.Random()
        self._kept: dict[str, Head] = {}  # node id -> newest head that our log has of it
        self._given: Head | None = None  # newest of ours that a site keeps
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; owned until `close`."""
        self._loop = asyncio.create_task(self._run(), name="witnesses")

    async def close(self) -> None:
        """One last round is not attempted: sites ask for it when they are back."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            try:
                await self.round()
            except Exception:  # a loop of the service must not end for good of one error
                log.exception("witness_round_failed")

    async def round(self) -> None:
        """Ask every attached site once, one after the other: each answer is a synced write."""
        places = [edge.place for edge in self._hub.attached()]
        keepers = {place.node_id for place in self._rng.sample(places, min(_KEEPERS, len(places)))}
        for place in places:
            try:
                await self._exchange(place, give=place.node_id in keepers)
            except (MeshError, TimeoutError) as error:
                reason = error.reason if isinstance(error, MeshError) else "TIMEOUT"
                log.warning("witness_failed", peer=place.node_id, reason=reason)

    async def _exchange(self, place: Place, *, give: bool) -> None:
        ours = self._audit.head
        request = self._desk.ask(self._kept.get(place.node_id), self._given if give else ours)
        command = uplink_pb2.Command(witness=request)
        result = await self._hub.command(place.node_id, command, timeout_s=_TIMEOUT_S)
        if request.HasField("head"):
            self._given = ours
        if result.witness.HasField("head"):
            self._kept[place.node_id] = await self._desk.keep(result.witness.head, of=place.uri)


def admin_recorder(audit: AuditLog) -> Callable[[str, dict[str, str]], Awaitable[str]]:
    """Writes an admin's action, with who asked, before it is done; returns the id of the asker's key."""

    async def record(action: str, facts: dict[str, str]) -> str:
        who = current_principal()
        actor = {"tenant": who.tenant, "key_id": who.key_id, "role": who.role.name}
        await audit.append(EntryKind.ADMIN, {"actor": actor, "action": action, **facts})
        return who.key_id

    return record
