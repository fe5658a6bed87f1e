"""Running and showing the steps of the set-up. Standard library only."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

TAIL_LINES = 25


class SetupFailed(Exception):
    """The message says what failed and what to do; nothing half-done counts as done."""


class Show:
    """Prints steps; on a terminal the running one is rewritten in place, elsewhere it is a line per stage."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self.terminal = self._out.isatty()
        self._last_shown = ""

    def line(self, text: str) -> None:
        """One line for good."""
        print(text, file=self._out, flush=True)

    def progress(self, text: str) -> None:
        """The state of a running step: rewritten on a terminal, nothing elsewhere (see `stage`)."""
        if self.terminal:
            print(f"\r\x1b[K  {text}", end="", file=self._out, flush=True)

    def stage(self, text: str) -> None:
        """A coarse state of a long step, for logs that can't be rewritten."""
        if not self.terminal and text != self._last_shown:
            self._last_shown = text
            print(f"  {text}", file=self._out, flush=True)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A step with its time."""
        started_s = time.monotonic()
        self.progress(f"{name} ...")
        yield
        if self.terminal:
            print("\r\x1b[K", end="", file=self._out)
        self.line(f"  {name}: {duration(time.monotonic() - started_s)}")


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def run(
    command: Sequence[str | Path], log: Path, *, env: dict[str, str] | None = None, on_terminal: bool = False
) -> None:
    """Run with output into the log, or for progress bars straight to the terminal. Raises SetupFailed."""
    if not on_terminal:
        watch(command, log, lambda line: None, env=env)
        return
    words = [str(word) for word in command]
    print()
    code = subprocess.run(words, env=env).returncode
    if code != 0:
        raise SetupFailed(f"this command ended with {code}: {' '.join(words)}")


def watch(
    command: Sequence[str | Path], log: Path, seen: Callable[[str], None], *, env: dict[str, str] | None = None
) -> None:
    """Run with each line of output into the log and to `seen`. Raises SetupFailed with the log's tail."""
    words = [str(word) for word in command]
    log.parent.mkdir(parents=True, exist_ok=True)
    tail: list[str] = []
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(words)}\n")
        file.flush()
        child = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=env
        )
        assert child.stdout is not None
        try:
            for line in child.stdout:
                file.write(line)
                tail = [*tail[-TAIL_LINES + 1 :], line.rstrip()]
                seen(line)
            code = child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise
    if code != 0:
        shown = "\n".join(f"    {line}" for line in tail)
        raise SetupFailed(f"this command ended with {code}:\n    {' '.join(words)}\n{shown}\n  all of it: {log}")
