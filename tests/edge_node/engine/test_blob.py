"""llama.cpp's state blob: what we build we can read, and nothing else passes."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest

from edge_node.engine.blob import MAGIC, Blob, BlobLayout, Rows, build, check, parse
from mesh.errors import PayloadCorrupt
from mesh.kv.geometry import KvGeometry

LAYOUT = BlobLayout(n_layers=3, n_kv_heads=2, head_dim=8)


def rows(n_tokens: int, seed: int = 0) -> tuple[Rows, Rows]:
    rng = np.random.default_rng(seed)
    k, v = (rng.standard_normal(LAYOUT.shape(n_tokens)).astype(np.float16) for _ in range(2))
    return k, v


def test_layout_of_the_demo_model_is_what_was_measured() -> None:
    geometry = KvGeometry(
        architecture="llama",
        n_layers=30,
        n_kv_heads=3,
        head_dim=64,
        rope_base=1e5,
        rope_scaling="none",
        tokenizer_hash="",
    )
    layout = BlobLayout.of(geometry)
    assert layout.token_bytes == 23_040 == geometry.f16_bytes_per_token
    assert layout.blob_bytes(32) == 738_408


def test_fields_lie_where_llama_cpp_puts_them() -> None:
    k, v = rows(2)
    blob = build(LAYOUT, 5, k, v).tobytes()
    assert struct.unpack_from("<IiII", blob, 0) == (MAGIC, 0, 1, 2)
    assert struct.unpack_from("<iIiiIi", blob, 16) == (5, 1, 0, 6, 1, 0)
    assert struct.unpack_from("<II", blob, 40) == (0, 3)
    assert struct.unpack_from("<iQ", blob, 48) == (1, LAYOUT.row_bytes)
    assert blob[60 : 60 + 2 * LAYOUT.row_bytes] == k[0].tobytes()
    assert blob.endswith(v[-1].tobytes())


@pytest.mark.parametrize(("start", "n_tokens"), [(0, 1), (0, 7), (100, 33)])
def test_what_is_built_can_be_parsed(start: int, n_tokens: int) -> None:
    k, v = rows(n_tokens)
    got_k, got_v = parse(build(LAYOUT, start, k, v), LAYOUT, start, start + n_tokens)
    assert np.array_equal(got_k, k)
    assert np.array_equal(got_v, v)


def test_cells_out_of_order_are_put_in_order() -> None:
    k, v = rows(4)
    order = [2, 0, 3, 1]
    blob = build(LAYOUT, 0, k[:, order], v[:, order])
    blob[16 : 16 + 48].view("<i4")[0::3] = order
    got_k, got_v = parse(blob, LAYOUT, 0, 4)
    assert np.array_equal(got_k, k)
    assert np.array_equal(got_v, v)


def put(fmt: str, offset: int, value: int) -> Callable[[Blob], Blob]:
    def change(blob: Blob) -> Blob:
        raw = bytearray(blob.tobytes())
        struct.pack_into(fmt, raw, offset, value)
        return np.frombuffer(bytes(raw), np.uint8)

    return change


def cut(n_bytes: int) -> Callable[[Blob], Blob]:
    return lambda blob: blob[:n_bytes]


N = 5
BODY = 16 + 12 * N
FIRST = BODY + 8
LAYER = 12 + N * LAYOUT.row_bytes


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("size", cut(0)),
        ("size", cut(15)),
        ("size", cut(40)),
        ("size", cut(-1)),
        ("size", lambda blob: np.concatenate([blob, blob[:1]])),
        ("magic", put("<I", 0, MAGIC + 1)),
        ("streams", put("<I", 8, 2)),
        ("streams", put("<I", 8, 0)),
        ("cells", put("<I", 12, N - 1)),
        ("cells", put("<I", 12, 0xFFFFFFFF)),
        ("sequences", put("<I", 16 + 4, 0)),
        ("sequences", put("<I", 16 + 12 * 3 + 4, 2)),
        ("position", put("<i", 16, -1)),
        ("position", put("<i", 16 + 12 * 4, 10)),
        ("position", put("<i", 16 + 12 * 4, 9)),
        ("transposed", put("<I", BODY, 1)),
        ("layers", put("<I", BODY + 4, 2)),
        ("layers", put("<I", BODY + 4, 0x7FFFFFFF)),
        ("type of tensor 0", put("<i", FIRST, 8)),
        ("type of tensor 4", put("<i", FIRST + 4 * LAYER, 0)),
        ("row bytes of tensor 2", put("<Q", FIRST + 2 * LAYER + 4, LAYOUT.row_bytes + 2)),
        ("row bytes of tensor 5", put("<Q", FIRST + 5 * LAYER + 4, 2**63)),
    ],
)
def test_a_wrong_field_is_refused_by_name(field: str, change: Callable[[Blob], Blob]) -> None:
    blob = change(build(LAYOUT, 10, *rows(N)))
    with pytest.raises(PayloadCorrupt) as caught:
        check(blob, LAYOUT, 10, 10 + N)
    assert caught.value.details["field"] == field
    with pytest.raises(PayloadCorrupt):
        parse(blob, LAYOUT, 10, 10 + N)


@pytest.mark.parametrize(("start", "stop"), [(10, 14), (10, 16), (9, 14), (11, 16)])
def test_another_range_is_refused(start: int, stop: int) -> None:
    with pytest.raises(PayloadCorrupt):
        check(build(LAYOUT, 10, *rows(N)), LAYOUT, start, stop)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 1), (-1, 4)])
def test_a_range_that_is_none_is_refused(start: int, stop: int) -> None:
    with pytest.raises(PayloadCorrupt, match="no range"):
        check(build(LAYOUT, 0, *rows(N)), LAYOUT, start, stop)


def test_wrong_shapes_are_not_built() -> None:
    k, v = rows(4)
    for wrong_k, wrong_v in ((k[:2], v[:2]), (k, v[:, :3]), (k[:, :0], v[:, :0]), (k[..., :4], v[..., :4])):
        with pytest.raises(PayloadCorrupt):
            build(LAYOUT, 0, wrong_k, wrong_v)


def test_no_garbage_passes_or_breaks_the_reader() -> None:
    rng = np.random.default_rng(1)
    for size in (0, 1, 16, 100, LAYOUT.blob_bytes(N)):
        for _ in range(50):
            with pytest.raises(PayloadCorrupt):
                check(rng.integers(0, 256, size, dtype=np.uint8), LAYOUT, 0, N)
