"""How to reach a person: e-mail addresses and telephone numbers (the latter by phonenumbers). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import phonenumbers

from placement.detect.types import Finding

_EMAIL = re.compile(
    r"(?<![A-Za-z0-9_.+-])[A-Za-z0-9À-ɏ_.+-]{1,64}@(?:[A-Za-z0-9À-ɏ](?:[A-Za-z0-9À-ɏ-]{0,61}[A-Za-z0-9À-ɏ])?\.){1,8}"
    r"[A-Za-z]{2,24}(?![A-Za-z0-9_@-])"
)
# Addresses that are made for documentation (RFC 2606, RFC 6761) are nobody's.
_NOBODY = re.compile(r"@(?:[\w-]+\.)*(?:example(?:\.com|\.net|\.org)?|test|invalid|localhost)$", re.IGNORECASE)
_PHONE_SHAPE = re.compile(r"(?<![A-Za-z0-9_.,/-])(?:\+|00)?\(?\d[\d ()/.-]{5,22}\d(?![A-Za-z0-9_-]|[.,]\d)")
_PHONE_WORDS = re.compile(
    r"\b(?:tel|phone|call|mobile|cell|fax|text me|reach|whatsapp|ruf|telefon|handy|mobil|durchwahl|anruf|rückruf)"
    r"|电话|手机|联系|致电|拨打|来电|☎|📞",
    re.IGNORECASE,
)
_MAINLAND_MOBILE = re.compile(r"1[3-9]\d[ -]?\d{4}[ -]?\d{4}")
_CONTEXT_CHARS = 32


class Contacts:
    """The detector "contacts". A number without a country code needs a word such as "Tel." in front of it (a
    Chinese mobile number with its 11 digits does not), and is then read as one of `regions`."""

    name = "contacts"
    kinds = frozenset({"email", "phone"})

    def __init__(self, regions: Sequence[str] = ("US", "DE", "CN", "GB", "FR", "AT", "CH")) -> None:
        self._regions = tuple(regions)

    def find(self, text: str) -> Iterable[Finding]:
        for match in _EMAIL.finditer(text):
            if not _NOBODY.search(match.group()):
                yield Finding(match.start(), match.end(), "email")
        for match in _PHONE_SHAPE.finditer(text):
            number = match.group()
            before = text[max(0, match.start() - _CONTEXT_CHARS) : match.start()]
            if self._is_phone(number, has_word=_PHONE_WORDS.search(before) is not None):
                yield Finding(match.start(), match.end(), "phone")

    def _is_phone(self, number: str, *, has_word: bool) -> bool:
        if number.startswith(("+", "00")):
            return _valid("+" + number[2:] if number.startswith("00") else number, None)
        if _MAINLAND_MOBILE.fullmatch(number):
            return _valid(number, "CN")
        return has_word and any(_valid(number, region) for region in self._regions)


def _valid(number: str, region: str | None) -> bool:
    try:
        return phonenumbers.is_valid_number(phonenumbers.parse(number, region))
    except phonenumbers.NumberParseException:
        return False
