"""A model under measurement: its KV as features, what its output feels of them, and how it goes on from them.

Runs the engine's own forward pass and pool, one sequence of fixed length at a time.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from core_node.engine.attention import StepLayout, lay_out
from core_node.engine.blocks import blocks_for
from core_node.engine.decoder import DecoderModel
from core_node.engine.gguf_weights import GgufWeights
from core_node.engine.kv_pool import KvPool
from core_node.engine.safetensors_weights import SafetensorsWeights
from core_node.engine.scheduler import Chunk
from core_node.engine.sequence import Sequence
from core_node.engine.weights import load_weights
from mesh.kv.geometry import KvDtype
from mesh.kv.kvtc.transform import features_of
from mesh.kv.slab import KvSlab
from mesh.model.description import ModelDescription
from mesh.node.engine import RunId

Ids = NDArray[np.int64]
_CPU = torch.device("cpu")


class _Pool(NamedTuple):
    """What the forward pass uses of a pool, out of tensors that carry gradients."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]


class ModelProbe:
    """One model in one precision on the CPU, with room for one sequence of `window_tokens`. One owner."""

    def __init__(self, description: ModelDescription, dtype: torch.dtype, window_tokens: int) -> None:
        path: Path = description.path
        source = SafetensorsWeights(description) if path.is_dir() else GgufWeights(path)
        self.geometry = description.geometry
        self.dtype = dtype
        self._model = DecoderModel(description, load_weights(description, source, dtype, _CPU), window_tokens)
        self._blocks = list(range(blocks_for(window_tokens)))
        self._pool = KvPool(description.geometry, len(self._blocks), KvDtype.F32, _CPU)

    @torch.inference_mode()
    def prefill(self, ids: Ids) -> KvSlab:
        """KV of all of `ids`, f32."""
        self._model.forward(self._layout(ids, 0, every_row=False), self._pool)
        return self._pool.read(self._blocks, 0, len(ids))

    def load(self, slab: KvSlab) -> None:
        """Put KV where `continuation` will look for it."""
        self._pool.write(self._blocks, slab)

    @torch.inference_mode()
    def continuation(self, ids: Ids, start: int) -> torch.Tensor:
        """log-probabilities [len(ids) - start - 1, vocab] of the tokens after `start`, from the loaded KV of the
        first `start` tokens and the tokens themselves from there on."""
        logits = self._model.forward(self._layout(ids, start, every_row=True), self._pool)
        return torch.log_softmax(logits[:-1], dim=-1)

    def sensitivity(self, ids: Ids, start: int, generator: torch.Generator) -> NDArray[np.float32]:
        """Gradients of the continuation's log-likelihood by the features of the first `start` tokens [2, start, F].

        The continuation's targets are drawn from the model itself: the expected outer product of such gradients is
        the Fisher information, to second order what the output's distribution feels of a change."""
        k, v = (part.detach().clone().requires_grad_() for part in (self._pool.k, self._pool.v))
        # The pass writes into its pool, which a leaf does not allow: it gets copies, layer by layer.
        pool = _Pool(*([layer.clone() for layer in part] for part in (k, v)))
        logits = self._model.forward(self._layout(ids, start, every_row=True), cast(KvPool, pool))
        log_p = torch.log_softmax(logits, dim=-1)
        drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
        log_p.gather(1, drawn).sum().backward()  # type: ignore[no-untyped-call]
        assert k.grad is not None
        assert v.grad is not None
        grad = KvSlab(start=0, dtype=KvDtype.F32, k=k.grad[:, :start].numpy(), v=v.grad[:, :start].numpy())
        return features_of(grad, self.geometry)  # a rotation is its own inverse's transpose: gradients turn like K

    def _layout(self, ids: Ids, start: int, *, every_row: bool) -> StepLayout:
        sequence = Sequence(run_id=RunId("probe"), token_ids=ids.tolist(), root=b"", blocks=self._blocks)
        layout = lay_out([Chunk(sequence, start, len(ids) - start)], [True], self._model.query_form)
        return replace(layout, logit_rows=torch.arange(len(ids) - start)) if every_row else layout
