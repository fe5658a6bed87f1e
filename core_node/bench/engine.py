"""`kvmesh bench engine`: the core engine beside other engines on the same machine, on the same work.

Each engine runs in a process of its own (core_node/bench/peers; a peer needs its own environment, see its driver) and
is driven in process: token-id prompts, greedy, end of sequence ignored. One burst at a time, engines in turn, rounds
interleaved. A fixed product and a fixed read are timed before and after each round; a round in which they moved is
dropped, since hosts drift. Prefill = prompt tokens / T(1 output token); decode = output tokens beyond the first /
(T(n) - T(1)); output = output tokens / T(n).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from core_node.bench.step_profile import profile_decode
from mesh.bench.types import BenchContext, BenchResult, Cell, Direction, Goal
from mesh.errors import Internal, InvalidRequest
from mesh.model.catalogue import DEMO_MODEL, find_model
from mesh.model.description import describe

_DRIVERS = Path(__file__).parent / "peers"
_PEERS = ("openvino", "vllm")
_PROMPT_TOKENS, _OUTPUT_TOKENS = 256, 64
_SHARED_TOKENS, _OWN_TOKENS, _SHARED_OUTPUT_TOKENS, _SHARERS = 512, 32, 32, 16
_LINE_LIMIT_BYTES = 1 << 24
_READY_TIMEOUT_S = 900.0  # vLLM compiles at its first start
_MEASURES = ("prefill_tokens_per_s", "decode_tokens_per_s", "output_tokens_per_s", "ttft_p50_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Burst:
    wall_s: float
    ttft_s: list[float]
    ids: list[list[int]]


@dataclass(slots=True, kw_only=True)
class _Engine:
    name: str
    process: Process
    ready: str = ""
    samples: dict[tuple[str, str], list[float]] = field(default_factory=dict)  # by (case, measure)

    async def burst(self, prompts: list[list[int]], max_tokens: int) -> _Burst:
        """One burst. Raises Internal if the engine died."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}).encode() + b"\n")
        answer = await self.answer()
        burst = _Burst(wall_s=answer["wall_s"], ttft_s=answer["ttft_s"], ids=answer["ids"])
        if any(len(ids) != max_tokens for ids in burst.ids):
            raise Internal(f"{self.name} did not give {max_tokens} tokens for each prompt")
        return burst

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise Internal(f"the driver of {self.name} ended with code {await self.process.wait()}; see its stderr")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def median(self, case: str, measure: str) -> float:
        return statistics.median(self.samples[case, measure])


