"""Running requests as operators see them: whose, where, how far. Neither prompts nor tokens are told."""

from __future__ import annotations

import time

from mesh.v1 import admin_pb2 as admin
from placement.entry.front_door import FrontDoor
from placement.entry.live_request import LiveRequest
from placement.entry.mesh_view import NodeFacts


def running_requests(door: FrontDoor, entry_node_id: str, nodes: tuple[NodeFacts, ...]) -> list[admin.RunningRequest]:
    """Those of one entry, the oldest first. `nodes` say how large a token's KV is."""
    kv_bytes_per_token = {
        (node.place.node_id, model.model_id): model.kv_bytes_per_token for node in nodes for model in node.models
    }
    now_s = time.monotonic()
    found = sorted(door.live(), key=lambda live: live.started_s)
    return [_view(live, entry_node_id, kv_bytes_per_token, now_s) for live in found]


def _view(
    live: LiveRequest, entry_node_id: str, kv_bytes_per_token: dict[tuple[str, str], int], now_s: float
) -> admin.RunningRequest:
    accepted, usage, node_id = live.accepted, live.driver.usage, live.driver.node_id
    model = accepted.model.model_id
    prompt_tokens = len(accepted.token_ids)
    return admin.RunningRequest(
        request_id=live.stream.request_id,
        tenant=accepted.principal.tenant,
        model=model,
        label=accepted.placement.label,
        shape=live.shape.value,
        entry_node_id=entry_node_id,
        node_id=node_id,
        moving=live.driver.moving,
        prompt_tokens=prompt_tokens,
        generated_tokens=usage.completion_tokens,
        max_tokens=accepted.sampling.max_tokens,
        kv_bytes=(prompt_tokens + usage.completion_tokens) * kv_bytes_per_token.get((node_id, model), 0),
        age_s=now_s - live.started_s,
        token_s=live.progress.token_s,
    )
