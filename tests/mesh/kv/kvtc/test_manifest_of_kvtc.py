"""A manifest that names a basis: taken where the basis is, refused before a byte moves where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh.errors import KvIncompatible
from mesh.kv.chunks import PrefixNames
from mesh.kv.kvtc import shelf
from mesh.kv.manifest import KvManifest, check_compatible, make_manifest
from mesh.node.engine import EngineInfo
from tests.fakes.fake_engine import FakeEngine
from tests.mesh.kv.kvtc.synthetic import GEOMETRY, artifact

INFO = replace(FakeEngine().info, geometry=GEOMETRY)
NAMES = PrefixNames(GEOMETRY.layout_hash, b"salt", tuple(range(40)))


def make(info: EngineInfo = INFO) -> KvManifest:
    return make_manifest(
        info,
        codec=f"kvtc:{artifact().digest[:16]}:fine",
        count_tokens=40,
        block_hashes=NAMES.full_blocks(40),
        tenant="acme",
        label="internal",
        expires_unix_s=1000.0,
    )


def check(manifest: KvManifest) -> None:
    check_compatible(
        manifest,
        INFO,
        now_unix_s=1.0,
        tenant="acme",
        label="internal",
        codec=manifest.codec,
        max_tokens=40,
        known_blocks=(),
    )


def test_both_sides_need_the_basis() -> None:
    with pytest.raises(KvIncompatible):
        make()
    shelf.put(artifact())
    try:
        manifest = make()
        check(manifest)
        with pytest.raises(KvIncompatible):
            make(FakeEngine().info)  # of another model
    finally:
        shelf.remove(artifact())
    with pytest.raises(KvIncompatible) as caught:
        check(manifest)
    assert caught.value.details["field"] == "codec"
