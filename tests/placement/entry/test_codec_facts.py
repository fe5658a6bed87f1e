"""Declarations of codecs on their way from a node to a decision."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

from mesh.kv.codec_profile import CodecProfile
from mesh.v1 import admin_pb2 as admin
from placement.entry.codec_facts import (
    MAX_TEXT_BYTES,
    codec_table,
    codecs_from_text,
    codecs_from_wire,
    codecs_to_text,
    codecs_to_wire,
)


def profile(codec: str, ratio: float = 2.0, loss_ratio: float = 0.0, speed: float = 1000.0) -> CodecProfile:
    return CodecProfile(
        codec=codec, ratio=ratio, loss_ratio=loss_ratio, encode_tokens_per_s=speed, decode_tokens_per_s=2 * speed
    )


@dataclass
class Model:
    codecs: tuple[CodecProfile, ...]


F16 = profile("f16", 1.0)
Q8 = profile("q8_0", 1.88, 0.001)
KVTC = profile("kvtc:0123456789abcdef:30x", 30.0, 0.009)


def test_there_and_back() -> None:
    assert codecs_from_wire(codecs_to_wire((F16, Q8, KVTC))) == (F16, Q8, KVTC)
    assert codecs_from_text(codecs_to_text((F16, Q8, KVTC))) == (F16, Q8, KVTC)
    assert codecs_from_text(codecs_to_text(())) == ()


def test_as_many_as_fit_a_value_of_meta() -> None:
    many = tuple(profile(f"kvtc:0123456789abcdef:{i}x") for i in range(40))
    text = codecs_to_text(many)
    assert len(text.encode()) <= MAX_TEXT_BYTES
    assert codecs_from_text(text) == many[: len(codecs_from_text(text))]


@pytest.mark.parametrize("text", ["f16", "f16 1 0 1", "f16 1 0 x 1", "f16 1 0 1 1 1"])
def test_text_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"not enough|too many|could not convert"):
        codecs_from_text(text)


@pytest.mark.parametrize(
    "bad",
    [
        profile(""), profile("x" * 200), profile("a\nb"), profile("f16", ratio=0.0), profile("f16", ratio=math.nan),
        profile("f16", loss_ratio=-0.1), profile("f16", loss_ratio=math.nan), profile("f16", speed=math.inf),
    ],
)  # fmt: skip
def test_a_declaration_that_cannot_be_is_not_made(bad: CodecProfile) -> None:
    assert codecs_from_wire([*codecs_to_wire((bad,)), *codecs_to_wire((Q8,))]) == (Q8,)


def test_more_than_anyone_has_are_not_read() -> None:
    assert len(codecs_from_wire([admin.KvCodec(name=f"c{i}", ratio=1, encode_tokens_per_s=1, decode_tokens_per_s=1)
                                 for i in range(1000)])) == 16  # fmt: skip


def test_the_table_has_what_somebody_declares_the_least_lossy_first() -> None:
    table = codec_table([[Model((F16, KVTC))], [Model((F16, Q8, replace(KVTC, loss_ratio=0.02, ratio=20.0)))], []])
    assert table.names == ("f16", "q8_0", KVTC.codec)
    assert list(table.loss_ratio) == [0.0, 0.001, 0.02]  # the worse declaration counts
    assert table.bytes_ratio[2] == pytest.approx(1 / 20)
    assert table.encode_s[0].tolist() == [pytest.approx(0.001), math.inf, pytest.approx(0.001)]
    assert table.decode_s[2].tolist() == [0.0, math.inf, math.inf]  # says nothing: f16


def test_a_mesh_that_declares_nothing_has_f16() -> None:
    for nodes in ([], [[]], [[Model(())], []]):
        table = codec_table(nodes)
        assert table.names == ("f16",)
        assert (table.encode_s == 0).all()
