"""What decisions need of a snapshot that does not depend on the request: worked out once per change, as columns.

    queue_s        until the prompts that wait are prefilled
    turn_ratio     decode steps of this request's length until there is a place, for each that must end before
    token_s, growth_s, chunk_tokens, chunk_s        prefill of a token, per position before it, chunk, each chunk
    step_s, step_context_s                          a decode step of all that run or wait, and per position of this one

The formulae are those of placement.predict.predict, for all nodes at once, with the corrections that the entry measured
in them; a node that tells no fit is taken by its speeds and the pessimistic defaults. A snapshot that came from another
one by changing a few rows gets its columns by working out those rows. Memory: 122 bytes a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np

from placement.decide.settings import DecideSettings
from placement.decide.types import AnyArray, FitColumns, FloatArray, IntArray, Patch, Reason, Snapshot
from placement.predict.predict import DEFAULT_STEP_TOKENS

_NO_LIMIT = float(1 << 60)
_BITS = np.int16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compiled:
    """Columns over nodes, shape [n_nodes]; seconds. `state_bits`: reasons that no request can do anything about, int16.
    `fitted`: 1.0 where the node tells a fit: its last prefill step gives the first token; else 0.0."""

    state_bits: AnyArray
    fitted: FloatArray
    rtt_s: FloatArray
    goodput_bytes_per_s: FloatArray
    queue_s: FloatArray
    turn_ratio: FloatArray
    full_turn_ratio: FloatArray  # the same where the prompt does not fit the free KV now
    full_wait_s: FloatArray  # and what else is to be waited for there
    kv_room_tokens: FloatArray  # free KV; no limit where it is not told or nothing is there
    token_s: FloatArray
    growth_s: FloatArray
    chunk_tokens: FloatArray
    chunk_s: FloatArray
    step_s: FloatArray
    step_context_s: FloatArray
    error_ratio: FloatArray


def compiled(snapshot: Snapshot, settings: DecideSettings) -> Compiled:
    """The columns of a snapshot under these settings; made once."""
    known = cast("tuple[DecideSettings, Compiled] | None", snapshot.kept.get(Compiled))
    if known is None or known[0] is not settings:
        known = settings, _compile(snapshot, settings)
        snapshot.kept.pop(Patch, None)  # the one before it is not needed any more
        snapshot.kept[Compiled] = known
    return known[1]


def _compile(snapshot: Snapshot, settings: DecideSettings) -> Compiled:
    patch = snapshot.kept.get(Patch)
    if not isinstance(patch, Patch) or len(patch.rows) * 4 > snapshot.n_nodes:
        return Compiled(**_columns(snapshot, np.arange(snapshot.n_nodes), settings))
    before, new = compiled(patch.origin, settings), _columns(snapshot, patch.rows, settings)
    columns: dict[str, Any] = {}
    for name, values in new.items():
        column = getattr(before, name)
        if column[patch.rows].tolist() != values.tolist():  # of few rows, lists are the quicker way
            column = column.copy()
            column[patch.rows] = values
        columns[name] = column
    return Compiled(**columns)


def _columns(snapshot: Snapshot, rows: IntArray, settings: DecideSettings) -> Mapping[str, AnyArray]:
    """All columns at these rows."""
    own = rows == snapshot.entry_row
    with np.errstate(invalid="ignore"):  # what was not measured is not a number
        rtt, goodput = snapshot.rtt_s[rows], snapshot.goodput_bytes_per_s[rows]
        rtt_s = np.where(np.isfinite(rtt), rtt, settings.rtt_s)
        goodput = np.where(np.isfinite(goodput) & (goodput > 0), goodput, settings.goodput_bytes_per_s)
    rtt_s[own], goodput[own] = 0.0, np.inf
    busy = (snapshot.kv_capacity_tokens[rows] > 0) & (snapshot.running[rows] + snapshot.waiting[rows] > 0)
    columns: dict[str, AnyArray] = {
        "state_bits": _state_bits(snapshot, rows, own),
        "rtt_s": rtt_s,
        "goodput_bytes_per_s": goodput,
        "kv_room_tokens": np.where(busy, snapshot.kv_free_tokens[rows], _NO_LIMIT),
        **_by_speeds(snapshot, rows, settings),
    }
    if snapshot.fit is not None:
        fit = _Fit(snapshot, snapshot.fit, rows)
        known = fit.known
        if known.any():
            for name, values in fit.columns().items():
                columns[name] = np.where(known, values, columns[name])
        _correct(columns, snapshot.fit, rows)
    return columns


def _state_bits(snapshot: Snapshot, rows: IntArray, own: AnyArray) -> AnyArray:
    bits = np.where(snapshot.ready[rows], 0, Reason.NOT_READY.value)
    bits |= np.where(snapshot.draining[rows], Reason.DRAINING.value, 0)
    bits |= np.where(snapshot.reachable[rows] | own, 0, Reason.UNREACHABLE_FROM_ENTRY.value)
    return bits.astype(_BITS)


def _by_speeds(snapshot: Snapshot, rows: IntArray, settings: DecideSettings) -> dict[str, AnyArray]:
    """Times of nodes that tell speeds and no fit."""
    prefill, decode = snapshot.prefill_tokens_per_s[rows], snapshot.decode_tokens_per_s[rows]
    prefill = np.where(np.isfinite(prefill) & (prefill > 0), prefill, settings.prefill_tokens_per_s)
    decode = np.where(np.isfinite(decode) & (decode > 0), decode, settings.decode_tokens_per_s)
    running, waiting = snapshot.running[rows], snapshot.waiting[rows]
    token_s, growth_s = 1.0 / prefill, np.zeros(len(rows))
    if snapshot.prefill_token_s is not None and snapshot.prefill_growth_s is not None:
        told = snapshot.prefill_token_s[rows]
        token_s = np.where(told > 0, told, token_s)
        growth_s = np.where(told > 0, snapshot.prefill_growth_s[rows], 0.0)
    # Requests that wait for a slot each want about as long as this one; they leave as many slots as run now.
    turn_ratio = waiting / np.maximum(running, 1)
    zero = np.zeros(len(rows))
    return {
        "fitted": zero,
        "queue_s": snapshot.waiting_prefill_tokens[rows] / prefill,
        "turn_ratio": turn_ratio,
        "full_turn_ratio": turn_ratio,
        "full_wait_s": np.full(len(rows), settings.busy_wait_s),
        "token_s": token_s,
        "growth_s": growth_s,
        "chunk_tokens": np.ones(len(rows)),
        "chunk_s": zero,
        "step_s": (1.0 + settings.batch_cost_ratio * running) / decode,
        "step_context_s": zero,
        "error_ratio": np.ones(len(rows)),
    }


class _Fit:
    """The formulae of placement.predict.predict at some rows."""

    def __init__(self, snapshot: Snapshot, fit: FitColumns, rows: IntArray) -> None:
        self._at = {f.name: getattr(fit, f.name)[rows] for f in fields(FitColumns)}
        self._running = snapshot.running[rows]
        self._waiting = snapshot.waiting[rows]
        self._ahead = snapshot.waiting_prefill_tokens[rows]
        at = self._at
        self.known = (at["prefill_base_s"] + at["prefill_token_s"] > 0) & (at["decode_base_s"] + at["decode_row_s"] > 0)

    def columns(self) -> dict[str, AnyArray]:
        at, running, waiting, ahead = self._at, self._running, self._waiting, self._ahead
        budget = np.where(at["step_tokens"] > 0, at["step_tokens"], DEFAULT_STEP_TOKENS)
        chunk = np.maximum(1.0, budget - running)
        chunk_s = at["prefill_base_s"] + at["decode_row_s"] * running + at["decode_context_s"] * at["context_tokens"]
        queue_s = at["prefill_token_s"] * ahead + ahead / chunk * chunk_s
        queue_s = queue_s + at["prefill_growth_s"] * ahead * ahead / (2 * np.maximum(waiting, 1))
        most = np.where(at["most_running"] > 0, at["most_running"], _NO_LIMIT)
        rows = np.minimum(running + waiting + 1, most)
        before = np.maximum(running + waiting + 1 - most, 0.0)
        step_s = at["decode_base_s"] + at["decode_row_s"] * rows
        return {
            "fitted": np.ones(len(running)),
            "queue_s": queue_s,
            "turn_ratio": before / np.maximum(running, 1),
            "full_turn_ratio": (waiting + 1) / np.maximum(running, 1),
            "full_wait_s": np.zeros(len(running)),
            "token_s": at["prefill_token_s"],
            "growth_s": at["prefill_growth_s"],
            "chunk_tokens": chunk,
            "chunk_s": chunk_s,
            "step_s": step_s + at["decode_context_s"] * (at["context_tokens"] + ahead),
            "step_context_s": at["decode_context_s"],
            "error_ratio": at["error_ratio"],
        }


def _correct(columns: dict[str, AnyArray], fit: FitColumns, rows: IntArray) -> None:
    """What the entry found the node's answers to take is what counts, in place."""
    ttft, tpot, seen = fit.ttft_scale[rows], fit.tpot_scale[rows], fit.scale_error_ratio[rows]
    if (seen >= 1.0).all() and (ttft == 1.0).all() and (tpot == 1.0).all():
        return  # nothing was measured yet
    for name in ("queue_s", "token_s", "growth_s", "chunk_s"):
        columns[name] = columns[name] * ttft
    for name in ("step_s", "step_context_s"):
        columns[name] = columns[name] * tpot
    for name in ("turn_ratio", "full_turn_ratio"):  # of decode steps, in the wait
        columns[name] = columns[name] * (ttft / tpot)
    columns["error_ratio"] = np.where(seen < 1.0, seen, columns["error_ratio"])
