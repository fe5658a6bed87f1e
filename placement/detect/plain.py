"""Text as detectors see it: look-alike characters made plain, invisible ones taken out. Pure.

A card number in full-width digits, with no-break spaces or with zero-width characters between its digits is still a
card number. Each character that stays stands for exactly one of the original, so positions can be given back.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

_INVISIBLE = re.compile("[\u00ad\u034f\u061c\u180e\u200b-\u200f\u2060-\u2064\ufe00-\ufe0f\ufeff]")
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\uff0d"
_SPACES = "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
_FULL_WIDTH = {0xFF01 + i: 0x21 + i for i in range(94)}


class _Plain(dict[int, int]):
    """A table for str.translate that learns: what is not known yet is looked up once."""

    def __missing__(self, code: int) -> int:
        digit = unicodedata.decimal(chr(code), None) if code > 127 else None
        self[code] = ord("0") + digit if digit is not None else code
        return self[code]


_TABLE = _Plain({**_FULL_WIDTH, **{ord(c): ord("-") for c in _DASHES}, **{ord(c): ord(" ") for c in _SPACES}})


@dataclass(frozen=True, slots=True)
class PlainText:
    """`text[i]` stands for character `position(i)` of the original."""

    text: str
    _kept: tuple[int, ...] | None  # None: all characters stayed

    def position(self, i: int) -> int:
        """Position in the original of character i."""
        return i if self._kept is None else self._kept[i]


def plain(original: str) -> PlainText:
    """The plain form."""
    if original.isascii():
        return PlainText(original, None)
    kept = None
    if _INVISIBLE.search(original):
        kept = tuple(i for i, c in enumerate(original) if not _INVISIBLE.match(c))
        original = "".join(original[i] for i in kept)
    return PlainText(original.translate(_TABLE), kept)
