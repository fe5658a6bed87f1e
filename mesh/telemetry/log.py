"""The structured log, which cannot repeat a prompt by accident.

What a field may hold is decided by allowing, not by forbidding: numbers pass under any name; text passes only
under a name of `TEXT_FIELDS` and is cut; everything else (lists of token ids, bytes, messages, unknown text) is
replaced by a mark that shows its type. Exceptions keep their stack and type; their message only if it is of a
kind that never holds a user's data (a MeshError by its contract, an OSError). Lines of foreign libraries lose
their arguments. A field that is withheld by mistake is seen at once and is a one-line fix; a leaked prompt is not.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import IO, Any, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from mesh.errors import MeshError
from mesh.settings import Log, LogFormat

TEXT_FIELDS = frozenset(
    {
        "event", "level", "timestamp", "logger", "stack", "exception",
        # who and where
        "mesh", "role", "tier", "site", "region", "jurisdiction", "node", "node_id", "peer", "source", "target",
        "source_node_id", "target_node_id", "from_node_id", "to_node_id", "address", "listener", "registry",
        # what
        "method", "error_id",
        "request_id", "run_id", "transfer_id", "key_id", "model", "model_id", "tenant", "label", "rule", "shape",
        "state", "codec", "direction", "kind", "cause", "outcome", "reason", "error", "error_type", "effect",
        # the process
        "version", "build", "device", "dtype", "backend", "path", "folder", "file", "signal", "name",
    }
)  # fmt: skip
MAX_TEXT_CHARACTERS = 500
_ASYNCIO = "asyncio"  # a logger that repeats itself as fast as it can, e.g. while no descriptor is left
_ASYNCIO_LINES = 20
_ASYNCIO_WINDOW_S = 10.0
_OWN_PACKAGES = ("mesh", "placement", "core_node", "edge_node")


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger for a module; events are short constant words, facts go into fields."""
    return cast(FilteringBoundLogger, structlog.get_logger(name))


def log_context(**fields: str) -> AbstractContextManager[None]:
    """Bind fields (request_id, run_id, model_id) to all lines of this task and those that it starts."""
    return cast(AbstractContextManager[None], structlog.contextvars.bound_contextvars(**fields))


def configure_log(settings: Log, *, node_id: str = "", stream: IO[str] | None = None) -> None:
    """Set up structlog and the standard library's logging for this process; `stream` is stderr by default."""
    level = logging.getLevelNamesMapping()[settings.level.name]

    def bind_node(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        # Not a contextvar: engine threads have none.
        if node_id:
            event.setdefault("node_id", node_id)
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        bind_node,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[strip_foreign_arguments, *shared],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                safe_exception,
                keep_safe_fields,
                _renderer(settings.format, handler),
            ],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for package in _OWN_PACKAGES:
        logging.getLogger(package).setLevel(level)
    repeating = logging.getLogger(_ASYNCIO)
    for old_filter in repeating.filters[:]:
        if isinstance(old_filter, RateLimit):
            repeating.removeFilter(old_filter)
    repeating.addFilter(RateLimit(_ASYNCIO_LINES, _ASYNCIO_WINDOW_S))


class RateLimit(logging.Filter):
    """Lets `most` lines through in each `window_s` seconds. The first line after that is preceded by one of this
    module's with the count of those left out."""

    def __init__(self, most: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most = most
        self._window_s = window_s
        self._clock = clock
        self._began_s = clock()
        self._seen = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = self._clock()
        if now_s - self._began_s >= self._window_s:
            left_out = self._seen - self._most
            self._began_s, self._seen = now_s, 0
            if left_out > 0:
                get_logger(__name__).warning("lines_left_out", source=record.name, count=left_out)
        self._seen += 1
        return self._seen <= self._most


def keep_safe_fields(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Replace what may hold a user's data; see the module's docstring."""
    return {name: _safe(name, value) for name, value in event.items()}


def safe_exception(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Turn exc_info into `exception`: stack frames and types, messages only where they are harmless."""
    info = event.pop("exc_info", None)
    if info is True:
        info = sys.exc_info()
    error = info[1] if isinstance(info, tuple) else info
    if isinstance(error, BaseException):
        event["exception"] = _describe(error)
    return event


def strip_foreign_arguments(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Keep a foreign library's message template (its first line) but not what was put in."""
    record = event.get("_record")
    if isinstance(record, logging.LogRecord) and record.name.partition(".")[0] not in _OWN_PACKAGES:
        event["event"] = str(record.msg).partition("\n")[0]
    return event


def _safe(name: str, value: object) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str) and name == "exception":
        return value
    if isinstance(value, str) and name in TEXT_FIELDS:
        return value if len(value) <= MAX_TEXT_CHARACTERS else value[:MAX_TEXT_CHARACTERS] + "..."
    return f"[withheld {type(value).__name__}]"


def _describe(error: BaseException) -> str:
    """The chain of causes, the oldest first, as Python prints it but without messages that may hold data."""
    parts = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        message = f": {link}" if isinstance(link, MeshError | OSError) else ""
        inner = "".join(_describe(e) for e in link.exceptions) if isinstance(link, BaseExceptionGroup) else ""
        frames = "".join(traceback.format_tb(link.__traceback__))
        parts.append(f"{frames}{type(link).__module__}.{type(link).__qualname__}{message}\n{inner}")
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return "caused:\n".join(reversed(parts))


def _renderer(kind: LogFormat, handler: logging.StreamHandler[Any]) -> Processor:
    if kind is LogFormat.JSON:
        return structlog.processors.JSONRenderer()
    colours = bool(getattr(handler.stream, "isatty", lambda: False)())
    return structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)
