from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesh.errors import InvalidRequest
from mesh.model.gguf_file import read_gguf
from tests.mesh.model.gguf_writer import METADATA, TENSORS, gguf, string, tiny_gguf


def _write(folder: Path, data: bytes) -> Path:
    path = folder / "m.gguf"
    path.write_bytes(data)
    return path


def test_reads_metadata_and_places_tensors(tmp_path: Path) -> None:
    file = read_gguf(tiny_gguf(tmp_path))
    assert file.text("general.architecture") == "llama"
    assert file.integer("llama.block_count") == 2
    assert file.number("llama.rope.freq_base") == 10000.0
    assert file.strings("tokenizer.ggml.merges") == ("a b", "ab c")
    assert file.integers("tokenizer.ggml.token_type")[-1] == 4
    first, second = file.tensors
    assert first.shape == (8, 13)
    assert first.size_bytes == 8 * 13 * 4
    assert second.offset_bytes >= first.offset_bytes + first.size_bytes
    assert second.offset_bytes % 32 == 0
    assert not file.tensor_bytes(second).any()
    assert file.tensor("absent") is None


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    from gguf import GGUFReader

    path = tiny_gguf(tmp_path)
    theirs = {t.name: (int(t.data_offset), int(t.n_bytes)) for t in GGUFReader(path).tensors}
    assert {t.name: (t.offset_bytes, t.size_bytes) for t in read_gguf(path).tensors} == theirs


def test_every_truncation_is_an_error_that_says_so(tmp_path: Path) -> None:
    whole = gguf(METADATA, TENSORS)
    for size in (0, 3, 23, *range(24, len(whole), 7), len(whole) - 1):
        with pytest.raises(InvalidRequest, match=r"truncated|too short"):
            read_gguf(_write(tmp_path, whole[:size]))


def _header(n_tensors: int, n_keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + rest + bytes(64)


def _tensor(name: str = "t", dims: tuple[int, ...] = (1,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GGML" + bytes(60), "magic"),
        (_header(0, 0, version=1), "version 1"),
        (_header(0, 0, version=0x03000000), "big-endian"),
        (_header(2**63, 0), "more than the limit"),
        (_header(0, 2**63), "more than the limit"),
        (_header(60_000, 0), "do not fit"),
        (_header(0, 1, struct.pack("<Q", 2**62)), "more than the limit"),
        (_header(0, 1, struct.pack("<Q", 60_000)), "truncated"),
        (_header(0, 1, struct.pack("<Q", 2) + b"\xff\xfe"), "not UTF-8"),
        (_header(0, 1, string("k") + struct.pack("<I", 99)), "unknown type 99"),
        (_header(0, 1, string("k") + struct.pack("<IB", 7, 2)), "neither 0 nor 1"),
        (_header(0, 1, string("k") + struct.pack("<IIQ", 9, 8, 2**60)), "more than the limit"),
        (_header(0, 1, string("k") + struct.pack("<IIQ", 9, 8, 2**20)), "truncated"),
        (_header(0, 1, string("k") + struct.pack("<IIQQ", 9, 8, 1, 2**60)), "item 0 of k"),
        (_header(0, 1, string("k") + struct.pack("<IIQQ", 9, 8, 1, 1) + b"\xff"), "not UTF-8"),
        (_header(0, 1, string("k") + struct.pack("<IIQ", 9, 4, 2**24)), "truncated"),
        (_header(0, 1, string("k") + struct.pack("<IIQ", 9, 9, 1)), "arrays of arrays"),
        (_header(0, 2, (string("k") + struct.pack("<IB", 0, 1)) * 2), "twice"),
        (_header(0, 1, string("general.alignment") + struct.pack("<II", 4, 3)), "power of two"),
        (_header(1, 0, _tensor(dims=())), "0 dimensions"),
        (_header(1, 0, _tensor(dims=(1,) * 5)), "5 dimensions"),
        (_header(1, 0, _tensor(dims=(0,))), "cannot be F32"),
        (_header(1, 0, _tensor(dims=(33,), kind=8)), "cannot be Q8_0"),
        (_header(1, 0, _tensor(kind=999)), "unknown type 999"),
        (_header(1, 0, _tensor(offset=1)), "not a multiple"),
        (_header(1, 0, _tensor(offset=2**62)), "truncated"),
        (_header(1, 0, _tensor(dims=(2**60, 2**60))), "truncated"),
        (_header(2, 0, _tensor() * 2), "same name"),
    ],
)
def test_bad_headers_are_refused(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_gguf(_write(tmp_path, data))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, len(gguf(METADATA, TENSORS)) - 1), byte=st.integers(0, 255))
def test_any_changed_byte_is_read_or_refused(tmp_path: Path, at: int, byte: int) -> None:
    data = bytearray(gguf(METADATA, TENSORS))
    data[at] = byte
    with contextlib.suppress(InvalidRequest):  # anything else fails the test
        read_gguf(_write(tmp_path, bytes(data)))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        read_gguf(tmp_path / "none.gguf")


def test_getters_name_the_key(tmp_path: Path) -> None:
    file = read_gguf(tiny_gguf(tmp_path, some__nan=float("nan")))
    for get in (file.text, file.flag, file.strings, file.integers):
        with pytest.raises(InvalidRequest, match=r"llama\.block_count"):
            get("llama.block_count")
    with pytest.raises(InvalidRequest, match=r"some\.nan"):
        file.number("some.nan")
    with pytest.raises(InvalidRequest, match="lacks x"):
        file.integer("x")
    assert file.integer("x", 7) == 7
    assert isinstance(file.metadata["tokenizer.ggml.token_type"], np.ndarray)
