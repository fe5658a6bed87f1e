"""How far a model has been read, on stderr: a bar on a terminal, a line of the log each quarter elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from mesh.telemetry.log import get_logger

_log = get_logger(__name__)
_LINES = 4


class LoadView:
    """A context manager whose `show` is the engine's `on_load`; it may be called from the engine's thread."""

    def __init__(self, model_id: str, console: Console | None = None) -> None:
        self._model_id = model_id
        self._told = -1
        self._bar: Progress | None = None
        console = console or Console(file=sys.stderr)
        if console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TimeElapsedColumn()
            self._bar = Progress(*columns, console=console)

    def __enter__(self) -> LoadView:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(f"loading {self._model_id}", total=None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done_bytes: int, total_bytes: int) -> None:
        """So much of the model's tensors has been read."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done_bytes, total=total_bytes)
            if done_bytes >= total_bytes:
                self._bar.stop()  # what the engine logs next must not run into the bar
            return
        quarter = _LINES * done_bytes // max(1, total_bytes)
        if quarter > self._told:
            self._told = quarter
            _log.info(
                "model_loading",
                model_id=self._model_id,
                done_mib=round(done_bytes / 2**20, 1),
                total_mib=round(total_bytes / 2**20, 1),
            )
