"""The KV manifest: what travels in front of KV bytes and says exactly what they are. Pure.

Both ends compare it with what they are before a byte of KV moves. A mismatch is refused and counted, and the
receiver recomputes; it is never guessed at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mesh.errors import KvIncompatible, MeshError
from mesh.kv.chunks import DIGEST_BYTES
from mesh.kv.codecs import codec_named
from mesh.kv.geometry import KvDtype
from mesh.kv.hashing import BLOCK_TOKENS
from mesh.node.engine import EngineInfo

MANIFEST_FORMAT = 1
CLOCK_SKEW_S = 60.0
"""How far the clocks of two nodes may be apart before KV that is still good counts as expired. Clocks of a mesh are
synchronised; a box whose clock is further off has its KV refused and recomputed, never used past its time."""
CANONICAL = "canonical"
"""In an order: the codec is settled by the two ends, see chosen_codec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvManifest:
    """Says what KV follows. Positions [first_position, first_position + count_tokens) are there when it is
    offered; more may follow from a source that still runs. `expires_unix_s` is by the producer's clock."""

    format: int = MANIFEST_FORMAT
    layout_hash: str
    weights_lineage: str
    dtype: KvDtype  # of the producer's pool, before the codec
    codec: str
    first_position: int
    count_tokens: int
    block_hashes: tuple[bytes, ...]  # of the full blocks of 16 tokens within count_tokens; salted
    label: str
    tenant: str
    expires_unix_s: float
    producer_build: str


def make_manifest(
    info: EngineInfo,
    *,
    codec: str,
    count_tokens: int,
    block_hashes: tuple[bytes, ...],
    tenant: str,
    label: str,
    expires_unix_s: float,
) -> KvManifest:
    """The manifest of the first `count_tokens` positions of something in the engine of `info`. Raises
    KvIncompatible if this codec is unknown or cannot carry this geometry."""
    codec_named(codec).check(info.geometry)
    return KvManifest(
        layout_hash=info.geometry.layout_hash,
        weights_lineage=info.weights_lineage,
        dtype=info.kv_dtype,
        codec=codec,
        first_position=0,
        count_tokens=count_tokens,
        block_hashes=block_hashes,
        label=label,
        tenant=tenant,
        expires_unix_s=expires_unix_s,
        producer_build=info.build,
    )


def check_compatible(
    manifest: KvManifest,
    info: EngineInfo,
    *,
    now_unix_s: float,
    tenant: str,
    label: str,
    codec: str,
    max_tokens: int,
    known_blocks: tuple[bytes, ...],
) -> None:
    """Raise KvIncompatible, naming the first field that differs, unless the engine of `info` may take this KV.

    `tenant`, `label` and `codec` are those of the order; `max_tokens` is the room; `known_blocks` are the full
    block hashes of the token ids that the receiver knows, computed by itself.
    """
    _equal("format", manifest.format, MANIFEST_FORMAT)
    _equal("layout_hash", manifest.layout_hash, info.geometry.layout_hash)
    _equal("weights_lineage", manifest.weights_lineage, info.weights_lineage)
    _equal("codec", manifest.codec, codec)
    try:
        codec_named(codec).check(info.geometry)
    except MeshError as exc:
        raise _refusal("codec", exc.message) from exc
    if codec == "raw":
        _equal("dtype", manifest.dtype.value, info.kv_dtype.value)
    _equal("first_position", manifest.first_position, 0)
    if not 0 <= manifest.count_tokens <= max_tokens:
        raise _refusal("count_tokens", f"{manifest.count_tokens} are offered, there is room for {max_tokens}")
    _equal("block_hashes", len(manifest.block_hashes), manifest.count_tokens // BLOCK_TOKENS)
    if any(len(h) != DIGEST_BYTES for h in manifest.block_hashes):
        raise _refusal("block_hashes", f"each has {DIGEST_BYTES} bytes")
    for i, (theirs, ours) in enumerate(zip(manifest.block_hashes, known_blocks, strict=False)):
        if theirs != ours:
            raise _refusal("block_hashes", f"block {i} is of other tokens or another namespace")
    _equal("tenant", manifest.tenant, tenant)
    _equal("label", manifest.label, label)
    if not (math.isfinite(manifest.expires_unix_s) and manifest.expires_unix_s + CLOCK_SKEW_S > now_unix_s):
        raise _refusal("expires_unix_s", "it has expired")


def check_receiver(info: EngineInfo, *, codec: str, layout_hash: str, weights_lineage: str, dtype: KvDtype) -> None:
    """Raise KvIncompatible, naming the first field that differs, unless what a receiver says of its engine fits KV
    of the engine of `info` in this codec. The sender's half of the comparison, before it computes or sends any."""
    _equal("layout_hash", layout_hash, info.geometry.layout_hash)
    _equal("weights_lineage", weights_lineage, info.weights_lineage)
    if codec == "raw":
        _equal("dtype", dtype.value, info.kv_dtype.value)


def chosen_codec(ordered: str, here: KvDtype, there: KvDtype) -> str:
    """The codec that an order means between two pools: `canonical` is the pools' own elements where they are alike
    (lossless), else f16. Both ends work it out and must agree."""
    if ordered != CANONICAL:
        return ordered
    return "raw" if here is there else "f16"


def _equal(field: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise _refusal(field, f"there it is {theirs!r}, here it is {ours!r}")


def _refusal(field: str, why: str) -> KvIncompatible:
    return KvIncompatible(f"KV refused, {field}: {why}", field=field)
