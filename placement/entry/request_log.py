"""Requests that a client may come back for: one producer, any number of readers, at any token offset.

Every running request has a RequestStream: its producer appends events, readers follow from their offset. A
request with an idempotency key outlives a lost client for `grace_s` and stays readable for `keep_s` after its
end; one without a key is cancelled with its reader. Memory is bounded: a stream holds at most its max_tokens,
and at most `max_kept` ended streams are kept, oldest out first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mesh.errors import InvalidRequest, MeshError, NotFound
from mesh.v1 import common_pb2 as common
from mesh.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """One generated token with the text that became final with it."""

    token_id: int
    text: str
    node_id: str
    logprobs: common.PositionLogprobs | None = None


LogEntry = TokenPiece | pb.GenerateResponse


class StreamCopies(Protocol):
    """Other entries that keep a copy of a stream: they decide when readers see what was appended (see `show`)."""

    def appended(self, entries: Sequence[LogEntry]) -> None: ...

    def ended(self, error: MeshError | None) -> None: ...


class RequestStream:
    """Append-only events of one request. With `copies` they are shown to readers once those have them."""

    def __init__(self, request_id: str, tenant: str, fingerprint: bytes, idempotency_key: str = "") -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.fingerprint = fingerprint
        self.idempotency_key = idempotency_key
        self.readers = 0
        self.ended_s: float | None = None
        self.former_id = ""  # at an entry that is gone, from which it was taken over
        self.copies: StreamCopies | None = None
        self._entries: list[LogEntry] = []
        self._shown = 0
        self._error: MeshError | None = None
        self._grown = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self.ended_s is not None

    @property
    def failed(self) -> bool:
        """It ended with an error."""
        return self._error is not None

    def append(self, *entries: LogEntry) -> None:
        """Add events; readers wake."""
        self._entries.extend(entries)
        if self.copies is not None:
            self.copies.appended(entries)
        else:
            self.show(len(self._entries))

    def show(self, count: int) -> None:
        """Readers may see so many events."""
        if count > self._shown:
            self._shown = count
            self._wake()

    @property
    def count(self) -> int:
        """Events so far, shown or not."""
        return len(self._entries)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens so far, shown or not."""
        return tuple(entry.token_id for entry in self._entries if isinstance(entry, TokenPiece))

    @property
    def last_node_id(self) -> str:
        """Node of the newest token; empty if there is none."""
        return next((entry.node_id for entry in reversed(self._entries) if isinstance(entry, TokenPiece)), "")

    def end(self, now_s: float, error: MeshError | None = None) -> None:
        """No more events. Readers get what there is, then `error` if there is one."""
        self._error, self.ended_s = error, now_s
        if self.copies is not None:
            self.copies.ended(error)
        self._wake()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    async def read(self, offset_tokens: int) -> AsyncIterator[pb.GenerateResponse]:
        """Events as responses; tokens before `offset_tokens` are left out. Raises InvalidRequest if the
        request ended with fewer tokens than that."""
        at, token_index = 0, 0
        while True:
            grown = self._grown
            batch = self._entries[at : self._shown]
            at += len(batch)
            run: list[TokenPiece] = []
            for entry in batch:
                if isinstance(entry, TokenPiece):
                    token_index += 1
                    if token_index > offset_tokens:
                        run.append(entry)
                    continue
                if run:
                    yield _delta(run, token_index - len(run))
                    run = []
                if entry.WhichOneof("event") == "finish" and token_index < offset_tokens:
                    raise InvalidRequest(
                        f"resume_offset_tokens is {offset_tokens}, the request had {token_index} tokens",
                        field="resume_offset_tokens",
                    )
                yield entry
            if run:
                yield _delta(run, token_index - len(run))
            if at < self._shown:
                continue
            if self.ended and at == len(self._entries):
                if self._error is not None:  # each reader gets its own, for tracebacks grow on the one that is raised
                    raise type(self._error)(self._error.message, **self._error.details)
                return
            await grown.wait()


def _delta(run: list[TokenPiece], offset_tokens: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        tokens=pb.TokenDelta(
            offset_tokens=offset_tokens,
            ids=[p.token_id for p in run],
            text="".join(p.text for p in run),
            logprobs=[p.logprobs for p in run if p.logprobs is not None],
            node_id=run[-1].node_id,
        )
    )


class RequestLog:
    """All streams of one entry, by request id and by (tenant, idempotency key)."""

    def __init__(self, *, keep_s: float = 120.0, max_kept: int = 1_000) -> None:
        self.keep_s = keep_s
        self._max_kept = max_kept
        self._by_id: OrderedDict[str, RequestStream] = OrderedDict()
        self._by_key: dict[tuple[str, str], RequestStream] = {}

    def find(self, tenant: str, idempotency_key: str, fingerprint: bytes) -> RequestStream | None:
        """The stream of this key; None for an empty one. Raises InvalidRequest if the key was used for another
        request."""
        stream = self._by_key.get((tenant, idempotency_key)) if idempotency_key else None
        if stream is not None and stream.fingerprint != fingerprint:
            raise InvalidRequest(
                "this idempotency_key belongs to a request with other contents: use a new key",
                field="idempotency_key",
            )
        return stream

    def add(self, stream: RequestStream, now_s: float) -> None:
        """Take in a new stream, and let old ones go. Its key, if it has one, names it from now on."""
        self.expire(now_s)
        self._by_id[stream.request_id] = stream
        if stream.idempotency_key:
            self._by_key[(stream.tenant, stream.idempotency_key)] = stream

    def get(self, request_id: str, tenant: str | None) -> RequestStream:
        """By id; `tenant` None sees all tenants'. Raises NotFound, for other tenants' requests too."""
        stream = self._by_id.get(request_id)
        if stream is None or (tenant is not None and stream.tenant != tenant):
            raise NotFound(f"no request {request_id[:100]!r} here", field="request_id")
        return stream

    def rename(self, stream: RequestStream, request_id: str) -> None:
        """It goes on under another id; the one before names it too."""
        stream.former_id, stream.request_id = stream.request_id, request_id
        self._by_id[request_id] = stream

    def drop(self, stream: RequestStream) -> None:
        """Forget a stream that nobody can come back for."""
        for request_id in (stream.request_id, stream.former_id):
            self._by_id.pop(request_id, None)
        key = (stream.tenant, stream.idempotency_key)
        if self._by_key.get(key) is stream:
            del self._by_key[key]

    def expire(self, now_s: float) -> None:
        """Forget what ended more than `keep_s` ago, and what is too much."""
        ended = [s for s in self._by_id.values() if s.ended_s is not None]
        old = [s for s in ended if s.ended_s is not None and now_s - s.ended_s > self.keep_s]
        for stream in (*old, *ended[: max(0, len(ended) - self._max_kept)]):
            self.drop(stream)
