"""Runs one step on the device: chunks in, one drawn token out for each chunk that asks for one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from core_node.engine.attention import lay_out
from core_node.engine.blocks import blocks_for
from core_node.engine.kv_pool import KvPool
from core_node.engine.llama import LlamaModel
from core_node.engine.sampler import SampleRow, choose
from core_node.engine.scheduler import Chunk
from core_node.engine.sequence import Sequence
from mesh.node.engine import RunId
from mesh.node.sampling import Sampled

_WARM_UP = RunId("warm-up")


class Runner:
    """Owns model and pool. All calls on the engine thread."""

    def __init__(self, model: LlamaModel, pool: KvPool, eos_token_ids: frozenset[int]) -> None:
        self.pool = pool
        self._model = model
        self._eos_token_ids = eos_token_ids

    @torch.inference_mode()
    def run(self, chunks: Seq[Chunk], rows: Seq[SampleRow | None]) -> list[Sampled | None]:
        """Compute `chunks` (those of one token first) and draw a token where `rows[i]` is given. None: no row was
        given, or its logits are not finite."""
        layout = lay_out(chunks, [row is not None for row in rows], self._model.query_form)
        logits = self._model.forward(layout, self.pool)
        drawn = iter(choose(logits, [row for row in rows if row is not None], self._eos_token_ids))
        return [None if row is None else next(drawn) for row in rows]

    @torch.inference_mode()
    def warm_up(self, n_tokens: int) -> None:
        """One throw-away chunk and one decode step in the first blocks, so that no run pays for lazy set-up."""
        blocks = list(range(blocks_for(n_tokens + 1)))
        scratch = Sequence(run_id=_WARM_UP, token_ids=[0] * (n_tokens + 1), root=b"", blocks=blocks)
        for chunk in (Chunk(scratch, 0, n_tokens), Chunk(scratch, n_tokens, 1)):
            self._model.forward(lay_out([chunk], [True], self._model.query_form), self.pool)
