"""Text to token ids and back, by the `tokenizers` library, equal to what llama.cpp makes of the same file.

Control tokens (`<|im_end|>` ...) come into being in one place only: `encode_prompt` with `control=True` parses them in
text that we trust, a rendered template whose user content was guarded (mesh.model.chat_template). `encode` never
makes one, so nobody can end a turn by typing.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import AddedToken
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE

from mesh.errors import InvalidRequest
from mesh.model.gguf_file import read_gguf
from mesh.model.pretokenizers import WHOLE_PIECES, pre_tokenizer
from mesh.model.vocabulary import Vocabulary, parse_object, read_text, vocabulary_of_folder, vocabulary_of_gguf


class Tokenizer:
    """One model's tokenizer. Stateless after construction; safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._bpe = _build(vocabulary)
        tokens = vocabulary.tokens
        # One character cannot be guarded by putting something inside it; no known model has such a control token.
        self._control_ids = {tokens[i]: i for i in vocabulary.control if len(tokens[i]) > 1}
        longest_first = sorted(self._control_ids, key=lambda text: (-len(text), text))
        self._control = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self._bytes = _token_bytes(vocabulary)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._bytes)

    def text_of(self, token_id: int | None) -> str:
        """Text of a control token as a template writes it; "" for None."""
        return "" if token_id is None else self.vocabulary.tokens[token_id]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of untrusted text: control tokens in it are plain characters. `add_special`: put the begin-of-sequence
        token first if the model wants one. Raises InvalidRequest on text that is not valid Unicode."""
        ids = self._encode_plain(text)
        return self._with_bos(ids) if add_special else ids

    def encode_prompt(self, rendered: str, guard: str) -> list[int]:
        """Ids of a rendered chat template: control tokens are parsed, `guard` characters break them up and are then
        dropped (see mesh.model.chat_template). A template that writes the begin-of-sequence token gets no second."""
        parts = self._control.split(rendered) if self._control is not None else [rendered]
        ids: list[int] = []
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self._control_ids[part])
            elif plain := part.replace(guard, ""):
                ids.extend(self._encode_plain(plain))
        return ids if ids[:1] == [self.vocabulary.bos_token_id] else self._with_bos(ids)

    def break_controls(self, text: str, guard: str) -> str:
        """`text` with `guard` inside each control text in it."""
        return self._control.sub(lambda m: m[0][0] + guard + m[0][1:], text) if self._control is not None else text

    def control_ids_in(self, rendered: str) -> list[int]:
        """The control tokens that encode_prompt would make, in order."""
        return (
            [self._control_ids[text] for text in self._control.findall(rendered)] if self._control is not None else []
        )

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; control tokens give none, bytes that are not UTF-8 give U+FFFD. Raises InvalidRequest on an id
        outside the vocabulary."""
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for (empty for control tokens)."""
        if not 0 <= token_id < len(self._bytes):
            raise InvalidRequest(f"token id {token_id} is outside [0, {len(self._bytes)})", field="tokens")
        return self._bytes[token_id]

    def stream(self) -> TokenTextStream:
        """A fresh incremental detokeniser."""
        return TokenTextStream(self)

    def _encode_plain(self, text: str) -> list[int]:
        try:
            # A batch of one: `encode` holds the interpreter's lock, for seconds on a long text.
            return list(self._bpe.encode_batch([text], add_special_tokens=False)[0].ids)
        except (UnicodeError, TypeError) as exc:
            raise InvalidRequest("the text holds code points that are not valid Unicode", field="text") from exc

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self.vocabulary.bos_token_id
        return [bos, *ids] if self.vocabulary.add_bos and bos is not None else ids


class TokenTextStream:
    """Incremental detokeniser: all pushes and the flush joined are `Tokenizer.decode` of the same ids. Implements
    mesh.node.stop.TextStream."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that is final after this token; a UTF-8 sequence is held until it is complete."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What was held: a sequence that never became complete, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file or Hugging Face folder. Blocks (well under a second); raises InvalidRequest."""
    if path.is_dir():
        config = path / "config.json"
        return Tokenizer(vocabulary_of_folder(path, parse_object(read_text(config), config)))
    return Tokenizer(vocabulary_of_gguf(read_gguf(path)))


def _build(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """A `tokenizers` BPE that knows no control token. User-defined tokens are matched in any text, as in llama.cpp."""
    if vocabulary.hf_json is not None:
        return _build_hf(vocabulary.hf_json)
    vocab = {text: i for i, text in enumerate(vocabulary.tokens)}
    if len(vocab) != len(vocabulary.tokens):
        raise InvalidRequest("the vocabulary holds a token twice", field="model")
    merges = [(left, right) for m in vocabulary.merges for left, _, right in [m.partition(" ")]]
    try:
        model = BPE(vocab, merges, ignore_merges=vocabulary.pre_tokenizer in WHOLE_PIECES)
    except Exception as exc:  # the binding raises bare Exception for a merge of unknown tokens
        raise InvalidRequest(f"the tokenizer's merges do not fit its vocabulary: {exc}", field="model") from exc
    bpe = tokenizers.Tokenizer(model)
    missing = [char for char in _byte_alphabet().values() if char not in vocab]
    bpe.pre_tokenizer = pre_tokenizer(vocabulary.pre_tokenizer, missing)
    bpe.decoder = ByteLevelDecoder()
    texts = [vocabulary.tokens[i] for i in sorted(vocabulary.user_defined)]
    bpe.add_tokens([AddedToken(text, normalized=False, special=False) for text in texts if text])
    return bpe


def _build_hf(hf_json: str) -> tokenizers.Tokenizer:
    try:
        bpe = tokenizers.Tokenizer.from_str(hf_json)
    except Exception as exc:  # the binding raises bare Exception for any fault of the file
        raise InvalidRequest(f"tokenizer.json: {exc}", field="model") from exc
    bpe.encode_special_tokens = True  # special tokens in a text are plain characters
    bpe.no_padding()
    bpe.no_truncation()
    return bpe


def _token_bytes(vocabulary: Vocabulary) -> list[bytes]:
    """Bytes of every id: GPT-2's byte alphabet undone; user-defined tokens are UTF-8; control tokens are empty."""
    to_byte = {char: byte for byte, char in _byte_alphabet().items()}
    table: list[bytes] = []
    for i, text in enumerate(vocabulary.tokens):
        if i in vocabulary.control:
            table.append(b"")
        elif i in vocabulary.user_defined:
            table.append(text.encode())
        else:
            # A character outside the alphabet stands for itself (a padding token that is never drawn).
            table.append(b"".join(bytes((to_byte[c],)) if c in to_byte else c.encode() for c in text))
    return table


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(rest)}
