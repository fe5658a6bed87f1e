"""Requests of other entries that this one could go on with: what is known of each. Pure; no I/O.

An entry tells the others of a request with an idempotency key before its client sees anything of it. So whoever the
client comes to next has at least what it has, and may show it the rest, or go on from there if that entry is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from mesh.errors import MeshError, by_reason, told_details
from mesh.identity.place import Place
from mesh.v1 import inference_pb2 as pb
from mesh.v1 import sibling_pb2 as wire
from placement.entry.request_log import LogEntry, RequestStream, TokenPiece

MOST_COPIES = 4_096
KEEP_S = 120.0
"""How long a request of an entry that is gone waits for its client."""


ENTRY_STOPS = "entry"
"""Detail of a Draining with which an entry that stops ends its requests; a node that drains names no entry."""


class Copier(Protocol):
    """The other entries of this kind, as far as they are there."""

    def copy(
        self, opened: wire.CopiedRequest, stream: RequestStream, may_be_at: Callable[[Place], bool]
    ) -> tuple[Place, ...]:
        """From now on tell them of the stream, which is empty; returns where copies are."""
        ...

    def followed(self, origin: str, request_id: str, followed: bool) -> None:
        """A client follows a request of the entry `origin` here, or does so no longer."""


@dataclass(slots=True, kw_only=True)
class Copy:
    """One request of the entry `origin` (a node id). `orphan`: that entry is gone, and it had not ended."""

    origin: str
    request: pb.GenerateRequest
    label: str
    seed: int
    stream: RequestStream
    orphan: bool = False

    def to_go_on(self) -> pb.GenerateRequest:
        """The request as it is to be decided again: with the label that it had been found to have, so that it cannot be
        lower now, and with its seed."""
        made = pb.GenerateRequest()
        made.CopyFrom(self.request)
        made.label = self.label
        if not made.sampling.HasField("seed"):
            made.sampling.seed = self.seed
        return made


def entries_to_wire(request_id: str, entries: Iterable[LogEntry]) -> wire.CopiedEntries:
    """Entries of a stream, for another entry."""
    return wire.CopiedEntries(request_id=request_id, entries=map(_entry_to_wire, entries))


def entries_from_wire(message: wire.CopiedEntries) -> list[LogEntry]:
    """Inverse of entries_to_wire; entries of a kind that this build does not know are left out."""
    return [entry for entry in map(_entry_from_wire, message.entries) if entry is not None]


def error_of(message: wire.CopiedEnd) -> MeshError | None:
    """What the request ended with."""
    if not message.error_reason:
        return None
    return by_reason(message.error_reason)(message.error_message, **told_details(message.error_details))


def _entry_to_wire(entry: LogEntry) -> wire.CopiedEntry:
    if isinstance(entry, TokenPiece):
        token = wire.CopiedToken(id=entry.token_id, text=entry.text, node_id=entry.node_id, logprobs=entry.logprobs)
        return wire.CopiedEntry(token=token)
    return wire.CopiedEntry(event=entry)


def _entry_from_wire(entry: wire.CopiedEntry) -> LogEntry | None:
    match entry.WhichOneof("entry"):
        case "token":
            token = entry.token
            logprobs = token.logprobs if token.HasField("logprobs") else None
            return TokenPiece(token.id, token.text, token.node_id, logprobs)
        case "event":
            return entry.event
    return None
