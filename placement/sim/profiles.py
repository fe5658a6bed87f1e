"""Speeds of modelled nodes. The GPU ones are published constants, not our measurements.

    step = W + H * (positions that all sequences of the step attend to) / 8192

with W, H, the chunk, the sequences and the KV pool of vllm-project/semantic-router, src/fleet-sim (FleetOpt, arXiv
2603.16514; there H is per sequence of mean context L: W + H (L / 8192) n). A step holds at most `chunk_tokens`: one for
each sequence that decodes, the rest prefill, first come first served (chunked prefill, Sarathi-Serve, arXiv
2403.02310). A prefilling sequence attends to its context once a step, as in that model. The profiles know no limit of
arithmetic: prefill of a chunk takes one step, however short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

LLAMA3_70B_KV_BYTES_PER_TOKEN = 327_680
"""320 KiB, as in Mooncake (FAST'25)."""

_PER_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProfile:
    """One kind of node. `base_s` is W, `context_s` is H / 8192; `cost_per_h` in dollars."""

    name: str
    base_s: float
    context_s: float
    chunk_tokens: int
    most_running: int
    kv_capacity_tokens: int
    max_context_tokens: int = 163_840
    kv_bytes_per_token: int = LLAMA3_70B_KV_BYTES_PER_TOKEN
    cost_per_h: float = 0.0
    source: str = "published"

    def step_s(self, attended_tokens: float) -> float:
        """One step whose sequences attend to so many positions in all."""
        return self.base_s + self.context_s * attended_tokens


def _gpu(name: str, w_ms: float, h_ms: float, chunk: int, slots: int, kv_blocks: int, dollars: float) -> NodeProfile:
    return NodeProfile(
        name=name,
        base_s=w_ms / 1000.0,
        context_s=h_ms / 1000.0 / _PER_TOKENS,
        chunk_tokens=chunk,
        most_running=slots,
        kv_capacity_tokens=kv_blocks * 16,
        cost_per_h=dollars,
    )


PROFILES: Mapping[str, NodeProfile] = MappingProxyType(
    {
        "a100": _gpu("a100", 8.0, 0.65, 512, 128, 65_536, 2.21),
        "h100": _gpu("h100", 4.0, 0.32, 1024, 256, 65_536, 4.02),
        "a10g": _gpu("a10g", 12.0, 0.90, 256, 64, 32_768, 1.01),
    }
)
"""By name."""
