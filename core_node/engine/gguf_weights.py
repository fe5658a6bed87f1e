"""Tensors of a GGUF file. Its Q and K rows are in the order of the architecture's RopePairs already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from mesh.errors import InvalidRequest
from mesh.model.gguf_file import read_gguf

_DESCRIBED = {"rope_freqs.weight"}  # mesh.model.description has read it: it is the RoPE scaling
_PLAIN = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2"}


class GgufWeights:
    """A WeightSource over one file; reads the header at once and tensors when asked."""

    def __init__(self, path: Path) -> None:
        self._file = read_gguf(path)
        self._tensors = {t.name: t for t in self._file.tensors if t.name not in _DESCRIBED}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(reversed(t.shape)) for name, t in self._tensors.items()}

    def size_bytes(self, name: str) -> int:
        return self._tensors[name].size_bytes

    def load(self, name: str) -> torch.Tensor:
        """f32, or f16 if it is stored so. Raises InvalidRequest on a quantisation without a dequantiser."""
        tensor = self._tensors[name]
        raw = np.asarray(self._file.tensor_bytes(tensor))
        shape = tuple(reversed(tensor.shape))
        plain = _PLAIN.get(tensor.ggml_type)
        if plain is not None:
            return torch.from_numpy(raw.view(plain).reshape(shape).copy())
        rows = int(np.prod(shape[:-1]))
        try:
            values = dequantize(raw.reshape(rows, -1), tensor.ggml_type)
        except NotImplementedError as exc:
            raise InvalidRequest(
                f"{self._file.path.name}: tensor {name} is {tensor.ggml_type.name}, which cannot be dequantised here",
                field="model",
            ) from exc
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32).reshape(shape))
