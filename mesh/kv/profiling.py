"""The codecs that a node can offer for its model, each with ratio, loss and speed here: what it declares.

Speeds are measured, on KV as the artifact expects it (or plain noise for codecs that do not care), once, when the node
has loaded its model; on a machine under load they come out low, which errs on the side of sending more bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mesh.errors import MeshError
from mesh.kv.chunks import CHUNK_TOKENS
from mesh.kv.codec_profile import CodecProfile
from mesh.kv.codecs import codec_named
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.kvtc import shelf
from mesh.kv.kvtc.artifact import Artifact, Quality, n_features, worst_loss_ratio
from mesh.kv.kvtc.codec import PREFIX
from mesh.kv.kvtc.shelf import MakeMaps
from mesh.kv.kvtc.transform import NumpyMaps, slab_of
from mesh.kv.slab import KvSlab
from mesh.telemetry.log import get_logger

log = get_logger(__name__)
_Q8_LOSS_RATIO = 0.001  # what may be used unmeasured: rounding that no model is known to feel
_ALWAYS = {"f16": (1.0, 0.0), "q8_0": (64 / 34, _Q8_LOSS_RATIO)}
_TRIES = 2
_START_TOKENS = 64  # enough for a speed, little enough for a start
F32 = NDArray[np.float32]


def profiles_of(
    artifact: Artifact | None, geometry: KvGeometry, *, n_tokens: int = CHUNK_TOKENS
) -> tuple[CodecProfile, ...]:
    """Profiles of all codecs that are known for a model: `f16` and `q8_0` always, those of the artifact where it was
    measured what they lose on this model. The artifact must be on the shelf (mesh.kv.kvtc.shelf). Blocks for a second
    or a few; CPU-bound."""
    slab = _noise(geometry, n_tokens) if artifact is None else usual_slab(artifact, n_tokens)
    return _measured(known(artifact), slab, geometry)


def codecs_beside(
    model: Path, geometry: KvGeometry, weights_lineage: str, make_maps: MakeMaps = NumpyMaps
) -> tuple[CodecProfile, ...]:
    """What a node with this model declares, with the artifact that lies beside it if one does. One that is damaged or
    of another model is left alone and logged: the node serves without it. Blocks for seconds."""
    artifact: Artifact | None = None
    try:
        artifact = shelf.put_beside(model, geometry, weights_lineage, make_maps)
    except MeshError as error:
        log.error("kvtc_artifact_refused", reason=error.reason, error=error.message)
    return profiles_of(artifact, geometry, n_tokens=_START_TOKENS)


def start_profiles(artifact: Artifact, geometry: KvGeometry) -> tuple[CodecProfile, ...]:
    """Of the codecs that need this artifact, which is on the shelf. Blocks for a second; CPU-bound."""
    slab = usual_slab(artifact, _START_TOKENS)
    return _measured((facts for facts in known(artifact) if facts[0].startswith(PREFIX)), slab, geometry)


def usual_slab(artifact: Artifact, n_tokens: int, *, start: int = 1024, seed: int = 0) -> KvSlab:
    """f16 KV that codes like what the artifact was calibrated on: coefficients drawn as the finest setting's tables
    expect them."""
    setting = artifact.settings[0]
    rng = np.random.default_rng(seed)
    tables = artifact.tables
    out = np.empty((2, n_tokens, n_features(artifact.geometry)), dtype=np.float32)
    for s, basis in enumerate(artifact.kept(setting)):
        kept = setting.steps[s] > 0
        contexts, restore = setting.contexts[s][kept].astype(np.intp), setting.restore[s][kept]
        drawn = tables.lookup[(contexts << 12) + rng.integers(0, 1 << 12, (n_tokens, len(contexts)))] & np.uint32(0xFF)
        size = np.minimum((drawn.astype(np.int64) + 1) // 2, 60)
        levels = np.where(drawn & 1, size, -size).astype(np.float32)
        weighted = (levels * restore) @ basis.T
        out[s] = _unweighted(artifact, s, weighted) + artifact.mean[s]
    return slab_of(out, artifact.geometry, start, KvDtype.F16)


def _unweighted(artifact: Artifact, stream: int, weighted: F32) -> F32:
    blocks, dim = artifact.weights.shape[1:3]
    inverse = np.linalg.inv(artifact.weights[stream].astype(np.float64)).astype(np.float32)
    parts = weighted.reshape(-1, blocks, dim).transpose(1, 0, 2)
    out: F32 = np.matmul(parts, inverse).transpose(1, 0, 2).reshape(weighted.shape)
    return out


def known(artifact: Artifact | None) -> Iterator[tuple[str, float, float]]:
    """Name, ratio and loss of each codec, without its speeds. What was not measured on the model is not among them, but
    for what loses nothing or next to it."""
    probed = {p.codec: p.quality for p in artifact.probed} if artifact is not None else {}
    for name, (ratio, loss) in _ALWAYS.items():
        yield name, ratio, worst_loss_ratio(probed[name]) if name in probed else loss
    for setting in artifact.settings if artifact is not None else ():
        if artifact is not None and setting.quality:
            name = f"{PREFIX}{artifact.digest[:16]}:{setting.name}"
            yield name, _ratio(setting.quality), max(0.0, setting.worst_loss_ratio)
    for name, quality in probed.items():
        if name not in _ALWAYS and quality:
            yield name, _ratio(quality), max(0.0, worst_loss_ratio(quality))


def _ratio(quality: tuple[Quality, ...]) -> float:
    return min(q.coded_ratio for q in quality)


def _measured(
    facts: Iterable[tuple[str, float, float]], slab: KvSlab, geometry: KvGeometry
) -> tuple[CodecProfile, ...]:
    return tuple(
        CodecProfile(codec=name, ratio=ratio, loss_ratio=loss, encode_tokens_per_s=encode, decode_tokens_per_s=decode)
        for name, ratio, loss in facts
        for encode, decode in [_speeds(name, slab, geometry)]
    )


def _speeds(name: str, slab: KvSlab, geometry: KvGeometry) -> tuple[float, float]:
    """Tokens per second of encode and decode, the better of a few."""
    codec = codec_named(name)
    times: list[tuple[float, float]] = []
    for _ in range(_TRIES):
        started_s = time.perf_counter()
        data = codec.encode(slab)
        encoded_s = time.perf_counter()
        codec.decode(data, start=slab.start, n_tokens=slab.n_tokens, geometry=geometry, dtype=slab.dtype)
        times.append((encoded_s - started_s, time.perf_counter() - encoded_s))
    encode_s, decode_s = (max(min(column), 1e-9) for column in zip(*times, strict=True))
    return slab.n_tokens / encode_s, slab.n_tokens / decode_s


def _noise(geometry: KvGeometry, n_tokens: int) -> KvSlab:
    rng = np.random.default_rng(0)
    shape = (geometry.n_layers, n_tokens, geometry.n_kv_heads, geometry.head_dim)
    k, v = (rng.standard_normal(shape, dtype=np.float32).astype(np.float16) for _ in range(2))
    return KvSlab(start=0, dtype=KvDtype.F16, k=k, v=v)
