"""Forward pass of a decoder-only model in torch: embedding, the architecture's blocks, last norm, output head.

Knows nothing of sequences or scheduling: tokens come flattened, and where their KV lies is in the layout.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from core_node.engine.architectures import architecture_of
from core_node.engine.attention import QueryForm, StepLayout
from core_node.engine.kv_pool import KvPool
from core_node.engine.layers import Arithmetic, FastArithmetic, LayerStep
from core_node.engine.rope import rope_table
from core_node.engine.weights import ModelWeights
from mesh.model.architectures import architecture_facts
from mesh.model.description import ModelDescription


class DecoderModel:
    """Weights and tables on one device. Owned by the engine thread."""

    def __init__(
        self,
        description: ModelDescription,
        weights: ModelWeights,
        max_positions: int,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        d = self._description = description
        self._weights = weights
        self._block = architecture_of(d).block
        self._pairs = architecture_facts(d.architecture).pairs
        self._arithmetic = arithmetic or FastArithmetic()
        w = weights.embedding
        self.query_form = QueryForm(group=d.n_heads // d.n_kv_heads, dtype=w.dtype, device=w.device)
        self._rope = rope_table(d.head_dim, d.rope_base, d.rope_scaling, max_positions).to(w.device)

    def forward(self, layout: StepLayout, pool: KvPool) -> torch.Tensor:
        """Write the step's K and V into the pool; return logits f32 [len(layout.logit_rows), vocab]."""
        d = self._description
        x = embedding(layout.token_ids, self._weights.embedding)
        cos, sin = self._rope[layout.positions].unsqueeze(2).unbind(1)
        for i, layer in enumerate(self._weights.layers):
            step = LayerStep(
                arithmetic=self._arithmetic,
                pairs=self._pairs,
                n_heads=d.n_heads,
                n_kv_heads=d.n_kv_heads,
                head_dim=d.head_dim,
                norm_eps=d.norm_eps,
                cos=cos,
                sin=sin,
                layout=layout,
                pool=pool,
                index=i,
            )
            x = self._block(x, layer, step)
        x = self._arithmetic.rms_norm(x[layout.logit_rows], self._weights.norm, d.norm_eps)
        return self._arithmetic.linear(x, self._weights.head).float()
