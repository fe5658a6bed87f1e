"""What an entry learns from its own requests: which prefixes the nodes still have, and what codecs really save. Pure.

Both are guesses about other nodes, good for predictions only. A prefix that a node has forgotten since, or a codec
that saves less on the next text, costs a worse choice and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from mesh.kv.hashing import BLOCK_TOKENS
from mesh.node.port import KvReport
from placement.decide.types import CodecTable

_MOST_BLOCKS = 65_536
_KEEP_S = 600.0
_WEIGHT = 0.3  # of the newest transfer
_LEAST_TOKENS = 64  # of a transfer that says something of its codec


class PrefixMemory:
    """Salted names of token blocks (mesh.kv.hashing), and the nodes that computed or got KV of each lately. The one
    that was used last is forgotten last."""

    def __init__(
        self, most_blocks: int = _MOST_BLOCKS, keep_s: float = _KEEP_S, *, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        self._most_blocks = most_blocks
        self._block_tokens = block_tokens
        self._keep_s = keep_s
        self._holders: OrderedDict[bytes, dict[str, float]] = OrderedDict()  # block -> node id -> time

    def saw(self, node_id: str, blocks: Sequence[bytes], now_s: float) -> None:
        """The node has KV of these blocks, which are a prefix from its first block on."""
        for block in blocks:
            self._holders.setdefault(block, {})[node_id] = now_s
            self._holders.move_to_end(block)
        while len(self._holders) > self._most_blocks:
            self._holders.popitem(last=False)

    def tokens(self, blocks: Sequence[bytes], now_s: float) -> dict[str, int]:
        """How many leading tokens each node is thought to have; nodes that have none are left out."""
        found: dict[str, int] = {}
        alive: set[str] | None = None
        for n, block in enumerate(blocks, start=1):
            fresh = {node for node, at in self._holders.get(block, {}).items() if now_s - at <= self._keep_s}
            alive = fresh if alive is None else alive & fresh
            if not alive:
                break
            found.update(dict.fromkeys(alive, n * self._block_tokens))
        return found


class CodecSavings:
    """Moving averages of encoded bytes for a byte of f16, by codec, of real transfers."""

    def __init__(self) -> None:
        self._bytes_ratio: dict[str, float] = {}

    def saw(self, report: KvReport, f16_bytes_per_token: int) -> None:
        """A transfer that is done."""
        tokens = report.tokens - report.skipped_tokens
        if tokens < _LEAST_TOKENS or report.wire_bytes <= 0 or f16_bytes_per_token <= 0:
            return
        ratio = report.wire_bytes / (tokens * f16_bytes_per_token)
        known = self._bytes_ratio.get(report.codec, ratio)
        self._bytes_ratio[report.codec] = known + _WEIGHT * (ratio - known)

    def applied(self, table: CodecTable) -> CodecTable:
        """The table with what was seen in place of what was declared."""
        seen = [self._bytes_ratio.get(name) for name in table.names]
        if all(ratio is None for ratio in seen):
            return table
        ratios = [float(d) if s is None else s for s, d in zip(seen, table.bytes_ratio, strict=True)]
        return CodecTable(
            names=table.names,
            bytes_ratio=np.array(ratios),
            loss_ratio=table.loss_ratio,
            encode_s=table.encode_s,
            decode_s=table.decode_s,
        )
