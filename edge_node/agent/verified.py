"""How old the mesh's last word is: since when a site goes on alone under policies that nobody has confirmed.

While an uplink is up that is when its newest heartbeat was answered. The moment is kept on disk every now and then, so
that a restart does not make an old policy young. Wall time counts over a restart: a clock that was set back to before
the last word counts as no time passed since (there is no other witness on the box), one that was set forward as more.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from mesh.errors import MeshError
from mesh.identity.files import write_private
from mesh.process import background_loop
from mesh.rpc.uplink.types import LinkState
from mesh.telemetry.log import get_logger

log = get_logger(__name__)
VERIFIED_FILE = "verified.json"
_LOOK_S = 1.0
_KEEP_EVERY_S = 30.0


class LastWord:
    """One per agent."""

    def __init__(
        self,
        file: Path,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        """Reads the file. Blocking. Without one (or with a damaged one) no word was ever heard."""
        self._file = file
        self._links: Callable[[], Iterable[LinkState]] = tuple
        self._monotonic = monotonic
        self._unix = unix
        self._heard_s: float | None = None  # in monotonic time, which this life began with
        self._kept_s = -_KEEP_EVERY_S
        self._loop: asyncio.Task[None] | None = None
        try:
            heard_unix_s = float(json.loads(file.read_bytes())["unix_s"])
        except (OSError, ValueError, KeyError, TypeError):
            return
        self._heard_s = monotonic() - max(0.0, unix() - heard_unix_s)

    def start(self, links: Callable[[], Iterable[LinkState]]) -> None:
        """Begin to look at the states of the uplinks, any of which brings the mesh's word; owned until `close`."""
        self._links = links
        self._loop = background_loop(self._look_for_ever, "last-word")

    async def close(self) -> None:
        """Keep what is known."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop])
        self.look()
        await asyncio.to_thread(self._keep)

    @property
    def age_s(self) -> float:
        """Seconds since the mesh's last word; infinite if there never was one."""
        self.look()
        return float("inf") if self._heard_s is None else max(0.0, self._monotonic() - self._heard_s)

    def look(self) -> None:
        """Take the uplinks' states in."""
        for state in self._links():
            if state.connected and state.heard_monotonic_s is not None:
                self._heard_s = max(state.heard_monotonic_s, self._heard_s or state.heard_monotonic_s)

    async def _look_for_ever(self) -> None:
        while True:
            self.look()
            if self._heard_s is not None and self._heard_s - self._kept_s >= _KEEP_EVERY_S:
                await asyncio.to_thread(self._keep)
            await asyncio.sleep(_LOOK_S)

    def _keep(self) -> None:
        if self._heard_s is None or self._heard_s <= self._kept_s:
            return
        heard_unix_s = self._unix() - (self._monotonic() - self._heard_s)
        try:
            write_private(self._file, json.dumps({"unix_s": heard_unix_s}).encode())
        except MeshError as error:  # a full disk: an older moment stays there, which is the safe side
            log.warning("last_word_not_kept", reason=error.reason, error=error.message)
            return
        self._kept_s = self._heard_s
