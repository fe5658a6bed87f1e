"""The mesh as one entry sees it: facts per node, and the columnar snapshot that decisions read.

Pure. Facts come from a registry, from load streams and from probes (the placement service), or from the last
snapshot that was pushed plus own probes (an edge). Every number carries its age.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from mesh.errors import InvalidRequest
from mesh.identity.place import Place, Role, Tier
from mesh.kv.codec_profile import CodecProfile
from mesh.node.engine import EngineInfo, EngineLoad
from mesh.node.serving_role import ServingRole, serving_role
from mesh.node.wire import MAX_CONTEXT_TOKENS, curve_from_wire, fit_to_wire
from mesh.v1 import admin_pb2 as admin
from placement.decide.types import FitColumns, Snapshot
from placement.entry.codec_facts import codec_table, codecs_from_wire, codecs_to_wire
from placement.predict.calibration import NEUTRAL, Scale


class NodeState(Enum):
    """READY: takes work. DISCONNECTED: silent; serves its own clients and is reconciled when it is back.
    RETIRED: taken out by an operator. Nothing is deleted because it was silent."""

    READY = "ready"
    DISCONNECTED = "disconnected"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """One model on one node; stable."""

    model_id: str
    weights_dtype: str
    max_context_tokens: int
    layout_hash: str
    weights_lineage: str
    digest: str
    kv_bytes_per_token: int
    codecs: tuple[CodecProfile, ...] = ()  # in which it can send and take KV; none: f16

    @classmethod
    def of(cls, info: EngineInfo, digest: str, codecs: tuple[CodecProfile, ...] = ()) -> ModelFacts:
        """What an engine serves; `digest` is the model file's SHA-256 in hex, `codecs` were measured on it here."""
        return cls(
            model_id=info.model_id,
            weights_dtype=info.weights_dtype,
            max_context_tokens=info.max_context_tokens,
            layout_hash=info.geometry.layout_hash,
            weights_lineage=info.weights_lineage,
            digest=digest,
            kv_bytes_per_token=info.geometry.f16_bytes_per_token,
            codecs=codecs,
        )


