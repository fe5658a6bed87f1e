"""The compiled step against the torch step, and against itself in other company."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from core_node.engine.blocks import blocks_for
from core_node.engine.decoder import DecoderModel
from core_node.engine.gguf_weights import GgufWeights
from core_node.engine.kernel_step import KernelStep
from core_node.engine.kv_pool import KvPool
from core_node.engine.models import rounded_to_int8
from core_node.engine.runner import TorchStep
from core_node.engine.sampler import Logits
from core_node.engine.scheduler import Chunk
from core_node.engine.sequence import Sequence
from core_node.engine.weights import ModelWeights, load_weights
from core_node.kernels.build import VARIANTS, Variant, cpu_features, library
from mesh.errors import NotImplementedHere
from mesh.kv.geometry import KvDtype
from mesh.kv.hashing import BLOCK_TOKENS
from mesh.model.description import ModelDescription, describe
from mesh.node.engine import RunId
from tests.core_node.engine.checkpoints import TinyConfig, random_weights, write_gguf

pytestmark = pytest.mark.model

CPU = torch.device("cpu")
N_BLOCKS = 96
SHAPES = {
    "gqa": TinyConfig(n_heads=4, n_kv_heads=2, head_dim=32),
    "one KV head": TinyConfig(n_heads=6, n_kv_heads=1, head_dim=32, hidden_size=96, ffn_size=160),
    "no groups": TinyConfig(n_heads=5, n_kv_heads=5, head_dim=64, n_layers=2),
    "wide heads": TinyConfig(n_heads=9, n_kv_heads=3, head_dim=96, n_layers=1, tied=False),
    "more heads than a tile": TinyConfig(n_heads=34, n_kv_heads=2, head_dim=32, n_layers=1),
}


@pytest.fixture(params=VARIANTS, ids=lambda v: v.name)
def variant(request: pytest.FixtureRequest) -> Variant:
    """Skips the test where this variant cannot run."""
    wanted: Variant = request.param
    if missing := wanted.needed - cpu_features():
        pytest.skip(f"the processor has no {', '.join(sorted(missing))}")
    try:
        library(wanted)
    except NotImplementedHere as exc:
        pytest.skip(exc.message)
    return wanted


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ModelDescription, GgufWeights]]:
    folder = tmp_path_factory.mktemp("kernels")
    made = {}
    for name, config in SHAPES.items():
        path = write_gguf(folder / f"{name}.F32.gguf", random_weights(config), config)
        made[name] = (describe(path, model_id=name), GgufWeights(path))
    return made


class Bench:
    """One model behind the kernels, a pool, and sequences with shuffled blocks."""

    def __init__(
        self, model: tuple[ModelDescription, GgufWeights], *, variant: Variant, int8: bool = False, n_threads: int = 1
    ) -> None:
        self.description, self.source = model
        self.int8 = int8
        self.kernels = KernelStep.load(
            self.description,
            self.source,
            max_positions=512,
            max_rows=256,
            max_sequences=32,
            n_threads=n_threads,
            int8=int8,
            variant=variant,
        )
        self.pool = KvPool(self.description.geometry, N_BLOCKS, KvDtype.BF16, CPU)

    def step(self, chunks: Seq[Chunk], *, only_best: bool = False) -> list[NDArray[np.float32]]:
        logits = self.compute(chunks, only_best=only_best)
        return [logits.row(i).copy() for i in range(len(chunks))]

    def compute(self, chunks: Seq[Chunk], *, only_best: bool = False) -> Logits:
        return self.kernels.compute(chunks, [True] * len(chunks), self.pool, only_best=only_best)

    def torch_step(self, dtype: torch.dtype) -> TorchStep:
        """The same weights (rounded to bf16, and to int8 if need be) computed by torch in `dtype`."""
        weights = load_weights(self.description, self.source, torch.bfloat16, CPU)
        if dtype is torch.float32:
            weights = widened(weights)
        if self.int8:
            weights = rounded_to_int8(weights)
        return TorchStep(DecoderModel(self.description, weights, 512))


def widened(weights: ModelWeights) -> ModelWeights:
    layers = tuple(
        replace(
            layer,
            qkv=layer.qkv.float(),
            attention_out=layer.attention_out.float(),
            gate_up=layer.gate_up.float(),
            down=layer.down.float(),
        )
        for layer in weights.layers
    )
    return replace(weights, embedding=weights.embedding.float(), head=weights.head.float(), layers=layers)


def sequences(lengths: Seq[int], vocab: int, seed: int = 0) -> list[Sequence]:
    rng = random.Random(seed)
    free = list(range(N_BLOCKS))
    rng.shuffle(free)
    return [
        Sequence(
            run_id=RunId(str(i)),
            token_ids=[rng.randrange(vocab) for _ in range(n)],
            root=b"",
            blocks=[free.pop() for _ in range(blocks_for(n))],
        )
        for i, n in enumerate(lengths)
    ]


def ragged_steps(vocab: int) -> list[list[Chunk]]:
    """Long and short prompts, cut on and off block and span borders, then decodes among prefills."""
    a, b, c, d, e = sequences([300, 18, 129, 17, 40], vocab)
    return [
        [Chunk(d, 0, 1), Chunk(a, 0, 130), Chunk(b, 0, 17)],
        [Chunk(b, 17, 1), Chunk(d, 1, 1), Chunk(a, 130, 41), Chunk(c, 0, 128), Chunk(e, 0, 33)],
        [Chunk(c, 128, 1), Chunk(d, 2, 1), Chunk(e, 33, 7), Chunk(a, 171, 128)],
        [Chunk(a, 299, 1), Chunk(d, 3, 1)],
    ]


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
def test_logits_are_at_least_as_near_to_f32_as_torch_in_bf16(
    shape: str, int8: bool, variant: Variant, models: dict[str, tuple[ModelDescription, GgufWeights]]
) -> None:
    bench = Bench(models[shape], variant=variant, int8=int8, n_threads=2)
    exact, exact_pool = bench.torch_step(torch.float32), KvPool(bench.description.geometry, N_BLOCKS, KvDtype.F32, CPU)
    rival, rival_pool = (
        bench.torch_step(torch.bfloat16),
        KvPool(bench.description.geometry, N_BLOCKS, KvDtype.BF16, CPU),
    )
    ours, torchs, wants = [], [], []
    for chunks in ragged_steps(bench.description.vocab_size):
        every = [True] * len(chunks)
        ours += bench.step(chunks)
        wanted = exact.compute(chunks, every, exact_pool, only_best=False)
        rivals = rival.compute(chunks, every, rival_pool, only_best=False)
        wants += [wanted.row(i) for i in range(len(chunks))]
        torchs += [rivals.row(i) for i in range(len(chunks))]
    error, rival_error = (float(np.sqrt(np.mean((np.stack(x) - np.stack(wants)) ** 2))) for x in (ours, torchs))
    size = float(np.sqrt(np.mean(np.stack(wants) ** 2)))
    print(f"{shape}: ours {error / size:.4f}, torch bf16 {rival_error / size:.4f} of the logits' size")
    assert error < 1.1 * rival_error + 1e-3 * size


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
def test_a_sequence_does_not_depend_on_its_company_bit_for_bit(
    int8: bool, variant: Variant, models: dict[str, tuple[ModelDescription, GgufWeights]]
) -> None:
    """Alone or in a batch, whole or in chunks, on one thread or on three: equal logits and equal KV."""
    together = Bench(models["gqa"], variant=variant, int8=int8, n_threads=3)
    last: dict[str, NDArray[np.float32]] = {}
    for chunks in ragged_steps(together.description.vocab_size):
        for chunk, row in zip(chunks, together.step(chunks), strict=True):
            last[chunk.sequence.run_id] = row
    alone = Bench(models["gqa"], variant=variant, int8=int8)
    ends = {"0": 300, "1": 18, "2": 129, "3": 4, "4": 40}
    everyone = {c.sequence.run_id: c.sequence for s in ragged_steps(alone.description.vocab_size) for c in s}
    for run_id, end in ends.items():
        rows = []
        for start in range(0, end, 256):
            rows = alone.step([Chunk(everyone[RunId(run_id)], start, min(256, end - start))])
        assert np.array_equal(rows[0], last[run_id]), run_id
    for pool in ("k", "v"):
        assert torch.equal(getattr(alone.pool, pool), getattr(together.pool, pool))


@pytest.mark.parametrize("shape", ["gqa", "more heads than a tile"])
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_sharing_a_prefix_changes_no_bit(
    shape: str, n_threads: int, variant: Variant, models: dict[str, tuple[ModelDescription, GgufWeights]]
) -> None:
    """Sequences over the same blocks, which end apart and within a shared block's span, at once and one by one."""
    bench = Bench(models[shape], variant=variant, n_threads=n_threads)
    whole, alone = sequences([300, 150], bench.description.vocab_size)
    bench.step([Chunk(whole, 0, 250)])
    bench.step([Chunk(whole, 250, 50), Chunk(alone, 0, 150)])
    free = [b for b in range(N_BLOCKS) if b not in {*whole.blocks, *alone.blocks}]
    sharers = []
    for i, n in enumerate([129, 299, 131, 160, 257, 300, 145, 258, 170, 299, 128]):
        kept = min(n - 1, 256) // BLOCK_TOKENS
        new = [free.pop() for _ in range(blocks_for(n) - kept)]
        ids = whole.token_ids[: kept * BLOCK_TOKENS] + [(7 * i + j) % 200 for j in range(n - kept * BLOCK_TOKENS)]
        sharers.append(Sequence(run_id=RunId(str(i)), token_ids=ids, root=b"", blocks=whole.blocks[:kept] + new))
        bench.step([Chunk(sharers[-1], kept * BLOCK_TOKENS, n - kept * BLOCK_TOKENS)])
    chunks = [Chunk(s, s.n_tokens - 1, 1) for s in (*sharers[:5], alone, *sharers[5:])]
    together = bench.step(chunks)
    for chunk, row in zip(chunks, together, strict=True):
        assert np.array_equal(bench.step([chunk])[0], row), chunk.sequence.run_id


