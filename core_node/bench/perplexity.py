"""`kvmesh bench perplexity`: what do int8 weights lose, through the kernels that serve them?

Windows of a text are computed by the compiled step, once with bf16 and once with int8 weights. Each position of a
window is a row of its own over one block table, so a step gives the logits of all of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from core_node.engine.blocks import blocks_for
from core_node.engine.gguf_weights import GgufWeights
from core_node.engine.kernel_step import KernelStep
from core_node.engine.kv_pool import KvPool
from core_node.engine.scheduler import Chunk
from core_node.engine.sequence import Sequence
from mesh.bench.types import BenchContext, BenchResult, Cell, Goal
from mesh.errors import InvalidRequest
from mesh.kv.geometry import KvDtype
from mesh.model.catalogue import DEMO_MODEL, find_model
from mesh.model.description import ModelDescription, describe
from mesh.model.tokenizer import load_tokenizer
from mesh.node.engine import RunId

_STEP_TOKENS = 128
_CPU = torch.device("cpu")


class PerplexityBench:
    """See the module's docstring."""

    name = "perplexity"
    question = "Perplexity with int8 weights to that with bf16 weights, as a ratio, through the kernels?"
    defaults: Mapping[str, Cell] = {
        "model": DEMO_MODEL,
        "text": "../shared/data/wikitext2_valid.txt",
        "windows": 16,
        "window_tokens": 512,
        "threads": 2,
        "seed": 1,
    }

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; under a minute with the defaults on two quiet cores. Raises InvalidRequest or NotImplementedHere."""
        return await asyncio.to_thread(_run, context)


def _run(context: BenchContext) -> BenchResult:
    description, path = describe(find_model(context.text("model"))), Path(context.text("text"))
    if not path.is_file():
        raise InvalidRequest(f"text {path} is not there: give another with --set text=FILE", field="text")
    n, length = context.count("windows"), context.count("window_tokens")
    ids = load_tokenizer(description.path).encode(path.read_text(encoding="utf-8")[: n * length * 8])
    windows = [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)][:n]
    if len(windows) < n:
        raise InvalidRequest(f"{path} has {len(ids)} tokens, {n} windows need {n * length}", field="windows")
    rows: list[Mapping[str, Cell]] = []
    for done, int8 in enumerate((False, True)):
        context.progress(done, 2, "precisions")
        name, nll = _mean_nll(description, windows, int8=int8, n_threads=context.count("threads"))
        rows.append(
            {
                "weights": "int8" if int8 else "bf16",
                "backend": name,
                "predictions": n * (length - 1),
                "perplexity": round(math.exp(nll), 4),
            }
        )
    ratio = float(str(rows[1]["perplexity"])) / float(str(rows[0]["perplexity"]))
    return BenchResult(rows=tuple(rows), goals=(Goal(name="int8 to bf16 perplexity, ratio", value=ratio, goal=1.01),))


def _mean_nll(
    description: ModelDescription, windows: list[list[int]], *, int8: bool, n_threads: int
) -> tuple[str, float]:
    """The backend's name, and the mean negative log-likelihood in nats of each window's tokens but its first."""
    length = len(windows[0])
    model = KernelStep.load(
        description,
        GgufWeights(description.path),
        max_positions=length,
        max_rows=_STEP_TOKENS,
        max_sequences=_STEP_TOKENS,
        n_threads=n_threads,
        int8=int8,
    )
    pool = KvPool(description.geometry, blocks_for(length), KvDtype.BF16, _CPU)
    total = 0.0
    for window in windows:
        whole = Sequence(run_id=RunId("text"), token_ids=window, root=b"", blocks=list(range(pool.n_blocks)))
        for start in range(0, length - 1, _STEP_TOKENS):
            chunks = [Chunk(whole, at, 1) for at in range(start, min(start + _STEP_TOKENS, length - 1))]
            logits = model.compute(chunks, [True] * len(chunks), pool, only_best=False)
            for i, chunk in enumerate(chunks):
                row = logits.row(i).astype(np.float64)
                top = float(row.max())
                total += top + math.log(float(np.exp(row - top).sum())) - float(row[window[chunk.stop]])
    return model.name, total / (len(windows) * (length - 1))


BENCH = PerplexityBench()
