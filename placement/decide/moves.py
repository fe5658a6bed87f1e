"""How to move a running request: pre-copy, at what codec and pace; stop and copy; or replay its tokens. Pure.

Pre-copy ships KV while the source decodes on, so its rounds shrink only where the link carries KV faster than it grows
(f16 of a small model at 60 tokens/s needs 11 Mbit/s). Where it does not, in this order: a smaller codec; the source
slowed down, within what the tenant accepts as time per token; else whatever is predicted to pause the client least:
stopping first and copying, or prefilling the tokens at the target while the source goes on, of which only what came
meanwhile is left to compute when it takes over.

Predictions are of measured figures. Pre-copy must also be done before the request is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

_CONVERGES_BELOW_RATIO = 0.75  # of KV that grows to KV that is carried in the same time; links are never steady
_LAST_ROUND_TOKENS = 2.0
_GOAL_TOKENS = 2.0  # the client should see a pause of at most so many token intervals, and a round trip


class Tactic(Enum):
    """How; the numbers are those of the wire."""

    PRECOPY = 1  # ship while the source goes on, stop for the rest
    STOP_AND_COPY = 2  # stop, ship all
    REPLAY = 3  # the target computes KV of the tokens itself; none is shipped


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveFacts:
    """What is known of one move. `tokens`: prompt and generated so far; `target_has_tokens`: of these the target's
    cache has; `left_tokens`: most that the request may still make. `token_s`: interval of the request's tokens at the
    source. Link figures are of the way between the two nodes. `wait_s`: until the target's engine has time.
    `tpot_s`: most time per token that the tenant accepts; None: nothing was said, so the source is not slowed."""

    tokens: int
    left_tokens: int
    token_s: float
    f16_bytes_per_token: int
    goodput_bytes_per_s: float
    rtt_s: float
    prefill_tokens_per_s: float
    target_has_tokens: int = 0
    wait_s: float = 0.0
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSize:
    """A codec that may be used, and its bytes for each byte of f16."""

    name: str
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveWay:
    """`codec` is empty where no KV is shipped. `pace_s`: least interval of the source's tokens while it is shipped, 0:
    as fast as it can. `pause_s`: predicted between two tokens; `total_s`: until the target goes on."""

    tactic: Tactic
    codec: str = ""
    pace_s: float = 0.0
    pause_s: float = 0.0
    total_s: float = 0.0


def choose_move(facts: MoveFacts, codecs: Sequence[CodecSize], *, tactic: Tactic | None = None) -> MoveWay:
    """The way to move. `codecs`: those allowed, the preferred one first; at least one. `tactic`: only this one."""
    if tactic is Tactic.REPLAY:
        return _replay(facts)
    if tactic is Tactic.STOP_AND_COPY:
        return _stop(facts, codecs[0])
    converging = next(_converging(facts, codecs), None)
    if converging is not None:
        return converging
    if tactic is Tactic.PRECOPY:
        return replace(_stop(facts, codecs[0]), tactic=Tactic.PRECOPY)  # its first round will tell, and stop it
    return min((*(_stop(facts, codec) for codec in codecs), _replay(facts)), key=lambda way: way.pause_s)


def goal_s(facts: MoveFacts) -> float:
    """The pause that a move should stay below."""
    return _GOAL_TOKENS * facts.token_s + facts.rtt_s


def _converging(facts: MoveFacts, codecs: Sequence[CodecSize]) -> Iterator[MoveWay]:
    """Pre-copies that are predicted to converge in time, preferred ones first."""
    for codec in codecs:
        yield from _precopy(facts, codec, facts.token_s)
    if facts.tpot_s is None:
        return
    for codec in codecs:
        pace_s = _carry_s(facts, codec) / (_CONVERGES_BELOW_RATIO - 0.01)
        if facts.token_s < pace_s <= facts.tpot_s:
            yield from (replace(way, pace_s=pace_s) for way in _precopy(facts, codec, pace_s))


def _carry_s(facts: MoveFacts, codec: CodecSize) -> float:
    """Of the KV of one token over the link."""
    return facts.f16_bytes_per_token * codec.ratio / facts.goodput_bytes_per_s


def _missing(facts: MoveFacts) -> int:
    return max(0, facts.tokens - 1 - facts.target_has_tokens)


def _precopy(facts: MoveFacts, codec: CodecSize, token_s: float) -> Iterator[MoveWay]:
    carry_s = _carry_s(facts, codec)
    ratio = carry_s / token_s
    if ratio >= _CONVERGES_BELOW_RATIO:
        return
    total_s = facts.rtt_s + _missing(facts) * carry_s / (1.0 - ratio)
    if total_s < facts.left_tokens * token_s:
        pause_s = min(_LAST_ROUND_TOKENS, 1.0 + ratio) * carry_s + facts.rtt_s + facts.token_s
        yield MoveWay(tactic=Tactic.PRECOPY, codec=codec.name, pause_s=pause_s, total_s=total_s + pause_s)


def _stop(facts: MoveFacts, codec: CodecSize) -> MoveWay:
    pause_s = _missing(facts) * _carry_s(facts, codec) + facts.rtt_s + facts.token_s
    return MoveWay(tactic=Tactic.STOP_AND_COPY, codec=codec.name, pause_s=pause_s, total_s=pause_s)


def _replay(facts: MoveFacts) -> MoveWay:
    """The target computes while the source goes on; then what came meanwhile, while nobody does."""
    first_s = facts.rtt_s + facts.wait_s + _missing(facts) / facts.prefill_tokens_per_s
    meanwhile = 1.0 + min(facts.left_tokens, first_s / facts.token_s)
    pause_s = meanwhile / facts.prefill_tokens_per_s + facts.wait_s + facts.rtt_s + facts.token_s
    return MoveWay(tactic=Tactic.REPLAY, pause_s=pause_s, total_s=first_s + pause_s)
