"""Engines as processes: started, given work, stopped in place while others are measured, killed if they hang.

Each driver leads a process group of its own, so that all that it starts can be paused (SIGSTOP) and killed together.
A paused engine takes no processor from the one that is measured, not even by threads that spin while they wait. The
nodes of our own mesh are sessions of their own and are not paused; they idle.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from core_node.bench.engines.installed import EngineCommand
from core_node.bench.engines.work import Answer, Work
from mesh.errors import Internal

READY_TIMEOUT_S = 900.0  # vLLM compiles at its first start
_LINE_LIMIT_BYTES = 1 << 24
_TAIL_BYTES, _TAIL_LINES = 20_000, 6
_END_S = 30.0  # a mesh of ours drains


class EngineProcess:
    """One engine's driver. Its stderr goes to `folder`/NAME.log."""

    def __init__(self, engine: EngineCommand, folder: Path, *, work_timeout_s: float) -> None:
        self.engine = engine
        self.said = ""  # its version and settings, once it has started
        self._log = folder / f"{engine.name}.log"
        self._work_timeout_s = work_timeout_s
        self._process: Process | None = None
        self._stderr: IO[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._process is not None

    async def start(self) -> None:
        """Start it and wait until it is ready. Raises Internal with the end of its log; then nothing is left of it."""
        self._stderr = self._log.open("wb")
        environment = {**os.environ, **self.engine.environment}
        self._process = await asyncio.create_subprocess_exec(
            *self.engine.command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=self._stderr,
            env=environment,
            limit=_LINE_LIMIT_BYTES,
            start_new_session=True,
        )
        self.said = str((await self._answer(READY_TIMEOUT_S))["ready"])

    async def work(self, work: Work) -> Answer:
        """One exchange. Raises Internal if it failed, answered wrongly or took too long; then nothing is left of it."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work.message()).encode() + b"\n")
        message = await self._answer(self._work_timeout_s)
        try:
            return Answer.parse(message, work, self.engine.name)
        except Internal:
            await self.stop()
            raise

    def pause(self) -> None:
        """Stop it where it is."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    async def stop(self) -> None:
        """End it: by the end of its input, else by force. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _END_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if self._stderr is not None:
            self._stderr.close()

    async def _answer(self, timeout_s: float) -> Mapping[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
            message = json.loads(line) if line else None
        except TimeoutError:
            problem = f"gave no answer within {timeout_s:.0f} s"
        except ValueError as exc:
            problem = f"gave an answer that is not to be read ({type(exc).__name__})"
        else:
            if isinstance(message, dict):
                return message
            problem = "ended"
        await self.stop()
        raise Internal(f"{self.engine.name} {problem}; the end of {self._log}:\n{self._log_tail()}")

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _log_tail(self) -> str:
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(f"  {line[:300]}" for line in lines[-_TAIL_LINES:])
