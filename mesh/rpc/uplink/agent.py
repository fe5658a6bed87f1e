"""The edge side of the uplink: dial, say hello, keep the lease, run orders, reconnect for as long as it lives.

First form of what happens when a session breaks: the orders that ran over it are cancelled at once, before the
agent dials again; their requests fail over from the entry that ordered them. Requests that entered at this site
do not run over the uplink and are not touched.

The agent never stops trying. A refusal (wrong role, other protocol) is kept in `state` and logged when it
changes; a later attempt may find it put right.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

import grpc.aio

from mesh.errors import Internal, MeshError, NodeUnreachable
from mesh.rpc.errors import translate_rpc_errors
from mesh.rpc.uplink import wire
from mesh.rpc.uplink.agent_session import AgentSession, OnConfig, OnSnapshot, being_cancelled
from mesh.rpc.uplink.backoff import FullJitter
from mesh.rpc.uplink.clock import Clock, SystemClock, time_limit
from mesh.rpc.uplink.orders import OnCommand
from mesh.rpc.uplink.types import AgentFacts, LinkState, UplinkHost, UplinkLimits
from mesh.telemetry.log import get_logger
from mesh.v1 import uplink_pb2_grpc

ATTACH_TIMEOUT_S = 10.0
"""From dialling to the lease."""

log = get_logger(__name__)


class UplinkAgent:
    """Keeps one uplink session. `dial` makes a new channel for each session (so that a renewed certificate is
    used); the agent closes it. `on_config` and `on_snapshot` get pushes one at a time in order, the latest only if
    they are slow; if one raises, the session ends with that error, for placement must not count on a site that
    could not take its policies. `on_command` answers a command or raises a MeshError. `on_refusal` hears why each
    session or attempt ended; it must be quick and not raise."""

    def __init__(
        self,
        *,
        dial: Callable[[], grpc.aio.Channel],
        host: UplinkHost,
        facts: AgentFacts,
        on_config: OnConfig,
        on_snapshot: OnSnapshot,
        on_command: OnCommand,
        on_refusal: Callable[[MeshError], None] = lambda error: None,
        clock: Clock | None = None,
        backoff: FullJitter | None = None,
        limits: UplinkLimits | None = None,
    ) -> None:
        self._dial = dial
        self._host = host
        self._facts = facts
        self._on_config, self._on_snapshot, self._on_command = on_config, on_snapshot, on_command
        self._on_refusal = on_refusal
        self._clock = clock or SystemClock()
        self._backoff = backoff or FullJitter(random.Random())
        self._limits = limits or UplinkLimits()
        self._connected = asyncio.Event()
        self._disconnected = asyncio.Event()
        self._disconnected.set()
        self._since_s = self._clock.monotonic()
        self._session: AgentSession | None = None
        self._last_error: MeshError | None = None
        self._stopping = asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self._logged_reason = ""

    @property
    def state(self) -> LinkState:
        """The link now."""
        session = self._session
        return LinkState(
            connected=session is not None,
            since_monotonic_s=self._since_s,
            session_id=session.session_id if session else "",
            heard_monotonic_s=session.heard_s if session else None,
            rtt_s=session.rtt_s if session else None,
            last_error=self._last_error,
        )

    def set_facts(self, facts: AgentFacts) -> None:
        """What it is has changed: the hub is told with the next heartbeat, or the next hello."""
        self._facts = facts
        if self._session is not None:
            self._session.tell_models(facts.models)

    async def wait_connected(self) -> None:
        """Until there is a session."""
        await self._connected.wait()

    async def wait_disconnected(self) -> None:
        """Until there is none."""
        await self._disconnected.wait()

    async def start(self) -> None:
        """Start connecting; returns at once. The agent owns the task until `stop`."""
        if self._main is None:
            self._main = asyncio.create_task(self._keep_connected(), name="uplink-agent")

    async def stop(self, timeout_s: float = 2.0) -> None:
        """Cancel open orders (the hub is told Draining), leave, close the channel; after `timeout_s` without more
        words. Idempotent."""
        self._stopping.set()
        main, self._main = self._main, None
        if main is None:
            return
        try:
            if self._session is None:
                main.cancel()
            await asyncio.wait([main], timeout=timeout_s)
        finally:
            main.cancel()
        await asyncio.wait([main])
        if not main.cancelled():
            main.result()

    async def _keep_connected(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._one_session()
            except MeshError as exc:
                error = exc
            except Exception:
                log.exception("uplink_failed_by_a_bug")
                error = Internal("an uplink session failed by a bug; the log has it")
            else:
                return  # it was asked to stop
            if self._stopping.is_set() or being_cancelled():
                return  # grpc can answer a cancellation with the end of the call; it must not be lost
            if self._logged_reason != error.reason:
                self._logged_reason = error.reason
                log.warning("uplink_down", reason=error.reason, error=error.message)
            self._last_error = error
            self._on_refusal(error)
            await self._clock.sleep(self._backoff.next_s())

    async def _one_session(self) -> None:
        channel = self._dial()
        call = uplink_pb2_grpc.UplinkStub(channel).Attach()
        try:
            session = await self._attach(call)
            attached_s = self._clock.monotonic()
            self._set_session(session)
            try:
                await session.run(self._stopping)
            finally:
                self._set_session(None)
                # A short session may be one of two that share a certificate and replace each other.
                if self._clock.monotonic() - attached_s >= session.lease_s:
                    self._backoff.reset()
        finally:
            call.cancel()
            await channel.close()

    async def _attach(self, call: grpc.aio.StreamStreamCall) -> AgentSession:
        sent_s = self._clock.monotonic()
        try:
            async with time_limit(self._clock, ATTACH_TIMEOUT_S):
                load = wire.load_to_wire(await self._host.load(), draining=self._host.draining)
                with translate_rpc_errors("placement"):
                    # A refusal may come before the hello is out; then the reader has it.
                    with contextlib.suppress(asyncio.InvalidStateError):
                        await call.write(wire.hello_to_wire(self._facts, load, self._clock.unix()))
                    first = await call.read()
        except TimeoutError:
            raise NodeUnreachable(f"no lease within {ATTACH_TIMEOUT_S:g} s of dialling") from None
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            raise NodeUnreachable("the placement service cancelled the session") from None
        if first is grpc.aio.EOF:
            raise NodeUnreachable("the placement service closed the session")
        return AgentSession(
            call,
            wire.lease_from_wire(first),
            host=self._host,
            on_config=self._on_config,
            on_snapshot=self._on_snapshot,
            on_command=self._on_command,
            clock=self._clock,
            limits=self._limits,
            attached_s=sent_s,
        )

    def _set_session(self, session: AgentSession | None) -> None:
        self._session = session
        self._since_s = self._clock.monotonic()
        if session is None:
            self._connected.clear()
            self._disconnected.set()
        else:
            self._disconnected.clear()
            self._connected.set()
            self._logged_reason = ""
            log.info("uplink_up", lease_s=session.lease_s)
