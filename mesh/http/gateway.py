"""What the HTTP app asks of the entry that it is a face of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from mesh.identity.principal import Principal
from mesh.v1 import inference_pb2


class Gateway(Protocol):
    """An entry's front door. Every method may raise errors of mesh.errors; the app maps them to HTTP."""

    async def authenticate(self, authorization: str | None) -> Principal:
        """Who sent this `Authorization` header. Raises Unauthenticated."""
        ...

    def generate(
        self, principal: Principal, request: inference_pb2.GenerateRequest
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """One request as a stream: the decision first, the finish last. Closing the iterator cancels it."""
        ...

    async def models(self, principal: Principal) -> list[inference_pb2.ModelInfo]:
        """Models that this caller may use."""
        ...

    def token_bytes(self, model: str, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes that each token of a model stands for (OpenAI's log-probabilities name tokens by text).

        Raises UnknownModel, or InvalidRequest on an id outside the vocabulary."""
        ...

    def metrics(self) -> bytes:
        """Prometheus text exposition format."""
        ...

    def ready(self) -> bool:
        """Whether this entry takes requests."""
        ...
