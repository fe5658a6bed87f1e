"""Small GGUF files for tests, written by hand so that each field can be wrong on purpose."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Type and bytes of one metadata value: bool, int (u32), float (f32), str, or a list of str or int."""
    match item:
        case bool():
            return struct.pack("<I?", 7, item)
        case int():
            return struct.pack("<II", 4, item)
        case float():
            return struct.pack("<If", 6, item)
        case str():
            return struct.pack("<I", 8) + string(item)
        case list() if item and isinstance(item[0], str):
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(string, item))
        case list():
            return struct.pack("<IIQ", 9, 5, len(item)) + struct.pack(f"<{len(item)}i", *item)
    raise TypeError(item)


def gguf(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], *, version: int = 3) -> bytes:
    """A file whose tensors are f32 zeros."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(string(k) + value(v) for k, v in metadata.items())
    offset, infos = 0, b""
    for name, shape in tensors.items():
        infos += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)
        size = 4
        for n in shape:
            size *= n
        offset += -(-size // 32) * 32
    head += infos
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + bytes(offset)


TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "c", "ab", "abc", "Ġ", "Ċ", "<", "|", "<think>"]
TYPES = [3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4]  # <|im_end|> is mislabelled as normal on purpose
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "Tiny Test Q8_0",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 2,
}
TENSORS = {"token_embd.weight": (8, len(TOKENS)), "blk.0.attn_q.weight": (8, 8)}


def tiny_gguf(folder: Path, **changes: Any) -> Path:
    """A tiny llama-shaped file. `changes` by key with '.' written as '__'; None removes the key."""
    metadata = dict(METADATA)
    for key, item in changes.items():
        name = key.replace("__", ".")
        if item is None:
            metadata.pop(name)
        else:
            metadata[name] = item
    path = folder / "tiny-test.Q8_0.gguf"
    path.write_bytes(gguf(metadata, TENSORS))
    return path


def tiny_folder(folder: Path, **changes: Any) -> Path:
    """The same model as a Hugging Face folder. `changes` to config.json; None removes the key."""
    path = folder / "tiny-test"
    path.mkdir()
    special = {0, 1, 2, 12}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i, "content": TOKENS[i], "special": i != 12, "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False,
            }
            for i in sorted(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": {t: i for i, t in enumerate(TOKENS) if i not in special},
            "merges": [["a", "b"], ["ab", "c"]],
        },
    }  # fmt: skip
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "_name_or_path": "someone/Tiny-Test",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(TOKENS),
        "max_position_embeddings": 64,
        "eos_token_id": 2,
        "bos_token_id": 0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    } | changes
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    (path / "model.safetensors").write_bytes(b"")
    return path
