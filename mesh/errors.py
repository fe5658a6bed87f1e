"""The one error tree.

Each class fixes its gRPC code, what the caller should do, and a stable reason word. The rim (mesh.rpc for
gRPC, mesh.http for HTTP) maps in one place; an exception outside this tree becomes INTERNAL and is logged
with its traceback.

    MeshError
    ├── InvalidRequest          INVALID_ARGUMENT      stop
    ├── Unauthenticated         UNAUTHENTICATED       stop
    ├── PolicyDenied            PERMISSION_DENIED     stop
    ├── UnknownModel            NOT_FOUND             stop
    ├── UnknownNode             NOT_FOUND             stop
    ├── NotFound                NOT_FOUND             stop
    ├── AlreadyExists           ALREADY_EXISTS        stop
    ├── Overloaded              RESOURCE_EXHAUSTED    back off
    ├── NodeUnreachable         UNAVAILABLE           retry elsewhere
    ├── Draining                UNAVAILABLE           retry elsewhere
    ├── WrongRole               UNAVAILABLE           retry elsewhere
    ├── NoNodeNow               UNAVAILABLE           retry elsewhere
    ├── NoCapableNode           FAILED_PRECONDITION   fix state first
    ├── RevisionMismatch        FAILED_PRECONDITION   fix state first
    ├── KvIncompatible          FAILED_PRECONDITION   recompute instead
    ├── StalePlan               ABORTED               refresh, replan
    ├── LeaseLost               ABORTED               refresh, replan
    ├── PayloadCorrupt          DATA_LOSS             discard, recompute
    ├── Expired                 DEADLINE_EXCEEDED     stop
    ├── Cancelled               CANCELLED             stop
    ├── NotImplementedHere      UNIMPLEMENTED         stop
    └── Internal                INTERNAL              stop (our bug)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum


class Code(Enum):
    """gRPC status codes by their wire number, so that this module needs no grpc."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Retry(Enum):
    """What the caller should do."""

    STOP = "stop"
    BACK_OFF = "back_off"
    ELSEWHERE = "retry_elsewhere"
    FIX_STATE = "fix_state_first"
    REPLAN = "refresh_and_replan"
    RECOMPUTE = "discard_and_recompute"


class MeshError(Exception):
    """Base of all errors that kvmesh raises on purpose.

    `message` is for people: what was wrong, where, and what to do; it never holds prompt text or a secret.
    `details` are short machine-readable facts (field, rule, node ...) that travel as ErrorInfo metadata.
    """

    code: Code = Code.INTERNAL
    retry: Retry = Retry.STOP
    reason: str = "INTERNAL"

    def __init__(self, message: str, **details: str) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, str] = details


class InvalidRequest(MeshError):
    """The request itself is wrong; `field` names where."""

    code, reason = Code.INVALID_ARGUMENT, "INVALID_REQUEST"


class Unauthenticated(MeshError):
    """No credential, or one that is not known."""

    code, reason = Code.UNAUTHENTICATED, "UNAUTHENTICATED"


class PolicyDenied(MeshError):
    """A policy or role forbids it; `rule` names the rule."""

    code, reason = Code.PERMISSION_DENIED, "POLICY_DENIED"


class NotFound(MeshError):
    """The named thing does not exist (or is not the caller's to see)."""

    code, reason = Code.NOT_FOUND, "NOT_FOUND"


class UnknownModel(NotFound):
    """No node of the mesh serves this model."""

    reason = "UNKNOWN_MODEL"


class UnknownNode(NotFound):
    """No such node in the mesh."""

    reason = "UNKNOWN_NODE"


class AlreadyExists(MeshError):
    """The name is taken."""

    code, reason = Code.ALREADY_EXISTS, "ALREADY_EXISTS"


class Overloaded(MeshError):
    """No room now; try again later."""

    code, retry, reason = Code.RESOURCE_EXHAUSTED, Retry.BACK_OFF, "OVERLOADED"


