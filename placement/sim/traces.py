"""Requests to replay: published traces, and a synthetic one. Pure but for reading a file.

A request knows its lengths and the identity of its prompt's blocks, never a text. Requests that share leading blocks
share a prefix. `session` groups requests of one conversation, so that they enter the mesh at one site.

    mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids of 512-token blocks (Mooncake, FAST'25)
    azure      CSV: TIMESTAMP, ContextTokens, GeneratedTokens; no prefix identity (Azure LLM inference trace 2023)
    synthetic  conversations of several turns with a shared system prompt, Poisson arrivals, log-normal lengths
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from mesh.errors import InvalidRequest

MOONCAKE_BLOCK_TOKENS = 512
_MOST_TOKENS = 10_000_000
_MOST_REQUESTS = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request. `blocks` are the identities of its prompt's full blocks of `block_tokens`; equal ones at equal
    places behind equal ones are one prefix."""

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    session: int = 0
    label: str = "public"


def scaled(trace: Sequence[TraceRequest], rate_per_s: float) -> list[TraceRequest]:
    """The trace with its arrivals compressed or stretched to this mean rate."""
    if not rate_per_s > 0:
        raise InvalidRequest(f"a rate is above 0 requests/s, got {rate_per_s}", field="rate")
    factor = mean_rate(trace) / rate_per_s
    return [replace(r, arrival_s=r.arrival_s * factor) for r in trace]


def mean_rate(trace: Sequence[TraceRequest]) -> float:
    """Requests per second over the trace. Raises InvalidRequest for one without a duration."""
    if len(trace) < 2 or trace[-1].arrival_s <= trace[0].arrival_s:
        raise InvalidRequest("a trace needs at least two requests at different times", field="trace")
    return len(trace) / (trace[-1].arrival_s - trace[0].arrival_s)


