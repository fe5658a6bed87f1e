"""What the orders of a request have in common, who carries out a transfer, and what comes back. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mesh.identity.place import Place, Tier
from mesh.kv.manifest import CANONICAL
from mesh.node.engine import RunId
from mesh.node.port import (
    KvDirection,
    NodePort,
    PortEvent,
    PortFinished,
    PortHeld,
    PortPrefilled,
    PortTokens,
    WorkContext,
)
from mesh.node.sampling import SamplingParams
from placement.entry import runner_types as rt


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every order of one request has in common."""

    context: WorkContext
    prompt_tokens: int
    sampling: SamplingParams
    priority: int


def choose_dialler(source: NodePort, target: NodePort) -> tuple[NodePort, NodePort, KvDirection]:
    """(who dials, whom, which way the KV flows from the dialler's view). An edge always dials; between core nodes
    the target pulls; between edges, which meet over a relay, the source pushes, unless it is one that the entry cannot
    order to dial."""
    if source.place.tier is Tier.EDGE and (target.place.tier is not Tier.EDGE or source.can_dial):
        return source, target, KvDirection.PUSH
    return target, source, KvDirection.PULL


def needs_relay(source: Place, target: Place) -> bool:
    """Whether KV between two nodes has to pass a third one: both dial out only."""
    return source.tier is Tier.EDGE and target.tier is Tier.EDGE and source.node_id != target.node_id


def choose_codec(planned: str, source: NodePort, target: NodePort) -> str:
    """Between core nodes, whose engines are mostly alike, plain KV goes over without loss."""
    if planned == "f16" and source.place.tier is target.place.tier is Tier.CORE:
        return CANONICAL
    return planned


def run_event(run_id: RunId, event: PortEvent) -> rt.Event:
    """What a node told of a run, for the runner."""
    match event:
        case PortTokens():
            return rt.RunTokens(run_id=run_id, ids=event.ids, logprobs=event.logprobs)
        case PortPrefilled():
            return rt.RunPrefilled(run_id=run_id, tokens=event.tokens, cached_tokens=event.cached_tokens)
        case PortFinished():
            return rt.RunFinished(run_id=run_id, reason=event.reason, stop_string=event.stop_string, leg=event.leg)
        case PortHeld():
            return rt.RunHeld(run_id=run_id, kv_tokens=event.kv_tokens, leg=event.leg)
