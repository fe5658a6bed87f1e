"""A tenant's own patterns as a detector. RE2 is linear in the text, so a tenant's pattern cannot stall an entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import re2

from placement.detect.types import Finding

PATTERN_BYTES = 1 << 20
"""Memory that one compiled pattern may take."""


def compile_pattern(regex: str) -> re2._Regexp[str]:
    """Raises ValueError with RE2's words."""
    options = re2.Options()
    options.max_mem, options.log_errors = PATTERN_BYTES, False
    try:
        return re2.compile(regex, options)
    except re2.error as exc:
        words = exc.args[0] if exc.args else "not a regular expression"
        raise ValueError(words.decode() if isinstance(words, bytes) else str(words)) from exc


class Patterns:
    """Kinds are named `pattern.NAME`."""

    name = "patterns"

    def __init__(self, regexes: Mapping[str, str]) -> None:
        self._compiled = {f"pattern.{name}": compile_pattern(regex) for name, regex in regexes.items()}
        self.kinds = frozenset(self._compiled)

    def find(self, text: str) -> Iterable[Finding]:
        for kind, regex in self._compiled.items():
            for match in regex.finditer(text):
                if match.end() > match.start():
                    yield Finding(match.start(), match.end(), kind)
