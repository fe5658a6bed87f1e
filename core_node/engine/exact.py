"""Arithmetic whose every row is the same to the bit, whatever else is in the step (the setting `exact`, in torch).

How a product or a sum rounds depends on the shape that it is called with: libraries choose their loops by it. So all
sums over a row are made in calls of one shape. Rows go through norms and products in tiles of _TILE_ROWS, filled up
with zeros; attention goes over _TILE_KEYS keys at a time with a running maximum and sum, and a query takes the place
in its tile that its position gives it. A tile of keys that a query may not see multiplies what it has by exactly 1
and adds exactly 0, so how a prompt was cut into steps does not show either. That rows of one tile round alike, each
for itself, is a property of the libraries that the tests check; nothing else is assumed.

Source of the running maximum: Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear, silu

from core_node.engine.attention import PrefillRows, StepLayout
from mesh.kv.hashing import BLOCK_TOKENS

_TILE_ROWS = 16
_TILE_KEYS = 128
_TILE_BLOCKS = _TILE_KEYS // BLOCK_TOKENS


class ExactArithmetic:
    """See the module's docstring."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _by_tiles(lambda tile: linear(tile, weight), x)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        def norm(tile: torch.Tensor) -> torch.Tensor:
            wide = tile.float()
            return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)

        return _by_tiles(norm, x)

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        # Row by row: the ends of what a thread takes are computed by other instructions than the rest.
        return torch.stack([silu(row) for row in gate]) * up

    def attend(self, q: torch.Tensor, k_layer: torch.Tensor, v_layer: torch.Tensor, layout: StepLayout) -> torch.Tensor:
        n, n_heads, head_dim = q.shape
        out = torch.empty(n, n_heads * head_dim, dtype=q.dtype, device=q.device)
        for row in range(layout.n_decode):
            blocks, position = layout.decode_blocks[row], int(layout.positions[row])
            out[row] = _attend_tile(q[row : row + 1], position, blocks, k_layer, v_layer)[0]
        for chunk in layout.prefill:
            _attend_chunk(q, chunk, k_layer, v_layer, out)
        return out


def _by_tiles(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    n, missing = x.shape[0], -x.shape[0] % _TILE_ROWS
    padded = torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x.contiguous()
    return torch.cat([function(tile) for tile in torch.split(padded, _TILE_ROWS)])[:n]


def _attend_chunk(
    q: torch.Tensor, chunk: PrefillRows, k_layer: torch.Tensor, v_layer: torch.Tensor, out: torch.Tensor
) -> None:
    row, position = chunk.first, chunk.n_context - (chunk.last - chunk.first)
    while row < chunk.last:
        n = min(chunk.last - row, _TILE_ROWS - position % _TILE_ROWS)
        out[row : row + n] = _attend_tile(q[row : row + n], position, chunk.blocks, k_layer, v_layer)
        row, position = row + n, position + n


def _attend_tile(
    q: torch.Tensor, position: int, blocks: torch.Tensor, k_layer: torch.Tensor, v_layer: torch.Tensor
) -> torch.Tensor:
    """`q` [rows, heads, head_dim], the first at `position`, all within one tile. [rows, heads * head_dim]"""
    rows, n_heads, head_dim = q.shape
    n_kv = k_layer.shape[1]
    group, first = n_heads // n_kv, position % _TILE_ROWS
    tile = q.new_zeros(_TILE_ROWS, n_heads, head_dim, dtype=torch.float32)
    tile[first : first + rows] = q
    queries = tile.view(_TILE_ROWS, n_kv, group, head_dim).permute(1, 2, 0, 3).reshape(n_kv, -1, head_dim)
    queries = queries * head_dim**-0.5
    positions = (position - first + torch.arange(_TILE_ROWS, device=q.device)).repeat(group)[:, None]
    most = q.new_full((n_kv, group * _TILE_ROWS, 1), float("-inf"), dtype=torch.float32)
    total, mixed = torch.zeros_like(most), torch.zeros_like(queries)
    offsets = torch.arange(BLOCK_TOKENS, device=q.device)
    for start in range(0, position + rows, _TILE_KEYS):
        part = blocks[start // BLOCK_TOKENS :][:_TILE_BLOCKS]
        part = torch.cat((part, part.new_zeros(_TILE_BLOCKS - len(part))))
        slots = (part[:, None] * BLOCK_TOKENS + offsets).flatten()
        keys = k_layer[slots].float().permute(1, 2, 0).contiguous()
        values = v_layer[slots].float().transpose(0, 1).contiguous()
        unseen = start + torch.arange(_TILE_KEYS, device=q.device) > positions
        scores = torch.bmm(queries, keys).masked_fill_(unseen, float("-inf"))
        new_most = torch.maximum(most, scores.amax(-1, keepdim=True))
        weights, shrink = torch.exp(scores - new_most), torch.exp(most - new_most)
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + torch.bmm(weights, values)
        most = new_most
    out = (mixed / total).view(n_kv, group, _TILE_ROWS, head_dim)[:, :, first : first + rows]
    return out.permute(2, 0, 1, 3).reshape(rows, n_heads * head_dim).to(q.dtype)
