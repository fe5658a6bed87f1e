"""Padded decode steps against plain ones, on the CPU: bucket choice, padding, tokens that stay on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core_node.engine.bucket_step import BucketShape, BucketStep, bucket_for
from core_node.engine.decoder import DecoderModel
from core_node.engine.kv_pool import KvPool
from core_node.engine.loading import open_weights
from core_node.engine.runner import TorchStep
from core_node.engine.scheduler import Chunk
from core_node.engine.sequence import Sequence
from core_node.engine.weights import load_weights
from mesh.kv.geometry import KvDtype
from mesh.model.description import describe
from mesh.node.engine import RunId

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("rows", "blocks", "want"),
    [
        (1, 1, BucketShape(1, 8)),
        (3, 8, BucketShape(4, 8)),
        (4, 9, BucketShape(4, 16)),
        (17, 100, BucketShape(24, 128)),  # never more than the most
        (24, 128, BucketShape(24, 128)),
        (25, 1, None),
        (0, 1, None),
    ],
)
def test_the_bucket_of_a_step(rows: int, blocks: int, want: BucketShape | None) -> None:
    assert bucket_for(rows, blocks, 24) == want


@pytest.fixture
def model(tiny_gguf: Path) -> DecoderModel:
    d = describe(tiny_gguf)
    return DecoderModel(d, load_weights(d, open_weights(d), torch.float32, CPU), d.context_tokens)


def prefilled(step: TorchStep | BucketStep, pool: KvPool, lengths: list[int]) -> list[Sequence]:
    made = []
    for i, n in enumerate(lengths):
        blocks = list(range(12 * i, 12 * i + 12))
        sequence = Sequence(
            run_id=RunId(str(i)), token_ids=[(7 * i + j) % 250 for j in range(n)], root=b"", blocks=blocks
        )
        step.compute([Chunk(sequence, 0, n)], [True], pool, only_best=True)
        made.append(sequence)
    return made


def test_padded_steps_draw_what_plain_steps_draw(tiny_gguf: Path, model: DecoderModel) -> None:
    geometry = describe(tiny_gguf).geometry
    lengths = [5, 16, 130, 31, 32, 6, 7, 8]
    plain, buckets = TorchStep(model), BucketStep(model, 8)
    pools = [KvPool(geometry, 100, KvDtype.F32, CPU) for _ in range(2)]
    ours = prefilled(buckets, pools[0], lengths), prefilled(plain, pools[1], lengths)
    best: dict[RunId, int] = {}
    for number in range(7):
        results = []
        for step, pool, sequences in zip((buckets, plain), pools, ours, strict=True):
            # One leaves after the third step, in the same bucket; three more after the fifth, for another one.
            chunks = []
            for sequence in sequences[: (8, 8, 8, 7, 7, 3, 3)[number]]:
                sequence.token_ids.append(sequence.token_ids[-1] + 1 if number == 0 else best[sequence.run_id])
                chunks.append(Chunk(sequence, len(sequence.token_ids) - 1, 1))
            logits = step.compute(chunks, [True] * len(chunks), pool, only_best=False)
            results.append((list(logits.best_ids), [torch.tensor(logits.row(i)) for i in range(len(chunks))]))
            if step is plain:
                best = {c.sequence.run_id: int(i) for c, i in zip(chunks, logits.best_ids, strict=True)}
        assert results[0][0] == results[1][0]
        for got, want in zip(results[0][1], results[1][1], strict=True):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    # Each bucket was told its tokens once; after that they were there.
    assert buckets.tokens_sent == 8 + 3
    for pool in (pools[0].k, pools[0].v):
        assert bool(torch.isfinite(pool).all())
    torch.testing.assert_close(pools[0].k, pools[1].k, atol=1e-4, rtol=1e-4)


def test_a_step_that_is_not_decode_goes_the_plain_way(tiny_gguf: Path, model: DecoderModel) -> None:
    geometry = describe(tiny_gguf).geometry
    step, pool = BucketStep(model, 2), KvPool(geometry, 80, KvDtype.F32, CPU)
    a, b, c = prefilled(step, pool, [20, 30, 40])
    for sequence in (a, b, c):
        sequence.token_ids.append(1)
    one = [Chunk(s, s.n_tokens - 1, 1) for s in (a, b, c)]
    assert len(step.compute(one, [True] * 3, pool, only_best=True).best_ids) == 3  # more than the most
    assert len(step.compute(one[:2], [True, False], pool, only_best=True).best_ids) == 1
    assert step.tokens_sent == 0
