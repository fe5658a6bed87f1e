"""`kvmesh bench roofline`: how near are decode and prefill to what the device allows?

A model of a given shape with random weights (8 billion parameters by default) runs single steps on the device, in the
engine's own step model. A decode step must read all weights and the KV of all its sequences: its limit is those bytes
over the measured rate of reading memory. A prefill step must multiply: its limit is its operations over the measured
rate of a large bf16 product. Both rates are probed on the same device before and after.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from core_node.engine.blocks import blocks_for
from core_node.engine.kv_pool import KvPool
from core_node.engine.loading import kv_bytes_per_token
from core_node.engine.models import load_model
from core_node.engine.runner import StepModel
from core_node.engine.scheduler import Chunk
from core_node.engine.sequence import Sequence
from core_node.engine.settings import CoreEngineSettings
from core_node.engine.weights import expected_shapes, n_parameters
from mesh.bench.types import BenchContext, BenchResult, Cell, Direction, Goal
from mesh.errors import InvalidRequest, Overloaded
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.machine import available_bytes, usable_threads
from mesh.model.description import ModelDescription
from mesh.node.engine import RunId

_SHAPES: Mapping[str, Mapping[str, int]] = {
    "8b": {"n_layers": 32, "hidden_size": 4096, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "ffn_size": 14336,
           "vocab_size": 128_256},
    "1b": {"n_layers": 16, "hidden_size": 2048, "n_heads": 32, "n_kv_heads": 8, "head_dim": 64, "ffn_size": 8192,
           "vocab_size": 128_256},
    "135m": {"n_layers": 30, "hidden_size": 576, "n_heads": 9, "n_kv_heads": 3, "head_dim": 64, "ffn_size": 1536,
             "vocab_size": 49_152},
    "tiny": {"n_layers": 2, "hidden_size": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "ffn_size": 96,
             "vocab_size": 512},
}  # fmt: skip
_PROBE_BYTES = 1 << 28
_PROBE_SIZE = {"cpu": 1024, "cuda": 8192}
_PROBES = 5
_DECODE_GOAL_RATIO, _PREFILL_GOAL_RATIO = 1.25, 0.6


class RooflineBench:
    """See the module's docstring."""

    name = "roofline"
    question = "How near are decode and prefill to the device's memory and matrix rates?"
    defaults: Mapping[str, Cell] = {
        "device": "cuda",
        "shape": "8b",
        "batches": "1,2,4,8,16,32,64",
        "context_tokens": 2048,
        "prefill_tokens": 2048,
        "steps": 20,
        "threads": 0,
        "seed": 1,
    }

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; a minute or two on a device that is meant for it."""
        device = _device(context.text("device"))
        batches = [int(text) for text in context.text("batches").split(",")]
        if min(batches) < 1 or context.text("shape") not in _SHAPES:
            raise InvalidRequest(f"shape is one of {', '.join(_SHAPES)}, batches are at least 1", field="shape")
        n_threads = context.count("threads") or usable_threads()
        torch.set_num_threads(n_threads)
        d = _description(_SHAPES[context.text("shape")], context.count("context_tokens") + context.count("steps") + 2)
        positions = max(context.count("context_tokens") + 2, context.count("prefill_tokens"))
        pool_tokens = max(blocks_for(positions) * 16 * max(batches), positions)
        _check_room(d, pool_tokens, device)
        context.progress(0, len(batches) + 2, "weights")
        settings = CoreEngineSettings(
            model_path=d.path,
            model_id=d.model_id,
            device=str(device),
            max_step_tokens=max(context.count("prefill_tokens"), *batches),
            max_running=max(batches),
        )
        torch.manual_seed(context.count("seed"))
        model, backend = load_model(settings, d, RandomWeights(d), device, positions, KvDtype.BF16, n_threads)
        pool = KvPool(d.geometry, blocks_for(pool_tokens), KvDtype.BF16, device)
        first = _rates(device)
        steps = Steps(model, pool, d, device, context.count("steps"))
        rows: list[Mapping[str, Cell]] = []
        for number, batch in enumerate(batches):
            context.progress(1 + number, len(batches) + 2, f"decode of {batch}")
            rows.append(_decode_row(steps, batch, context.count("context_tokens"), first[0]))
        context.progress(1 + len(batches), len(batches) + 2, "prefill")
        rows.append(_prefill_row(steps, context.count("prefill_tokens"), first[1]))
        last = _rates(device)
        notes = (
            f"{context.text('shape')}: {n_parameters(d):,} parameters with random weights on {device}, "
            f"{backend.name}: {backend.reason}; {n_threads} threads",
            f"memory reads {first[0] / 1e9:.1f} GB/s before and {last[0] / 1e9:.1f} after, bf16 products "
            f"{first[1] / 1e12:.3f} Tflop/s before and {last[1] / 1e12:.3f} after",
        )
        return BenchResult(rows=tuple(rows), goals=_goals(rows), notes=notes)


class RandomWeights:
    """A WeightSource of a described model that is on no disk."""

    def __init__(self, description: ModelDescription) -> None:
        self._shapes = expected_shapes(description)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def load(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        return torch.empty(shape, dtype=torch.bfloat16).normal_(std=shape[1] ** -0.5)

    def size_bytes(self, name: str) -> int:
        return 2 * torch.Size(self._shapes[name]).numel()


class Steps:
    """Times single steps of one model."""

    def __init__(
        self, model: StepModel, pool: KvPool, description: ModelDescription, device: torch.device, n_steps: int
    ) -> None:
        self._model = model
        self._pool = pool
        self.description = description
        self._device = device
        self._n_steps = n_steps

    def median_s(self, chunks: list[Chunk]) -> float:
        """Of computing `chunks` again and again, after two that do not count."""

        def once() -> None:
            self._model.compute(chunks, [True] * len(chunks), self._pool, only_best=True)

        return statistics.median(_timed(once, self._device, self._n_steps, warm_ups=2))

    def sequences(self, n: int, n_tokens: int) -> list[Sequence]:
        """`n` sequences with blocks of their own."""
        size, vocab = blocks_for(n_tokens), self.description.vocab_size
        return [
            Sequence(
                run_id=RunId(str(i)),
                token_ids=[(31 * i + 7 * j) % vocab for j in range(n_tokens)],
                root=b"",
                blocks=list(range(i * size, (i + 1) * size)),
            )
            for i in range(n)
        ]


def read_bytes(d: ModelDescription, batch: int, context_tokens: int) -> int:
    """What a decode step must read: every matrix once (of the embedding a row a sequence), and the sequences' KV."""
    table = 0 if d.tied_embeddings else d.vocab_size * d.hidden_size
    rows = batch * d.hidden_size
    return 2 * (n_parameters(d) - table + rows) + batch * context_tokens * kv_bytes_per_token(d.geometry, KvDtype.BF16)


