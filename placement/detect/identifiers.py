"""Numbers that name a person or an account: a shape, then the checksum, then for weak checksums a word nearby.

The checks are python-stdnum's. A number whose checksum would pass by chance once in ten needs its context: a word
such as "Steuer-ID" within CONTEXT_CHARS in front of it (or right behind). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stdnum import iban, luhn
from stdnum.ch import ssn as swiss_ahv
from stdnum.cn import ric
from stdnum.de import idnr
from stdnum.es import dni, nie
from stdnum.exceptions import ValidationError
from stdnum.fr import nir
from stdnum.gb import nhs
from stdnum.it import codicefiscale
from stdnum.us import itin, ssn

from placement.detect.types import Finding

CONTEXT_CHARS = 48
_AFTER_CHARS = 16
_MARGIN_CHARS = 40  # more than any shape goes on without a digit
_DIGITS = re.compile(r"\d+")


def _alone(shape: str, *, ignore_case: bool = False) -> re.Pattern[str]:
    """The shape with no Latin letter, digit or underscore right before or behind it. Others may be: Chinese has no
    spaces."""
    edges = rf"(?<![A-Za-z0-9_]){shape}(?![A-Za-z0-9_])"
    return re.compile(edges, re.IGNORECASE if ignore_case else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRule:
    """`near`: words of which one must stand near the number; None: the number is enough by itself."""

    kind: str
    shape: re.Pattern[str]
    valid: Callable[[str], bool]
    near: re.Pattern[str] | None = None


def _words(*words: str) -> re.Pattern[str]:
    """Latin words at a word's start, others anywhere."""
    return re.compile("|".join((rf"\b{w}" if w[0].isascii() else w) for w in words), re.IGNORECASE)


def _card(number: str) -> bool:
    """A payment card: issuer prefix and length (ISO/IEC 7812), Luhn, and not one digit over and over."""
    digits = re.sub(r"[ -]", "", number)
    known = (
        (r"4", (13, 16, 19)),
        (r"5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720", (16,)),
        (r"3[47]", (15,)),
        (r"6011|64[4-9]|65|62", (16, 17, 18, 19)),
        (r"30[0-5]|3[689]", (14, 16)),
        (r"35(?:2[89]|[3-8])", (16,)),
        (r"50|5[6-9]|6[0379]", (16, 19)),
    )
    if not any(re.match(prefix, digits) and len(digits) in lengths for prefix, lengths in known):
        return False
    return len(set(digits)) > 1 and bool(luhn.is_valid(digits))


def _german_id(number: str) -> bool:
    """German identity card or passport: nine characters and a check digit, weights 7-3-1 (BSI TR-03110, ICAO 9303)."""
    plain = number.replace(" ", "").upper()
    body, check = plain[:-1], plain[-1]
    total = sum(int(c, 36) * (7, 3, 1)[i % 3] for i, c in enumerate(body))
    return check.isdigit() and total % 10 == int(check)


def _resident_id(number: str) -> bool:
    """Chinese resident identity number (GB 11643): a province, a date of birth and the check digit. The county is
    not looked up: lists of them lack those of earlier years, which are in use for a lifetime."""
    try:
        ric.get_birth_date(number)
    except ValidationError:
        return False
    return number[:2] in _PROVINCES and ric.calc_check_digit(number) == number[-1].upper()


def _social_security(number: str) -> bool:
    return bool(ssn.is_valid(number.replace(" ", "-")))


_PROVINCES = frozenset(
    f"{n}"
    for n in (
        *range(11, 16),
        *range(21, 24),
        *range(31, 38),
        *range(41, 47),
        *range(50, 55),
        *range(61, 66),
        71,
        81,
        82,
    )
)
_SEPARATED = r"(?<![A-Za-z0-9_.+-])(?:\d[ -]?){%d,%d}\d(?![A-Za-z0-9_-]|[.,]\d)"

