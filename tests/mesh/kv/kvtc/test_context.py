"""Whole contexts: chunks in order, sinks and the latest tokens as in q8_0."""

from __future__ import annotations

import numpy as np
import pytest

from mesh.errors import PayloadCorrupt
from mesh.kv.codecs import codec_named
from mesh.kv.geometry import KvDtype
from mesh.kv.kvtc.codec import WINDOW_TOKENS, KvtcCodec
from mesh.kv.kvtc.context import decode_context, encode_context
from tests.mesh.kv.kvtc.synthetic import GEOMETRY, artifact, slab


def test_sinks_and_window_come_back_as_q8_0() -> None:
    a = artifact()
    codec, plain = KvtcCodec(a, a.settings[0], codec_named("q8_0")), codec_named("q8_0")
    s = slab(300, start=0)
    chunks = list(encode_context(codec, s))
    assert len(chunks) == 2
    got = decode_context(codec, chunks, start=0, stop=300, geometry=GEOMETRY, dtype=KvDtype.F16)
    got.check(GEOMETRY)
    want = plain.decode(plain.encode(s), start=0, n_tokens=300, geometry=GEOMETRY, dtype=KvDtype.F16)
    same = (got.k == want.k).all(axis=(0, 2, 3))
    assert same[:4].all()
    assert same[-WINDOW_TOKENS:].all()
    assert not same[4:-WINDOW_TOKENS].any()
    assert np.isfinite(got.v).all()


def test_a_missing_chunk_is_refused() -> None:
    a = artifact()
    codec = KvtcCodec(a, a.settings[0], codec_named("q8_0"))
    chunks = list(encode_context(codec, slab(300, start=0)))
    for wrong in (chunks[:1], [], [*chunks, chunks[0]], chunks[::-1]):
        with pytest.raises(PayloadCorrupt):
            decode_context(codec, wrong, start=0, stop=300, geometry=GEOMETRY, dtype=KvDtype.F16)
