"""Change notification inside one event loop: watchers wait for the next change, or for a while."""

from __future__ import annotations

import asyncio


class Signal:
    """`event` is set at the next `fire()`. Take it before reading the state, then nothing is missed."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def fire(self) -> None:
        """Wake all who wait."""
        self.event.set()
        self.event = asyncio.Event()


async def wait_for_event(event: asyncio.Event, timeout_s: float | None) -> bool:
    """True if the event was set within the time."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