IDLE = EngineLoad(
    running=0,
    waiting=0,
    waiting_prefill_tokens=0,
    kv_used_tokens=0,
    kv_capacity_tokens=0,
    prefill_tokens_per_s=0.0,
    decode_tokens_per_s=0.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What is known of one node. `age_s` is the age of `load`; `rtt_s` and `goodput_bytes_per_s` are None until
    measured. `reachable`: the entry has a way to give it work (an address that answers, or an uplink)."""

    place: Place
    address: str
    state: NodeState
    models: tuple[ModelFacts, ...]
    load: EngineLoad = field(default=IDLE)
    draining: bool = False
    reachable: bool = True
    age_s: float = 0.0
    rtt_s: float | None = None
    goodput_bytes_per_s: float | None = None
    role: ServingRole = ServingRole.BOTH
    scale: Scale = NEUTRAL  # what this entry found its answers to take over what was predicted


@dataclass(frozen=True, slots=True)
class Column:
    """One numeric column of the snapshot: its dtype, and a node's value."""

    dtype: type[np.bool_] | type[np.int64] | type[np.float64]
    of: Callable[[NodeFacts], float]


STABLE_COLUMNS: Mapping[str, Column] = {
    "tier_edge": Column(np.bool_, lambda n: n.place.tier is Tier.EDGE),
    "max_context_tokens": Column(np.int64, lambda n: max((m.max_context_tokens for m in n.models), default=0)),
    "kv_bytes_per_token": Column(np.int64, lambda n: max((m.kv_bytes_per_token for m in n.models), default=0)),
}
"""Columns that change only with a node's place or models."""

LIVE_COLUMNS: Mapping[str, Column] = {
    "prefills": Column(np.bool_, lambda n: n.role.prefills),
    "decodes": Column(np.bool_, lambda n: n.role.decodes),
    "ready": Column(np.bool_, lambda n: n.state is NodeState.READY),
    "draining": Column(np.bool_, lambda n: n.draining),
    "reachable": Column(np.bool_, lambda n: n.reachable),
    "age_s": Column(np.float64, lambda n: n.age_s),
    "running": Column(np.int64, lambda n: n.load.running),
    "waiting": Column(np.int64, lambda n: n.load.waiting),
    "waiting_prefill_tokens": Column(np.int64, lambda n: n.load.waiting_prefill_tokens),
    "kv_free_tokens": Column(np.int64, lambda n: n.load.kv_capacity_tokens - n.load.kv_used_tokens),
    "kv_capacity_tokens": Column(np.int64, lambda n: n.load.kv_capacity_tokens),
    "prefill_tokens_per_s": Column(np.float64, lambda n: n.load.prefill_tokens_per_s),
    "decode_tokens_per_s": Column(np.float64, lambda n: n.load.decode_tokens_per_s),
    "prefill_token_s": Column(np.float64, lambda n: n.load.prefill_token_s),
    "prefill_growth_s": Column(np.float64, lambda n: n.load.prefill_growth_s),
    "rtt_s": Column(np.float64, lambda n: math.nan if n.rtt_s is None else n.rtt_s),
    "goodput_bytes_per_s": Column(
        np.float64, lambda n: math.nan if n.goodput_bytes_per_s is None else n.goodput_bytes_per_s
    ),
}
"""Columns that change while a node runs."""

FIT_COLUMNS: Mapping[str, Column] = {
    "prefill_base_s": Column(np.float64, lambda n: n.load.curve.prefill_base_s),
    "prefill_token_s": Column(np.float64, lambda n: n.load.curve.prefill_token_s),
    "prefill_growth_s": Column(np.float64, lambda n: n.load.curve.prefill_growth_s),
    "decode_base_s": Column(np.float64, lambda n: n.load.curve.decode_base_s),
    "decode_row_s": Column(np.float64, lambda n: n.load.curve.decode_row_s),
    "decode_context_s": Column(np.float64, lambda n: n.load.curve.decode_context_s),
    "error_ratio": Column(np.float64, lambda n: n.load.curve.error_ratio),
    "context_tokens": Column(np.int64, lambda n: n.load.context_tokens),
    "step_tokens": Column(np.int64, lambda n: n.load.step_tokens),
    "most_running": Column(np.int64, lambda n: n.load.most_running),
    "ttft_scale": Column(np.float64, lambda n: n.scale.ttft),
    "tpot_scale": Column(np.float64, lambda n: n.scale.tpot),
    "scale_error_ratio": Column(np.float64, lambda n: n.scale.error_ratio),
}
"""Columns of Snapshot.fit."""


def build_snapshot(
    nodes: Sequence[NodeFacts], *, entry_node_id: str, version: int, made_s: float = math.nan
) -> Snapshot:
    """The columnar snapshot of `nodes` for the entry named (which need not be among them). `made_s`: see Snapshot.

    Costs about 10 us a node; placement.entry.snapshot_table keeps one up to date instead."""
    rows = sorted(nodes, key=lambda n: n.place.node_id)
    model_ids = tuple(sorted({m.model_id for n in rows for m in n.models}))
    column = {model_id: i for i, model_id in enumerate(model_ids)}
    models = np.zeros((len(rows), len(model_ids)), dtype=np.bool_)
    for i, node in enumerate(rows):
        for model in node.models:
            models[i, column[model.model_id]] = True
    arrays = _arrays(rows, {**STABLE_COLUMNS, **LIVE_COLUMNS})
    return Snapshot(
        version=version,
        places=tuple(n.place for n in rows),
        entry_row=next((i for i, n in enumerate(rows) if n.place.node_id == entry_node_id), -1),
        model_ids=model_ids,
        models=models,
        cached_tokens=np.zeros(len(rows), dtype=np.int64),
        codecs=codec_table([n.models for n in rows]),
        made_s=made_s,
        fit=FitColumns(**_arrays(rows, FIT_COLUMNS)),
        **arrays,
    )


def _arrays(rows: Sequence[NodeFacts], columns: Mapping[str, Column]) -> dict[str, Any]:
    return {name: np.array([column.of(n) for n in rows], dtype=column.dtype) for name, column in columns.items()}


def models_to_wire(models: Sequence[ModelFacts]) -> list[admin.NodeModel]:
    """The models of a node as its hello and the snapshot carry them."""
    return [
        admin.NodeModel(
            id=m.model_id,
            weights_dtype=m.weights_dtype,
            max_context_tokens=m.max_context_tokens,
            layout_hash=m.layout_hash,
            weights_lineage=m.weights_lineage,
            digest=m.digest,
            kv_bytes_per_token=m.kv_bytes_per_token,
            codecs=codecs_to_wire(m.codecs),
        )
        for m in models
    ]


def models_from_wire(models: Sequence[admin.NodeModel]) -> tuple[ModelFacts, ...]:
    """Inverse of models_to_wire."""
    return tuple(
        ModelFacts(
            model_id=m.id,
            weights_dtype=m.weights_dtype,
            max_context_tokens=m.max_context_tokens,
            layout_hash=m.layout_hash,
            weights_lineage=m.weights_lineage,
            digest=m.digest,
            kv_bytes_per_token=m.kv_bytes_per_token,
            codecs=codecs_from_wire(m.codecs),
        )
        for m in models
    )


def to_wire(nodes: Sequence[NodeFacts], *, version: int, registry_age_s: float, made_unix_s: float) -> admin.Snapshot:
    """The snapshot as operators and edges get it."""
    return admin.Snapshot(
        version=version,
        registry_age_s=registry_age_s,
        made_unix_s=made_unix_s,
        nodes=[_node_to_wire(n) for n in sorted(nodes, key=lambda n: n.place.node_id)],
    )


def _node_to_wire(node: NodeFacts) -> admin.NodeView:
    return admin.NodeView(
        node_id=node.place.node_id,
        tier=node.place.tier.value,
        site=node.place.site,
        region=node.place.region,
        jurisdiction=node.place.jurisdiction,
        state=node.state.value,
        address=node.address,
        models=models_to_wire(node.models),
        running=node.load.running,
        waiting=node.load.waiting,
        waiting_prefill_tokens=node.load.waiting_prefill_tokens,
        kv_used_tokens=node.load.kv_used_tokens,
        kv_capacity_tokens=node.load.kv_capacity_tokens,
        prefill_tokens_per_s=node.load.prefill_tokens_per_s,
        decode_tokens_per_s=node.load.decode_tokens_per_s,
        age_s=node.age_s,
        rtt_s=node.rtt_s or 0.0,
        goodput_bytes_per_s=node.goodput_bytes_per_s or 0.0,
        draining=node.draining,
        role=node.role.value,
        prefill_token_s=node.load.prefill_token_s,
        prefill_growth_s=node.load.prefill_growth_s,
        fit=fit_to_wire(node.load),
    )


def from_wire(snapshot: admin.Snapshot, *, mesh: str) -> tuple[NodeFacts, ...]:
    """Facts out of a pushed snapshot. Link figures are the pusher's, so they are left out; the receiver measures its
    own. Nodes that this build cannot read (a tier, state or role that it does not know) are left out too: it gives
    them no work."""
    facts = (_node_from_wire(view, mesh) for view in snapshot.nodes)
    return tuple(node for node in facts if node is not None)


def _node_from_wire(view: admin.NodeView, mesh: str) -> NodeFacts | None:
    try:
        place = Place(
            mesh=mesh,
            role=Role(view.tier),
            tier=Tier(view.tier),
            site=view.site,
            region=view.region,
            jurisdiction=view.jurisdiction,
            node_id=view.node_id,
        )
        state = NodeState(view.state)
        role = serving_role(view.role)
    except (ValueError, InvalidRequest):
        return None
    return NodeFacts(
        place=place,
        address=view.address,
        state=state,
        models=models_from_wire(view.models),
        load=EngineLoad(
            running=view.running,
            waiting=view.waiting,
            waiting_prefill_tokens=view.waiting_prefill_tokens,
            kv_used_tokens=view.kv_used_tokens,
            kv_capacity_tokens=view.kv_capacity_tokens,
            prefill_tokens_per_s=view.prefill_tokens_per_s,
            decode_tokens_per_s=view.decode_tokens_per_s,
            prefill_token_s=view.prefill_token_s,
            prefill_growth_s=view.prefill_growth_s,
            curve=curve_from_wire(view.fit),
            context_tokens=min(view.fit.context_tokens, MAX_CONTEXT_TOKENS),
            step_tokens=view.fit.step_tokens,
            most_running=view.fit.most_running,
        ),
        draining=view.draining,
        age_s=view.age_s,
        role=role,
    )
