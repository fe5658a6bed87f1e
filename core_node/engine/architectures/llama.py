"""`llama`: SmolLM2, Llama 3, Mistral. Source: Touvron et al., "LLaMA" (2023)."""

from __future__ import annotations

import torch

from core_node.engine.architectures.architecture import Architecture
from core_node.engine.layers import LayerStep, LayerWeights


def block(x: torch.Tensor, w: LayerWeights, step: LayerStep) -> torch.Tensor:
    """One layer."""
    q, k, v = step.heads(step.norm(x, w.attention_norm), w.qkv)
    x = x + step.attention(q, k, v, w.attention_out)
    return x + step.swiglu(step.norm(x, w.ffn_norm), w.gate_up, w.down)


LLAMA = Architecture(name="llama", block=block, kernels=True)
