"""Stop strings over a token stream. The engine owns them; the entry uses the same matcher to trim text.

State is a function of the generated tokens, so that a moved run rebuilds it by replaying its own output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextStream(Protocol):
    """Incremental detokeniser: text that is final after this token (UTF-8 sequences held until complete)."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class StopMatcher:
    """Feeds text, tells the part that can be shown, and whether a stop string was met.

    Text that might be the start of a stop string is held back until that is settled.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that can be shown now. After a match: what came before it, and nothing more ever."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        buffer = self._held + text
        found = min(((at, s) for s in self._stop if (at := buffer.find(s)) >= 0), default=None)
        if found is not None:
            self.matched, self._held = found[1], ""
            return buffer[: found[0]]
        keep = max(_overlap(buffer, s) for s in self._stop)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """What was held back, at the end of a stream that met no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
