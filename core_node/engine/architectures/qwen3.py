"""`qwen3`: as llama, with q and k normalised head by head before they turn. Source: Qwen Team, "Qwen3" (2025)."""

from __future__ import annotations

import torch

from core_node.engine.architectures.architecture import Architecture, ExtraVector
from core_node.engine.layers import LayerStep, LayerWeights


def block(x: torch.Tensor, w: LayerWeights, step: LayerStep) -> torch.Tensor:
    """One layer."""
    q, k, v = step.heads(step.norm(x, w.attention_norm), w.qkv)
    q, k = step.norm(q, w.extra["attn_q_norm"]), step.norm(k, w.extra["attn_k_norm"])
    x = x + step.attention(q, k, v, w.attention_out)
    return x + step.swiglu(step.norm(x, w.ffn_norm), w.gate_up, w.down)


QWEN3 = Architecture(
    name="qwen3",
    block=block,
    extra=(
        ExtraVector(name="attn_q_norm", hf_name="self_attn.q_norm", size=lambda d: d.head_dim),
        ExtraVector(name="attn_k_norm", hf_name="self_attn.k_norm", size=lambda d: d.head_dim),
    ),
)
