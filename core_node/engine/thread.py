"""The engine thread: commands in, events out, steps in between.

The event loop hands over closures through a deque under a condition; the thread runs all that are there before
each step, so a cancellation takes effect before another token is computed. What the thread has to say (results of
commands, events of runs) is collected in order and handed to the loop in one call per round.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import structlog

from core_node.engine.core import EngineCore
from mesh.errors import Cancelled, Internal

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")

Command = Callable[[EngineCore], None]


class EngineThread:
    """Methods are for the event loop that called `start`, except `tell`, which is for the thread itself."""

    def __init__(self, build: Callable[[], EngineCore]) -> None:
        self._build = build
        self._wake = threading.Condition()
        self._commands: deque[Command] = deque()
        self._stopping = False
        self._outbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Build the core on the thread (this may take seconds). Raises what `build` raised."""
        self._loop = asyncio.get_running_loop()
        built: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(built,), name="kvmesh-engine", daemon=True)
        self._thread.start()
        await built

    async def close(self) -> None:
        """Stop after the current step; open runs end with Cancelled. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def post(self, command: Command) -> None:
        """Run `command` on the thread before its next step; nothing comes back. Dropped if the thread has ended."""
        with self._wake:
            if not self._stopping:
                self._commands.append(command)
                self._wake.notify()

    async def call(self, function: Callable[[EngineCore], _T]) -> _T:
        """Run `function` on the thread before its next step; its result, or what it raised. Raises Cancelled if the
        engine is closed."""
        if self._thread is None:
            raise Cancelled("the engine was not started")
        future: asyncio.Future[_T] = self._loop.create_future()

        def command(core: EngineCore) -> None:
            try:
                result = function(core)
            except Exception as exc:
                self.tell(_settle, future, None, exc)
            else:
                self.tell(_settle, future, result, None)

        with self._wake:
            if self._stopping:
                raise Cancelled("the engine is closed")
            self._commands.append(command)
            self._wake.notify()
        return await future

    def tell(self, callback: Callable[..., None], *args: object) -> None:
        """Have the event loop call `callback(*args)` after everything told before. On the engine thread only."""
        self._outbox.append((callback, args))

    # --- on the thread ------------------------------------------------------------------------------------------

    def _main(self, built: asyncio.Future[None]) -> None:
        try:
            core = self._build()
        except BaseException as exc:
            with self._wake:
                self._stopping = True  # there will be nobody to run commands
            self.tell(_settle, built, None, exc)
            self._flush()
            return
        self.tell(_settle, built, None, None)
        busy = True
        while self._flush() and self._run_commands(core, busy):
            try:
                busy = core.step()
            except Exception as exc:
                # The books themselves are in doubt (a step's own failure is handled inside): start afresh.
                _log.exception("engine scheduling failed; all runs and holds are dropped")
                core.drop_all(Internal, f"the engine failed: {type(exc).__name__}")
        self._stop(core)

    def _run_commands(self, core: EngineCore, busy: bool) -> bool:
        """Wait for commands if there is nothing else to do; run them. False: stop."""
        with self._wake:
            while not busy and not self._commands and not self._stopping:
                self._wake.wait()
            if self._stopping:
                return False
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command(core)
        return True

    def _stop(self, core: EngineCore) -> None:
        with self._wake:
            self._stopping = True
            left = list(self._commands)
            self._commands.clear()
        for command in left:  # somebody waits for each of them
            command(core)
        core.drop_all(Cancelled, "the engine was closed")
        self._flush()

    def _flush(self) -> bool:
        """Hand over what was told. False if the event loop is gone, and nobody is left to serve."""
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            try:
                self._loop.call_soon_threadsafe(_deliver, outbox)
            except RuntimeError:  # the loop is closed
                return False
        return True


def _deliver(outbox: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    for callback, args in outbox:
        callback(*args)


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():  # its caller was cancelled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
