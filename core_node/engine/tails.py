"""Imports without their head: KV of positions [first, n), until a prefill of this engine's own brings [0, first).

The tail's blocks begin at a block's border, so that joining is nothing but one block table behind the other. Pure.
"""

from __future__ import annotations

from core_node.engine.blocks import BlockPool, blocks_for
from core_node.engine.sequence import Phase, Sequence
from mesh.errors import InvalidRequest, Overloaded
from mesh.kv.hashing import BLOCK_TOKENS
from mesh.node.engine import ImportSpec


def check_tail(spec: ImportSpec) -> None:
    """Raise InvalidRequest unless `first_position` is a block's border below the known tokens."""
    first = spec.first_position
    if first % BLOCK_TOKENS or not 0 <= first < len(spec.token_ids):
        raise InvalidRequest(
            f"first_position must be a multiple of {BLOCK_TOKENS} below {len(spec.token_ids)}, got {first}",
            field="first_position",
        )


def open_tail(pool: BlockPool, tail: Sequence, first: int) -> None:
    """Blocks for positions [first, n). `tail.computed` counts from `first`. Raises Overloaded with nothing taken."""
    need = blocks_for(tail.n_tokens) - first // BLOCK_TOKENS
    if need > pool.n_free:
        raise Overloaded(f"the import needs {need} KV blocks, {pool.n_free} of {pool.n_blocks} are free")
    tail.blocks, tail.phase = pool.allocate(need), Phase.HELD


def join(tail: Sequence, head: Sequence, first: int) -> None:
    """Give the head's blocks to the tail, which is a whole hold then. Raises InvalidRequest with nothing changed."""
    if head.root != tail.root or head.token_ids[:first] != tail.token_ids[:first]:
        raise InvalidRequest("the head is of other tokens or of another cache namespace", field="head")
    if head.computed != first or len(head.blocks) != first // BLOCK_TOKENS:
        raise InvalidRequest(f"the head has KV of {head.computed} positions, not of {first}", field="head")
    tail.blocks = head.blocks + tail.blocks
    tail.computed += first
    tail.named = head.named
    head.blocks, head.computed, head.named, head.phase = [], 0, 0, Phase.GONE