class EngineBench:
    """See the module's docstring. `peers`: names of drivers, each with settings NAME_python (the interpreter of its
    environment) and NAME_model (its model folder)."""

    name = "engine"
    question = "Output tokens/s, prefill and TTFT of the core engine against other engines here, as ratios?"
    defaults: Mapping[str, Cell] = {
        "peers": "",
        "openvino_python": "",
        "openvino_model": "",
        "vllm_python": "",
        "vllm_model": "",
        "model": DEMO_MODEL,
        "int8": True,
        "threads": 2,
        "concurrency": "1,8,32",
        "rounds": 3,
        "probe_tolerance_ratio": 0.15,
        "plot": "",
        "seed": 1,
    }

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; minutes. Raises InvalidRequest, or Internal if an engine died."""
        model = find_model(context.text("model"))
        vocab = describe(model, model_id="bench").vocab_size
        levels = [int(c) for c in context.text("concurrency").split(",")]
        rng, rounds, dropped = random.Random(context.count("seed")), context.count("rounds"), 0
        async with AsyncExitStack() as stack:
            engines = [await _start(stack, name, command) for name, command in _commands(context, model).items()]
            for engine in engines:  # lazy set-up is not what is measured
                await engine.burst(_prompts(rng, vocab, 2, _PROMPT_TOKENS), 4)
            for done in range(rounds):
                context.progress(done, rounds, "rounds")
                before = await asyncio.to_thread(_probe, context.count("threads"))
                found = await _round(engines, levels, rng, vocab)
                after = await asyncio.to_thread(_probe, context.count("threads"))
                moved = max(max(a, b) / min(a, b) - 1 for a, b in zip(before, after, strict=True))
                if moved > context.number("probe_tolerance_ratio"):
                    dropped += 1
                    continue
                for engine, case, measure, value in found:
                    engine.samples.setdefault((case, measure), []).append(value)
        notes = [f"{e.name}: {e.ready}" for e in engines]
        notes.append(f"{dropped} of {rounds} rounds dropped: the machine's speed moved meanwhile")
        if dropped == rounds:
            return BenchResult(rows=(), notes=tuple(notes))
        read_bytes_per_s, flop_per_s = await asyncio.to_thread(_limits, context.count("threads"))
        notes += profile_decode(model, context.count("threads"), read_bytes_per_s)
        notes.append(f"limits: {read_bytes_per_s / 1e9:.1f} GB/s of reads, {flop_per_s / 1e12:.2f} TFLOP/s bf16")
        if path := context.text("plot"):
            _plot(engines, Path(path))
        return BenchResult(rows=tuple(_rows(engines)), goals=tuple(_goals(engines)), notes=tuple(notes))


def _commands(context: BenchContext, model: Path) -> dict[str, list[str]]:
    threads = str(context.count("threads"))
    ours = [sys.executable, str(_DRIVERS / "ours_driver.py"), str(model), threads]
    commands = {"kvmesh": [*ours, "bf16"]}
    if context.settings["int8"]:
        commands["kvmesh-int8"] = [*ours, "int8"]
    for name in filter(None, context.text("peers").split(",")):
        if name not in _PEERS:
            raise InvalidRequest(f"no driver for {name!r}; there are {', '.join(_PEERS)}", field="peers")
        python, folder = context.text(f"{name}_python"), context.text(f"{name}_model")
        if not Path(python).is_file() or not Path(folder).is_dir():
            raise InvalidRequest(f"set {name}_python and {name}_model; {name}_driver.py says how", field="peers")
        commands[name] = [python, str(_DRIVERS / f"{name}_driver.py"), folder, threads]
    return commands


async def _start(stack: AsyncExitStack, name: str, command: list[str]) -> _Engine:
    environment = dict(os.environ)
    if name.startswith("kvmesh"):
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, env=environment, limit=_LINE_LIMIT_BYTES
    )
    stack.push_async_callback(_stop, process)
    engine = _Engine(name=name, process=process)
    async with asyncio.timeout(_READY_TIMEOUT_S):
        engine.ready = str((await engine.answer())["ready"])
    return engine


async def _stop(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def _round(
    engines: list[_Engine], levels: list[int], rng: random.Random, vocab: int
) -> list[tuple[_Engine, str, str, float]]:
    found: list[tuple[_Engine, str, str, float]] = []
    for n in levels:
        for engine in engines:
            first = await engine.burst(_prompts(rng, vocab, n, _PROMPT_TOKENS), 1)
            whole = await engine.burst(_prompts(rng, vocab, n, _PROMPT_TOKENS), _OUTPUT_TOKENS)
            decoding_s = max(whole.wall_s - first.wall_s, 1e-9)
            values = (
                n * _PROMPT_TOKENS / first.wall_s,
                n * (_OUTPUT_TOKENS - 1) / decoding_s,
                n * _OUTPUT_TOKENS / whole.wall_s,
                statistics.median(whole.ttft_s),
            )
            found += [(engine, f"{n} at once", m, v) for m, v in zip(_MEASURES, values, strict=True)]
    for engine in engines:
        shared = _prompts(rng, vocab, 1, _SHARED_TOKENS)[0]
        for case in ("shared prefix, cold", "shared prefix, warm"):
            prompts = [shared + own for own in _prompts(rng, vocab, _SHARERS, _OWN_TOKENS)]
            burst = await engine.burst(prompts, _SHARED_OUTPUT_TOKENS)
            found.append((engine, case, _MEASURES[2], _SHARERS * _SHARED_OUTPUT_TOKENS / burst.wall_s))
            found.append((engine, case, _MEASURES[3], statistics.median(burst.ttft_s)))
    return found


def _prompts(rng: random.Random, vocab: int, n: int, n_tokens: int) -> list[list[int]]:
    return [[rng.randrange(vocab) for _ in range(n_tokens)] for _ in range(n)]


def _probe(threads: int) -> tuple[float, float]:
    """Seconds of a fixed product and of a fixed read, each the best of three."""
    torch.set_num_threads(threads)
    a, memory = torch.ones(1024, 1024, dtype=torch.bfloat16), torch.zeros(32 << 20, dtype=torch.int64)
    best = [float("inf"), float("inf")]
    for _ in range(3):
        started = time.perf_counter()
        torch.mm(a, a)
        between = time.perf_counter()
        memory.sum()
        best = [min(best[0], between - started), min(best[1], time.perf_counter() - between)]
    return best[0], best[1]


def _limits(threads: int) -> tuple[float, float]:
    product_s, read_s = _probe(threads)
    return (32 << 20) * 8 / read_s, 2 * 1024**3 / product_s


def _rows(engines: list[_Engine]) -> list[Mapping[str, Cell]]:
    ours, peers = engines[0], [e for e in engines if not e.name.startswith("kvmesh")]
    rows: list[Mapping[str, Cell]] = []
    for case in dict.fromkeys(case for case, _ in ours.samples):
        for engine in engines:
            row: dict[str, Cell] = {"case": case, "engine": engine.name}
            for measure in _MEASURES:
                row[measure] = round(engine.median(case, measure), 3) if (case, measure) in engine.samples else None
            best = max((p.median(case, _MEASURES[2]) for p in peers), default=None)
            row["ratio_to_best_peer"] = round(engine.median(case, _MEASURES[2]) / best, 3) if best else None
            rows.append(row)
    return rows


def _goals(engines: list[_Engine]) -> list[Goal]:
    by_name = {e.name: e for e in engines}
    ours, int8 = by_name["kvmesh"], by_name.get("kvmesh-int8")
    peers = [e for e in engines if not e.name.startswith("kvmesh")]
    goals = []
    for case in dict.fromkeys(case for case, _ in ours.samples) if peers else ():

        def ratio(measure: str, case: str = case) -> float:
            return ours.median(case, measure) / max(p.median(case, measure) for p in peers)

        cold = case.endswith("cold")
        goals.append(
            Goal(
                name=f"{case}: output tokens/s to the best peer's, ratio",
                value=ratio(_MEASURES[2]),
                goal=1.0 if cold else 1.15,
                direction=Direction.AT_LEAST,
            )
        )
        if (case, _MEASURES[0]) in ours.samples:
            name = f"{case}: prefill tokens/s to the best peer's, ratio"
            goals.append(Goal(name=name, value=ratio(_MEASURES[0]), goal=1.0, direction=Direction.AT_LEAST))
        best_ttft = min(p.median(case, _MEASURES[3]) for p in peers)
        name = f"{case}: TTFT p50 to the best peer's, ratio"
        goals.append(Goal(name=name, value=ours.median(case, _MEASURES[3]) / best_ttft, goal=1.0))
    if int8 is not None and ("1 at once", _MEASURES[1]) in ours.samples:
        value = int8.median("1 at once", _MEASURES[1]) / ours.median("1 at once", _MEASURES[1])
        goals.append(
            Goal(name="int8 to bf16 decode, 1 at once, ratio", value=value, goal=1.5, direction=Direction.AT_LEAST)
        )
    return goals


def _plot(engines: list[_Engine], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise InvalidRequest("a plot needs matplotlib: install kvmesh[bench]", field="plot") from exc
    cases = list(dict.fromkeys(case for case, _ in engines[0].samples))
    figure = Figure(figsize=(9, 4))
    axes = figure.subplots()
    width = 0.8 / len(engines)
    for i, engine in enumerate(engines):
        values = [engine.median(case, _MEASURES[2]) for case in cases]
        axes.bar([x + i * width for x in range(len(cases))], values, width, label=engine.name)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(cases))], cases)
    axes.set_ylabel("output tokens/s")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


BENCH = EngineBench()
