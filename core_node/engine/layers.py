"""What the blocks of all architectures are made of: norms, projections, rotation, attention, feed-forward.

Tokens come flattened; where their KV lies is in the step's layout. Norms, rotation and logits are f32, the rest is in
the weights' dtype. Sources: Zhang & Sennrich, "Root Mean Square Layer Normalization" (2019); Shazeer, "GLU Variants
Improve Transformer" (2020); Ainslie et al., "GQA" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.nn.functional import linear, silu

from core_node.engine.attention import StepLayout, attend
from core_node.engine.kv_pool import KvPool
from core_node.engine.rope import rotate
from mesh.model.architectures import RopePairs


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One block. Matrices are [out, in]; `qkv` stacks Q, K and V rows, `gate_up` stacks gate and up rows; norms are
    f32. `extra`: the vectors that the architecture names beyond these, f32, by name."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    attention_out: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Arithmetic(Protocol):
    """How sums over a row are made. Each gives the same values up to rounding."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`x` [rows, in] times `weight` [out, in]: [rows, out]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Over the last dimension, in f32; in x's dtype."""
        ...

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        ...

    def attend(self, q: torch.Tensor, k_layer: torch.Tensor, v_layer: torch.Tensor, layout: StepLayout) -> torch.Tensor:
        """See attention.attend."""
        ...


class FastArithmetic:
    """Torch's own products over all rows at once. How they round may depend on how many rows there are."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear(x, weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return silu(gate) * up

    def attend(self, q: torch.Tensor, k_layer: torch.Tensor, v_layer: torch.Tensor, layout: StepLayout) -> torch.Tensor:
        return attend(q, k_layer, v_layer, layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStep:
    """One layer in one step, for a block to compute with. `cos`, `sin`: f32 [rows, 1, head_dim / 2]."""

    arithmetic: Arithmetic
    pairs: RopePairs
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    cos: torch.Tensor
    sin: torch.Tensor
    layout: StepLayout
    pool: KvPool
    index: int

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension."""
        return self.arithmetic.rms_norm(x, weight, self.norm_eps)

    def heads(self, x: torch.Tensor, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of `x` [rows, hidden]: [rows, heads, head_dim] each."""
        n_q, n_kv = self.n_heads, self.n_kv_heads
        rows = self.arithmetic.linear(x, qkv).view(-1, n_q + 2 * n_kv, self.head_dim)
        q, k, v = torch.split(rows, [n_q, n_kv, n_kv], dim=1)
        return q, k, v

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Rotate q and k, store k and v, attend, project: [rows, hidden]."""
        k_layer, v_layer = self.pool.k[self.index], self.pool.v[self.index]
        k_layer.index_copy_(0, self.layout.slots, self._rotated(k).to(k_layer.dtype))
        v_layer.index_copy_(0, self.layout.slots, v.to(v_layer.dtype))
        mixed = self.arithmetic.attend(self._rotated(q), k_layer, v_layer, self.layout)
        return self.arithmetic.linear(mixed, out)

    def swiglu(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """SwiGLU feed-forward: [rows, hidden]."""
        gate, up = self.arithmetic.linear(x, gate_up).chunk(2, dim=-1)
        return self.arithmetic.linear(self.arithmetic.gated(gate, up), down)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        return rotate(x, self.cos, self.sin, self.pairs)
