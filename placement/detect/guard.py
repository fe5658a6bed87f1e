"""Runs detectors for an entry: off the event loop, with a time limit, failing closed.

A detector that raises or hangs says nothing about a text, and nothing is not "harmless": the outcome tells of the
failure and the caller raises the label. A thread cannot be stopped, so one that hangs keeps its slot until it ends;
while all slots are taken so, every text counts as failed at once. Threads are daemons: one that hangs does not keep the
process from ending, as one of an executor would.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from mesh.telemetry.log import get_logger
from placement.detect.scan import scan
from placement.detect.types import Detector, Finding

log = get_logger(__name__)
_INLINE_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class Detected:
    """What was found. `failure`: why the text could not be looked at as a whole; empty if it was."""

    findings: tuple[Finding, ...] = ()
    failure: str = ""


class Guard:
    """One per entry. `limit_s` is for one text, waiting included."""

    def __init__(self, *, limit_s: float = 2.0, n_threads: int = 2) -> None:
        self._limit_s = limit_s
        self._n_threads = n_threads
        self._slots = asyncio.Semaphore(n_threads)
        self._stuck = 0  # threads that were given up and still run

    async def detect(self, text: str, detectors: Sequence[Detector], *, trusted: bool) -> Detected:
        """Scan a text. `trusted`: all detectors are ours, so a short text is looked at in place."""
        if not detectors or not text:
            return Detected()
        try:
            if trusted and len(text) <= _INLINE_CHARS:
                return Detected(scan(text, detectors))
            return await self._in_thread(text, detectors)
        except Exception as exc:
            # Its message could quote the text, so the type is all that is told.
            log.error("detector_failed", error_type=type(exc).__name__)
            return Detected(failure=f"a detector failed ({type(exc).__name__})")

    async def _in_thread(self, text: str, detectors: Sequence[Detector]) -> Detected:
        if self._stuck >= self._n_threads:
            return Detected(failure="detectors hang: restart this entry")
        outcome: asyncio.Future[tuple[Finding, ...]] | None = None
        try:
            async with asyncio.timeout(self._limit_s):
                await self._slots.acquire()
                outcome = self._start(text, tuple(detectors))
                return Detected(await outcome)
        except TimeoutError:
            log.error("detector_timed_out", limit_s=self._limit_s)
            return Detected(failure=f"detectors took more than {self._limit_s:g} s")
        finally:
            if outcome is not None and outcome.cancelled():  # its thread runs, and nothing can stop it
                self._stuck += 1

    def _start(self, text: str, detectors: tuple[Detector, ...]) -> asyncio.Future[tuple[Finding, ...]]:
        """Scan in a thread of its own. The slot is free when the thread ends, whoever still waits for it then."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[Finding, ...]] = loop.create_future()

        def ended(found: tuple[Finding, ...] | Exception) -> None:
            self._slots.release()
            if outcome.cancelled():
                self._stuck -= 1
            elif isinstance(found, Exception):
                outcome.set_exception(found)
            else:
                outcome.set_result(found)

        def work() -> None:
            found: tuple[Finding, ...] | Exception
            try:
                found = scan(text, detectors)
            except Exception as exc:
                found = exc
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(ended, found)

        try:
            threading.Thread(target=work, name="detect", daemon=True).start()
        except RuntimeError:  # no more threads: the slot must not go with it
            self._slots.release()
            raise
        return outcome
