"""Spoilt bytes: a chunk or an artifact is refused with PayloadCorrupt or gives finite values, never anything else."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mesh.errors import KvIncompatible, PayloadCorrupt
from mesh.kv.codecs import codec_named
from mesh.kv.geometry import KvDtype
from mesh.kv.kvtc.artifact import make_artifact, parse_artifact
from mesh.kv.kvtc.codec import KvtcCodec
from tests.mesh.kv.kvtc.mutations import mutate
from tests.mesh.kv.kvtc.synthetic import GEOMETRY, artifact, artifact_parts, slab


def spoil_chunks(n: int, seed: int) -> tuple[int, int]:
    """How many of `n` mutated chunks were refused, and how many passed (with finite values)."""
    made = artifact()
    codec = KvtcCodec(made, made.settings[0], codec_named("q8_0"))
    chunks = [codec.encode(slab(n_tokens, start=start, usual=usual)) for n_tokens, start, usual in
              ((12, 0, True), (12, 100, True), (12, 100, False))]  # fmt: skip
    rng = random.Random(seed)
    refused = passed = 0
    for _ in range(n):
        data = rng.choice(chunks)
        try:
            out = codec.decode(
                mutate(data, rng), start=0, n_tokens=12, geometry=GEOMETRY, dtype=rng.choice(list(KvDtype))
            )
        except PayloadCorrupt:
            refused += 1
            continue
        out.check(GEOMETRY)
        assert all(np.isfinite(part.astype(np.float32)).all() for part in (out.k, out.v) if part.dtype != np.uint16)
        passed += 1
    return refused, passed


def spoil_artifacts(n: int, seed: int) -> int:
    """How many of `n` mutated artifacts were refused; the others have another digest."""
    made, data = make_artifact(**artifact_parts())  # type: ignore[arg-type]
    rng = random.Random(seed)
    refused = 0
    for _ in range(n):
        spoilt = mutate(data, rng)
        try:
            found = parse_artifact(spoilt)
        except PayloadCorrupt:
            refused += 1
            continue
        assert spoilt == data or found.digest != made.digest  # another name: no peer takes it for the one it knows
    return refused


def test_spoilt_chunks() -> None:
    refused, passed = spoil_chunks(120, seed=1)
    assert refused > 60
    assert refused + passed == 120


def test_spoilt_artifacts() -> None:
    assert spoil_artifacts(25, seed=1) > 4


@pytest.mark.soak
def test_thousands_of_spoilt_chunks() -> None:
    assert sum(spoil_chunks(4000, seed=2)) == 4000


@pytest.mark.soak
def test_thousands_of_spoilt_artifacts() -> None:
    assert spoil_artifacts(2000, seed=2) > 200


def test_an_artifact_of_another_model_is_refused() -> None:
    from dataclasses import replace

    from mesh.kv.kvtc.shelf import check_made_for

    check_made_for(artifact(), GEOMETRY, "synthetic")
    for geometry, lineage in ((replace(GEOMETRY, rope_base=5e5), "synthetic"), (GEOMETRY, "another")):
        with pytest.raises(KvIncompatible) as caught:
            check_made_for(artifact(), geometry, lineage)
        assert caught.value.details["field"] == "artifact"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"ranks":[40,40]', b'"ranks":[1e999,1]'),
        (b'"windows":3', b'"windows":[]'),
        (b'"loss_ratio":0.004', b'"loss_ratio":"low"'),
        (b'"head_dim":32', b'"head_dim":99'),
        (b'"predicted":20', b'"predicted":99'),
        (b'"name":"fine"', b'"name":"f:ne"'),
        (b'"notes":"synthetic"', b'"notes":' + b"[" * 9 + b"]" * 9),
    ],
)
def test_headers_that_lie_are_refused(old: bytes, new: bytes) -> None:
    _, data = make_artifact(**artifact_parts())  # type: ignore[arg-type]
    size = int.from_bytes(data[8:12], "little")
    header = data[12 : 12 + size]
    assert old in header
    if b"notes" in old:  # text of any form is as good as any
        header = header.replace(b'"settings"', b'"settings":' + b"[" * 100_000 + b',"x"')
    header = header.replace(old, new)
    with pytest.raises(PayloadCorrupt):
        parse_artifact(data[:8] + len(header).to_bytes(4, "little") + header + data[12 + size :])
