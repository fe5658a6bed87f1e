"""What the three processes have in common at their rim: signals, readiness, tasks that live as long as they do.

A process says that it is ready once, in `ready.json` of its state folder and as one JSON line on stdout; SIGTERM
or SIGINT asks it to drain, a second one to stop at once.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mesh.errors import Unauthenticated
from mesh.identity.ca import NodeCredentials
from mesh.identity.certificates import check_issued, load_certificate
from mesh.identity.files import make_private_folder, write_private
from mesh.telemetry.log import get_logger

log = get_logger(__name__)
READY_FILE = "ready.json"
_MAX_DESCRIPTORS = 65_536
_RESUME_AFTER_S = 1.0


def prepare_state_folder(folder: Path) -> None:
    """Make it (mode 0700) and remove an old life's ready.json. Raises Overloaded on a full disk."""
    make_private_folder(folder)
    with suppress(FileNotFoundError):
        (folder / READY_FILE).unlink()


def raise_descriptor_limit() -> int:
    """Open the soft limit of file descriptors (1,024 by default) up to the hard one, at most 65,536, and return it:
    sockets of clients must not starve the links to the mesh. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # a sandbox may forbid it; the process can work with few
        log.warning("descriptor_limit_not_raised", soft=soft, hard=hard, error_type=type(error).__name__)
        return soft
    return wanted


def check_certificate(credentials: NodeCredentials) -> None:
    """Raise Unauthenticated unless the own certificate is of its authority and valid now: better at the start than
    as handshakes that fail for no visible reason."""
    try:
        check_issued(
            load_certificate(credentials.cert_pem, "the node certificate"),
            load_certificate(credentials.ca_pem, "the CA"),
            datetime.now(UTC),
        )
    except Unauthenticated as error:
        raise Unauthenticated(
            f"{error.message}; join anew (`kvmesh edge join`) or issue a new one with `kvmesh ca`"
        ) from error


def announce_ready(folder: Path, **facts: Any) -> None:
    """Say so, to whoever started this process."""
    line = json.dumps({"event": "ready", **facts}, sort_keys=True)
    write_private(folder / READY_FILE, line.encode())
    print(line, flush=True)


async def stop_signal() -> None:
    """Return at the first SIGTERM or SIGINT; a second one then ends the process as if nothing handled it."""
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    await asked.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    log.info("draining")


def background(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
    """A task that runs until its owner cancels it. One that dies of an error says so in the log at once, for nobody
    awaits it before the end."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_tell_death)
    return task


def background_loop(work: Callable[[], Coroutine[None, None, None]], name: str) -> asyncio.Task[None]:
    """As `background`, for a loop that others depend on: an error is logged, and after a pause it is begun anew, for
    one bad input must not stop it for good. Ends when `work` returns."""
    return background(_resume(work, name), name)


class OneAtATime:
    """Work that is asked for now and then, never twice at a time: asked for while it runs, it runs once more."""

    def __init__(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        self._work = work
        self._again = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Returns at once."""
        if self._task is not None and not self._task.done():
            self._again = True
            return
        self._task = background(self._run(), "asked-for work")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        again = True
        while again:
            self._again = False
            await self._work()
            again = self._again


async def _resume(work: Callable[[], Coroutine[None, None, None]], name: str) -> None:
    while True:
        try:
            return await work()
        except Exception as error:
            log.error("background_loop_failed", name=name, exc_info=error)
        await asyncio.sleep(_RESUME_AFTER_S)


def _tell_death(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("background_task_died", name=task.get_name(), exc_info=error)
