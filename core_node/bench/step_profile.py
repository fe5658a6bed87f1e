"""Where each microsecond of a decode step goes: the kernels' phases, and what Python does around them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from core_node.engine.kernel_step import KernelStep
from core_node.engine.loading import load_engine
from core_node.engine.settings import CoreEngineSettings
from core_node.kernels.llama_step import PHASES
from mesh.errors import MeshError
from mesh.node.engine import RunEvent, RunId, RunSpec
from mesh.node.sampling import SamplingParams

_PROMPT_TOKENS, _STEPS = 256, 60


class _Nobody:
    def put(self, item: RunEvent | MeshError) -> None: ...


def profile_decode(model: Path, threads: int, read_bytes_per_s: float) -> list[str]:
    """Lines for people, of steps that decode 1 and 32 sequences. Empty where the kernels cannot run."""
    core = load_engine(
        CoreEngineSettings(
            model_path=model, model_id="profile", n_threads=threads, kv_pool_tokens=16_384, max_context_tokens=1024
        )
    )
    step_model = core._runner._model
    if not isinstance(step_model, KernelStep):
        return []
    weights_bytes = step_model.step.weight_bytes
    lines = []
    for n in (1, 32):
        for i in range(n):
            ids = tuple((7 * i + 13 * j) % core.info.vocab_size for j in range(_PROMPT_TOKENS))
            sampling = SamplingParams(max_tokens=2 * _STEPS, seed=0, temperature=0.0, ignore_eos=True)
            spec = RunSpec(
                run_id=RunId(f"{n}-{i}"), token_ids=ids, prompt_tokens=len(ids), sampling=sampling, salt=bytes([n])
            )
            core.add_run(spec, _Nobody())
        while core.load().waiting_prefill_tokens:
            core.step()
        phases, walls = [], []
        for _ in range(_STEPS):
            step_model.step.phase_ns = np.zeros(len(PHASES), dtype=np.int64)
            started = time.perf_counter()
            core.step()
            walls.append((time.perf_counter() - started) * 1e6)
            phases.append(step_model.step.phase_ns / 1e3)
        step_model.step.phase_ns = None
        wall, spent = float(np.median(walls)), np.median(np.stack(phases), axis=0)
        python = wall - float(spent.sum())
        parts = ", ".join(f"{name} {us:.0f}" for name, us in zip(PHASES, spent.tolist(), strict=True))
        lines.append(f"decode step of {n}: {wall:.0f} us = {parts}, Python {python:.0f} ({python / wall:.1%})")
        if n == 1:
            least = weights_bytes / read_bytes_per_s * 1e6
            lines.append(
                f"reading its {weights_bytes >> 20} MiB of weights once takes {least:.0f} us, {least / wall:.0%} of it"
            )
        for i in range(n):
            core.release(RunId(f"{n}-{i}"))
    return lines