RULES = (
    NumberRule(kind="payment_card", shape=re.compile(_SEPARATED % (12, 18)), valid=_card),
    NumberRule(
        kind="iban",
        shape=re.compile(r"(?<![A-Za-z0-9_])[A-Z]{2}\d{2}(?: ?[A-Z0-9]){11,30}(?![A-Za-z0-9])", re.IGNORECASE),
        valid=lambda number: iban.is_valid(number),
    ),
    NumberRule(
        kind="cn_resident_id",
        shape=re.compile(r"(?<![0-9A-Za-z])[1-9]\d{16}[\dXx](?![0-9A-Za-z])"),
        valid=lambda number: _resident_id(number),
    ),
    NumberRule(
        kind="us_ssn",
        shape=re.compile(r"(?<![A-Za-z0-9_-])\d{3}-\d{2}-\d{4}(?![A-Za-z0-9_-])"),
        valid=lambda number: _social_security(number) or itin.is_valid(number),
    ),
    NumberRule(
        kind="us_ssn",
        shape=re.compile(r"(?<![A-Za-z0-9_-])\d{3} ?\d{2} ?\d{4}(?![A-Za-z0-9_-])"),
        valid=lambda number: _social_security(re.sub(r"(\d{3}) ?(\d{2}) ?(\d{4})", r"\1-\2-\3", number)),
        near=_words("ssn", "social security", "soc sec", "tax ?payer id"),
    ),
    NumberRule(
        kind="de_tax_id",
        shape=re.compile(r"(?<!\d)\d{2} ?\d{3} ?\d{3} ?\d{3}(?!\d)"),
        valid=idnr.is_valid,
        near=_words(r"steuer-?\s?id", r"steuerident", r"steuerliche", r"id-?nr", r"identifikationsn", "tin", "tax id"),
    ),
    NumberRule(
        kind="de_id_card",
        shape=_alone(r"[CFGHJKLMNPRTVWXYZ][0-9CFGHJKLMNPRTVWXYZ]{8} ?\d", ignore_case=True),
        valid=_german_id,
        near=_words("ausweis", "personalausweis", "reisepass", "pass-?nr", "passnummer", "passport", "id card"),
    ),
    NumberRule(
        kind="cn_passport",
        shape=re.compile(r"(?<![A-Za-z0-9])[EGDSP][A-Z]?\d{7,8}(?![A-Za-z0-9])", re.IGNORECASE),
        valid=lambda number: 8 <= len(number) <= 9,
        near=_words("护照", "passport"),
    ),
    NumberRule(
        kind="uk_nhs",
        shape=re.compile(r"(?<![A-Za-z0-9_-])\d{3}[ -]?\d{3}[ -]?\d{4}(?![A-Za-z0-9_-])"),
        valid=nhs.is_valid,
        near=_words("nhs"),
    ),
    NumberRule(
        kind="uk_nino",
        shape=_alone(r"(?!BG|GB|KN|NK|NT|TN|ZZ)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z] ?\d{2} ?\d{2} ?\d{2} ?[A-D]"),
        valid=lambda number: True,
        near=_words("national insurance", "ni number", "ni no", "nino"),
    ),
    NumberRule(
        kind="fr_nir",
        shape=re.compile(r"(?<!\d)[1-478] ?\d{2} ?\d{2} ?(?:\d{2}|2[AB]) ?\d{3} ?\d{3} ?\d{2}(?!\d)"),
        valid=nir.is_valid,
    ),
    NumberRule(
        kind="it_codice_fiscale",
        shape=_alone(r"[A-Z]{6}[0-9LMNP-V]{2}[A-Z][0-9LMNP-V]{2}[A-Z][0-9LMNP-V]{3}[A-Z]", ignore_case=True),
        valid=codicefiscale.is_valid,
    ),
    NumberRule(
        kind="es_dni",
        shape=_alone(r"(?:\d{8}|[XYZ]\d{7})-?[A-Z]", ignore_case=True),
        valid=lambda number: dni.is_valid(number) or nie.is_valid(number),
        near=_words("dni", "nie", "nif", "identidad"),
    ),
    NumberRule(
        kind="ch_ahv",
        shape=re.compile(r"(?<![\d.])756\.?\d{4}\.?\d{4}\.?\d{2}(?!\d)"),
        valid=swiss_ahv.is_valid,
    ),
)


class Identifiers:
    """The detector "identifiers"."""

    name = "identifiers"
    kinds = frozenset(rule.kind for rule in RULES)

    def find(self, text: str) -> Iterable[Finding]:
        for start, end in _around_digits(text):
            for rule in RULES:
                for match in rule.shape.finditer(text, start, end):
                    span = _longest_valid(match, rule)
                    if span is not None and (rule.near is None or _is_near(text, span, rule.near)):
                        yield Finding(*span, rule.kind)


def _around_digits(text: str) -> Iterable[tuple[int, int]]:
    """The parts of a text that have digits in them or close by: every shape has some, and most text has none."""
    start = end = 0
    for match in _DIGITS.finditer(text):
        if match.start() - _MARGIN_CHARS > end:
            if end:
                yield start, end
            start = match.start() - _MARGIN_CHARS
        end = min(len(text), match.end() + _MARGIN_CHARS)
    if end:
        yield max(0, start), end


def _longest_valid(match: re.Match[str], rule: NumberRule) -> tuple[int, int] | None:
    """The match, or the longest head of it at a word's end that is valid: an IBAN may be followed by words."""
    text, start = match.group(), match.start()
    ends = [len(text), *(m.start() for m in re.finditer(" ", text))][:8] if rule.kind == "iban" else [len(text)]
    for end in sorted(ends, reverse=True):
        if rule.valid(text[:end]):
            return start, start + end
    return None


def _is_near(text: str, span: tuple[int, int], near: re.Pattern[str]) -> bool:
    start, end = span
    before = text[max(0, start - CONTEXT_CHARS) : start]
    return near.search(before) is not None or near.search(text[end : end + _AFTER_CHARS]) is not None
