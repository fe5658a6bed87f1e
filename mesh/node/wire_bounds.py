"""Bounds of what one node takes from another, so that a faulty peer costs an error and not memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mesh.errors import InvalidRequest

MAX_TOKENS = 1 << 20
MAX_NAME_CHARS = 256
SALT_BYTES = 32


def name(field: str, text: str, *, empty: bool = False) -> str:
    """An id or name: printable, 1 to MAX_NAME_CHARS characters (0 too, if `empty`)."""
    if not text and empty:
        return text
    if not (1 <= len(text) <= MAX_NAME_CHARS and text.isprintable()):
        raise InvalidRequest(f"{field} must have 1 to {MAX_NAME_CHARS} printable characters", field=field)
    return text


def token_ids(field: str, ids: Sequence[int]) -> tuple[int, ...]:
    """At most MAX_TOKENS ids; the wire itself keeps each below 2**32."""
    if len(ids) > MAX_TOKENS:
        raise InvalidRequest(f"{field} has {len(ids)} tokens, at most {MAX_TOKENS} are taken", field=field)
    return tuple(ids)


def at_most(field: str, value: int, most: int) -> int:
    """`value` unless it is over `most`."""
    if value > most:
        raise InvalidRequest(f"{field} must be at most {most}, got {value}", field=field)
    return value


def not_negative(field: str, value: float) -> float:
    """A finite number, 0 or more."""
    if not (math.isfinite(value) and value >= 0):
        raise InvalidRequest(f"{field} must be finite and not negative, got {value}", field=field)
    return value