def operations(d: ModelDescription, n_tokens: int) -> int:
    """Multiplications and additions of a prefill of `n_tokens` that wants the last token's logits."""
    table = d.vocab_size * d.hidden_size
    matrices = n_parameters(d) - table * (1 if d.tied_embeddings else 2)
    attention = 2 * d.n_layers * d.n_heads * d.head_dim * n_tokens * (n_tokens + 1)  # half of a square, two products
    return 2 * matrices * n_tokens + attention + 2 * table


def _decode_row(steps: Steps, batch: int, context_tokens: int, bytes_per_s: float) -> Mapping[str, Cell]:
    sequences = steps.sequences(batch, context_tokens)
    took_s = steps.median_s([Chunk(s, context_tokens - 1, 1) for s in sequences])
    limit_s = read_bytes(steps.description, batch, context_tokens) / bytes_per_s
    return {"step": "decode", "sequences": batch, "tokens": batch, "context_tokens": context_tokens,
            "took_ms": took_s * 1e3, "limit_ms": limit_s * 1e3, "times_the_limit": took_s / limit_s,
            "share_of_the_limit": limit_s / took_s}  # fmt: skip


def _prefill_row(steps: Steps, n_tokens: int, operations_per_s: float) -> Mapping[str, Cell]:
    took_s = steps.median_s([Chunk(steps.sequences(1, n_tokens)[0], 0, n_tokens)])
    limit_s = operations(steps.description, n_tokens) / operations_per_s
    return {"step": "prefill", "sequences": 1, "tokens": n_tokens, "context_tokens": n_tokens,
            "took_ms": took_s * 1e3, "limit_ms": limit_s * 1e3, "times_the_limit": took_s / limit_s,
            "share_of_the_limit": limit_s / took_s}  # fmt: skip


