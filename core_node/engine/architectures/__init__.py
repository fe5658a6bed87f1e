"""The architectures that the engine computes, one file each. README.md says how to add one."""

from __future__ import annotations

from typing import Final

from core_node.engine.architectures.architecture import Architecture
from core_node.engine.architectures.llama import LLAMA
from core_node.engine.architectures.qwen3 import QWEN3
from mesh.model.description import ModelDescription

_ALL: Final = {a.name: a for a in (LLAMA, QWEN3)}


def architecture_of(description: ModelDescription) -> Architecture:
    """How a model is computed. What mesh.model.description accepts is here: a test holds the two together."""
    return _ALL[description.architecture]
