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

import numpy as np

from placement.decide.settings import DEFAULTS, DecideSettings
from placement.decide.types import CodecTable, FloatArray, Snapshot

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
    """A codec that may be used, and its bytes for each byte of f16. `token_s`: the longer of encoding and decoding."""

    name: str
    ratio: float
    token_s: float = 0.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a running request is. `token_s` 0: not measured yet."""

    tokens: int
    left_tokens: int
    token_s: float = 0.0


def facts_of_move(
    snapshot: Snapshot,
    source: int,
    target: int,
    progress: Progress,
    *,
    tpot_s: float | None = None,
    settings: DecideSettings = DEFAULTS,
) -> MoveFacts:
    """What a snapshot knows of a move from row `source` to row `target`; what nobody measured is taken as slow."""
    ends = [row for row in (source, target) if row != snapshot.entry_row]
    goodputs = [_or(snapshot.goodput_bytes_per_s, row, settings.goodput_bytes_per_s) for row in ends]
    prefill_tokens_per_s = _or(snapshot.prefill_tokens_per_s, target, settings.prefill_tokens_per_s)
    decode_tokens_per_s = _or(snapshot.decode_tokens_per_s, source, settings.decode_tokens_per_s)
    return MoveFacts(
        tokens=progress.tokens,
        left_tokens=progress.left_tokens,
        token_s=progress.token_s or 1.0 / decode_tokens_per_s,
        f16_bytes_per_token=max(1, int(snapshot.kv_bytes_per_token[source])),
        goodput_bytes_per_s=min(goodputs),
        rtt_s=sum(_or(snapshot.rtt_s, row, settings.rtt_s) for row in ends),
        prefill_tokens_per_s=prefill_tokens_per_s,
        wait_s=float(snapshot.waiting_prefill_tokens[target]) / prefill_tokens_per_s,
        tpot_s=tpot_s,
    )


def codecs_of_move(
    snapshot: Snapshot, source: int, target: int, *, max_loss_ratio: float, preferred: str
) -> tuple[CodecSize, ...]:
    """Codecs that lose no more than policy accepts and that both ends have: the preferred one first, if it is one,
    then those that lose least. Without any, the preferred one: the nodes will say."""
    table = snapshot.codecs or CodecTable.plain(snapshot.n_nodes)
    found = []
    for i, name in enumerate(table.names):
        token_s = float(max(table.encode_s[source, i], table.decode_s[target, i]))
        if table.loss_ratio[i] <= max_loss_ratio and np.isfinite(token_s):
            found.append(CodecSize(name=name, ratio=float(table.bytes_ratio[i]), token_s=token_s))
    found.sort(key=lambda codec: codec.name != preferred)
    return tuple(found) or (CodecSize(name=preferred, ratio=1.0),)


def _or(measured: FloatArray, row: int, default: float) -> float:
    """A figure, or what is taken where nothing was measured (0 or not a number)."""
    value = float(measured[row])
    return value if value > 0.0 else default


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
    """Of the KV of one token from one engine into the other."""
    return max(codec.token_s, _link_s(facts, codec))


def _link_s(facts: MoveFacts, codec: CodecSize) -> float:
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