class NodeUnreachable(MeshError):
    """A node did not answer; `node` names it."""

    code, retry, reason = Code.UNAVAILABLE, Retry.ELSEWHERE, "NODE_UNREACHABLE"


class Draining(MeshError):
    """The node takes nothing new."""

    code, retry, reason = Code.UNAVAILABLE, Retry.ELSEWHERE, "DRAINING"


class WrongRole(MeshError):
    """The node's role (prefill, decode) does not do this part of a request; it may have changed a moment ago."""

    code, retry, reason = Code.UNAVAILABLE, Retry.ELSEWHERE, "WRONG_ROLE"


class NoNodeNow(MeshError):
    """Policy could be met but for nodes that are down; names `rule` and `node`."""

    code, retry, reason = Code.UNAVAILABLE, Retry.ELSEWHERE, "NO_NODE_NOW"


class NoCapableNode(MeshError):
    """No node of the mesh, up or down, could ever serve this under its policy."""

    code, retry, reason = Code.FAILED_PRECONDITION, Retry.FIX_STATE, "NO_CAPABLE_NODE"


class RevisionMismatch(MeshError):
    """Compare-and-set failed, or builds differ."""

    code, retry, reason = Code.FAILED_PRECONDITION, Retry.FIX_STATE, "REVISION_MISMATCH"


class KvIncompatible(MeshError):
    """KV state of another layout, lineage, label or place; recompute instead."""

    code, retry, reason = Code.FAILED_PRECONDITION, Retry.RECOMPUTE, "KV_INCOMPATIBLE"


class StalePlan(MeshError):
    """The node's state changed since the plan was made."""

    code, retry, reason = Code.ABORTED, Retry.REPLAN, "STALE_PLAN"


class LeaseLost(MeshError):
    """The uplink lease ended."""

    code, retry, reason = Code.ABORTED, Retry.REPLAN, "LEASE_LOST"


class PayloadCorrupt(MeshError):
    """A digest did not match; nothing of it was used."""

    code, retry, reason = Code.DATA_LOSS, Retry.RECOMPUTE, "PAYLOAD_CORRUPT"


class Expired(MeshError):
    """The deadline passed."""

    code, reason = Code.DEADLINE_EXCEEDED, "EXPIRED"


class Cancelled(MeshError):
    """The caller went away or aborted."""

    code, reason = Code.CANCELLED, "CANCELLED"


class NotImplementedHere(MeshError):
    """A feature that this node does not have."""

    code, reason = Code.UNIMPLEMENTED, "NOT_IMPLEMENTED_HERE"


class Internal(MeshError):
    """A bug of ours."""


def walk(base: type[MeshError] = MeshError) -> Iterator[type[MeshError]]:
    """Every class of the tree, the base first."""
    yield base
    for child in base.__subclasses__():
        yield from walk(child)


def by_reason(reason: str) -> type[MeshError]:
    """The class with this reason word; `Internal` if none has it (a newer peer's word)."""
    for cls in walk():
        if cls is not MeshError and cls.reason == reason:
            return cls
    return Internal


_MAX_DETAILS = 8
_MAX_DETAIL_CHARS = 256


def told_details(details: Mapping[str, str]) -> dict[str, str]:
    """Details as they are told to a peer, or taken from one: few and short, and none that would be mistaken for the
    message."""
    kept = [(key, value) for key, value in details.items() if key != "message" and len(key) <= 64]
    return {key: value[:_MAX_DETAIL_CHARS] for key, value in kept[:_MAX_DETAILS]}


def by_code(code: int) -> type[MeshError]:
    """The most general class for a bare gRPC code, used when a peer sent no details."""
    defaults: dict[int, type[MeshError]] = {
        1: Cancelled, 3: InvalidRequest, 4: Expired, 5: NotFound, 6: AlreadyExists, 7: PolicyDenied,
        8: Overloaded, 9: NoCapableNode, 10: StalePlan, 12: NotImplementedHere, 14: NodeUnreachable,
        15: PayloadCorrupt, 16: Unauthenticated,
    }  # fmt: skip
    return defaults.get(code, Internal)
