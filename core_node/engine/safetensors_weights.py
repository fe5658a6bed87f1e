"""Tensors of a Hugging Face folder, under GGUF's names.

Hugging Face checkpoints rotate dimension i with i + head_dim / 2. Where llama.cpp turns adjacent pairs, the rows of Q
and K are put into that order here, which changes no score and gives K in the pool the canonical order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from core_node.engine.architectures import architecture_of
from mesh.errors import InvalidRequest
from mesh.model.architectures import RopePairs, architecture_facts
from mesh.model.description import ModelDescription

_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")  # old checkpoints store what config.json says already
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of an element


def canonical_name(hf_name: str, extra: Mapping[str, str]) -> str:
    """GGUF's name of a tensor; a name that has none stays as it is (and is refused later). `extra`: GGUF's names of
    the architecture's own vectors by Hugging Face's."""
    if (match := _LAYER.fullmatch(hf_name)) is not None:
        part = _INNER.get(match[2]) or extra.get(match[2])
        return f"blk.{match[1]}.{part}.weight" if part is not None else hf_name
    return _OUTER.get(hf_name, hf_name)


def to_adjacent_pairs(rows: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Reorder the rows [n_heads * head_dim, in] of Q or K from (i, i + head_dim / 2) pairs to (2i, 2i + 1)."""
    head_dim = rows.shape[0] // n_heads
    return rows.view(n_heads, 2, head_dim // 2, -1).transpose(1, 2).reshape(rows.shape)


class SafetensorsWeights:
    """A WeightSource over all .safetensors files of a folder; reads the headers at once."""

    def __init__(self, description: ModelDescription) -> None:
        self._description = description
        self._permutes = architecture_facts(description.architecture).pairs is RopePairs.ADJACENT
        self._extra = {e.hf_name: e.name for e in architecture_of(description).extra}
        self._files: dict[str, tuple[Path, str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._sizes: dict[str, int] = {}
        for path in sorted(description.path.glob("*.safetensors")):
            self._read_header(path)
        if description.tied_embeddings:  # some checkpoints store the tied matrix twice
            self._files.pop("output.weight", None)
            self._shapes.pop("output.weight", None)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def size_bytes(self, name: str) -> int:
        return self._sizes[name]

    def load(self, name: str) -> torch.Tensor:
        """In the stored float type."""
        path, hf_name = self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(hf_name)
        except (SafetensorError, OSError) as exc:
            raise InvalidRequest(f"{path.name}: cannot read {hf_name}: {exc}", field="model") from exc
        if not self._permutes:
            return tensor
        if name.endswith("attn_q.weight"):
            return to_adjacent_pairs(tensor, self._description.n_heads)
        if name.endswith("attn_k.weight"):
            return to_adjacent_pairs(tensor, self._description.n_kv_heads)
        return tensor

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for hf_name in file.keys():  # noqa: SIM118 - not a dict
                    if _IGNORED.fullmatch(hf_name):
                        continue
                    part = file.get_slice(hf_name)
                    if part.get_dtype() not in _FLOATS:
                        raise InvalidRequest(
                            f"{path.name}: {hf_name} is {part.get_dtype()}; only float checkpoints can be read",
                            field="model",
                        )
                    name = canonical_name(hf_name, self._extra)
                    if name in self._files:
                        raise InvalidRequest(
                            f"{hf_name} is in both {self._files[name][0].name} and {path.name}", field="model"
                        )
                    self._files[name] = (path, hf_name)
                    self._shapes[name] = tuple(part.get_shape())
                    self._sizes[name] = math.prod(part.get_shape()) * _FLOATS[part.get_dtype()]
        except (SafetensorError, OSError) as exc:
            raise InvalidRequest(f"{path.name}: not a readable safetensors file: {exc}", field="model") from exc
