"""A thread for blocking calls whose end nobody has to wait for.

asyncio's own executor joins its threads when a program ends, so a blocking query of ten seconds would hold up every
shutdown by that long. These threads are daemons: after `close` one finishes the call it is in, drops the result and
ends; if the program ends first, so does it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


class CallThread:
    """Runs calls one after the other on one thread, in the order in which they were given."""

    def __init__(self, name: str, *, at_end: Callable[[], None] | None = None) -> None:
        """`at_end` runs on the thread when it ends, to close what the calls used."""
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._at_end = at_end
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def run(self, function: Callable[[], T]) -> T:
        """Await `function()`. A call that was cancelled before its turn does not run; one that runs is not stopped."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.put(_Call(function, loop, future))
        return await future

    def close(self) -> None:
        """Take no more calls. Does not wait."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if call.future.cancelled():
                continue
            try:
                result, error = call.function(), None
            except Exception as raised:
                result, error = None, raised
            try:
                call.loop.call_soon_threadsafe(_settle, call.future, result, error)
            except RuntimeError:
                break  # the loop is closed: nobody waits
        if self._at_end is not None:
            self._at_end()


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
