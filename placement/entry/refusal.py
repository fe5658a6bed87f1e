"""A refusal of the decision core as the error that the client gets. Pure."""

from __future__ import annotations

from mesh.errors import Expired, MeshError, NoCapableNode, NoNodeNow, Overloaded, PolicyDenied
from placement.decide.types import Refusal

REFUSALS = (PolicyDenied, Expired, Overloaded, NoNodeNow, NoCapableNode)


def refusal_error(refusal: Refusal, *, unheard: bool = False) -> MeshError:
    """PolicyDenied: the wish asks for what policy forbids. Overloaded: it would do but for room, or
    but for its deadline. Expired: not even an idle node would be done before its deadline. NoNodeNow: it
    would do but for nodes that are down. NoCapableNode: no node of the mesh could ever.

    `unheard`: this entry was never told of the mesh, so that it cannot know what could ever."""
    details = {"rule": refusal.rule}
    if refusal.missing:
        details["node"] = ",".join(refusal.missing)
    if refusal.denied:
        return PolicyDenied(refusal.message, **details)
    if refusal.retry_s:
        details["retry_after_s"] = f"{refusal.retry_s:.1f}"
    if refusal.late and not refusal.overloaded:
        return Expired(refusal.message, **details)
    if refusal.overloaded:
        return Overloaded(refusal.message, **details)
    if refusal.permanent and unheard:
        return NoNodeNow(f"this site has not heard of the mesh since it started: {refusal.message}", **details)
    if refusal.permanent:
        return NoCapableNode(refusal.message, **details)
    return NoNodeNow(refusal.message, **details)
