"""What a node says of itself in the registry: its place, its address, its models and its role, as flat meta pairs.

The place here is a claim: whoever dials the node has TLS check it against the certificate. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from mesh.errors import InvalidRequest
from mesh.identity.place import Place
from mesh.node.serving_role import ServingRole, serving_role
from mesh.registry.types import Registration
from placement.entry.codec_facts import codecs_from_text, codecs_to_text
from placement.entry.mesh_view import ModelFacts

_MAX_COUNT = 2**31 - 1  # of a count of tokens or bytes: what the snapshot's fields and every node hold
_MODEL_FIELDS = (
    "model_id",
    "weights_dtype",
    "max_context_tokens",
    "layout_hash",
    "weights_lineage",
    "digest",
    "kv_bytes_per_token",
)


def to_registration(
    place: Place,
    address: str,
    models: Iterable[ModelFacts],
    *,
    ttl_s: float,
    health_address: str = "",
    role: ServingRole = ServingRole.BOTH,
) -> Registration:
    """A node's registration. At most seven models: meta has 64 pairs."""
    meta = {"place": place.uri, "protocol": "1", "serving-role": role.value}
    for i, model in enumerate(models):
        meta.update({f"model-{i}-{field}": str(getattr(model, field)) for field in _MODEL_FIELDS})
        if model.codecs:
            meta[f"model-{i}-codecs"] = codecs_to_text(model.codecs)
    return Registration(node_id=place.node_id, address=address, meta=meta, ttl_s=ttl_s, health_address=health_address)


def from_registration(registration: Registration, *, mesh: str) -> tuple[Place, tuple[ModelFacts, ...]]:
    """Place and models of a registration. Raises InvalidRequest if it is not one of this mesh's nodes, or a figure
    of a model is out of range."""
    meta = registration.meta
    place = Place.from_uri(meta.get("place", ""))
    if place.mesh != mesh or place.node_id != registration.node_id:
        raise InvalidRequest(f"registration {registration.node_id!r} claims the place of another node", field="place")
    models: list[ModelFacts] = []
    while f"model-{len(models)}-model_id" in meta:
        prefix = f"model-{len(models)}-"
        try:
            models.append(
                ModelFacts(
                    model_id=meta[prefix + "model_id"],
                    weights_dtype=meta[prefix + "weights_dtype"],
                    max_context_tokens=_count(meta[prefix + "max_context_tokens"]),
                    layout_hash=meta[prefix + "layout_hash"],
                    weights_lineage=meta[prefix + "weights_lineage"],
                    digest=meta[prefix + "digest"],
                    kv_bytes_per_token=_count(meta[prefix + "kv_bytes_per_token"]),
                    codecs=codecs_from_text(meta.get(prefix + "codecs", "")),
                )
            )
        except (KeyError, ValueError) as exc:
            raise InvalidRequest(f"registration {registration.node_id!r} has a bad {prefix}*", field="meta") from exc
    return place, tuple(models)


def role_of(registration: Registration) -> ServingRole:
    """The node's serving role. Raises InvalidRequest for a word that this build does not know."""
    return serving_role(registration.meta.get("serving-role", ""))


def _count(text: str) -> int:
    """Raises ValueError unless it is 1 to _MAX_COUNT, in plain digits."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(_MAX_COUNT)) and 0 < int(text) <= _MAX_COUNT):
        raise ValueError("a count is out of range")
    return int(text)
