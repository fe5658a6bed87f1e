"""What a file of this folder declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from core_node.engine.layers import LayerStep, LayerWeights
from mesh.model.description import ModelDescription

Block = Callable[[torch.Tensor, LayerWeights, LayerStep], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraVector:
    """A vector of each layer beyond the tensors that all architectures share (weights.expected_shapes). `name`: as in
    a GGUF, `blk.N.NAME.weight`; `hf_name`: as in a checkpoint, `model.layers.N.HF_NAME.weight`."""

    name: str
    hf_name: str
    size: Callable[[ModelDescription], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """`name`: one of mesh.model.architectures. `block`: `x` [rows, hidden] to the same after one layer, which stores
    the rows' K and V on the way. `kernels`: whether the compiled step computes it too."""

    name: str
    block: Block
    extra: tuple[ExtraVector, ...] = ()
    kernels: bool = False
