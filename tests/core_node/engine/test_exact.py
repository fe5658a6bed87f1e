"""`exact` in torch: rows equal to the bit in any company, and the same function as the fast arithmetic."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from core_node.engine.attention import lay_out
from core_node.engine.decoder import DecoderModel
from core_node.engine.exact import ExactArithmetic
from core_node.engine.kv_pool import KvPool
from core_node.engine.loading import load_engine, open_weights
from core_node.engine.scheduler import Chunk
from core_node.engine.sequence import Sequence
from core_node.engine.weights import load_weights
from mesh.kv.geometry import KvDtype
from mesh.model.description import describe
from mesh.node.engine import RunId
from tests.core_node.engine.checkpoints import TinyConfig, random_weights, write_gguf
from tests.core_node.engine.conftest import tiny_settings

CPU = torch.device("cpu")
N_BLOCKS = 256


class Model:
    """One model and pool, and sequences over shuffled blocks of it."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        d = describe(path)
        weights = load_weights(d, open_weights(d), dtype, CPU)
        self.vocab = d.vocab_size
        self.exact = DecoderModel(d, weights, d.context_tokens, ExactArithmetic())
        self.fast = DecoderModel(d, weights, d.context_tokens)
        self.pool = KvPool(d.geometry, N_BLOCKS, KvDtype.BF16 if dtype is torch.bfloat16 else KvDtype.F32, CPU)
        self._free = list(range(N_BLOCKS))
        random.Random(0).shuffle(self._free)

    def sequence(self, seed: int, n_tokens: int) -> Sequence:
        rng = random.Random(seed)
        blocks = [self._free.pop() for _ in range(-(-n_tokens // 16))]
        ids = [rng.randrange(self.vocab) for _ in range(n_tokens)]
        return Sequence(run_id=RunId(str(seed)), token_ids=ids, root=b"", blocks=blocks)

    @torch.inference_mode()
    def step(self, chunks: list[Chunk], *, fast: bool = False) -> torch.Tensor:
        model = self.fast if fast else self.exact
        chunks = sorted(chunks, key=lambda c: c.n_tokens > 1)
        return model.forward(lay_out(chunks, [True] * len(chunks), model.query_form), self.pool)


@pytest.fixture(scope="module", params=["llama bf16", "qwen3 bf16", "llama f32"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    architecture, dtype = request.param.split()
    config = TinyConfig(architecture=architecture, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=16, ffn_size=104)
    path = write_gguf(tmp_path_factory.mktemp("exact") / "m.gguf", random_weights(config), config)
    return Model(path, torch.bfloat16 if dtype == "bf16" else torch.float32)


def test_any_company_any_cut_the_same_bits(model: Model) -> None:
    n = 150
    alone = model.sequence(1, n)
    want = torch.cat([model.step([Chunk(alone, 0, n - 3)]), *(model.step([Chunk(alone, n - i, 1)]) for i in (3, 2, 1))])
    rng = random.Random(2)
    for round_ in range(4):
        copy = model.sequence(1, n)
        others = [model.sequence(100 * (round_ + 1) + i, 40) for i in range(rng.randrange(1, 8))]
        at = 0
        while at < n - 3:
            size = min(rng.choice([1, 2, 5, 16, 33, 100]), n - 3 - at)
            company = [Chunk(o, 0, rng.choice([1, 1, 7, 40])) for o in others]
            logits = model.step([Chunk(copy, at, size), *company])
            at += size
        row = 0 if size == 1 else sum(c.n_tokens == 1 for c in company)
        assert torch.equal(logits[row], want[0])
        for i in (3, 2, 1):
            got = model.step([*(Chunk(o, 39, 1) for o in others), Chunk(copy, n - i, 1)])[len(others)]
            assert torch.equal(got, want[4 - i])
        model._free += [b for s in (copy, *others) for b in s.blocks]


def test_it_is_the_same_function(model: Model) -> None:
    sequence = model.sequence(9, 140)
    exact = model.step([Chunk(sequence, 0, 140)])
    fast = model.step([Chunk(sequence, 0, 140)], fast=True)
    model._free += sequence.blocks
    if model.pool.dtype is KvDtype.F32:
        torch.testing.assert_close(exact, fast, atol=1e-4, rtol=1e-4)
    assert torch.nn.functional.cosine_similarity(exact[0], fast[0], dim=0) > 0.999


def test_the_setting_chooses_it_and_says_so(tiny_gguf: Path) -> None:
    core = load_engine(tiny_settings(tiny_gguf, exact=True))
    assert core.info.build.endswith(" torch, exact")
