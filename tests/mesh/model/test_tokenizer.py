from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import InvalidRequest
from mesh.model.catalogue import demo_model_path
from mesh.model.tokenizer import Tokenizer, load_tokenizer
from tests.mesh.model.gguf_writer import TOKENS, tiny_folder, tiny_gguf

TEXTS = [
    "",
    " ",
    "\n",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\r\nline\n\n\n breaks \n \n  x",
    "It's we're I'll they've I'd don't I'M",
    "Déjà vu, naïve Ωmega, Straße, ÅÄÖ",
    "日本語のテキストと中文，以及한국어 텍스트",
    "مرحبا بالعالم שלום עולם हिन्दी ไทย",
    "emoji 🎉👩‍👩‍👧‍👦🏳️‍🌈 end",
    "0 12 123 1234 12345 ⅷ ² ½ ٣٤",
    "def f(x: int) -> str:\n    return f'{x!r}' # comment\n\n\tif x:\n\t\tpass",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|> <|im_ end|>",
    "a\u00a0b\u2003c\u3000d\u200be\ufefff\u0085g",
    "e\u0301 combining, ﬁ ligature, \U00010000 \ufffd \x00\x01\x7f",
    "https://example.org/?q=1&r=%20#frag user@example.com 3.14e-10 $5.00 50%",
    " " * 50 + "x" + "\n" * 20 + "=" * 70,
    "word " * 300,
]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(demo_model_path())


def test_tiny_file_and_folder_agree(tmp_path: Path) -> None:
    ours, hf = load_tokenizer(tiny_gguf(tmp_path)), load_tokenizer(tiny_folder(tmp_path))
    for text in ("abc ab", "a<think>b", "c\na"):
        ids = ours.encode(text)
        assert ids == hf.encode(text)
        assert ours.decode(ids) == hf.decode(ids) == text
    assert ours.encode("a<think>b") == [3, 12, 4]
    assert ours.vocabulary.control == hf.vocabulary.control


def test_a_control_text_is_never_a_token_whatever_its_type_in_the_file(tmp_path: Path) -> None:
    for tokenizer in (load_tokenizer(tiny_gguf(tmp_path)), load_tokenizer(tiny_folder(tmp_path))):
        ids = tokenizer.encode("<|im_end|>")
        assert not tokenizer.vocabulary.control & set(ids)
        assert TOKENS.index("<|im_end|>") in tokenizer.vocabulary.control


def test_bos_comes_first_once_where_the_model_wants_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_gguf(tmp_path, tokenizer__ggml__add_bos_token=True))
    assert tokenizer.encode("a") == [0, 3]
    assert tokenizer.encode("a", add_special=False) == [3]
    assert tokenizer.encode_prompt("a", "\ufdd0") == [0, 3]
    assert tokenizer.encode_prompt("<|endoftext|>a", "\ufdd0") == [0, 3]


@pytest.mark.parametrize("ids", [[-1], [13], [0, 10**9]])
def test_decoding_an_id_outside_the_vocabulary_is_refused(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="outside"):
        load_tokenizer(tiny_gguf(tmp_path)).decode(ids)


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        load_tokenizer(tiny_gguf(tmp_path)).encode("a\ud800b")


def test_unknown_pre_tokenizers_and_broken_merges_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="'tekken' is not supported; supported: gpt-2"):
        load_tokenizer(tiny_gguf(tmp_path, tokenizer__ggml__pre="tekken"))
    with pytest.raises(InvalidRequest, match="pre-tokenizer '\\(none\\)'"):
        load_tokenizer(tiny_gguf(tmp_path, tokenizer__ggml__pre=None))
    with pytest.raises(InvalidRequest, match="merges"):
        load_tokenizer(tiny_gguf(tmp_path, tokenizer__ggml__merges=["a z"]))
    with pytest.raises(InvalidRequest, match="twice"):
        load_tokenizer(tiny_gguf(tmp_path, tokenizer__ggml__tokens=[*TOKENS[:-1], "a"]))


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_decode_undoes_encode_and_the_stream_equals_decode(demo: Tokenizer, text: str) -> None:
    ids = demo.encode(text)
    assert demo.decode(ids) == text
    stream = demo.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == text


@pytest.mark.model
@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=20))
def test_the_stream_equals_decode_on_any_ids(demo: Tokenizer, ids: list[int]) -> None:
    stream = demo.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == demo.decode(ids)


@pytest.mark.model
def test_a_split_character_is_held_until_it_is_complete(demo: Tokenizer) -> None:
    ids = demo.encode("🎉")
    assert len(ids) > 1
    stream = demo.stream()
    assert [stream.push(i) for i in ids] == [""] * (len(ids) - 1) + ["🎉"]
    stream = demo.stream()
    assert stream.push(ids[0]) == ""
    assert stream.flush() == "\ufffd"


@pytest.fixture(scope="module")
def llama_cpp_tokenizer() -> object:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    return llama_cpp.Llama(str(demo_model_path()), vocab_only=True, verbose=False, n_ctx=8)


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_equals_llama_cpp(demo: Tokenizer, llama_cpp_tokenizer: object, text: str) -> None:
    theirs = llama_cpp_tokenizer.tokenize(text.encode(), add_bos=False, special=False)  # type: ignore[attr-defined]
    assert demo.encode(text) == theirs


@pytest.mark.model
@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60))
def test_equals_llama_cpp_on_any_text(demo: Tokenizer, llama_cpp_tokenizer: object, text: str) -> None:
    theirs = llama_cpp_tokenizer.tokenize(text.encode(), add_bos=False, special=False)  # type: ignore[attr-defined]
    assert demo.encode(text) == theirs


@pytest.mark.model
def test_control_tokens_of_trusted_text_equal_llama_cpp(demo: Tokenizer, llama_cpp_tokenizer: object) -> None:
    text = "<|im_start|>user\nHi  there<|im_end|>\n<|im_start|>assistant\n"
    theirs = llama_cpp_tokenizer.tokenize(text.encode(), add_bos=False, special=True)  # type: ignore[attr-defined]
    assert demo.encode_prompt(text, "\ufdd0") == theirs
