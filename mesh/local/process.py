"""One child process of a local mesh: started, waited for until it is ready, ended."""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mesh.errors import Internal, NodeUnreachable
from mesh.process import READY_FILE

READY_TIMEOUT_S = 240.0
_POLL_S = 0.05
_TAIL_LINES = 12
_PR_SET_PDEATHSIG = 1


class NodeProcess:
    """A `kvmesh placement|core|edge` process. Owned by one LocalMesh."""

    def __init__(self, *, node_id: str, command: Sequence[str], state_folder: Path, log_file: Path) -> None:
        self.node_id = node_id
        self._command = command
        self._ready_file = state_folder / READY_FILE
        self._log_file = log_file
        self._process: asyncio.subprocess.Process | None = None
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> Mapping[str, Any]:
        """Start it and wait until it is ready; returns what it announced (addresses, speeds).

        Raises NodeUnreachable if it ends before that or takes longer than READY_TIMEOUT_S; it is gone then, and
        `log_tail` may say why."""
        self._is_ready = False
        self._ready_file.unlink(missing_ok=True)
        with self._log_file.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A session of its own: Ctrl-C reaches us alone, and we end the children in order.
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )
        try:
            return await asyncio.wait_for(self._until_ready(), READY_TIMEOUT_S)
        except TimeoutError as exc:
            raise NodeUnreachable(
                f"{self.node_id} was not ready after {READY_TIMEOUT_S:.0f} s; its log is {self._log_file}",
                node=self.node_id,
            ) from exc
        finally:
            if not self._is_ready:
                await self.kill()

    async def _until_ready(self) -> Mapping[str, Any]:
        assert self._process is not None
        while not self._ready_file.exists():
            if self._process.returncode is not None:
                raise NodeUnreachable(
                    f"{self.node_id} ended with code {self._process.returncode} before it was ready; "
                    f"its log is {self._log_file}",
                    node=self.node_id,
                )
            await asyncio.sleep(_POLL_S)
        facts = json.loads(self._ready_file.read_text())
        if not isinstance(facts, dict):
            raise Internal(f"{self._ready_file} holds no JSON object", node=self.node_id)
        self._is_ready = True
        return facts

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def drain(self, timeout_s: float) -> int | None:
        """SIGTERM, and SIGKILL after `timeout_s`. Returns the exit code, None if it was never started."""
        if self._process is None:
            return None
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), timeout_s)
            except TimeoutError:
                await self.kill()
        return self._process.returncode

    async def kill(self) -> None:
        """SIGKILL, as a crash would be."""
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()

    def log_tail(self) -> str:
        """The last lines of its log, indented."""
        try:
            lines = self._log_file.read_text(errors="replace").splitlines()
        except OSError:
            return "  (no log)"
        return "\n".join(f"  {line[:300]}" for line in lines[-_TAIL_LINES:]) or "  (empty)"


def _die_with_parent() -> Callable[[], None] | None:
    """On Linux, a call for the child that makes it drain when its parent is killed; else nothing."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)  # loaded before the fork
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
