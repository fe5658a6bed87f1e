"""Small meshes for decision tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mesh.identity.place import Place, Role, Tier
from placement.decide.types import CodecTable, PlacementRequest, Snapshot, Wish


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of a test mesh: idle, ready and measured unless said otherwise."""

    node_id: str
    tier: str = "edge"
    site: str = ""
    models: tuple[str, ...] = ("smol",)
    ready: bool = True
    draining: bool = False
    reachable: bool = True
    age_s: float = 0.0
    running: int = 0
    waiting: int = 0
    waiting_prefill_tokens: int = 0
    kv_free_tokens: int = 100_000
    kv_capacity_tokens: int = 100_000
    max_context_tokens: int = 8192
    kv_bytes_per_token: int = 23_040
    prefill_tokens_per_s: float = 500.0
    decode_tokens_per_s: float = 50.0
    rtt_s: float = 0.02
    goodput_bytes_per_s: float = 1e8
    cached_tokens: int = 0
    prefill_token_s: float = 0.0
    prefill_growth_s: float = 0.0
    codecs: tuple[str, ...] = ("f16",)
    role: str = "both"

    @property
    def place(self) -> Place:
        return Place(
            mesh="m", role=Role(self.tier), tier=Tier(self.tier), site=self.site or self.node_id, region="eu",
            jurisdiction="FR", node_id=self.node_id,
        )  # fmt: skip


def core(node_id: str = "core-1", **facts: object) -> Node:
    """A fast core node."""
    return Node(**{"node_id": node_id, "tier": "core", "site": "dc", "prefill_tokens_per_s": 5000.0, **facts})  # type: ignore[arg-type]


def edge(site: str, **facts: object) -> Node:
    """A slow edge node, named after its site."""
    return Node(**{"node_id": f"edge-{site}", "site": site, **facts})  # type: ignore[arg-type]


CODECS = {
    "f16": (1.0, 0.0, math.inf),
    "q8_0": (0.53, 0.001, 1e5),
    "small": (0.05, 0.008, 4e3),
    "tiny": (0.02, 0.03, 4e3),
}
"""Name: bytes and loss ratios, and tokens/s of encoding and decoding, in the order of their loss."""


def codec_table(nodes: Sequence[Node]) -> CodecTable:
    """What the nodes say they have."""
    seconds = np.array([[1 / c[2] if name in n.codecs else math.inf for name, c in CODECS.items()] for n in nodes])
    seconds = seconds.reshape(len(nodes), len(CODECS))
    ratios, losses = (np.array([c[i] for c in CODECS.values()]) for i in (0, 1))
    return CodecTable(
        names=tuple(CODECS), bytes_ratio=ratios, loss_ratio=losses, encode_s=seconds, decode_s=seconds.copy()
    )


def snapshot(nodes: Sequence[Node], entry: str = "", made_s: float = math.nan) -> Snapshot:
    """Rows in the order given (a real snapshot is sorted; decisions must not care)."""
    model_ids = tuple(sorted({m for n in nodes for m in n.models}))

    def floats(name: str) -> np.ndarray:  # type: ignore[type-arg]
        return np.array([getattr(n, name) for n in nodes], dtype=np.float64)

    def ints(name: str) -> np.ndarray:  # type: ignore[type-arg]
        return np.array([getattr(n, name) for n in nodes], dtype=np.int64)

    def bools(name: str) -> np.ndarray:  # type: ignore[type-arg]
        return np.array([getattr(n, name) for n in nodes], dtype=np.bool_)

    return Snapshot(
        version=1,
        places=tuple(n.place for n in nodes),
        entry_row=next((i for i, n in enumerate(nodes) if n.node_id == entry), -1),
        model_ids=model_ids,
        models=np.array([[m in n.models for m in model_ids] for n in nodes], dtype=np.bool_).reshape(
            len(nodes), len(model_ids)
        ),
        tier_edge=np.array([n.tier == "edge" for n in nodes], dtype=np.bool_),
        ready=bools("ready"),
        draining=bools("draining"),
        reachable=bools("reachable"),
        age_s=floats("age_s"),
        running=ints("running"),
        waiting=ints("waiting"),
        waiting_prefill_tokens=ints("waiting_prefill_tokens"),
        kv_free_tokens=ints("kv_free_tokens"),
        kv_capacity_tokens=ints("kv_capacity_tokens"),
        max_context_tokens=ints("max_context_tokens"),
        kv_bytes_per_token=ints("kv_bytes_per_token"),
        prefill_tokens_per_s=floats("prefill_tokens_per_s"),
        decode_tokens_per_s=floats("decode_tokens_per_s"),
        rtt_s=floats("rtt_s"),
        goodput_bytes_per_s=floats("goodput_bytes_per_s"),
        cached_tokens=ints("cached_tokens"),
        prefills=np.array([n.role != "decode" for n in nodes], dtype=np.bool_),
        decodes=np.array([n.role != "prefill" for n in nodes], dtype=np.bool_),
        codecs=codec_table(nodes),
        prefill_token_s=floats("prefill_token_s"),
        prefill_growth_s=floats("prefill_growth_s"),
        made_s=made_s,
    )


def request(
    prompt_tokens: int = 1000,
    *,
    label: str = "internal",
    expected_tokens: int = 100,
    max_tokens: int = 200,
    model: str = "smol",
    wish: Wish | None = None,
    exclude: Sequence[str] = (),
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    deadline_s: float | None = None,
) -> PlacementRequest:
    return PlacementRequest(
        tenant="acme", model=model, label=label, prompt_tokens=prompt_tokens, max_tokens=max_tokens,
        expected_tokens=expected_tokens, wish=wish or Wish(), exclude=frozenset(exclude), ttft_s=ttft_s,
        tpot_s=tpot_s, deadline_s=deadline_s,
    )  # fmt: skip
