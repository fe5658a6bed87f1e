"""What nodes declare of their codecs: on the wire, in a registration's meta, and as the table of decisions. Pure.

A declaration is believed as far as it goes: of one codec that several nodes declare, the largest loss and the least
saving count. One that cannot be (no name, a figure that is no positive number) is left out, as if it were not made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from mesh.kv.codec_profile import CodecProfile
from mesh.v1 import admin_pb2 as admin
from placement.decide.types import CodecTable

MAX_CODECS = 16
MAX_TEXT_BYTES = 512  # of a value in a registration's meta
_MAX_NAME_CHARS = 128


class HasCodecs(Protocol):
    """A model on a node."""

    @property
    def codecs(self) -> tuple[CodecProfile, ...]: ...


def codecs_to_wire(codecs: Iterable[CodecProfile]) -> list[admin.KvCodec]:
    """Of a model as hello and snapshot carry them."""
    return [
        admin.KvCodec(
            name=c.codec,
            ratio=c.ratio,
            loss_ratio=c.loss_ratio,
            encode_tokens_per_s=c.encode_tokens_per_s,
            decode_tokens_per_s=c.decode_tokens_per_s,
        )
        for c in codecs
    ]


def codecs_from_wire(codecs: Sequence[admin.KvCodec]) -> tuple[CodecProfile, ...]:
    """Inverse of codecs_to_wire."""
    return _sound(
        CodecProfile(
            codec=c.name,
            ratio=c.ratio,
            loss_ratio=c.loss_ratio,
            encode_tokens_per_s=c.encode_tokens_per_s,
            decode_tokens_per_s=c.decode_tokens_per_s,
        )
        for c in codecs[:MAX_CODECS]
    )


def codecs_to_text(codecs: Iterable[CodecProfile]) -> str:
    """As one value of a registration's meta: "name ratio loss encode decode;...", as many as fit."""
    text = ""
    for c in codecs:
        figures = (c.ratio, c.loss_ratio, c.encode_tokens_per_s, c.decode_tokens_per_s)
        more = f"{text};" * bool(text) + " ".join((c.codec, *(f"{value:.4g}" for value in figures)))
        if len(more.encode()) > MAX_TEXT_BYTES:
            break
        text = more
    return text


def codecs_from_text(text: str) -> tuple[CodecProfile, ...]:
    """Inverse of codecs_to_text, rounded. Raises ValueError."""
    found = []
    for part in text.split(";")[:MAX_CODECS] if text else ():
        name, *figures = part.split(" ")
        ratio, loss_ratio, encode, decode = (float(figure) for figure in figures)
        found.append(
            CodecProfile(
                codec=name,
                ratio=ratio,
                loss_ratio=loss_ratio,
                encode_tokens_per_s=encode,
                decode_tokens_per_s=decode,
            )
        )
    return _sound(found)


def _sound(codecs: Iterable[CodecProfile]) -> tuple[CodecProfile, ...]:
    return tuple(
        c
        for c in codecs
        if 0 < len(c.codec) <= _MAX_NAME_CHARS
        and c.codec.isascii()
        and c.codec.isprintable()
        and all(0 < x < math.inf for x in (c.ratio, c.encode_tokens_per_s, c.decode_tokens_per_s))
        and 0 <= c.loss_ratio < math.inf
    )


def codec_table(nodes: Sequence[Sequence[HasCodecs]]) -> CodecTable:
    """The table of the nodes' models, in the order of `nodes`. A node without a declaration has f16, at no cost; where
    none declares anything, that is the table."""
    declared = [{c.codec: c for model in models for c in model.codecs} for models in nodes]
    known: dict[str, tuple[float, float]] = {"f16": (0.0, 1.0)} if not all(declared) or not declared else {}
    for codecs in declared:
        for name, c in codecs.items():
            loss_ratio, ratio = known.get(name, (0.0, math.inf))
            known[name] = max(loss_ratio, c.loss_ratio), min(ratio, c.ratio)
    names = sorted(known, key=lambda name: (known[name][0], -known[name][1], name))
    shape = (len(nodes), len(names))
    encode_s, decode_s = np.full(shape, np.inf), np.full(shape, np.inf)
    for row, codecs in enumerate(declared):
        for column, name in enumerate(names):
            if name in codecs:
                encode_s[row, column] = 1.0 / codecs[name].encode_tokens_per_s
                decode_s[row, column] = 1.0 / codecs[name].decode_tokens_per_s
            elif not codecs and name == "f16":
                encode_s[row, column] = decode_s[row, column] = 0.0
    return CodecTable(
        names=tuple(names),
        bytes_ratio=np.array([1.0 / known[name][1] for name in names]),
        loss_ratio=np.array([known[name][0] for name in names]),
        encode_s=encode_s,
        decode_s=decode_s,
    )
