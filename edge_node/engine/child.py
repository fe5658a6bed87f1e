"""The agent's side of one llama.cpp process: start it, talk to it, notice its end and say what it died of.

The process hangs on a socket pair: when the agent goes, however it goes, the socket ends and the process exits.
KV crosses in an anonymous memory file (arena.py), so nothing is left behind on either side. One event loop owns a
Child; it is used up when the process ends, and the engine makes another.
"""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from edge_node.engine.arena import SLOTS, Arena
from edge_node.engine.messages import (
    LENGTH,
    MAX_FRAME_BYTES,
    Call,
    Cancel,
    Event,
    Failure,
    GetLoad,
    Ready,
    Reply,
    Request,
    Start,
    Submit,
    ToChild,
    decode,
    encode,
)
from edge_node.engine.openmp import openmp_environment
from mesh.errors import Cancelled, Internal, MeshError, NodeUnreachable
from mesh.node.engine import Finished, Held, RunEvent, RunSpec
from mesh.telemetry.log import get_logger

_log = get_logger(__name__)
_LOOKS: Final = 5  # of the watchdog, within the time after which a process hangs
_PATIENCE_WITH_WORK: Final = 10
_TOLD_STDERR_BYTES: Final = 480  # what the log takes of a text
_ADVICE: Final = {
    signal.SIGILL: "this llama.cpp build does not suit this CPU; run `kvmesh doctor`",
    signal.SIGKILL: "killed from outside, or out of memory",
    signal.SIGBUS: "the model file may have been changed or truncated while it was mapped",
}


