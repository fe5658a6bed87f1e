"""UplinkPort: an attached edge node behind the NodePort interface."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from mesh.errors import Internal, MeshError, StalePlan
from mesh.identity.place import Place
from mesh.node.engine import RunId
from mesh.node.port import KvOrder, KvReport, PortEvent, PortFinished, PortHeld, RunOrder
from mesh.rpc.uplink import wire
from mesh.rpc.uplink.session import Session


class UplinkPort:
    """A node by its id, over whatever session it has when it is called.

    A node that came back at another place than this port was made for is refused with StalePlan: the plan's
    policy check was for the old place."""

    can_dial = True

    def __init__(self, place: Place, session: Callable[[], Session]) -> None:
        self._place = place
        self._find_session = session

    @property
    def place(self) -> Place:
        """As its certificate said when the port was made."""
        return self._place

    @property
    def address(self) -> str:
        """Empty: an edge node only dials out."""
        return ""

    async def run(self, order: RunOrder) -> AsyncGenerator[PortEvent, None]:
        """See NodePort.run. Raises NodeUnreachable or LeaseLost when the session ends under it."""
        session = self._session()
        opened = await session.order(lambda work_id: wire.run_to_wire(work_id, order))
        try:
            while (message := await opened.next_event()) is not None:
                event = wire.event_from_wire(message)
                yield event
                if isinstance(event, PortFinished | PortHeld):
                    return
            raise opened.work.error or self._no_outcome("run")
        finally:
            session.close(opened)

    async def move_kv(self, order: KvOrder) -> KvReport:
        """See NodePort.move_kv; the edge node dials the peer. Cancelling this cancels the transfer."""
        session = self._session()
        opened = await session.order(lambda work_id: wire.move_to_wire(work_id, order))
        try:
            while await opened.next_event() is not None:
                pass  # a move has no events of its own; what a newer agent may tell is not needed
            if opened.work.error is not None:
                raise opened.work.error
            if opened.work.result is None:
                raise self._no_outcome("move")
            return opened.work.result
        finally:
            session.close(opened)

    async def release(self, run_id: RunId) -> None:
        """See NodePort.release. Nothing happens if the node is not attached: an agent that lost its session frees
        what ran over it by itself."""
        try:
            await self._session().release(run_id)
        except MeshError:
            return

    def _session(self) -> Session:
        session = self._find_session()
        if session.place != self._place:
            raise StalePlan(
                f"node {self._place.node_id} is at {session.place.site} now, not at {self._place.site}",
                node=self._place.node_id,
            )
        return session

    def _no_outcome(self, what: str) -> Internal:
        return Internal(f"node {self._place.node_id} ended a {what} without its outcome", node=self._place.node_id)
