"""The artifacts that this process has. A node puts its models' artifacts here when it starts; codecs are then found
by their name alone, as all others are. Safe from any thread."""

from __future__ import annotations

import threading

from mesh.errors import KvIncompatible
from mesh.kv.codec_types import Codec
from mesh.kv.geometry import KvGeometry
from mesh.kv.kvtc.artifact import Artifact
from mesh.kv.kvtc.codec import PREFIX, KvtcCodec
from mesh.kv.kvtc.transform import LinearMaps

_DIGEST_CHARS = 16
_lock = threading.Lock()
_artifacts: dict[str, Artifact] = {}
_codecs: dict[str, KvtcCodec] = {}


def put(artifact: Artifact) -> None:
    """Make an artifact known."""
    with _lock:
        _artifacts[artifact.digest[:_DIGEST_CHARS]] = artifact


def put_codec(codec: KvtcCodec) -> None:
    """Use this codec for its name: one whose maps are a faster twin's."""
    with _lock:
        _codecs[codec.name] = codec


def remove(artifact: Artifact) -> None:
    """Forget an artifact and its codecs."""
    key = artifact.digest[:_DIGEST_CHARS]
    with _lock:
        _artifacts.pop(key, None)
        for name in [n for n in _codecs if n.startswith(f"{PREFIX}{key}:")]:
            del _codecs[name]


def for_model(geometry: KvGeometry, weights_lineage: str) -> Artifact | None:
    """An artifact that was calibrated on this model."""
    with _lock:
        known = list(_artifacts.values())
    for artifact in known:
        if artifact.geometry == geometry and artifact.weights_lineage == weights_lineage:
            return artifact
    return None


def codec_named(name: str, *, exact: Codec, maps: LinearMaps | None = None) -> KvtcCodec:
    """The codec `kvtc:DIGEST16:SETTING`; made when first asked for (a second or so for its matrices), then kept.
    Raises KvIncompatible if the artifact or the setting is not here."""
    with _lock:
        if (codec := _codecs.get(name)) is not None:
            return codec
        digest, _, setting = name.removeprefix(PREFIX).partition(":")
        artifact = _artifacts.get(digest)
    if artifact is None:
        raise KvIncompatible(f"codec {name!r} needs a kvtc artifact that is not here", field="codec")
    made = KvtcCodec(artifact, artifact.setting(setting), exact, maps)
    with _lock:
        return _codecs.setdefault(name, made)
