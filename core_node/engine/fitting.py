"""What fits into the memory there is: the weights first, then the KV pool. Pure arithmetic, and its words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from core_node.engine.blocks import blocks_for
from mesh.errors import Overloaded
from mesh.kv.hashing import BLOCK_TOKENS

_DEFAULT_POOL_CONTEXTS = 4  # sequences of full context that a pool of default size can hold
_DEFAULT_POOL_RATIO = 0.5  # of the memory that is left after the weights, at most
_ADVISED_RATIO = 0.9  # of what is left: a pool that is advised leaves room for a step's own tensors
_LEAST_ADVISED_TOKENS = 256
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one model asks for. `weights_bytes`: in each dtype that could be set, the one asked for (`dtype`) among
    them. `pool_tokens` and `pool_bytes`: as in CoreEngineSettings, 0 for what is left open."""

    model_id: str
    device: str
    dtype: str
    weights_bytes: Mapping[str, int]
    kv_bytes_per_token: int
    context_tokens: int
    pool_tokens: int = 0
    pool_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What was decided. `why` says where the pool's size comes from."""

    n_blocks: int
    pool_bytes: int
    weights_bytes: int
    free_bytes: int
    why: str

    @property
    def pool_tokens(self) -> int:
        return self.n_blocks * BLOCK_TOKENS


def fit(demand: Demand, free_bytes: int) -> Fit:
    """Size the pool. Raises Overloaded, with the sum and the nearest setting that fits, if there is no room."""
    d, block_bytes = demand, demand.kv_bytes_per_token * BLOCK_TOKENS
    weights_bytes = d.weights_bytes[d.dtype]
    left_bytes = free_bytes - weights_bytes
    if d.pool_tokens:
        n_blocks, why = d.pool_tokens // BLOCK_TOKENS, "kv_pool_tokens is set"
    elif d.pool_bytes:
        n_blocks, why = d.pool_bytes // block_bytes, "kv_pool_bytes is set"
    else:
        wanted = blocks_for(d.context_tokens) * _DEFAULT_POOL_CONTEXTS
        n_blocks = min(wanted, int(max(0, left_bytes) * _DEFAULT_POOL_RATIO) // block_bytes)
        why = f"{_DEFAULT_POOL_CONTEXTS} contexts of {d.context_tokens:,} tokens fit"
        if n_blocks < wanted:
            why = f"half of the {mib(left_bytes)} that the weights leave"
    if n_blocks < 1 or n_blocks * block_bytes > left_bytes:
        raise Overloaded(
            f"{d.model_id} does not fit on {d.device}: weights {mib(weights_bytes)} in {d.dtype} + KV pool "
            f"{mib(max(1, n_blocks) * block_bytes)} ({max(1, n_blocks)} blocks of {block_bytes} bytes) against "
            f"{mib(free_bytes)} free; {_advice(d, free_bytes)}"
        )
    return Fit(
        n_blocks=n_blocks,
        pool_bytes=n_blocks * block_bytes,
        weights_bytes=weights_bytes,
        free_bytes=free_bytes,
        why=why,
    )


def mib(n_bytes: int) -> str:
    """Bytes for people."""
    return f"{n_bytes / _MIB:,.0f} MiB" if n_bytes >= 10 * _MIB else f"{n_bytes / _MIB:,.1f} MiB"


def _advice(d: Demand, free_bytes: int) -> str:
    """The nearest setting that fits: a smaller pool, else smaller weights, else how much memory it takes."""
    room = {dtype: _tokens_beside(n, d, free_bytes) for dtype, n in d.weights_bytes.items()}
    if room[d.dtype] >= _LEAST_ADVISED_TOKENS:
        return f"kv_pool_tokens={room[d.dtype]} fits"
    fitting = [t for t in room if d.weights_bytes[t] < d.weights_bytes[d.dtype] and room[t] >= _LEAST_ADVISED_TOKENS]
    if fitting:
        nearest = max(fitting, key=lambda t: d.weights_bytes[t])
        return f"dtype {nearest} ({mib(d.weights_bytes[nearest])}) with kv_pool_tokens={room[nearest]} fits"
    smallest = min(d.weights_bytes, key=lambda t: d.weights_bytes[t])
    least = d.weights_bytes[smallest] + int(_LEAST_ADVISED_TOKENS * d.kv_bytes_per_token / _ADVISED_RATIO)
    return f"no setting fits: in {smallest} with kv_pool_tokens={_LEAST_ADVISED_TOKENS} it takes {mib(least)}"


def _tokens_beside(weights_bytes: int, d: Demand, free_bytes: int) -> int:
    left = max(0, free_bytes - weights_bytes)
    most = blocks_for(d.context_tokens) * _DEFAULT_POOL_CONTEXTS  # more than that nobody would have chosen
    return min(int(left * _ADVISED_RATIO) // (d.kv_bytes_per_token * BLOCK_TOKENS), most) * BLOCK_TOKENS
