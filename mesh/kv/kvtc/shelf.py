"""The artifacts that this process has. A node puts its models' artifacts here when it starts; codecs are then found
by their name alone, as all others are. Safe from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from mesh.errors import KvIncompatible
from mesh.kv.codec_types import Codec
from mesh.kv.geometry import KvGeometry
from mesh.kv.kvtc.artifact import SUFFIX, Artifact, read_artifact
from mesh.kv.kvtc.codec import PREFIX, KvtcCodec
from mesh.kv.kvtc.transform import LinearMaps, NumpyMaps

DIGEST_CHARS = 16
MakeMaps = Callable[[Artifact], LinearMaps]
_lock = threading.Lock()
_artifacts: dict[str, tuple[Artifact, LinearMaps]] = {}
_codecs: dict[str, KvtcCodec] = {}


def put(artifact: Artifact, maps: LinearMaps | None = None) -> None:
    """Make an artifact known. `maps`: a faster twin's products for its codecs."""
    remove(artifact)
    with _lock:
        _artifacts[artifact.digest[:DIGEST_CHARS]] = artifact, maps or NumpyMaps(artifact)


def remove(artifact: Artifact) -> None:
    """Forget an artifact and its codecs."""
    key = artifact.digest[:DIGEST_CHARS]
    with _lock:
        _artifacts.pop(key, None)
        for name in [n for n in _codecs if n.startswith(f"{PREFIX}{key}:")]:
            del _codecs[name]


def for_model(geometry: KvGeometry, weights_lineage: str) -> Artifact | None:
    """An artifact that was calibrated on this model."""
    with _lock:
        known = list(_artifacts.values())
    for artifact, _ in known:
        if artifact.geometry == geometry and artifact.weights_lineage == weights_lineage:
            return artifact
    return None


def codec_named(name: str, *, exact: Codec) -> KvtcCodec:
    """The codec `kvtc:DIGEST16:SETTING`; made when first asked for, then kept. Raises KvIncompatible if the artifact or
    the setting is not here."""
    with _lock:
        if (codec := _codecs.get(name)) is not None:
            return codec
        digest, _, setting = name.removeprefix(PREFIX).partition(":")
        found = _artifacts.get(digest)
    if found is None:
        raise KvIncompatible(f"codec {name!r} needs a kvtc artifact that is not here", field="codec")
    artifact, maps = found
    made = KvtcCodec(artifact, artifact.setting(setting), exact, maps)
    with _lock:
        return _codecs.setdefault(name, made)


def path_beside(model: Path) -> Path:
    """Where a model's artifact is kept: beside its file or folder."""
    return model.with_name(model.name + SUFFIX)


def put_beside(
    model: Path, geometry: KvGeometry, weights_lineage: str, make_maps: MakeMaps = NumpyMaps
) -> Artifact | None:
    """Put the artifact that lies beside a model on the shelf; None if none does. Raises PayloadCorrupt if it is
    malformed, KvIncompatible if it was calibrated on another model. Blocks for a second."""
    path = path_beside(model)
    if not path.is_file():
        return None
    artifact = read_artifact(path)
    check_made_for(artifact, geometry, weights_lineage)
    put(artifact, make_maps(artifact))
    return artifact


def check_made_for(artifact: Artifact, geometry: KvGeometry, weights_lineage: str) -> None:
    """Raise KvIncompatible if the artifact was calibrated on another model."""
    if artifact.geometry.layout_hash != geometry.layout_hash or artifact.weights_lineage != weights_lineage:
        raise KvIncompatible(
            f"kvtc artifact {artifact.digest[:16]} was calibrated on another model; make this one's with "
            "`kvmesh kvtc calibrate MODEL`",
            field="artifact",
        )
