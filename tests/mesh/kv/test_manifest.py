"""The manifest: every field that differs is refused, and named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mesh.errors import KvIncompatible
from mesh.kv.chunks import PrefixNames
from mesh.kv.geometry import KvDtype
from mesh.kv.manifest import KvManifest, check_compatible, make_manifest
from mesh.node.engine import EngineInfo
from tests.fakes.fake_engine import FakeEngine

NAMES = PrefixNames(FakeEngine().info.geometry.layout_hash, b"salt", tuple(range(40)))


def info(**changes: Any) -> EngineInfo:
    return replace(FakeEngine().info, **changes)


def manifest(codec: str = "f16") -> KvManifest:
    return make_manifest(
        info(), codec=codec, count_tokens=40, block_hashes=NAMES.full_blocks(40), tenant="acme", label="internal",
        expires_unix_s=1000.0,
    )  # fmt: skip


def check(m: KvManifest, engine: EngineInfo | None = None, **changes: Any) -> None:
    values: dict[str, Any] = {
        "now_unix_s": 999.0, "tenant": "acme", "label": "internal", "codec": m.codec, "max_tokens": 40,
        "known_blocks": NAMES.full_blocks(40),
    }  # fmt: skip
    check_compatible(m, engine or info(), **{**values, **changes})


def test_like_meets_like() -> None:
    for codec in ("f16", "q8_0", "raw"):
        check(manifest(codec))
    assert manifest().producer_build == info().build


def test_precision_of_weights_and_build_may_differ() -> None:
    check(manifest(), info(weights_dtype="Q4_1", build="another"))


def test_unlike_pools_may_meet_in_f16_but_not_raw() -> None:
    check(manifest("f16"), info(kv_dtype=KvDtype.BF16))
    with pytest.raises(KvIncompatible) as caught:
        check(manifest("raw"), info(kv_dtype=KvDtype.BF16))
    assert caught.value.details["field"] == "dtype"


def test_fewer_known_tokens_are_compared_as_far_as_known() -> None:
    check(manifest(), known_blocks=NAMES.full_blocks(16))
    check(manifest(), known_blocks=())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"format": 2}, "format"),
        ({"layout_hash": "00"}, "layout_hash"),
        ({"weights_lineage": "other"}, "weights_lineage"),
        ({"codec": "q8_0"}, "codec"),
        ({"first_position": 16}, "first_position"),
        ({"count_tokens": 41}, "count_tokens"),
        ({"count_tokens": -1}, "count_tokens"),
        ({"count_tokens": 30}, "block_hashes"),
        ({"block_hashes": NAMES.full_blocks(16)}, "block_hashes"),
        ({"block_hashes": (b"short", b"short")}, "block_hashes"),
        ({"block_hashes": (bytes(32), bytes(32))}, "block_hashes"),
        ({"tenant": "other"}, "tenant"),
        ({"label": "public"}, "label"),
        ({"expires_unix_s": 938.9}, "expires_unix_s"),
        ({"expires_unix_s": float("nan")}, "expires_unix_s"),
        ({"expires_unix_s": float("inf")}, "expires_unix_s"),
    ],
)
def test_the_first_field_that_differs_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(KvIncompatible) as caught:
        check(replace(manifest(), **changes), codec="f16")
    assert caught.value.details["field"] == field
    assert field in caught.value.message


def test_another_namespace_is_seen_in_the_hashes() -> None:
    other = PrefixNames(info().geometry.layout_hash, b"another salt", tuple(range(40)))
    with pytest.raises(KvIncompatible) as caught:
        check(manifest(), known_blocks=other.full_blocks(40))
    assert caught.value.details["field"] == "block_hashes"


def test_codecs_that_are_not_here() -> None:
    with pytest.raises(KvIncompatible) as caught:
        check(replace(manifest(), codec="kvtc"), codec="kvtc")
    assert caught.value.details["field"] == "codec"
    odd = replace(info().geometry, head_dim=48)
    with pytest.raises(KvIncompatible):
        make_manifest(
            info(geometry=odd), codec="q8_0", count_tokens=0, block_hashes=(), tenant="a", label="b", expires_unix_s=1.0
        )
    with pytest.raises(KvIncompatible) as caught:
        check(replace(manifest("q8_0"), layout_hash=odd.layout_hash), info(geometry=odd), codec="q8_0")
    assert caught.value.details["field"] == "codec"
