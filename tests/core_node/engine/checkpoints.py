"""Tiny random checkpoints of each architecture, as GGUF and as a Hugging Face folder; weights by the latter's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import save_file

N_BYTES = 256
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = tuple(f"{a} {b}" for a in "aeio" for b in "nrst")


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """Shape of a checkpoint."""

    architecture: str = "llama"
    n_layers: int = 3
    hidden_size: int = 64
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 16
    ffn_size: int = 96
    context_tokens: int = 512
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = True

    @property
    def vocab_size(self) -> int:
        return len(vocabulary())


def vocabulary() -> list[str]:
    """All bytes in GPT-2's alphabet, control tokens, then one token a merge."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(N_BYTES) if b not in printable]
    alphabet = {b: chr(b) for b in printable} | {b: chr(N_BYTES + n) for n, b in enumerate(rest)}
    return [alphabet[b] for b in range(N_BYTES)] + list(CONTROL) + [m.replace(" ", "") for m in MERGES]


def random_weights(config: TinyConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """f32 weights by Hugging Face's names, scaled so that every part of the network matters."""
    g = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=g) * gain / columns**0.5

    def norm(size: int = config.hidden_size) -> torch.Tensor:
        return 1.0 + 0.2 * torch.randn(size, generator=g)

    h, q, kv = config.hidden_size, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    weights = {
        "model.embed_tokens.weight": matrix(config.vocab_size, h, gain=h**0.5),
        "model.norm.weight": norm(),
    }
    if not config.tied:
        weights["lm_head.weight"] = matrix(config.vocab_size, h, gain=3.0)
    for i in range(config.n_layers):
        p = f"model.layers.{i}."
        weights |= {
            p + "input_layernorm.weight": norm(),
            p + "self_attn.q_proj.weight": matrix(q, h, gain=2.0),
            p + "self_attn.k_proj.weight": matrix(kv, h, gain=2.0),
            p + "self_attn.v_proj.weight": matrix(kv, h, gain=2.0),
            p + "self_attn.o_proj.weight": matrix(h, q, gain=2.0),
            p + "post_attention_layernorm.weight": norm(),
            p + "mlp.gate_proj.weight": matrix(config.ffn_size, h, gain=2.0),
            p + "mlp.up_proj.weight": matrix(config.ffn_size, h),
            p + "mlp.down_proj.weight": matrix(h, config.ffn_size, gain=2.0),
        }
        if config.architecture == "qwen3":
            weights |= {p + f"self_attn.{x}_norm.weight": norm(config.head_dim) for x in "qk"}
    return weights


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensors(weights: Mapping[str, torch.Tensor], config: TinyConfig) -> dict[str, np.ndarray]:
    """The same weights under GGUF's names; of `llama`, Q and K rows interleaved as llama.cpp's converter does."""
    out: dict[str, np.ndarray] = {}
    for name, tensor in weights.items():
        array = tensor.numpy()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            part = rest.removesuffix(".weight")
            if config.architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                n_heads = config.n_heads if "q_proj" in part else config.n_kv_heads
                array = array.reshape(n_heads, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(array.shape)
            out[f"blk.{layer}.{GGUF_NAMES[part]}.weight"] = np.ascontiguousarray(array)
        else:
            key = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            out[f"{key[name.removesuffix('.weight')]}.weight"] = array
    return out


def write_gguf(
    path: Path,
    weights: Mapping[str, torch.Tensor],
    config: TinyConfig,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str | None = None,
    drop: str | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a GGUF; matrices in `kind`, norms in f32. `drop` leaves a tensor out, `extra` adds or replaces some."""
    w = gguf.GGUFWriter(path, architecture or config.architecture)
    w.add_name("tiny")
    w.add_block_count(config.n_layers)
    w.add_context_length(config.context_tokens)
    w.add_embedding_length(config.hidden_size)
    w.add_feed_forward_length(config.ffn_size)
    w.add_head_count(config.n_heads)
    w.add_head_count_kv(config.n_kv_heads)
    w.add_key_length(config.head_dim)
    w.add_value_length(config.head_dim)
    w.add_rope_dimension_count(config.head_dim)
    w.add_rope_freq_base(config.rope_base)
    w.add_layer_norm_rms_eps(config.norm_eps)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    tokens = vocabulary()
    w.add_token_list(tokens)
    w.add_token_types([3 if t in CONTROL else 1 for t in tokens])
    w.add_token_merges(list(MERGES))
    w.add_eos_token_id(tokens.index("<|im_end|>"))
    w.add_bos_token_id(tokens.index("<|endoftext|>"))
    tensors = gguf_tensors(weights, config) | dict(extra or {})
    for name, array in tensors.items():
        if name == drop:
            continue
        if array.ndim == 2 and kind is not GGMLQuantizationType.F32:
            w.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            w.add_tensor(name, np.ascontiguousarray(array))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def write_folder(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    config: TinyConfig,
    *,
    n_files: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a Hugging Face folder: config.json, tokenizer.json, one or several safetensors files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = vocabulary()
    eos, bos = tokens.index("<|im_end|>"), tokens.index("<|endoftext|>")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[config.architecture]],
                "model_type": config.architecture,
                "hidden_act": "silu",
                "num_hidden_layers": config.n_layers,
                "hidden_size": config.hidden_size,
                "num_attention_heads": config.n_heads,
                "num_key_value_heads": config.n_kv_heads,
                "head_dim": config.head_dim,
                "intermediate_size": config.ffn_size,
                "max_position_embeddings": config.context_tokens,
                "rope_theta": config.rope_base,
                "rms_norm_eps": config.norm_eps,
                "tie_word_embeddings": config.tied,
                "vocab_size": config.vocab_size,
                "eos_token_id": eos,
                "bos_token_id": bos,
            }
        )
    )
    write_tokenizer(folder)
    names = sorted(weights)
    for n in range(n_files):
        part = {name: weights[name].to(dtype).contiguous() for name in names[n::n_files]}
        name = "model.safetensors" if n_files == 1 else f"model-{n + 1:05}-of-{n_files:05}.safetensors"
        save_file(part, folder / name)
    return folder


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json of the tiny vocabulary."""
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer_json(vocabulary())))


def _tokenizer_json(tokens: list[str]) -> dict[str, object]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": tokens.index(t),
                "content": t,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for t in CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {t: i for i, t in enumerate(tokens) if t not in CONTROL},
            "merges": [m.split(" ") for m in MERGES],
        },
    }