def _goals(rows: list[Mapping[str, Cell]]) -> tuple[Goal, ...]:
    return tuple(
        Goal(name=f"decode of {row['sequences']}: times the limit", value=float(str(row["times_the_limit"])),
             goal=_DECODE_GOAL_RATIO)
        if row["step"] == "decode"
        else Goal(name="prefill: share of the matrix rate", value=float(str(row["share_of_the_limit"])),
                  goal=_PREFILL_GOAL_RATIO, direction=Direction.AT_LEAST)
        for row in rows
    )  # fmt: skip


def _rates(device: torch.device) -> tuple[float, float]:
    """Bytes read a second and operations a second, the best of some tries each."""
    data = torch.ones(_PROBE_BYTES // 4, device=device)
    read_s = min(_timed(lambda: data.sum(), device, _PROBES, warm_ups=1))
    n = _PROBE_SIZE[device.type]
    a = torch.randn(n, n, device=device).bfloat16()
    if device.type == "cpu":
        a = a.float()  # where bf16 is emulated its products say nothing of the processor
    product_s = min(_timed(lambda: a @ a, device, _PROBES, warm_ups=1))
    return _PROBE_BYTES / read_s, 2 * n**3 / product_s


def _timed(function: Callable[[], object], device: torch.device, n: int, *, warm_ups: int) -> Iterator[float]:
    for i in range(n + warm_ups):
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= warm_ups:
            yield time.perf_counter() - started


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as exc:
        raise InvalidRequest(
            f"device {name!r} cannot be used: {exc}; on a CPU try --set device=cpu --set shape=135m --set batches=1,8",
            field="device",
        ) from exc
    return device


def _check_room(d: ModelDescription, pool_tokens: int, device: torch.device) -> None:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    needed = 2 * n_parameters(d) + pool_tokens * kv_bytes_per_token(d.geometry, KvDtype.BF16)
    if needed > free:
        raise Overloaded(
            f"shape {d.model_id} with its KV takes {needed >> 20} MiB, {free >> 20} MiB are free on {device}; take a "
            f"smaller shape ({', '.join(_SHAPES)}), fewer batches or a shorter context"
        )


def _description(shape: Mapping[str, int], context_tokens: int) -> ModelDescription:
    tied = shape["vocab_size"] < 100_000
    geometry = KvGeometry(
        architecture="llama",
        n_layers=shape["n_layers"],
        n_kv_heads=shape["n_kv_heads"],
        head_dim=shape["head_dim"],
        rope_base=500_000.0,
        rope_scaling="none",
        tokenizer_hash="",
    )
    name = next(name for name, known in _SHAPES.items() if known is shape)
    return ModelDescription(
        model_id=name, path=Path(f"random-{name}"), architecture="llama", rope_base=500_000.0, rope_scaling="none",
        norm_eps=1e-5, context_tokens=context_tokens, eos_token_ids=frozenset(), bos_token_id=None, add_bos=False,
        tied_embeddings=tied, weights_dtype="BF16", weights_lineage="random", chat_template=None, geometry=geometry,
        **shape,
    )  # fmt: skip


BENCH = RooflineBench()
