"""The artifact file: what is written is what is read, and nothing else is taken."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import InvalidRequest, KvIncompatible, PayloadCorrupt
from mesh.kv.kvtc.artifact import Artifact, Setting, make_artifact, parse_artifact, read_artifact
from tests.mesh.kv.kvtc.synthetic import artifact_parts


def test_a_file_gives_the_artifact_that_was_written(tmp_path: Path) -> None:
    made, data = make_artifact(**artifact_parts())  # type: ignore[arg-type]
    path = tmp_path / "a.kvtc"
    path.write_bytes(data)
    read = read_artifact(path)
    assert read.digest == made.digest
    assert all(np.array_equal(a, b) for a, b in zip(read.basis, made.basis, strict=True))
    assert read.settings[0].quality == made.settings[0].quality
    assert np.array_equal(read.settings[0].steps, made.settings[0].steps)
    assert read.geometry == made.geometry


def test_settings_are_found_by_name() -> None:
    made, _ = make_artifact(**artifact_parts())  # type: ignore[arg-type]
    assert made.setting("fine") is made.settings[0]
    with pytest.raises(KvIncompatible):
        made.setting("coarse")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"none\.kvtc"):
        read_artifact(tmp_path / "none.kvtc")


@pytest.mark.parametrize("cut", [1, 1000])
def test_truncated_and_extended_files_are_refused(cut: int) -> None:
    _, data = make_artifact(**artifact_parts())  # type: ignore[arg-type]
    for wrong in (data[:-cut], data + bytes(cut), data[:cut], b""):
        with pytest.raises(PayloadCorrupt):
            parse_artifact(wrong)


@functools.cache
def _artifact() -> tuple[Artifact, bytes]:
    """Made once: it takes a second or two, and the examples only read it."""
    return make_artifact(**artifact_parts())  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 1200), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_header_is_refused_or_changes_the_digest(at: int, bit: int) -> None:
    made, data = _artifact()
    wrong = bytearray(data)
    wrong[at] ^= 1 << bit
    try:
        assert parse_artifact(bytes(wrong)).digest != made.digest
    except PayloadCorrupt:
        pass


@pytest.mark.parametrize("name", ["mean", "weights", "residual"])
def test_values_that_are_not_finite_are_refused(name: str) -> None:
    parts = artifact_parts()
    values = np.asarray(parts[name]).copy()
    values.flat[3] = np.nan
    with pytest.raises(PayloadCorrupt):
        make_artifact(**(parts | {name: values}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"name": "a:b"},
        {"name": ""},
        {"bound": 0.0},
        {"restore": np.zeros((2, 40), dtype=np.float32)},
        {"steps": -np.ones((2, 40), dtype=np.float32)},
        {"steps": np.zeros((2, 40), dtype=np.float32)},
        {"contexts": np.full((2, 40), 200, dtype=np.uint8)},
    ],
)
def test_malformed_settings_are_refused(change: dict[str, object]) -> None:
    parts = artifact_parts()
    (setting,) = parts["settings"]  # type: ignore[misc]
    assert isinstance(setting, Setting)
    with pytest.raises(PayloadCorrupt):
        make_artifact(**(parts | {"settings": (replace(setting, **change),)}))  # type: ignore[arg-type]
