"""A node behind an uplink agent that computes nothing: for benchmarks of the session itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from mesh.errors import NotImplementedHere
from mesh.node.engine import EngineLoad, RunId
from mesh.node.port import KvOrder, KvReport, PortEvent, RunOrder

_LOAD = EngineLoad(
    running=0,
    waiting=0,
    waiting_prefill_tokens=0,
    kv_used_tokens=0,
    kv_capacity_tokens=4096,
    prefill_tokens_per_s=100.0,
    decode_tokens_per_s=10.0,
)


class IdleHost:
    """See mesh.rpc.uplink.types.UplinkHost."""

    draining = False

    async def run(self, order: RunOrder) -> AsyncGenerator[PortEvent, None]:
        """Refused: raises NotImplementedHere."""
        raise NotImplementedHere("a benchmark's agent runs nothing")
        yield  # makes it a generator

    async def move_kv(self, order: KvOrder) -> KvReport:
        """Refused: raises NotImplementedHere."""
        raise NotImplementedHere("a benchmark's agent moves nothing")

    async def release(self, run_id: RunId) -> None:
        """Nothing is held."""

    async def load(self) -> EngineLoad:
        """Always idle."""
        return _LOAD
