"""`kvmesh bench step`: where each microsecond of a step goes, and how near the machine's limit that is.

Steps of the real engine that decode 1, 8 and 32 sequences and one that prefills, each the quickest of many: the
kernels' phases, what the scheduler, the arrays for the kernels, sampling, and book-keeping with events cost, and apart
from that detokenising (the entry does it, on another core). A phase's limit is the larger of its bytes over the read
bandwidth and its operations over the product rate that were measured, the best between the kinds of steps, as hosts
drift. What is not the kernels is measured in CPU time of the engine's thread, so other processes do not count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from core_node.bench.engines.probe import Speed, limits
from core_node.engine.core import EngineCore
from core_node.engine.kernel_step import KernelStep
from core_node.engine.loading import load_engine
from core_node.engine.settings import CoreEngineSettings
from core_node.kernels.llama_step import PHASES, StepShape
from mesh.bench.types import BenchContext, BenchResult, Cell, Goal
from mesh.errors import InvalidRequest, MeshError
from mesh.model.catalogue import DEMO_MODEL, find_model
from mesh.model.tokenizer import load_tokenizer
from mesh.node.engine import RunEvent, RunId, RunSpec
from mesh.node.sampling import SamplingParams

_PROMPT_TOKENS, _STEPS, _PREFILL_STEPS = 256, 24, 4
_BATCHES = (1, 8, 32)
_PYTHON = ("schedule", "arrays", "sampling", "book-keeping")
_KV_BYTES = 2  # of an element


class _Nobody:
    def put(self, item: RunEvent | MeshError) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One kind of step. `phases_us`: of the quickest step; `python_us`: medians of CPU time; `context_tokens`: the mean
    number of positions that a row attends to."""

    work: str
    rows: int
    logit_rows: int
    context_tokens: float
    wall_us: float
    phases_us: Mapping[str, float]
    kernels_cpu_us: float  # median, of the engine's own thread
    python_us: Mapping[str, float]

    @property
    def python_ratio(self) -> float:
        """What is not the kernels, of the step, in CPU time of the engine's thread (which is one of theirs)."""
        python = sum(self.python_us.values())
        return python / (python + self.kernels_cpu_us)


class _Watch:
    """Times calls of the engine's parts on this thread, in CPU time, until it is closed."""

    def __init__(self) -> None:
        self.us: dict[str, float] = {}
        self._undo: list[Callable[[], None]] = []

    def on(self, name: str, owner: object, method: str) -> None:
        """Time `owner.method` under `name`."""
        inner = getattr(owner, method)

        def timed(*args: object, **kwargs: object) -> object:
            started = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.us[name] = self.us.get(name, 0.0) + (time.thread_time() - started) * 1e6

        setattr(owner, method, timed)
        self._undo.append(lambda: delattr(owner, method))

    def close(self) -> None:
        for undo in self._undo:
            undo()


