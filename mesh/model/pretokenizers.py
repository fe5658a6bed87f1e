"""How a text is split before BPE, by the names that GGUF files use (`tokenizer.ggml.pre`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from mesh.errors import InvalidRequest

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Each rule splits the pieces of the one before it.
_RULES: Final[Mapping[str, tuple[str, ...]]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3 % 3,),
    "llama3": (_LLAMA3 % 3,),
    "qwen2": (_LLAMA3 % 1,),
}
# A piece that is a token by itself is taken whole, whatever the merges say.
WHOLE_PIECES: Final = frozenset({"llama-bpe", "llama3"})


def pre_tokenizer(name: str, missing: Iterable[str] = ()) -> PreTokenizer:
    """The splitter of this name. Raises InvalidRequest naming what is supported.

    `missing`: characters of the byte alphabet that the vocabulary lacks (rare control bytes). No token can hold them;
    standing alone they are dropped without joining what is left and right of them, as in llama.cpp."""
    rules = _RULES.get(name)
    if rules is None:
        raise InvalidRequest(
            f"pre-tokenizer {name or '(none)'!r} is not supported; supported: {', '.join(sorted(_RULES))}",
            field="model",
        )
    steps: list[PreTokenizer] = [Split(Regex(rule), "isolated") for rule in rules]
    steps.append(ByteLevel(add_prefix_space=False, use_regex=False))
    steps.extend(Split(char, "isolated") for char in missing)
    return Sequence(steps)
