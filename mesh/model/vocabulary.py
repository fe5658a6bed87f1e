"""What a tokenizer is made of, read from a GGUF file or a Hugging Face folder into one form.

Both sources of one model give equal `tokens` and `merges`, hence an equal `tokenizer_hash`, which is part of the
KV layout. Only byte-level BPE is known here; other tokenizers are refused by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from mesh.errors import InvalidRequest
from mesh.model.gguf_file import GgufFile

# Texts that end a turn in the chat formats of well-known models. A GGUF names one end-of-sequence id only; a
# control token of one of these texts ends a generation too (llama.cpp goes by the text as well).
END_TEXTS: Final = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"}
)
# Texts that are control tokens whatever the file says of them: a user must never be able to type them.
CONTROL_TEXTS: Final = END_TEXTS | {"<|im_start|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"}

MAX_VOCABULARY: Final = 1 << 22

_CONTROL, _UNKNOWN, _USER_DEFINED = 3, 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A byte-level BPE vocabulary. `tokens[i]` is the text of id i in GPT-2's byte alphabet (control and
    user-defined tokens as they are); `merges` are "left right", best first.

    `control` ids are made only by trusted template text; `user_defined` ids are matched in any text.
    `pre_tokenizer` is the GGUF name of the splitting rule, "" when `hf_json` (a tokenizer.json) brings its own.
    """

    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    control: frozenset[int]
    user_defined: frozenset[int]
    pre_tokenizer: str
    hf_json: str | None
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    add_bos: bool

    @property
    def tokenizer_hash(self) -> str:
        """Hex SHA-256 over tokens and merges, in order."""
        digest = hashlib.sha256(b"kvmesh.tokenizer.v1\0")
        for part in (self.tokens, self.merges):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update("\0".join(f"{len(item)}:{item}" for item in part).encode())
        return digest.hexdigest()


def vocabulary_of_gguf(file: GgufFile) -> Vocabulary:
    """The vocabulary of a GGUF file. Raises InvalidRequest if it is not byte-level BPE or does not add up."""
    kind = file.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise InvalidRequest(
            f"{file.path.name}: tokenizer {kind!r} is not supported; byte-level BPE ('gpt2') is", field="model"
        )
    tokens = file.strings("tokenizer.ggml.tokens")
    types = file.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise InvalidRequest(f"{file.path.name}: {len(tokens)} tokens but {len(types)} token types", field="model")
    control = {i for i, t in enumerate(types) if t in (_CONTROL, _UNKNOWN)}
    control |= {i for i, text in enumerate(tokens) if text in CONTROL_TEXTS}
    eos = [file.integer(f"tokenizer.ggml.{k}_token_id", -1) for k in ("eos", "eot", "eom")]
    bos = file.integer("tokenizer.ggml.bos_token_id", -1)
    pre = file.text("tokenizer.ggml.pre", "")
    return Vocabulary(
        tokens=tokens,
        merges=file.strings("tokenizer.ggml.merges"),
        control=frozenset(control),
        user_defined=frozenset(int(i) for i in (types == _USER_DEFINED).nonzero()[0]) - control,
        pre_tokenizer=pre,
        hf_json=None,
        bos_token_id=_checked_id(bos, tokens, "bos") if bos >= 0 else None,
        eos_token_ids=_end_ids(tokens, control, [i for i in eos if i >= 0]),
        # llama.cpp's rule: the flag where it is given, else the habit of the pre-tokenizer's family.
        add_bos=file.flag("tokenizer.ggml.add_bos_token", pre in ("llama-bpe", "llama3")) and bos >= 0,
    )


