"""One generation over any number of connections: what was received, and what is new in what comes.

An entry replays a request's stream to a client that asks again with its idempotency key: every event that is not a
token from the start, tokens from the offset that the client names. Pure; no I/O.
"""

from __future__ import annotations

from mesh.client_types import Event, decision_of, finish_of, migration_of, tokens_of
from mesh.errors import Internal
from mesh.v1 import inference_pb2


class StreamProgress:
    """Turns responses into events, each once. Call `reconnected` before each further connection."""

    def __init__(self, offset_tokens: int = 0) -> None:
        self.offset_tokens = offset_tokens
        """Generated tokens that the caller has: where to go on."""
        self.request_id = ""
        self.finished = False
        self._seen = 0  # events other than tokens, over all connections
        self._replayed = 0  # of these, on this connection

    def reconnected(self) -> None:
        """A new connection begins: its events other than tokens come again from the first."""
        self._replayed = 0

    def take(self, response: inference_pb2.GenerateResponse) -> Event | None:
        """The event, or None if it was there before (or is of a kind that is newer than this client).

        Raises Internal if tokens are missing or come twice."""
        kind = response.WhichOneof("event")
        if kind == "tokens" and response.tokens.ids:
            return self._tokens(response.tokens)
        self._replayed += 1
        if self._replayed <= self._seen:
            return None
        self._seen = self._replayed
        match kind:
            case "decision":
                self.request_id = response.decision.request_id
                return decision_of(response.decision)
            case "tokens":  # text alone, which was held back until the end
                return tokens_of(response.tokens)
            case "migration":
                return migration_of(response.migration)
            case "finish":
                self.finished = True
                return finish_of(response.finish)
        return None

    def _tokens(self, delta: inference_pb2.TokenDelta) -> Event:
        if delta.offset_tokens != self.offset_tokens:
            raise Internal(f"the stream goes on at token {delta.offset_tokens}, {self.offset_tokens} was expected")
        self.offset_tokens += len(delta.ids)
        return tokens_of(delta)