class Child:
    """One process. Make it with `spawn`; `ended` is set to the cause when it is gone."""

    def __init__(self, process: subprocess.Popen[bytes], arena: Arena, stderr: IO[bytes]) -> None:
        self.arena = arena
        self.free_slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(SLOTS):
            self.free_slots.put_nowait(slot)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.build = ""
        self._process = process
        self._stderr = stderr
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, asyncio.Queue[RunEvent | MeshError]] = {}
        self._last_key = 0
        self._closing = False
        self._writer: asyncio.StreamWriter | None = None
        self._pump: asyncio.Task[None] | None = None
        self._heard = False  # since the watchdog last looked
        self._hung = ""
        self._watchdog: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(cls, start: Start, timeout_s: float, hang_timeout_s: float = math.inf) -> Child:
        """Start a process and let it load the model. From then on one that owes an answer, says nothing and
        computes nothing for `hang_timeout_s` is ended. Raises InvalidRequest (llama.cpp refuses the file), Overloaded
        (no memory for the cache) or NodeUnreachable (it crashed, or was not ready within `timeout_s`)."""
        arena = Arena.create(start.slot_bytes)
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        ours, theirs = socket.socketpair()
        with theirs:
            process = _popen(theirs, arena, stderr, start.n_threads)
        child = cls(process, arena, stderr)
        child._pump = asyncio.create_task(child._serve(ours, start), name="llama.cpp reader")
        try:
            async with asyncio.timeout(timeout_s):
                child.build = await child._ready
        except TimeoutError:
            await child.close()
            raise NodeUnreachable(f"llama.cpp did not load the model within {timeout_s:g} s") from None
        except BaseException:
            await child.close()
            raise
        if hang_timeout_s < math.inf:
            child._watchdog = asyncio.create_task(child._watch(hang_timeout_s), name="llama.cpp watchdog")
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    async def close(self) -> None:
        """Kill the process and wait for its end; open runs and calls end with Cancelled. Idempotent."""
        self._closing = True
        self._process.kill()
        if self._pump is not None:
            await self._pump

    async def call(self, request: Request) -> Any:
        """Ask and wait for the answer. Raises what the process answers, or NodeUnreachable if it ends."""
        return await self.start_call(request)

    def start_call(self, request: Request) -> asyncio.Future[Any]:
        """Ask now; the future is answered even if nobody waits for it."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda f: f.cancelled() or f.exception())  # an error nobody waits for is no news
        self._last_key += 1
        self._send(Call(self._last_key, request))
        self._calls[self._last_key] = future
        return future

    async def run(self, spec: RunSpec) -> AsyncGenerator[RunEvent, None]:
        """Events of one run. Raises as Engine.generate; closing the iterator cancels."""
        self._last_key += 1
        key = self._last_key
        stream: asyncio.Queue[RunEvent | MeshError] = asyncio.Queue()
        self._streams[key] = stream
        over = False
        try:
            self._send(Submit(key, spec))
            while not over:
                event = await stream.get()
                over = isinstance(event, MeshError | Finished | Held)
                if isinstance(event, MeshError):
                    raise event
                yield event
        finally:
            del self._streams[key]
            if not over and not self.ended.done():
                self._send(Cancel(key))  # without waiting: whoever cancels may not wait either

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _watch(self, hang_timeout_s: float) -> None:
        """The loop that computes also answers, between steps: one that is stopped, or stuck in a step, does not. A long
        step on a slow or busy machine looks the same but for its CPU time, so a process that uses some is given ten
        times as long. Counts looks and not seconds, so that an agent that was itself suspended does not blame the
        process for it."""
        silent = idle = 0
        cpu_ticks = cpu_ticks_of(self.pid)
        while not self.ended.done():
            if self._streams and not self._calls:
                self.start_call(GetLoad())  # runs may be silent for good reasons: they wait for room
            owes, self._heard = bool(self._calls), False
            await asyncio.sleep(hang_timeout_s / _LOOKS)
            before, cpu_ticks = cpu_ticks, cpu_ticks_of(self.pid)
            silent = silent + 1 if owes and not self._heard else 0
            idle = idle + 1 if silent and before == cpu_ticks is not None else 0
            if idle >= _LOOKS or silent >= _LOOKS * _PATIENCE_WITH_WORK:
                self._hung = f"it did not answer for {silent * hang_timeout_s / _LOOKS:g} s"
                _log.error("llama_worker_hangs", cause=self._hung, used_cpu=not idle)
                self._process.kill()
                return

    def _send(self, message: ToChild) -> None:
        if self.ended.done() or self._writer is None:
            raise NodeUnreachable("the llama.cpp process has ended")
        self._writer.write(encode(message))

    async def _serve(self, sock: socket.socket, start: Start) -> None:
        """Talk to the process until it has ended; the one task that owns it."""
        trouble = ""
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=sock)
            self._send(start)
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if length > MAX_FRAME_BYTES:
                    raise Internal(f"the llama.cpp process sent a frame of {length} bytes")
                self._dispatch(decode(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it has ended; why is found below
        except MeshError as error:
            trouble = error.message
        finally:
            await asyncio.shield(self._bury(trouble))

    def _dispatch(self, message: Any) -> None:
        self._heard = True
        match message:
            case Event(key, event):
                self._tell_run(key, event)
            case Failure(of="run"):
                self._tell_run(message.id, message.error())
            case Reply(call_id, value):
                self._answer(call_id, value)
            case Failure(of="call"):
                self._answer(message.id, message.error())
            case Ready(build) if not self._ready.done():
                self._ready.set_result(build)
            case Failure(of="start") if not self._ready.done():
                self._ready.set_exception(message.error())
            case _:
                raise Internal(f"the llama.cpp process sent a {type(message).__name__} out of place")

    def _tell_run(self, key: int, event: RunEvent | MeshError) -> None:
        if (stream := self._streams.get(key)) is not None:  # None: it was cancelled meanwhile
            stream.put_nowait(event)

    def _answer(self, call_id: int, value: Any) -> None:
        future = self._calls.pop(call_id, None)
        if future is None or future.done():
            return  # its caller was cancelled
        if isinstance(value, MeshError):
            future.set_exception(value)
        else:
            future.set_result(value)

    async def _bury(self, trouble: str) -> None:
        """The process has ended or must: reap it, say why to all who wait, free what it held."""
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        if self._watchdog is not None:
            self._watchdog.cancel()
        cause = trouble or self._hung or _cause(self._process.returncode)
        if not self._closing:
            # For the log alone: the cause reaches tenants, and these lines hold paths and whatever a library prints.
            _log.warning("llama_worker_ended", cause=cause, error=_last_words(self._stderr))
        self._stderr.close()
        self.arena.close()
        if self._writer is not None:
            self._writer.close()
            with suppress(ConnectionError):
                await self._writer.wait_closed()
        self.ended.set_result(cause)
        if not self._ready.done():
            self._ready.set_exception(self._error(cause))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._error(cause))
        self._calls.clear()
        for stream in self._streams.values():
            stream.put_nowait(self._error(cause))

    def _error(self, cause: str) -> MeshError:
        if self._closing:
            return Cancelled("the engine was closed")
        return NodeUnreachable(f"the llama.cpp process ended: {cause}", cause=cause)


def cpu_ticks_of(pid: int) -> int | None:
    """CPU time that a process and its threads have used; None where that cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return int(fields[11]) + int(fields[12])


def _popen(theirs: socket.socket, arena: Arena, stderr: IO[bytes], n_threads: int) -> subprocess.Popen[bytes]:
    fds = (theirs.fileno(), arena.fd)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "edge_node.engine.worker", *map(str, fds)],
        stdin=subprocess.DEVNULL,
        stdout=stderr,
        stderr=stderr,
        pass_fds=fds,
        env=openmp_environment(n_threads),
    )


def _cause(returncode: int) -> str:
    """How it ended, in words for a tenant."""
    if returncode < 0:
        number = signal.Signals(-returncode)
        return f"{number.name} ({_ADVICE.get(number, 'a crash')})"
    return f"exit code {returncode}"


def _last_words(stderr: IO[bytes]) -> str:
    """The end of what it wrote, in one line."""
    stderr.seek(0, 2)
    stderr.seek(max(0, stderr.tell() - _TOLD_STDERR_BYTES))
    lines = (line.strip() for line in stderr.read().decode(errors="replace").splitlines())
    return " | ".join(line for line in lines if line)
