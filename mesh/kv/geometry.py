"""Shape of a model's KV state, and the hash that two engines must share before a byte moves. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import Enum

import numpy as np


class KvDtype(Enum):
    """Element type of KV bytes. numpy has no bfloat16: bf16 travels as its 16 bits in uint16."""

    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"

    @property
    def storage(self) -> np.dtype[np.generic]:
        """The numpy dtype that holds one element."""
        return np.dtype({"f16": np.float16, "bf16": np.uint16, "f32": np.float32}[self.value])


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGeometry:
    """Everything that fixes the meaning of a KV row, except the weights.

    K is stored after RoPE in llama.cpp's dimension order for the architecture (mesh.model.architectures; for
    `llama`: adjacent pairs, 2i with 2i+1). Two nodes may exchange KV only if `layout_hash` is equal.
    """

    architecture: str
    n_layers: int
    n_kv_heads: int
    head_dim: int
    rope_base: float
    rope_scaling: str  # "none", or a canonical text of the scaling parameters
    tokenizer_hash: str  # hex SHA-256 over the vocabulary and merges

    @property
    def layout_hash(self) -> str:
        """Hex SHA-256 over the canonical JSON of all fields."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def f16_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in f16 over all layers."""
        return self.n_layers * self.n_kv_heads * self.head_dim * 2 * 2
