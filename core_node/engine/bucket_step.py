"""Decode steps padded to a few shapes: on CUDA each is captured once as a graph and replayed.

A step of n sequences whose longest table has m blocks runs in the bucket of the next powers of two. Rows that are
missing repeat the first one: they write the same values to the same place, and nobody looks at them. A bucket keeps
its input tensors for good, which a graph needs; the tokens that it draws stay in them, so that the next step of the
same sequences sends none. Everything but a decode step goes through TorchStep.

On other devices a bucket computes its padded step without a graph; the engine does not use it there, tests do. It has
not been run on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from core_node.engine.attention import StepLayout, lay_out
from core_node.engine.decoder import DecoderModel
from core_node.engine.kv_pool import KvPool
from core_node.engine.runner import TorchStep
from core_node.engine.sampler import Logits
from core_node.engine.scheduler import Chunk
from mesh.kv.hashing import BLOCK_TOKENS

_LEAST_BLOCKS = 8
_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class BucketShape:
    """Rows, and blocks of each row's table."""

    rows: int
    blocks: int


def bucket_for(rows: int, blocks: int, max_rows: int) -> BucketShape | None:
    """The smallest bucket that holds a decode step; None if it has more than `max_rows` rows."""
    if not 0 < rows <= max_rows:
        return None
    return BucketShape(min(_power_of_two(rows), max_rows), max(_LEAST_BLOCKS, _power_of_two(blocks)))


def padded(layout: StepLayout, shape: BucketShape) -> StepLayout:
    """A decode step's layout in a bucket's shape; missing rows repeat the first, missing blocks are masked."""
    assert not layout.prefill

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        missing = shape.rows - tensor.shape[0]
        return torch.cat((tensor, tensor[:1].expand(missing, *tensor.shape[1:]))) if missing else tensor

    missing = shape.blocks - layout.decode_blocks.shape[1]
    mask = torch.nn.functional.pad(layout.decode_mask, (0, missing * BLOCK_TOKENS), value=float("-inf"))
    return StepLayout(
        token_ids=rows(layout.token_ids),
        positions=rows(layout.positions),
        slots=rows(layout.slots),
        n_decode=shape.rows,
        decode_blocks=rows(torch.nn.functional.pad(layout.decode_blocks, (0, missing))),
        decode_mask=rows(mask),
        prefill=(),
        logit_rows=torch.arange(shape.rows, device=layout.token_ids.device),
    )


class _Bucket:
    """One shape: its own inputs, and a graph over them on CUDA."""

    def __init__(self, model: DecoderModel, pool: KvPool, first: StepLayout) -> None:
        self._model = model
        self._pool = pool
        self._inputs = StepLayout(
            **{
                name: getattr(first, name).clone()
                for name in ("token_ids", "positions", "slots", "decode_blocks", "decode_mask", "logit_rows")
            },
            n_decode=first.n_decode,
            prefill=(),
        )
        self._drawn: list[int] = []
        self.tokens_sent = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        if first.token_ids.is_cuda:
            self._capture()

    def run(self, layout: StepLayout, token_ids: list[int]) -> torch.Tensor:
        """Logits [rows, vocab] of the padded `layout`, good until the next run; `token_ids` are the rows' own."""
        for name in ("positions", "slots", "decode_blocks", "decode_mask"):
            getattr(self._inputs, name).copy_(getattr(layout, name), non_blocking=True)
        if self._drawn[: len(token_ids)] != token_ids:
            self._inputs.token_ids.copy_(layout.token_ids, non_blocking=True)
            self.tokens_sent += len(token_ids)
        # Rows that repeat the first must be it in full, or they would write another token's KV to its place.
        self._inputs.token_ids[len(token_ids) :] = self._inputs.token_ids[0]
        if self._graph is not None:
            self._graph.replay()
        else:
            self._compute()
        self._drawn = self._inputs.token_ids.tolist()
        return self._logits

    def _compute(self) -> None:
        self._logits = self._model.forward(self._inputs, self._pool)
        self._inputs.token_ids.copy_(self._logits.argmax(-1))

    def _capture(self) -> None:
        tokens = self._inputs.token_ids.clone()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up here, which a capture does not allow
            for _ in range(_WARM_UPS):
                self._inputs.token_ids.copy_(tokens)
                self._compute()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._compute()


class BucketStep:
    """A StepModel over DecoderModel for `max_rows` sequences at most. One owner and one pool."""

    def __init__(self, model: DecoderModel, max_rows: int) -> None:
        self._model = model
        self._max_rows = max_rows
        self._plain = TorchStep(model)
        self._buckets: dict[BucketShape, _Bucket] = {}

    @property
    def tokens_sent(self) -> int:
        """Token ids that decode steps had to bring to the device."""
        return sum(bucket.tokens_sent for bucket in self._buckets.values())

    @torch.inference_mode()
    def compute(self, chunks: Seq[Chunk], wants_logits: Seq[bool], pool: KvPool, *, only_best: bool) -> Logits:
        if not all(wants_logits) or any(chunk.n_tokens > 1 for chunk in chunks):
            return self._plain.compute(chunks, wants_logits, pool, only_best=only_best)
        layout = lay_out(chunks, wants_logits, self._model.query_form)
        shape = bucket_for(len(chunks), layout.decode_blocks.shape[1], self._max_rows)
        if shape is None:
            return self._plain.compute(chunks, wants_logits, pool, only_best=only_best)
        layout = padded(layout, shape)
        bucket = self._buckets.get(shape)
        if bucket is None:
            bucket = self._buckets[shape] = _Bucket(self._model, pool, layout)
        token_ids = [chunk.sequence.token_ids[chunk.start] for chunk in chunks]
        return Logits.of(bucket.run(layout, token_ids)[: len(chunks)])


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