class StepBench:
    """See the module's docstring."""

    name = "step"
    question = "Where does each microsecond of a step go, and how near is each part to the machine's limit?"
    defaults: Mapping[str, Cell] = {"model": DEMO_MODEL, "int8": False, "threads": 2, "seed": 1}

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; under a minute on two quiet cores. Raises InvalidRequest where the kernels cannot run."""
        return await asyncio.to_thread(_run, context)


def _run(context: BenchContext) -> BenchResult:
    model, threads = find_model(context.text("model")), context.count("threads")
    int8 = bool(context.settings["int8"])
    core, step_model = _load(model, threads, int8=int8)
    if step_model is None:
        raise InvalidRequest("the kernels cannot run here, so there is no profile of them", field="model")
    speeds, profiles = [limits(threads)], []
    for done, work in enumerate((*_BATCHES, 0)):
        context.progress(done, len(_BATCHES) + 1, "kinds of steps")
        profiles.append(_decode(core, step_model, work) if work else _prefill(core, step_model))
        speeds.append(limits(threads))
    speed = Speed(
        flop_per_s=max(s.flop_per_s for s in speeds), read_bytes_per_s=max(s.read_bytes_per_s for s in speeds)
    )
    shape, weight_bytes = step_model.step.shape, 1 if int8 else 2
    rows = [row for p in profiles for row in _rows(p, shape, weight_bytes, speed)]
    goals = [
        Goal(name=f"{p.work}: scheduler and book-keeping, ratio of the step", value=round(p.python_ratio, 4), goal=0.05)
        for p in profiles
        if p.work == f"decode {_BATCHES[-1]}"
    ]
    notes = (
        f"{step_model.name}, {'int8' if int8 else 'bf16'} weights, {threads} threads",
        f"limits: {speed.read_bytes_per_s / 1e9:.1f} GB/s of reads, {speed.flop_per_s / 1e9:.0f} GFLOP/s",
        f"detokenising, on the entry: {_detokenise_us(model):.1f} us a token",
    )
    return BenchResult(rows=tuple(rows), goals=tuple(goals), notes=notes)


def profile_decode(model: Path, threads: int, read_bytes_per_s: float) -> list[str]:
    """Lines for people, of steps that decode 1 and 32 sequences. Empty where the kernels cannot run."""
    core, step_model = _load(model, threads, int8=False)
    if step_model is None:
        return []
    lines = []
    for n in (_BATCHES[0], _BATCHES[-1]):
        p = _decode(core, step_model, n)
        parts = ", ".join(f"{name} {us:.0f}" for name, us in (*p.phases_us.items(), *p.python_us.items()))
        lines.append(f"decode step of {n}: {p.wall_us:.0f} us = {parts}; not kernels {p.python_ratio:.1%}")
        if n == 1:
            weights_bytes = step_model.step.weight_bytes
            least = weights_bytes / read_bytes_per_s * 1e6
            lines.append(f"reading its {weights_bytes >> 20} MiB of weights once: {least:.0f} us")
    return lines


def _least_us(speed: Speed, n_bytes: float, flop: float) -> tuple[float, str]:
    """No less than this, and what binds."""
    memory, arithmetic = n_bytes / speed.read_bytes_per_s * 1e6, flop / speed.flop_per_s * 1e6
    return max(memory, arithmetic), "memory" if memory >= arithmetic else "arithmetic"


def _load(model: Path, threads: int, *, int8: bool) -> tuple[EngineCore, KernelStep | None]:
    core = load_engine(
        CoreEngineSettings(
            model_path=model,
            model_id="profile",
            dtype="int8" if int8 else "bf16",
            n_threads=threads,
            kv_pool_tokens=16_384,
            max_context_tokens=1024,
        )
    )
    step_model = core._runner._model
    return core, step_model if isinstance(step_model, KernelStep) else None


def _add_runs(core: EngineCore, name: str, n: int) -> list[RunId]:
    names = [RunId(f"{name} {i}") for i in range(n)]
    for i, run_id in enumerate(names):
        ids = tuple((7 * i + 13 * j) % core.info.vocab_size for j in range(_PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=2 * _STEPS, seed=0, temperature=0.0, ignore_eos=True)
        spec = RunSpec(run_id=run_id, token_ids=ids, prompt_tokens=len(ids), sampling=sampling, salt=name.encode())
        core.add_run(spec, _Nobody())
    return names


def _decode(core: EngineCore, step_model: KernelStep, n: int) -> Profile:
    names = _add_runs(core, f"decode {n}", n)
    while core.load().waiting_prefill_tokens:
        core.step()
    context = np.mean([core.kv_tokens(name) for name in names]) + _STEPS / 2
    profile = _measured(core, step_model, f"decode {n}", n, float(context), _STEPS)
    for name in names:
        core.release(name)
    return profile


def _prefill(core: EngineCore, step_model: KernelStep) -> Profile:
    names = []
    for i in range(_PREFILL_STEPS):
        names += _add_runs(core, f"prefill {i}", 1)
    work = f"prefill {_PROMPT_TOKENS}"
    profile = _measured(core, step_model, work, _PROMPT_TOKENS, (_PROMPT_TOKENS + 1) / 2, _PREFILL_STEPS)
    for name in names:
        core.release(name)
    return profile


def _measured(core: EngineCore, step_model: KernelStep, work: str, rows: int, context: float, steps: int) -> Profile:
    n_logit_rows = 1 if work.startswith("prefill") else rows
    walls, phases, python, kernels = [], [], [], []
    for _ in range(steps):
        watch = _Watch()
        watch.on("schedule", core._scheduler, "schedule")
        watch.on("run", core._runner, "run")
        watch.on("compute", step_model, "compute")
        watch.on("kernels", step_model.step, "run")
        step_model.step.phase_ns = np.zeros(len(PHASES), dtype=np.int64)
        cpu, started = time.thread_time(), time.perf_counter()
        core.step()
        walls.append((time.perf_counter() - started) * 1e6)
        whole = (time.thread_time() - cpu) * 1e6
        watch.close()
        us = watch.us
        parts = (
            us["schedule"],
            us["compute"] - us["kernels"],
            us["run"] - us["compute"],
            whole - us["schedule"] - us["run"],
        )
        python.append(parts)
        phases.append(step_model.step.phase_ns / 1e3)
        kernels.append(us["kernels"])
    step_model.step.phase_ns = None
    quickest = int(np.argmin(walls))
    return Profile(
        work=work,
        rows=rows,
        logit_rows=n_logit_rows,
        context_tokens=context,
        wall_us=walls[quickest],
        phases_us=dict(zip(PHASES, phases[quickest].tolist(), strict=True)),
        kernels_cpu_us=float(np.median(kernels)),
        python_us=dict(zip(_PYTHON, np.median(np.array(python), axis=0).tolist(), strict=True)),
    )


def _rows(p: Profile, shape: StepShape, weight_bytes: int, speed: Speed) -> list[Mapping[str, Cell]]:
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    matrices = {
        "qkv": (shape.n_layers * shape.hidden * (q + 2 * kv), p.rows),
        "attention_out": (shape.n_layers * shape.hidden * q, p.rows),
        "gate_up": (shape.n_layers * shape.hidden * 2 * shape.ffn, p.rows),
        "down": (shape.n_layers * shape.hidden * shape.ffn, p.rows),
        "head": (shape.vocab * shape.hidden, p.logit_rows),
    }
    work = {name: (float(n * weight_bytes), 2.0 * n * rows) for name, (n, rows) in matrices.items()}
    # A sequence's K and V once; a prefill's rows are one sequence, whose last row sees about twice the mean.
    positions = p.context_tokens * p.rows if p.logit_rows == p.rows else p.rows
    work["attention"] = (
        positions * 2.0 * kv * _KV_BYTES * shape.n_layers,
        4.0 * q * p.context_tokens * p.rows * shape.n_layers,
    )
    rows: list[Mapping[str, Cell]] = []
    total_least = 0.0
    for name, us in p.phases_us.items():
        least, bound = _least_us(speed, *work[name]) if name in work else (0.0, "")
        total_least += least
        rows.append(_row(p.work, name, us, least, bound))
    rows += [_row(p.work, name, us, 0.0, "") for name, us in p.python_us.items()]
    rows.append(_row(p.work, "whole step", p.wall_us, total_least, ""))
    return rows


def _row(work: str, part: str, us: float, least_us: float, bound: str) -> Mapping[str, Cell]:
    return {
        "work": work,
        "part": part,
        "us": round(us, 1),
        "limit_us": round(least_us, 1) if least_us else None,
        "bound_by": bound or None,
        "share_of_limit_ratio": round(least_us / us, 3) if least_us and us else None,
    }


def _detokenise_us(model: Path) -> float:
    """CPU time of one token."""
    stream, ids = load_tokenizer(model).stream(), range(200)
    started = time.thread_time()
    for token_id in ids:
        stream.push(token_id)
    return (time.thread_time() - started) * 1e6 / len(ids)


BENCH = StepBench()