def vocabulary_of_folder(folder: Path, config: dict[str, Any]) -> Vocabulary:
    """The vocabulary of a Hugging Face folder whose config.json is `config`; padded to its vocab_size as a GGUF is."""
    path = folder / "tokenizer.json"
    text = read_text(path)
    data = parse_object(text, path)
    model = data.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not _is_byte_level(data):
        raise InvalidRequest(f"{path}: only byte-level BPE tokenizers are supported", field="model")
    try:
        by_id, control, user_defined = _token_table(data)
        merges = tuple(m if isinstance(m, str) else " ".join(m) for m in model["merges"])
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise InvalidRequest(f"{path}: not a tokenizer of the format known here: {exc!r}", field="model") from exc
    declared = config.get("vocab_size", 0)
    size = max(declared if isinstance(declared, int) else 0, max(by_id, default=-1) + 1)
    if size > MAX_VOCABULARY:
        raise InvalidRequest(f"{path}: {size} tokens are more than the limit of {MAX_VOCABULARY}", field="model")
    tokens = tuple(by_id.get(i, f"[PAD{i}]") for i in range(size))
    generation = folder / "generation_config.json"
    configs = [config, parse_object(read_text(generation), generation)] if generation.is_file() else [config]
    bos = config.get("bos_token_id")
    return Vocabulary(
        tokens=tokens,
        merges=merges,
        control=frozenset(control),
        user_defined=frozenset(user_defined),
        pre_tokenizer="",
        hf_json=text,
        bos_token_id=_checked_id(bos, tokens, "bos") if isinstance(bos, int) else None,
        eos_token_ids=_end_ids(tokens, control, [i for c in configs for i in _as_ids(c.get("eos_token_id"))]),
        add_bos=isinstance(bos, int) and _adds_first(text, bos),
    )


def read_text(path: Path) -> str:
    """A UTF-8 file of a model folder. Raises InvalidRequest naming it."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"{path}: cannot read it: {exc}", field="model") from exc


def parse_object(text: str, path: Path) -> dict[str, Any]:
    """A JSON object. Raises InvalidRequest naming the file."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"{path}: not JSON: {exc}", field="model") from exc
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path}: not a JSON object", field="model")
    return value


def _token_table(data: dict[str, Any]) -> tuple[dict[int, str], set[int], set[int]]:
    """Texts by id, control ids and user-defined ids of a parsed tokenizer.json."""
    by_id = {int(i): str(text) for text, i in data["model"]["vocab"].items()}
    control: set[int] = set()
    user_defined: set[int] = set()
    for added in data.get("added_tokens", ()):
        token_id, text = int(added["id"]), str(added["content"])
        by_id[token_id] = text
        (control if added.get("special") or text in CONTROL_TEXTS else user_defined).add(token_id)
    return by_id, control, user_defined


def _is_byte_level(data: dict[str, Any]) -> bool:
    decoder = data.get("decoder")
    parts = [decoder, *(decoder.get("decoders", ()) if isinstance(decoder, dict) else ())]
    return any(isinstance(part, dict) and part.get("type") == "ByteLevel" for part in parts)


def _adds_first(tokenizer_json: str, token_id: int) -> bool:
    """Whether the file's own post-processor puts `token_id` first."""
    return Tokenizer.from_str(tokenizer_json).encode("").ids[:1] == [token_id]


def _as_ids(value: object) -> list[int]:
    items = value if isinstance(value, list) else [value]
    return [i for i in items if isinstance(i, int) and not isinstance(i, bool)]


def _end_ids(tokens: tuple[str, ...], control: Iterable[int], named: Iterable[int]) -> frozenset[int]:
    ids = {_checked_id(i, tokens, "eos") for i in named} | {i for i in control if tokens[i] in END_TEXTS}
    if not ids:
        raise InvalidRequest("the model names no end-of-sequence token", field="model")
    return frozenset(ids)


def _checked_id(token_id: int, tokens: tuple[str, ...], name: str) -> int:
    if not 0 <= token_id < len(tokens):
        raise InvalidRequest(f"{name}_token_id {token_id} is outside the vocabulary of {len(tokens)}", field="model")
    return token_id
