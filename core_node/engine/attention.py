"""Attention of one step's tokens over their sequences' blocks (torch's scaled_dot_product_attention).

Rows of one token (decode) are one batched call over padded block tables; longer chunks (prefill) are one call
each. Query heads that share a KV head are laid out as further query rows, so K and V are never repeated.
`StepLayout` holds what is the same in all layers and is made once a step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from core_node.engine.blocks import blocks_for
from core_node.engine.kv_pool import slots_of
from core_node.engine.scheduler import Chunk
from mesh.kv.hashing import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRows:
    """One chunk: rows [first, last) of the step; `blocks` i64 [n_blocks]; `n_context` positions to attend to;
    `mask` [group * rows, n_context], added to the scores: the chunk's causal mask once for each head of a group."""

    first: int
    last: int
    blocks: torch.Tensor
    n_context: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Tokens of a step, flattened: decode rows first. `token_ids`, `positions`, `slots`: i64 [n_tokens].
    `decode_blocks`: i64 [n_decode, n_blocks], padded with block 0; `decode_mask`, added to the scores:
    [n_decode, 1, 1, n_blocks * BLOCK_TOKENS]. `logit_rows`: i64, the last row of each chunk that wants logits."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    n_decode: int
    decode_blocks: torch.Tensor
    decode_mask: torch.Tensor
    prefill: tuple[PrefillRows, ...]
    logit_rows: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryForm:
    """What a layout must know of the model: query heads per KV head, and the dtype and device of queries."""

    group: int
    dtype: torch.dtype
    device: torch.device


def lay_out(chunks: Seq[Chunk], wants_logits: Seq[bool], form: QueryForm) -> StepLayout:
    """Tensors for `chunks`, those of one token first. `wants_logits[i]`: whether chunk i's last row needs them."""
    device = form.device
    token_ids: list[int] = []
    positions, slots = [], []
    logit_rows: list[int] = []
    prefill: list[PrefillRows] = []
    decode: list[Chunk] = []
    for chunk, wanted in zip(chunks, wants_logits, strict=True):
        first = len(token_ids)
        token_ids += chunk.sequence.token_ids[chunk.start : chunk.stop]
        positions.append(np.arange(chunk.start, chunk.stop, dtype=np.int64))
        slots.append(slots_of(chunk.sequence.blocks, chunk.start, chunk.stop))
        if wanted:
            logit_rows.append(len(token_ids) - 1)
        if chunk.n_tokens == 1:
            assert not prefill, "chunks of one token come first"
            decode.append(chunk)
        else:
            prefill.append(_prefill_rows(chunk, first, form))
    decode_blocks, decode_mask = _decode_tables(decode)
    return StepLayout(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        slots=torch.from_numpy(np.concatenate(slots)).to(device),
        n_decode=len(decode),
        decode_blocks=decode_blocks.to(device),
        decode_mask=_additive(decode_mask.to(device), form.dtype),
        prefill=tuple(prefill),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
    )


def attend(q: torch.Tensor, k_layer: torch.Tensor, v_layer: torch.Tensor, layout: StepLayout) -> torch.Tensor:
    """`q` [n_tokens, n_heads, head_dim] over one layer's pool [n_slots, n_kv_heads, head_dim], in which the step's
    own K and V are stored already. Returns [n_tokens, n_heads * head_dim]."""
    _, n_heads, head_dim = q.shape
    n_kv_heads = k_layer.shape[1]
    group = n_heads // n_kv_heads
    k_blocks = k_layer.view(-1, BLOCK_TOKENS, n_kv_heads, head_dim)
    v_blocks = v_layer.view(-1, BLOCK_TOKENS, n_kv_heads, head_dim)
    parts: list[torch.Tensor] = []
    if (n := layout.n_decode) > 0:
        k = k_blocks[layout.decode_blocks].view(n, -1, n_kv_heads, head_dim).transpose(1, 2).to(q.dtype)
        v = v_blocks[layout.decode_blocks].view(n, -1, n_kv_heads, head_dim).transpose(1, 2).to(q.dtype)
        rows = q[:n].view(n, n_kv_heads, group, head_dim)
        out = scaled_dot_product_attention(rows, k, v, attn_mask=layout.decode_mask)
        parts.append(out.reshape(n, n_heads * head_dim))
    for chunk in layout.prefill:
        n = chunk.last - chunk.first
        k = k_blocks[chunk.blocks].view(-1, n_kv_heads, head_dim)[: chunk.n_context].transpose(0, 1).to(q.dtype)
        v = v_blocks[chunk.blocks].view(-1, n_kv_heads, head_dim)[: chunk.n_context].transpose(0, 1).to(q.dtype)
        # Query heads of a group become further rows: [kv_heads, group * n, head_dim] under the mask repeated.
        rows = q[chunk.first : chunk.last].view(n, n_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        rows = rows.reshape(1, n_kv_heads, group * n, head_dim)
        out = scaled_dot_product_attention(rows, k.unsqueeze(0), v.unsqueeze(0), attn_mask=chunk.mask)
        out = out.view(n_kv_heads, group, n, head_dim).permute(2, 0, 1, 3)
        parts.append(out.reshape(n, n_heads * head_dim))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


def _prefill_rows(chunk: Chunk, first: int, form: QueryForm) -> PrefillRows:
    device = form.device
    n_blocks = blocks_for(chunk.stop)
    queries = torch.arange(chunk.start, chunk.stop, device=device)
    keys = torch.arange(chunk.stop, device=device)
    return PrefillRows(
        first=first,
        last=first + chunk.n_tokens,
        blocks=torch.tensor(chunk.sequence.blocks[:n_blocks], dtype=torch.int64, device=device),
        n_context=chunk.stop,
        mask=_additive(keys[None, :] <= queries[:, None], form.dtype).repeat(form.group, 1),
    )


def _decode_tables(chunks: Seq[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
    n_blocks = max((blocks_for(c.stop) for c in chunks), default=0)
    blocks = np.zeros((len(chunks), n_blocks), dtype=np.int64)
    for row, chunk in enumerate(chunks):
        used = blocks_for(chunk.stop)
        blocks[row, :used] = chunk.sequence.blocks[:used]
    lengths = np.asarray([c.stop for c in chunks], dtype=np.int64)
    mask = np.arange(n_blocks * BLOCK_TOKENS) < lengths[:, None]
    return torch.from_numpy(blocks), torch.from_numpy(mask)[:, None, None, :]
