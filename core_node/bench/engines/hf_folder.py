"""A GGUF file's weights as a Hugging Face folder in bf16, for peers that read nothing else.

    python -m core_node.bench.engines.hf_folder MODEL.gguf FOLDER

The weights are the file's own, dequantised, so that every engine computes the same model. The tokenizer is built from
the file's vocabulary (transformers' own reading of it goes wrong for SmolLM2) and knows no control tokens. Only the
`llama` architecture.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import typer
from safetensors.torch import save_file

from core_node.engine.gguf_weights import GgufWeights
from mesh.errors import InvalidRequest
from mesh.model.catalogue import find_model
from mesh.model.description import ModelDescription, describe
from mesh.model.tokenizer import load_tokenizer

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_END_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_hf_folder(model: Path, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer. Raises InvalidRequest."""
    description = describe(model)
    if description.architecture != "llama" or description.rope_scaling != "none":
        raise InvalidRequest(
            f"{model.name}: only the llama architecture without RoPE scaling is written, this is "
            f"{description.architecture} with {description.rope_scaling}",
            field="model",
        )
    source = GgufWeights(model)
    tensors = {hf_name(n): _halves(n, source.load(n), description) for n in source.shapes}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: t.to(torch.bfloat16).contiguous() for name, t in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(_config(description), indent=1))
    _write_tokenizer(model, description, folder)


def hf_name(name: str) -> str:
    """A tensor's name in a Hugging Face checkpoint: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight.
    Raises InvalidRequest for a tensor that Llama does not have there."""
    parts = name.removesuffix(".weight").split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    if len(parts) == 1 and parts[0] in _END_NAMES:
        return f"{_END_NAMES[parts[0]]}.weight"
    raise InvalidRequest(f"tensor {name} has no place in a Llama checkpoint", field="model")


def _halves(name: str, tensor: torch.Tensor, d: ModelDescription) -> torch.Tensor:
    """Rows of Q and K from adjacent pairs, GGUF's order, back to halves of each head."""
    heads = {"attn_q.weight": d.n_heads, "attn_k.weight": d.n_kv_heads}.get(name.partition(".")[2].partition(".")[2])
    if heads is None:
        return tensor
    return tensor.view(heads, d.head_dim // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)


def _config(d: ModelDescription) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": d.hidden_size,
        "intermediate_size": d.ffn_size,
        "num_hidden_layers": d.n_layers,
        "num_attention_heads": d.n_heads,
        "num_key_value_heads": d.n_kv_heads,
        "head_dim": d.head_dim,
        "max_position_embeddings": d.context_tokens,
        "rms_norm_eps": d.norm_eps,
        "rope_theta": d.rope_base,
        "tie_word_embeddings": d.tied_embeddings,
        "vocab_size": d.vocab_size,
        "bos_token_id": d.bos_token_id,
        "eos_token_id": min(d.eos_token_ids, default=None),
    }


def _write_tokenizer(model: Path, d: ModelDescription, folder: Path) -> None:
    tokenizer = load_tokenizer(model)
    tokenizer._bpe.save(str(folder / "tokenizer.json"))
    end = tokenizer.vocabulary.tokens[min(d.eos_token_ids)]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _main(model: str, folder: Path) -> None:
    write_hf_folder(find_model(model), folder)


if __name__ == "__main__":
    typer.run(_main)
