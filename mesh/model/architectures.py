"""The architectures that a model file may have, by GGUF's names, as far as the whole mesh must know them. Pure.

How one is computed is each engine's own matter (core_node/engine/architectures, llama.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from mesh.errors import InvalidRequest


class RopePairs(Enum):
    """Which dimensions of a head turn together, in the order in which llama.cpp stores K: the canonical one."""

    ADJACENT = "adjacent"  # 2i with 2i + 1
    HALVES = "halves"  # i with i + head_dim / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureFacts:
    """`name`: `general.architecture` of a GGUF. `hf_classes`: the names in a config.json that mean the same
    computation; Hugging Face checkpoints turn halves, whatever `pairs` is."""

    name: str
    pairs: RopePairs
    hf_classes: tuple[str, ...]


ARCHITECTURES: Final = {
    a.name: a
    for a in (
        # Mistral differs from Llama in its sliding window only, and models with one are refused.
        ArchitectureFacts(
            name="llama", pairs=RopePairs.ADJACENT, hf_classes=("LlamaForCausalLM", "MistralForCausalLM")
        ),
        ArchitectureFacts(name="qwen3", pairs=RopePairs.HALVES, hf_classes=("Qwen3ForCausalLM",)),
    )
}


def architecture_facts(name: str) -> ArchitectureFacts:
    """Raises InvalidRequest, naming those that are supported."""
    facts = ARCHITECTURES.get(name)
    if facts is None:
        raise InvalidRequest(
            f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}", field="model"
        )
    return facts


def facts_of_hf_class(name: str) -> ArchitectureFacts:
    """By a config.json's class name. Raises InvalidRequest, naming those that are supported."""
    for facts in ARCHITECTURES.values():
        if name in facts.hf_classes:
            return facts
    known = ", ".join(c for a in ARCHITECTURES.values() for c in a.hf_classes)
    raise InvalidRequest(f"architecture {name!r} is not supported; supported: {known}", field="model")
