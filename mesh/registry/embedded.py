"""The embedded registry: needs no service, keeps its state in one file, lives in the placement service.

Registrations and values are written (temporary file, fsync, rename) before a call that changes them returns, and
before anybody sees the change; a failed write changes nothing. Heartbeats stay in memory. The file belongs to
one process at a time, by a lock.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from mesh.errors import InvalidRequest, PayloadCorrupt
from mesh.identity.files import make_private_folder, write_error, write_private
from mesh.registry.checks import check_key, check_prefix, check_registration, check_value
from mesh.registry.durable import DurableState, from_bytes, to_bytes
from mesh.registry.liveness import Liveness
from mesh.registry.signal import Signal, wait_for_event
from mesh.registry.types import NodesView, RegisteredNode, Registration, Value

REPEAT_S = 5.0
"""A watcher gets a view at least this often, changed or not, so that it can tell quiet from gone."""


class EmbeddedRegistry:
    """See mesh.registry.types.Registry. `path`: the state file; None keeps all in memory. `clock`: monotonic
    seconds; a test that turns it by hand calls `expire()` after."""

    def __init__(self, path: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._state = DurableState()
        self._liveness = Liveness()
        self._nodes: tuple[RegisteredNode, ...] = ()
        self._index = 0
        self._nodes_changed = Signal()
        self._values_changed = Signal()
        self._writing = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()
        self._expiry: asyncio.Task[None] | None = None
        self._lock_handle: int | None = None
        self._closed = False

    async def start(self) -> None:
        """Read the file, if there is one. Raises PayloadCorrupt if it is damaged (it is left as it is),
        InvalidRequest if another process has it open."""
        if self._path is not None:
            self._state = await asyncio.to_thread(self._open, self._path)
        self.expire()
        self._expiry = asyncio.create_task(self._expire_forever(), name="registry-expiry")

    async def close(self) -> None:
        """Finish writes under way and end all watches."""
        self._closed = True
        if self._expiry is not None:
            self._expiry.cancel()
            await asyncio.gather(self._expiry, return_exceptions=True)
        await asyncio.gather(*self._writes, return_exceptions=True)
        if self._lock_handle is not None:
            os.close(self._lock_handle)
            self._lock_handle = None
        self._nodes_changed.fire()
        self._values_changed.fire()

    async def register(self, registration: Registration) -> None:
        check_registration(registration)
        if self._state.registrations.get(registration.node_id) != registration:
            await self._change(lambda state: state.with_registration(registration))

    async def heartbeat(self, node_id: str, *, ready: bool) -> None:
        self._liveness.heartbeat(self._state.registrations, node_id, ready=ready, now_s=self._clock())
        self.expire()

    async def deregister(self, node_id: str) -> None:
        if node_id in self._state.registrations:
            await self._change(lambda state: state.without_node(node_id))
        self._liveness.forget(node_id)

    async def nodes(self) -> NodesView:
        self.expire()
        return self._view()

    async def watch(self) -> AsyncIterator[NodesView]:
        while not self._closed:
            changed = self._nodes_changed.event
            yield self._view()
            await wait_for_event(changed, REPEAT_S)

    async def get(self, key: str) -> Value | None:
        check_key(key)
        return self._state.values.get(key)

    async def put(self, key: str, value: bytes, *, expected_version: int | None = None) -> int:
        check_key(key)
        check_value(key, value)
        version = 0

        def change(state: DurableState) -> DurableState:
            nonlocal version
            new = state.with_value(key, value, expected_version)
            version = new.last_version
            return new

        await self._change(change)
        return version

    async def delete(self, key: str) -> None:
        check_key(key)
        if key in self._state.values:
            await self._change(lambda state: state.without_value(key))

    async def list_values(self, prefix: str) -> tuple[Value, ...]:
        check_prefix(prefix)
        return self._state.under(prefix)

    async def watch_values(self, prefix: str) -> AsyncIterator[tuple[Value, ...]]:
        check_prefix(prefix)
        last: tuple[Value, ...] | None = None
        while not self._closed:
            changed = self._values_changed.event
            values = self._state.under(prefix)
            if values != last:
                last = values
                yield values
            await wait_for_event(changed, None)

    def expire(self) -> None:
        """Take note of what the clock has changed, and tell the watchers if it did."""
        nodes = self._liveness.nodes(self._state.registrations, self._clock())
        if nodes != self._nodes:
            self._nodes = nodes
            self._index += 1
            self._nodes_changed.fire()

    def _view(self) -> NodesView:
        return NodesView(index=self._index, nodes=self._nodes, heard_monotonic_s=time.monotonic())

    async def _expire_forever(self) -> None:
        while True:
            changed = self._nodes_changed.event
            now_s = self._clock()
            expiry_s = self._liveness.next_expiry_s(self._state.registrations, now_s)
            # A heartbeat only moves an expiry later, so waking at the old time is early, never late.
            await wait_for_event(changed, None if expiry_s is None else max(expiry_s - now_s, 0.0))
            self.expire()

    async def _change(self, change: Callable[[DurableState], DurableState]) -> None:
        """Write a change, then take it into use. A caller that is cancelled meanwhile does not undo it."""
        task = asyncio.create_task(self._write(change), name="registry-write")
        self._writes.add(task)
        task.add_done_callback(self._written)
        await asyncio.shield(task)

    def _written(self, task: asyncio.Task[None]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()  # a cancelled caller does not fetch it

    async def _write(self, change: Callable[[DurableState], DurableState]) -> None:
        async with self._writing:
            old, new = self._state, change(self._state)
            if self._path is not None:
                await asyncio.to_thread(write_private, self._path, to_bytes(new))
            self._state = new
        self.expire()
        if new.values != old.values:
            self._values_changed.fire()

    def _open(self, path: Path) -> DurableState:
        make_private_folder(path.parent)
        lock_path = path.with_name(f"{path.name}.lock")
        try:
            handle = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise write_error(lock_path, error) from error
        try:
            _lock(handle, path)
            state = _read(path)
        except BaseException:
            os.close(handle)
            raise
        self._lock_handle = handle
        return state


def _lock(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InvalidRequest(f"{path} is in use by another process", field="path") from error


def _read(path: Path) -> DurableState:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return DurableState()
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror or error}", field="path") from error
    try:
        return from_bytes(raw)
    except PayloadCorrupt as error:
        raise PayloadCorrupt(
            f"the registry's file {path} is damaged: {error.message}; restore it from a backup, or move it away to "
            "start empty (policies, tenants and keys are then gone)",
            path=str(path),
        ) from error
