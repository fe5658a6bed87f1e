"""What an entry remembers of its own requests."""

from __future__ import annotations

import numpy as np
import pytest

from mesh.kv.hashing import block_hashes
from mesh.node.port import KvReport
from placement.decide.types import CodecTable
from placement.entry.learned import CodecSavings, PrefixMemory

IDS = tuple(range(100))
BLOCKS = block_hashes("layout", b"salt", IDS)  # 6 of them


def test_who_has_how_much() -> None:
    memory = PrefixMemory()
    memory.saw("a", BLOCKS, 0.0)
    memory.saw("b", BLOCKS[:2], 1.0)
    assert memory.tokens(BLOCKS, 2.0) == {"a": 96, "b": 32}
    assert memory.tokens(block_hashes("layout", b"salt", (*IDS[:40], 7, *IDS[41:])), 2.0) == {"a": 32, "b": 32}
    assert memory.tokens(block_hashes("layout", b"other", IDS), 2.0) == {}
    assert memory.tokens([], 2.0) == {}


def test_a_prefix_without_its_first_block_is_none() -> None:
    memory = PrefixMemory()
    memory.saw("a", BLOCKS[1:], 0.0)
    assert memory.tokens(BLOCKS, 0.0) == {}


def test_it_forgets_by_time_and_by_number() -> None:
    memory = PrefixMemory(most_blocks=4, keep_s=10.0)
    memory.saw("a", BLOCKS[:3], 0.0)
    assert memory.tokens(BLOCKS, 10.0) == {"a": 48}
    assert memory.tokens(BLOCKS, 10.5) == {}
    memory.saw("a", BLOCKS[:3], 20.0)
    memory.saw("b", block_hashes("layout", b"s2", IDS)[:3], 20.0)
    assert memory.tokens(BLOCKS, 20.0) == {}  # its first two made room
    assert memory.tokens(block_hashes("layout", b"s2", IDS), 20.0) == {"b": 48}


def report(codec: str, wire_bytes: int, tokens: int = 1000, skipped: int = 0) -> KvReport:
    return KvReport(
        transfer_id="t", tokens=tokens, skipped_tokens=skipped, wire_bytes=wire_bytes, codec=codec, duration_s=1.0,
        first_chunk_s=0.1,
    )  # fmt: skip


def table() -> CodecTable:
    none = np.zeros((1, 2))
    return CodecTable(
        names=("f16", "small"), bytes_ratio=np.array([1.0, 0.1]), loss_ratio=np.zeros(2), encode_s=none, decode_s=none
    )


def test_what_a_codec_really_saves_counts() -> None:
    savings = CodecSavings()
    assert savings.applied(table()).bytes_ratio.tolist() == [1.0, 0.1]
    savings.saw(report("small", 5_000, skipped=500), 100)  # 500 tokens of 100 bytes
    assert savings.applied(table()).bytes_ratio.tolist() == [1.0, pytest.approx(0.1)]
    savings.saw(report("small", 20_000), 100)
    assert savings.applied(table()).bytes_ratio[1] == pytest.approx(0.1 + 0.3 * 0.1)


def test_a_transfer_too_small_to_tell() -> None:
    savings = CodecSavings()
    for odd in (report("small", 99_000, tokens=10), report("small", 0), report("small", 1, skipped=1000)):
        savings.saw(odd, 100)
    assert savings.applied(table()).bytes_ratio[1] == 0.1
