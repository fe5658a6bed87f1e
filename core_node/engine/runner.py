"""Runs one step on the device: chunks in, one drawn token out for each chunk that asks for one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from core_node.engine.attention import lay_out
from core_node.engine.blocks import blocks_for
from core_node.engine.decoder import DecoderModel
from core_node.engine.kv_pool import KvPool
from core_node.engine.sampler import Logits, SampleRow, choose, is_argmax
from core_node.engine.scheduler import Chunk
from core_node.engine.sequence import Sequence
from mesh.node.engine import RunId
from mesh.node.sampling import Sampled

_WARM_UP = RunId("warm-up")


class StepModel(Protocol):
    """A model that computes one step."""

    def compute(self, chunks: Seq[Chunk], wants_logits: Seq[bool], pool: KvPool, *, only_best: bool) -> Logits:
        """Write the KV of `chunks` (those of one token first) into the pool; logits of the last position of each that
        wants them, in order. `only_best`: nobody will ask for a whole row."""
        ...


class TorchStep:
    """The forward pass in torch: any device, any dtype, and the reference for every other StepModel."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model

    @torch.inference_mode()
    def compute(self, chunks: Seq[Chunk], wants_logits: Seq[bool], pool: KvPool, *, only_best: bool) -> Logits:
        return Logits.of(self._model.forward(lay_out(chunks, wants_logits, self._model.query_form), pool))


class Runner:
    """Owns model and pool. All calls on the engine thread."""

    def __init__(self, model: StepModel, pool: KvPool, eos_token_ids: frozenset[int]) -> None:
        self.pool = pool
        self._model = model
        self._eos_token_ids = eos_token_ids

    def run(self, chunks: Seq[Chunk], rows: Seq[SampleRow | None]) -> list[Sampled | None]:
        """Compute `chunks` (those of one token first) and draw a token where `rows[i]` is given. None: no row was
        given, or its logits are not finite."""
        wanted = [row for row in rows if row is not None]
        logits = self._model.compute(
            chunks, [row is not None for row in rows], self.pool, only_best=all(map(is_argmax, wanted))
        )
        drawn = iter(choose(logits, wanted, self._eos_token_ids))
        return [None if row is None else next(drawn) for row in rows]

    def warm_up(self, n_tokens: int) -> None:
        """One throw-away chunk and one decode step in the first blocks, so that no run pays for lazy set-up."""
        blocks = list(range(blocks_for(n_tokens + 1)))
        scratch = Sequence(run_id=_WARM_UP, token_ids=[0] * (n_tokens + 1), root=b"", blocks=blocks)
        for chunk in (Chunk(scratch, 0, n_tokens), Chunk(scratch, n_tokens, 1)):
            self._model.compute([chunk], [True], self.pool, only_best=True)
