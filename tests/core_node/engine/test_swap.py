"""Preempted KV: computed again, or to the host and back, whichever is predicted cheaper."""

from __future__ import annotations

import pytest
import torch

from core_node.engine.block_copies import BlockCopier, block_bytes
from core_node.engine.blocks import BlockPool
from core_node.engine.kv_pool import KvPool
from core_node.engine.scheduler import Chunk, Scheduler, SchedulerLimits
from core_node.engine.sequence import Phase, Sequence
from core_node.engine.swap import BlockCopy, CopyKind, HostBlocks, MoveRates, swap_is_cheaper
from mesh.kv.geometry import KvDtype
from mesh.kv.hashing import root_hash
from mesh.node.engine import RunId
from tests.core_node.engine.engine_world import GEOMETRY

ROOT = root_hash("layout", b"salt")
SWAP = MoveRates(recompute_tokens_per_s=100.0, copy_bytes_per_s=1e9, block_bytes=1000)


@pytest.mark.parametrize(
    ("rates", "cheaper"),
    [
        (SWAP, True),
        (MoveRates(recompute_tokens_per_s=16_000.0, copy_bytes_per_s=2e6, block_bytes=1000), False),  # 1 ms either way
        (MoveRates(recompute_tokens_per_s=15_900.0, copy_bytes_per_s=2e6, block_bytes=1000), True),
        (MoveRates(recompute_tokens_per_s=16_100.0, copy_bytes_per_s=2e6, block_bytes=1000), False),
        (MoveRates(recompute_tokens_per_s=0.0, copy_bytes_per_s=1e9, block_bytes=1000), False),
        (MoveRates(recompute_tokens_per_s=100.0, copy_bytes_per_s=0.0, block_bytes=1000), False),
    ],
)
def test_the_choice(rates: MoveRates, cheaper: bool) -> None:
    assert swap_is_cheaper(16, 1, rates) is cheaper


def scheduler(host_blocks: int, rates: MoveRates = SWAP) -> Scheduler:
    limits = SchedulerLimits(max_step_tokens=64, max_running=4, max_waiting=4, host_blocks=host_blocks)
    s = Scheduler(BlockPool(5), limits)
    s.rates = rates
    return s


def sequence(n_tokens: int, arrival: int) -> Sequence:
    ids = [arrival * 1000 + i for i in range(n_tokens)]
    return Sequence(run_id=RunId(f"s{arrival}"), token_ids=ids, root=ROOT, arrival=arrival)


def step(s: Scheduler) -> list[Chunk]:
    chunks = s.schedule(0.0)
    for chunk in chunks:
        completes = chunk.completes
        s.computed(chunk)
        if completes:
            chunk.sequence.token_ids.append(chunk.stop)
    s.check(iter(()))
    return chunks


def preempt(s: Scheduler) -> tuple[Sequence, Sequence]:
    """Two sequences of two blocks each in five: the second one has to go when the first needs a fourth."""
    a, b = sequence(30, 1), sequence(31, 2)
    s.add(a)
    s.add(b)
    for _ in range(30):
        if b.phase is not Phase.RUNNING and b.admitted:
            return a, b
        s.take_copies()
        step(s)
    raise AssertionError("nobody was preempted")


def test_it_goes_out_and_comes_back() -> None:
    s = scheduler(host_blocks=4)
    a, b = preempt(s)
    computed = b.swapped_tokens
    (out,) = s.take_copies()
    assert (out.kind, out.targets, s.swapped_total) == (CopyKind.OUT, tuple(b.swapped), 1)
    assert computed == b.n_tokens - 1
    s.remove(a)
    a = sequence(60, 3)  # takes the blocks that b's KV was in, so that nothing is found in the cache
    a.arrival = 0
    s.add(a)
    step(s)
    s.remove(a)
    host = tuple(b.swapped)
    assert [(c.start, c.n_tokens) for c in step(s)] == [(computed, 1)]  # nothing is computed again
    (back,) = s.take_copies()
    found = len(host) - len(back.sources)
    assert back == BlockCopy(CopyKind.IN, host[found:], tuple(b.blocks[found : len(host)]))
    assert b.swapped == []


def test_what_the_cache_kept_is_not_copied_back() -> None:
    s = scheduler(host_blocks=4)
    a, b = preempt(s)
    host = tuple(b.swapped)
    s.remove(a)
    s.take_copies()
    step(s)
    (back,) = s.take_copies()
    assert b.cached == 0
    assert 0 < len(back.sources) < len(host)


@pytest.mark.parametrize("host_blocks", [0, 1])
def test_without_room_it_is_computed_again(host_blocks: int) -> None:
    s = scheduler(host_blocks)
    _, b = preempt(s)
    assert s.take_copies() == []
    assert (b.swapped, s.swapped_total, s.preempted_total) == ([], 0, 1)


def test_a_fast_model_computes_again() -> None:
    s = scheduler(4, MoveRates(recompute_tokens_per_s=1e9, copy_bytes_per_s=1e6, block_bytes=1000))
    preempt(s)
    assert s.swapped_total == 0


@pytest.mark.parametrize("how", ["remove", "hold"])
def test_leaving_frees_the_host(how: str) -> None:
    s = scheduler(host_blocks=4)
    a, b = preempt(s)
    (s.remove if how == "remove" else s.hold)(b)
    s.check(iter([b] if how == "hold" else []))
    assert s._host.n_free == 4
    s.remove(a)


def test_a_host_block_that_leaked_is_noticed() -> None:
    host = HostBlocks(3)
    mine = host.allocate(2)
    host.check([mine])
    with pytest.raises(AssertionError):
        host.check([])
    with pytest.raises(AssertionError):
        host.check([mine, mine[:1]])


@pytest.mark.parametrize("dtype", list(KvDtype))
def test_blocks_come_back_to_the_bit(dtype: KvDtype) -> None:
    pool = KvPool(GEOMETRY, 6, dtype, torch.device("cpu"))
    pool.k.copy_(torch.randn(pool.k.shape))
    pool.v.copy_(torch.randn(pool.v.shape))
    before = pool.k.clone(), pool.v.clone()
    copier = BlockCopier(pool, 2)
    copier.run([BlockCopy(CopyKind.OUT, (4, 1), (1, 0))])
    pool.k.zero_()
    pool.v.zero_()
    copier.run([BlockCopy(CopyKind.IN, (1, 0), (2, 3)), BlockCopy(CopyKind.WITHIN, (2,), (5,))])
    for got, want in zip((pool.k, pool.v), before, strict=True):
        assert torch.equal(got[:, 32:64], torch.cat((want[:, 64:80], want[:, 16:32]), 1))
        assert torch.equal(got[:, 80:96], want[:, 64:80])
        assert not got[:, :32].any()
    assert copier.bytes_per_s > 0


def test_the_probe_changes_nothing_and_measures() -> None:
    pool = KvPool(GEOMETRY, 6, KvDtype.F32, torch.device("cpu"))
    pool.k.copy_(torch.randn(pool.k.shape))
    before = pool.k.clone()
    ticks = iter(range(100))
    copier = BlockCopier(pool, 3, lambda: next(ticks) / 2)
    copier.probe()
    assert torch.equal(pool.k, before)
    assert copier.bytes_per_s == pytest.approx(3 * block_bytes(pool) / 0.5)
    none = BlockCopier(pool, 0)
    none.probe()
    assert none.bytes_per_s == 0.0
