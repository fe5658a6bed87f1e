"""`kvmesh bench chunking`: what does a long prompt cost those who are decoding?

A prompt arrives among requests that decode. Four ways to schedule it, in turn, on one loaded model: not at all
(`quiet`), whole in one step (`whole`), cut to `max_step_tokens` (`fixed`), and cut so that a step lasts no longer than
a target (`tuned`: `target_ratio` times the quiet step). Inter-token times are those of the decoding requests, from the
prompt's arrival on; the first round teaches the fit and is dropped.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from core_node.engine.core import EngineCore
from core_node.engine.loading import load_engine
from core_node.engine.settings import CoreEngineSettings
from mesh.bench.types import BenchContext, BenchResult, Cell, Goal
from mesh.errors import InvalidRequest, MeshError
from mesh.model.catalogue import DEMO_MODEL, find_model
from mesh.node.engine import RunEvent, RunId, RunSpec, Tokens
from mesh.node.sampling import SamplingParams

_SHORT_PROMPT_TOKENS = 64
_TOKENS_BEFORE_ARRIVAL = 8
_QUIET = "quiet"


class ChunkingBench:
    """See the module's docstring."""

    name = "chunking"
    question = "A long prompt among decoding requests: what does it do to their inter-token times, cut and uncut?"
    defaults: Mapping[str, Cell] = {
        "prompt_tokens": 4096,
        "decoding": 16,
        "output_tokens": 80,
        "fixed_step_tokens": 256,
        "target_ratio": 2.0,
        "bound_ratio": 1.25,
        "rounds": 3,
        "n_threads": 0,
        "model": "",
        "seed": 1,
        "plot": "",
    }

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; minutes with the defaults on two cores."""
        return await asyncio.to_thread(_measure, context)


@dataclass(slots=True)
class _Request:
    """A run's sink: when its tokens came."""

    clock: Callable[[], float]
    token_times_s: list[float] = field(default_factory=list)
    ended: bool = False

    def put(self, item: RunEvent | MeshError) -> None:
        if isinstance(item, MeshError):
            raise item
        if isinstance(item, Tokens):
            self.token_times_s += [self.clock()] * len(item.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Inter-token times from the arrival on, and how long the prompt took to its first token (0.0: none came)."""

    inter_token_s: tuple[float, ...]
    ttft_s: float


def _measure(context: BenchContext) -> BenchResult:
    prompt_tokens, decoding = context.count("prompt_tokens"), context.count("decoding")
    if prompt_tokens < 64 or decoding < 1 or context.count("output_tokens") <= _TOKENS_BEFORE_ARRIVAL + 2:
        raise InvalidRequest("prompt_tokens is at least 64, decoding 1 and output_tokens 11", field="set")
    if context.text("plot"):
        _figure()  # not after minutes of measuring
    rng = random.Random(context.count("seed"))
    loaded = _load(context)
    whole = loaded._limits
    fixed = replace(whole, max_step_tokens=context.count("fixed_step_tokens"))
    total = 4 * (context.count("rounds") + 1)
    cores = {_QUIET: _like(loaded, whole), "whole": loaded, "fixed": _like(loaded, fixed)}
    context.progress(0, total, _QUIET)
    quiet = _round(cores[_QUIET], context, rng, with_prompt=False)
    target_s = context.number("target_ratio") * statistics.median(quiet.inter_token_s)
    cores["tuned"] = _like(loaded, replace(whole, tpot_target_s=target_s))
    rounds: dict[str, list[Round]] = {name: [] for name in cores}
    done = 0
    for number in range(context.count("rounds") + 1):
        for name, core in cores.items():
            found = _round(core, context, rng, with_prompt=name != _QUIET)
            if number:
                rounds[name].append(found)
            done += 1
            context.progress(done, total, name)
    rows = tuple(_row(name, rounds[name], rounds[_QUIET]) for name in rounds)
    if path := context.text("plot"):
        _plot(rounds, target_s, Path(path))
    p99_s = {name: _quantile([t for r in found for t in r.inter_token_s], 0.99) for name, found in rounds.items()}
    return BenchResult(
        rows=rows,
        goals=(
            Goal(
                name="tuned: p99 inter-token time to the target, ratio",
                value=p99_s["tuned"] / target_s,
                goal=context.number("bound_ratio"),
            ),
            Goal(name="tuned to whole: p99 inter-token time, ratio", value=p99_s["tuned"] / p99_s["whole"], goal=0.5),
        ),
        notes=(
            f"{loaded.info.build}; {prompt_tokens} tokens among {decoding} that decode; target {target_s * 1e3:.1f} ms",
        ),
    )


def _load(context: BenchContext) -> EngineCore:
    prompt, decoding = context.count("prompt_tokens"), context.count("decoding")
    context_tokens = prompt + 16
    output = context.count("output_tokens")
    return load_engine(
        CoreEngineSettings(
            model_path=Path(context.text("model")) if context.text("model") else find_model(DEMO_MODEL),
            model_id="chunking",
            n_threads=context.count("n_threads"),
            max_context_tokens=context_tokens,
            kv_pool_tokens=2 * context_tokens + decoding * (_SHORT_PROMPT_TOKENS + output + 32),
            max_step_tokens=prompt + decoding,
            max_running=decoding + 1,
        )
    )


def _like(core: EngineCore, limits: object) -> EngineCore:
    """Another engine over the same model and memory. Only one of them may have runs at a time, and none finds what it
    cached before: no prompt comes twice."""
    return EngineCore(core.info, core._runner, limits, core._new_stream)  # type: ignore[arg-type]


def _round(core: EngineCore, context: BenchContext, rng: random.Random, *, with_prompt: bool) -> Round:
    salt = rng.randbytes(16)
    output = context.count("output_tokens")

    def add(name: str, n_tokens: int, max_tokens: int) -> _Request:
        request = _Request(time.perf_counter)
        ids = tuple(rng.randrange(core.info.vocab_size) for _ in range(n_tokens))
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        spec = RunSpec(run_id=RunId(name), token_ids=ids, prompt_tokens=n_tokens, sampling=sampling, salt=salt)
        core.add_run(spec, request)
        return request

    decoding = [add(f"d{i}", _SHORT_PROMPT_TOKENS, output) for i in range(context.count("decoding"))]
    while min(len(d.token_times_s) for d in decoding) < _TOKENS_BEFORE_ARRIVAL:
        core.step()
    arrived_s, seen = time.perf_counter(), [len(d.token_times_s) for d in decoding]
    prompt = add("prompt", context.count("prompt_tokens"), 2) if with_prompt else None
    while core.step():
        pass
    core.check_integrity()
    times = []
    for request, n in zip(decoding, seen, strict=True):
        since = [request.token_times_s[n - 1], *request.token_times_s[n:]]
        times += [b - a for a, b in pairwise(since)]
    return Round(inter_token_s=tuple(times), ttft_s=prompt.token_times_s[0] - arrived_s if prompt is not None else 0.0)


def _row(name: str, rounds: list[Round], quiet: list[Round]) -> Mapping[str, Cell]:
    times = [t for r in rounds for t in r.inter_token_s]
    quiet_p99_s = _quantile([t for r in quiet for t in r.inter_token_s], 0.99)
    return {
        "prefill": name,
        "itl_p50_ms": round(_quantile(times, 0.5) * 1e3, 2),
        "itl_p99_ms": round(_quantile(times, 0.99) * 1e3, 2),
        "itl_max_ms": round(max(times) * 1e3, 2),
        "p99_to_quiet_ratio": round(_quantile(times, 0.99) / quiet_p99_s, 2),
        "prompt_ttft_s": round(statistics.median(r.ttft_s for r in rounds), 3) if name != _QUIET else None,
    }


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise InvalidRequest("a plot needs matplotlib: install kvmesh[bench]", field="plot") from exc
    return Figure(figsize=(8, 4))


def _plot(rounds: Mapping[str, list[Round]], target_s: float, path: Path) -> None:
    figure = _figure()
    axes = figure.subplots()
    for name, found in rounds.items():
        times_ms = sorted(t * 1e3 for r in found for t in r.inter_token_s)
        axes.plot(times_ms, [(i + 1) / len(times_ms) for i in range(len(times_ms))], label=name)
    axes.axvline(target_s * 1e3, linestyle=":", color="black", label="target")
    axes.set_xscale("log")
    axes.set_xlabel("inter-token time, ms")
    axes.set_ylabel("share of tokens")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


BENCH = ChunkingBench()
"""Entry point of `kvmesh.benches`."""