def with_arrivals(trace: Sequence[TraceRequest], times: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The requests of one trace at the times of another, in order; that one is repeated where it is too short."""
    if len(times) < len(trace):
        times = repeated(times, len(trace))
    return [replace(r, arrival_s=t.arrival_s) for r, t in zip(trace, times, strict=False)]


def repeated(trace: Sequence[TraceRequest], n_requests: int) -> list[TraceRequest]:
    """The trace over and over until it has `n_requests`; each time its sessions and blocks are new ones."""
    span_s = trace[-1].arrival_s + 1.0 / mean_rate(trace)
    most_block = 1 + max((max(r.blocks, default=0) for r in trace), default=0)
    most_session = 1 + max(r.session for r in trace)
    out: list[TraceRequest] = []
    for round_number in range(math.ceil(n_requests / len(trace))):
        blocks, sessions = round_number * most_block, round_number * most_session
        for r in trace[: n_requests - len(out)]:
            moved = tuple(b + blocks for b in r.blocks) if round_number else r.blocks
            out.append(
                replace(
                    r,
                    index=len(out),
                    arrival_s=r.arrival_s + round_number * span_s,
                    blocks=moved,
                    session=r.session + sessions,
                )
            )
    return out


def read_trace(path: Path, *, limit: int = _MOST_REQUESTS) -> list[TraceRequest]:
    """A trace by its name: .jsonl is Mooncake's form, .csv is Azure's. Raises InvalidRequest with the line."""
    readers = {".jsonl": _read_mooncake, ".csv": _read_azure}
    reader = readers.get(path.suffix)
    if reader is None:
        raise InvalidRequest(f"a trace is a .jsonl or .csv file, got {path.name!r}", field="trace")
    found: list[TraceRequest] = []
    try:
        for request in reader(path):
            found.append(replace(request, index=len(found)))
            if len(found) >= limit:
                break
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"cannot read the trace {path}: {exc}", field="trace") from exc
    if not found:
        raise InvalidRequest(f"the trace {path} has no requests", field="trace")
    return sorted(found, key=lambda r: r.arrival_s)


def _read_mooncake(path: Path) -> Iterator[TraceRequest]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                tokens, output = _tokens(row["input_length"]), _tokens(row["output_length"])
                ids = [int(i) for i in row["hash_ids"]]
                arrival_s = _time(float(row["timestamp"]) / 1000.0)
            except (ValueError, KeyError, TypeError) as exc:
                raise InvalidRequest(f"{path.name}, line {number}: {exc}", field="trace") from exc
            # The first block is a system prompt that nearly all share; the next one tells conversations apart.
            session = ids[1] if len(ids) > 1 else (ids[0] if ids else number)
            yield TraceRequest(
                index=0,
                arrival_s=arrival_s,
                prompt_tokens=tokens,
                output_tokens=output,
                blocks=tuple(ids[: tokens // MOONCAKE_BLOCK_TOKENS]),
                session=session,
            )


def _read_azure(path: Path) -> Iterator[TraceRequest]:
    with path.open(encoding="utf-8", newline="") as lines:
        first: datetime | None = None
        for number, row in enumerate(csv.DictReader(lines), start=2):
            try:
                # seven digits of a second's fraction, of which Python reads six
                moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
                tokens, output = _tokens(row["ContextTokens"]), _tokens(row["GeneratedTokens"])
            except (ValueError, KeyError, TypeError) as exc:
                raise InvalidRequest(f"{path.name}, line {number}: {exc}", field="trace") from exc
            first = first or moment
            yield TraceRequest(
                index=0,
                arrival_s=_time((moment - first).total_seconds()),
                prompt_tokens=tokens,
                output_tokens=output,
                session=number,
            )


def _tokens(value: object) -> int:
    number = int(str(value))
    if not 0 <= number <= _MOST_TOKENS:
        raise ValueError(f"{number} tokens are not 0 to {_MOST_TOKENS}")
    return max(number, 1)


def _time(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{value} is no time")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """A made-up load. Turns of a conversation carry everything said before; `labels` are drawn per conversation."""

    n_requests: int = 2000
    rate_per_s: float = 4.0
    system_tokens: int = 512
    first_tokens: float = 1200.0  # median of a first message
    later_tokens: float = 300.0  # and of those behind it
    output_tokens: float = 220.0
    sigma: float = 0.9  # of the logarithm of lengths
    turns: float = 3.0  # mean
    think_s: float = 20.0  # mean time between an answer's end and the next turn
    most_tokens: int = 32_000
    block_tokens: int = 64
    labels: tuple[str, ...] = ("public",)
    seed: int = 1


def synthetic(spec: Synthetic) -> list[TraceRequest]:
    """A synthetic trace; the same for the same spec. Raises InvalidRequest for one that makes no sense."""
    if spec.n_requests < 1 or not spec.rate_per_s > 0 or spec.block_tokens < 1 or spec.turns < 1 or not spec.labels:
        raise InvalidRequest("a synthetic trace needs requests, a rate, turns, labels and blocks", field="trace")
    rng = random.Random(spec.seed)
    out: list[TraceRequest] = []
    session, start_s, next_block = 0, 0.0, 1 + spec.system_tokens // spec.block_tokens
    while len(out) < spec.n_requests:
        start_s += rng.expovariate(spec.rate_per_s / spec.turns)
        at_s, tokens, label = start_s, spec.system_tokens, rng.choice(spec.labels)
        blocks = list(range(spec.system_tokens // spec.block_tokens))
        for turn in range(1 + _poisson(rng, spec.turns - 1)):
            median = spec.first_tokens if turn == 0 else spec.later_tokens
            tokens = min(spec.most_tokens, tokens + _length(rng, median, spec.sigma))
            while len(blocks) < tokens // spec.block_tokens:
                blocks.append(next_block)
                next_block += 1
            output = _length(rng, spec.output_tokens, spec.sigma)
            out.append(
                TraceRequest(
                    index=0,
                    arrival_s=at_s,
                    prompt_tokens=max(tokens, 1),
                    output_tokens=output,
                    blocks=tuple(blocks),
                    block_tokens=spec.block_tokens,
                    session=session,
                    label=label,
                )
            )
            tokens += output
            at_s += 0.03 * output + rng.expovariate(1.0 / spec.think_s)
        session += 1
    out.sort(key=lambda r: r.arrival_s)
    return [replace(r, index=i) for i, r in enumerate(out[: spec.n_requests])]


def _length(rng: random.Random, median: float, sigma: float) -> int:
    return max(1, min(100_000, round(median * math.exp(rng.gauss(0.0, sigma)))))


def _poisson(rng: random.Random, mean: float) -> int:
    """Knuth's product of uniforms; means are small here."""
    limit, k, product = math.exp(-mean), 0, rng.random()
    while product > limit:
        k += 1
        product *= rng.random()
    return k
