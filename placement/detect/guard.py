"""Runs detectors for an entry: off the event loop, with a time limit, failing closed.

A detector that raises or hangs says nothing about a text, and nothing is not "harmless": the outcome tells of the
failure and the caller raises the label. A thread cannot be stopped, so one that hangs keeps its slot until it ends;
while all slots are taken so, every text counts as failed at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
        self._threads = ThreadPoolExecutor(max_workers=n_threads, thread_name_prefix="detect")
        self._stuck: list[Future[tuple[Finding, ...]]] = []

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
        self._stuck = [work for work in self._stuck if not work.done()]
        if len(self._stuck) >= self._n_threads:
            return Detected(failure="detectors hang: restart this entry")
        work = self._threads.submit(scan, text, tuple(detectors))
        outcome = asyncio.wrap_future(work)
        # asyncio writes what nobody asks for to its log, and a detector's error may quote the text.
        outcome.add_done_callback(lambda f: f.cancelled() or f.exception())
        done, _ = await asyncio.wait([outcome], timeout=self._limit_s)
        if done:
            return Detected(outcome.result())
        if not work.cancel():  # it runs, and nothing can stop it
            self._stuck.append(work)
        log.error("detector_timed_out", limit_s=self._limit_s)
        return Detected(failure=f"detectors took more than {self._limit_s:g} s")

    def close(self) -> None:
        """Waits for nobody."""
        self._threads.shutdown(wait=False, cancel_futures=True)
