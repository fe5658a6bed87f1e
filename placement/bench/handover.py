"""`kvmesh bench handover`: is it faster to let the core prefill and ship KV than to prefill at the edge, and does
the edge that continues from the core's KV still say what the core would have said?

Time: fresh random prompts at one edge entry, `local` and `split` in turn, over a plain and over a throttled link;
medians of the entry's own time to first token. Agreement: the core (f32) answers greedily; the edge, on imported KV
of the prompt, is then asked for each next token with the core's own answer so far (teacher forcing), and so is the
edge on its own KV. KL is over the reference's 20 best tokens and the rest as one.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

from mesh.bench.link import Direction, LinkShape
from mesh.bench.types import BenchContext, BenchResult, Cell, Goal
from mesh.bench.types import Direction as Better
from mesh.client import MeshClient
from mesh.client_types import PositionLogprobs, Tokens
from mesh.errors import InvalidRequest
from placement.bench.testbed import Testbed, running_testbed

_VOCAB_RANGE = (1000, 40_000)  # ordinary tokens of the demo model
_TOP = 20


class Handover:
    """See the module's docstring."""

    name = "handover"
    question = "Split or local: time to first token, bytes moved, and agreement with the core's own tokens?"
    defaults: Mapping[str, Cell] = {
        "prompt_tokens": "1024,2048",
        "link_mbit_per_s": "0,100",
        "rounds": 3,
        "agreement_prompts": 20,
        "agreement_prompt_tokens": 200,
        "agreement_tokens": 32,
        "text_file": "",
        "seed": 1,
    }

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; about ten minutes with the defaults on two cores."""
        rng = random.Random(context.count("seed"))
        rows: list[Mapping[str, Cell]] = []
        async with running_testbed(sites="osaka") as bed:
            for mbit in _numbers(context.text("link_mbit_per_s")):
                _shape(bed, mbit)
                for tokens in _numbers(context.text("prompt_tokens")):
                    context.progress(0, 0, f"{tokens} tokens, {_link_name(mbit)}")
                    rows.append(await _time(bed, tokens, mbit, context.count("rounds"), rng))
        goals = [
            Goal(
                name=f"ttft split/local, {row['prompt_tokens']} tokens, {row['link']}",
                value=_ratio(row),
                goal=1.0,
            )
            for row in rows
        ]
        async with running_testbed(sites="osaka", core_dtype="f32") as bed:
            agreement = await _agreement(bed, context, rng)
        goals.append(
            Goal(
                name="top-1 agreement of split with the core's own tokens (f32), teacher-forced",
                value=agreement["split_top1_ratio"],
                goal=agreement["local_top1_ratio"],
                direction=Better.AT_LEAST,
            )
        )
        notes = tuple(f"{key} = {value:.4g}" for key, value in agreement.items())
        return BenchResult(rows=tuple(rows), goals=tuple(goals), notes=notes)


async def _time(bed: Testbed, tokens: int, mbit: int, rounds: int, rng: random.Random) -> Mapping[str, Cell]:
    edge = bed.edges["osaka"]
    ttft_s: dict[str, list[float]] = {"local": [], "split": []}
    moved: list[int] = []
    for number in range(rounds):
        shapes = ("local", "split") if number % 2 == 0 else ("split", "local")
        for shape in shapes:
            done = await edge.complete(_prompt(tokens, rng), shape=shape, max_tokens=2, temperature=0.0, label="public")
            ttft_s[shape].append(done.finish.ttft_s)
            moved += [m.kv_wire_bytes for m in done.migrations]
    return {
        "prompt_tokens": tokens,
        "link": _link_name(mbit),
        "local_ttft_s": round(statistics.median(ttft_s["local"]), 3),
        "split_ttft_s": round(statistics.median(ttft_s["split"]), 3),
        "kv_wire_bytes": max(moved, default=0),
        "rounds": rounds,
    }


async def _agreement(bed: Testbed, context: BenchContext, rng: random.Random) -> dict[str, float]:
    """Ratios and mean KL over all forced positions."""
    edge, core = bed.edges["osaka"], bed.core
    n_prompts, n_tokens = context.count("agreement_prompts"), context.count("agreement_tokens")
    prompts = await _text_prompts(core, context, n_prompts, rng)
    ways = {"split": _Score(), "local": _Score()}
    for number, prompt in enumerate(prompts):
        context.progress(number, n_prompts, "agreement")
        reference = await _next_tokens(core, prompt, label="public", shape="core", max_tokens=n_tokens)
        for way, score in ways.items():
            # A label has a cache namespace of its own: KV that was imported and KV that the edge made never meet.
            label = "internal" if way == "split" else "public"
            for i, position in enumerate(reference):
                forced = [*prompt, *(p.chosen[0] for p in reference[:i])]
                shape = way if i == 0 else "local"  # from the second token on: the edge's own decoding, on that KV
                [guess] = await _next_tokens(edge, forced, label=label, shape=shape, max_tokens=1)
                score.add(position, guess)
    facts = {"positions": float(ways["split"].positions)}
    for way, score in ways.items():
        facts[f"{way}_top1_ratio"] = score.same / score.positions
        facts[f"{way}_kl_nats"] = score.kl_nats / score.positions
    return facts


@dataclass(slots=True)
class _Score:
    """Sums over positions."""

    positions: int = 0
    same: int = 0
    kl_nats: float = 0.0

    def add(self, reference: PositionLogprobs, guess: PositionLogprobs) -> None:
        self.positions += 1
        self.same += guess.chosen[0] == reference.chosen[0]
        self.kl_nats += kl_of_best(reference.top, guess.top)


def kl_of_best(reference: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> float:
    """KL(reference || other) in nats over the reference's best tokens, and all the rest as one event. A token that
    is not among the other's best counts with the least probability that it can have there at most: the other's
    last one's, so that the figure is a lower bound."""
    there = dict(other)
    floor = min(there.values())
    total, rest_p, rest_q = 0.0, 1.0, 1.0
    for token, log_p in reference:
        log_q = there.get(token, floor)
        total += math.exp(log_p) * (log_p - log_q)
        rest_p -= math.exp(log_p)
        rest_q -= math.exp(log_q)
    if rest_p > 1e-9 and rest_q > 1e-9:
        total += rest_p * math.log(rest_p / rest_q)
    return total


