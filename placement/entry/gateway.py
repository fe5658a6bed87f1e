"""The front door as the HTTP app sees it: implements mesh.http.gateway.Gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from mesh.errors import UnknownModel
from mesh.identity.principal import Principal
from mesh.identity.tenants import TenantDirectory
from mesh.telemetry.metrics import Metrics
from mesh.v1 import inference_pb2 as pb
from placement.entry.front_door import FrontDoor


class EntryGateway:
    """Thin: everything is the front door's."""

    def __init__(self, door: FrontDoor, directory: Callable[[], TenantDirectory], metrics: Metrics) -> None:
        self._door = door
        self._directory = directory
        self._metrics = metrics

    async def authenticate(self, authorization: str | None) -> Principal:
        return self._directory().authenticate(authorization)

    def generate(self, principal: Principal, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        return self._door.generate(principal, request)

    async def models(self, principal: Principal) -> list[pb.ModelInfo]:
        return self._door.models(principal)

    def token_bytes(self, model: str, token_ids: Sequence[int]) -> list[bytes]:
        served = self._door.served_models.get(model)
        if served is None:
            raise UnknownModel(f"unknown model {model[:100]!r}", field="model")
        return [served.tokenizer.token_bytes(i) for i in token_ids]

    def metrics(self) -> bytes:
        return self._metrics.render()

    def ready(self) -> bool:
        return not self._door.draining
