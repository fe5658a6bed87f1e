"""Forward pass of the `llama` architecture: RMSNorm, RoPE on adjacent pairs, grouped-query attention, SwiGLU.

Source: Touvron et al., "LLaMA" (2023). Knows nothing of sequences or scheduling: tokens come flattened, and where
their KV lies is in the layout. Norms, rotation and logits are f32, the rest is in the weights' dtype.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, linear, silu

from core_node.engine.attention import QueryForm, StepLayout, attend
from core_node.engine.kv_pool import KvPool
from core_node.engine.rope import rope_table, rotate
from core_node.engine.weights import LayerWeights, LlamaWeights
from mesh.model.description import ModelDescription


class LlamaModel:
    """Weights and tables on one device. Owned by the engine thread."""

    def __init__(self, description: ModelDescription, weights: LlamaWeights, max_positions: int) -> None:
        d = description
        self._weights = weights
        self._eps = d.norm_eps
        self._n_heads, self._n_kv_heads, self._head_dim = d.n_heads, d.n_kv_heads, d.head_dim
        w = weights.embedding
        self.query_form = QueryForm(group=d.n_heads // d.n_kv_heads, dtype=w.dtype, device=w.device)
        self._rope = rope_table(d.head_dim, d.rope_base, d.rope_scaling, max_positions).to(w.device)

    def forward(self, layout: StepLayout, pool: KvPool) -> torch.Tensor:
        """Write the step's K and V into the pool; return logits f32 [len(layout.logit_rows), vocab]."""
        x = embedding(layout.token_ids, self._weights.embedding)
        cos, sin = self._rope[layout.positions].unsqueeze(2).unbind(1)
        for i, layer in enumerate(self._weights.layers):
            x = x + self._attention(_rms_norm(x, layer.attention_norm, self._eps), layer, i, cos, sin, layout, pool)
            x = x + self._feed_forward(_rms_norm(x, layer.ffn_norm, self._eps), layer)
        x = x[layout.logit_rows]
        return linear(_rms_norm(x, self._weights.norm, self._eps), self._weights.head).float()

    def _attention(
        self,
        x: torch.Tensor,
        layer: LayerWeights,
        index: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layout: StepLayout,
        pool: KvPool,
    ) -> torch.Tensor:
        n_q, n_kv = self._n_heads, self._n_kv_heads
        qkv = linear(x, layer.qkv).view(-1, n_q + 2 * n_kv, self._head_dim)
        q, k, v = torch.split(qkv, [n_q, n_kv, n_kv], dim=1)
        k_layer, v_layer = pool.k[index], pool.v[index]
        k_layer.index_copy_(0, layout.slots, rotate(k, cos, sin).to(k_layer.dtype))
        v_layer.index_copy_(0, layout.slots, v.to(v_layer.dtype))
        return linear(attend(rotate(q, cos, sin), k_layer, v_layer, layout), layer.attention_out)

    @staticmethod
    def _feed_forward(x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        gate, up = linear(x, layer.gate_up).chunk(2, dim=-1)
        return linear(silu(gate) * up, layer.down)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)