async def _next_tokens(
    client: MeshClient, prompt: Sequence[int], *, label: str, shape: str, max_tokens: int
) -> list[PositionLogprobs]:
    """Greedy tokens with the best alternatives at each position."""
    found: list[PositionLogprobs] = []
    async for event in client.generate(
        list(prompt),
        label=label,
        shape=shape,
        max_tokens=max_tokens,
        temperature=0.0,
        logprobs=_TOP,
        ignore_eos=True,
    ):
        if isinstance(event, Tokens):
            found += event.logprobs
    return found


async def _text_prompts(client: MeshClient, context: BenchContext, count: int, rng: random.Random) -> list[list[int]]:
    """Stretches of running text; by default Python's own documentation, which comes with Python."""
    file, size = context.text("text_file"), context.count("agreement_prompt_tokens")
    text = await asyncio.to_thread(_read, Path(file)) if file else "\n".join(topics.topics.values())
    prompts: list[list[int]] = []
    while len(prompts) < count:
        start = rng.randrange(max(1, len(text) - 10 * size))
        ids = (await client.tokenize(text[start : start + 10 * size]))[:size]
        if len(ids) == size:
            prompts.append(ids)
    return prompts


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"cannot read {file}: {exc}", field="text_file") from exc


def _prompt(tokens: int, rng: random.Random) -> list[int]:
    return [rng.randrange(*_VOCAB_RANGE) for _ in range(tokens)]


def _shape(bed: Testbed, mbit: int) -> None:
    shape = LinkShape(rate_bit_per_s=mbit * 1e6) if mbit else LinkShape()
    for direction in Direction:
        bed.link.reshape(direction, shape)


def _link_name(mbit: int) -> str:
    return f"{mbit} Mbit/s" if mbit else "not throttled"


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(f"a list of numbers like 1024,2048 is needed, got {text!r}", field="set") from None


def _ratio(row: Mapping[str, Cell]) -> float:
    split, local = row["split_ttft_s"], row["local_ttft_s"]
    assert isinstance(split, float)
    assert isinstance(local, float)
    return split / local


BENCH = Handover()
"""Entry point of `kvmesh.benches`."""