def test_the_best_is_the_first_of_the_largest(
    variant: Variant, models: dict[str, tuple[ModelDescription, GgufWeights]]
) -> None:
    bench = Bench(models["wide heads"], variant=variant, n_threads=2)
    chunks = [Chunk(s, 0, s.n_tokens) for s in sequences([5, 30, 64], bench.description.vocab_size)]
    rows = bench.step(chunks)
    best = bench.compute(chunks, only_best=True)
    assert best.best_ids == [int(np.argmax(row)) for row in rows]
    assert best.finite == [True] * 3


def test_rows_without_logits_and_rows_that_are_not_finite(
    variant: Variant, models: dict[str, tuple[ModelDescription, GgufWeights]]
) -> None:
    bench = Bench(models["gqa"], variant=variant)
    one, two, three = sequences([20, 9, 3], 200)
    embedding = bench.kernels.step._embedding
    assert embedding is not None
    embedding[250] = float("nan")
    two.token_ids[-1] = 250
    chunks = [Chunk(one, 0, 20), Chunk(two, 0, 9), Chunk(three, 0, 3)]
    logits = bench.kernels.compute(chunks, [False, True, True], bench.pool, only_best=False)
    assert list(logits.finite) == [False, True]
    clean = bench.kernels.compute([chunks[2]], [True], bench.pool, only_best=False)
    assert clean.best_ids[0] == logits.best_ids[1]


def test_shapes_that_it_was_not_written_for_are_refused(tmp_path: Path, variant: Variant) -> None:
    path = write_gguf(tmp_path / "odd.F32.gguf", random_weights(TinyConfig()), TinyConfig())
    with pytest.raises(NotImplementedHere, match="head_dim is 16"):
        KernelStep.load(
            describe(path, model_id="odd"),
            GgufWeights(path),
            max_positions=64,
            max_rows=64,
            max_sequences=4,
            n_threads=1,
            int8=False,
            variant=variant,
        )
