"""KV between real llama.cpp engines: what was measured once must stay true, and bad KV must change nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest

from edge_node.engine.engine import EdgeEngine
from mesh.errors import InvalidRequest, KvIncompatible, NotFound, Overloaded
from mesh.kv.geometry import KvDtype
from mesh.kv.slab import KvSlab
from mesh.model.tokenizer import load_tokenizer
from mesh.node.engine import ImportSpec, Prefilled, RunId
from tests.conformance.engine_runs import OTHER_SALT, SALT, greedy, hold_prefix, run, run_spec
from tests.edge_node.engine.engines import demo_model, edge_settings, started

pytestmark = pytest.mark.model

TEXT = (
    "A lighthouse keeper writes one line in his log every evening. The first line says that the sea is calm. "
    "The second says that a ship passed far out and did not answer the lamp. "
)


@pytest.fixture
async def source() -> AsyncIterator[EdgeEngine]:
    async with started(EdgeEngine(edge_settings())) as engine:
        yield engine


@pytest.fixture
async def target() -> AsyncIterator[EdgeEngine]:
    async with started(EdgeEngine(edge_settings(transfer_bytes=1 << 20))) as engine:
        yield engine


def prompt(n_tokens: int) -> tuple[int, ...]:
    ids = load_tokenizer(demo_model()).encode(TEXT * 20)
    assert len(ids) >= n_tokens
    return tuple(ids[:n_tokens])


def as_dtype(slab: KvSlab, dtype: KvDtype) -> KvSlab:
    """An f16 slab in f32, or in bf16 with the digits that it has room for."""
    k, v = slab.k.astype(np.float32), slab.v.astype(np.float32)
    if dtype is KvDtype.BF16:
        k, v = ((a.view(np.uint32) >> 16).astype(np.uint16) for a in (k, v))
    return KvSlab(start=slab.start, dtype=dtype, k=k, v=v)


async def move(source: EdgeEngine, target: EdgeEngine, ids: tuple[int, ...], start: int, chunk: int) -> None:
    """Hold "h" of the source to hold "i" of the target, from position `start`."""
    for a in range(start, len(ids) - 1, chunk):
        slab = await source.export_kv(RunId("h"), a, min(a + chunk, len(ids) - 1))
        await target.write_kv(RunId("i"), slab)


async def test_chunks_continue_as_the_source_would(source: EdgeEngine, target: EdgeEngine) -> None:
    ids = prompt(700)
    await hold_prefix(source, "h", ids[:-1])
    await target.open_import(ImportSpec(run_id=RunId("i"), token_ids=ids, max_tokens=740, salt=SALT))
    await move(source, target, ids, 0, 256)
    want = await run(source, run_spec("w", ids, greedy(33), kv_from="h"))
    got = await run(target, run_spec("g", ids, greedy(33), kv_from="i"))
    assert got.prefilled == [Prefilled(700, 699)]
    assert len(want.ids) == 33
    assert got.ids == want.ids


async def test_head_prefilled_here_tail_imported(source: EdgeEngine, target: EdgeEngine) -> None:
    ids = prompt(500)
    await hold_prefix(source, "h", ids[:-1])
    await hold_prefix(target, "i", ids[:192])
    await move(source, target, ids, 192, 128)
    want = await run(source, run_spec("w", ids, greedy(33), kv_from="h"))
    got = await run(target, run_spec("g", ids, greedy(33), kv_from="i"))
    assert got.ids == want.ids


async def test_a_slab_larger_than_a_slot_goes_in_pieces(target: EdgeEngine) -> None:
    ids = prompt(200)  # 4.6 MB through slots of 1 MiB
    await hold_prefix(target, "h", ids)
    slab = await target.export_kv(RunId("h"), 0, 200)
    await target.open_import(ImportSpec(run_id=RunId("i"), token_ids=ids, max_tokens=300, salt=OTHER_SALT))
    await target.write_kv(RunId("i"), slab)
    again = await target.export_kv(RunId("i"), 0, 200)
    assert np.array_equal(again.k, slab.k)
    assert np.array_equal(again.v, slab.v)
    with pytest.raises(InvalidRequest):  # a later piece is too much: all of it is refused
        await target.write_kv(RunId("i"), KvSlab(start=200, dtype=slab.dtype, k=slab.k, v=slab.v))
    with pytest.raises(NotFound):
        await target.kv_tokens(RunId("i"))
    assert await target.kv_tokens(RunId("h")) == 200
    await target.check_integrity()


@pytest.mark.parametrize("dtype", [KvDtype.F32, KvDtype.BF16])
async def test_other_precisions_are_taken(target: EdgeEngine, dtype: KvDtype) -> None:
    ids = prompt(40)
    await hold_prefix(target, "h", ids)
    slab = await target.export_kv(RunId("h"), 0, 39)
    await target.open_import(ImportSpec(run_id=RunId("i"), token_ids=ids, max_tokens=60, salt=OTHER_SALT))
    await target.write_kv(RunId("i"), as_dtype(slab, dtype))
    again = await target.export_kv(RunId("i"), 0, 39)
    if dtype is KvDtype.F32:
        assert np.array_equal(again.k, slab.k)
    else:
        assert np.allclose(again.k, slab.k, rtol=2**-7)
    assert len((await run(target, run_spec("g", ids, greedy(3), salt=OTHER_SALT, kv_from="i"))).ids) == 3


async def test_bad_kv_changes_nothing(target: EdgeEngine) -> None:
    ids = prompt(30)
    g = target.info.geometry
    await target.open_import(ImportSpec(run_id=RunId("i"), token_ids=ids, max_tokens=40, salt=SALT))

    def slab(start: int, shape: tuple[int, ...], dtype: KvDtype = KvDtype.F16, value: float = 0.0) -> KvSlab:
        rows = np.full(shape, value, dtype.storage)
        return KvSlab(start=start, dtype=dtype, k=rows, v=rows)

    good = (g.n_layers, 4, g.n_kv_heads, g.head_dim)
    for bad in (
        slab(1, good),
        slab(-1, good),
        slab(0, (g.n_layers + 1, *good[1:])),
        slab(0, (g.n_layers, 0, *good[2:])),
        slab(0, (*good[:3], g.head_dim // 2)),
        slab(0, (g.n_layers, 41, *good[2:])),
        KvSlab(start=0, dtype=KvDtype.F16, k=np.zeros(good, np.float32), v=np.zeros(good, np.float32)),
    ):
        with pytest.raises(InvalidRequest):
            await target.write_kv(RunId("i"), bad)
    for value, dtype in ((np.nan, KvDtype.F16), (np.inf, KvDtype.F32), (1e6, KvDtype.F32)):
        with pytest.raises(KvIncompatible):
            await target.write_kv(RunId("i"), slab(0, good, dtype, value))
    assert await target.kv_tokens(RunId("i")) == 0
    await target.write_kv(RunId("i"), slab(0, good))
    await target.release(RunId("i"))
    await target.check_integrity()


async def test_more_imports_than_fit_are_refused_and_runs_go_on(target: EdgeEngine) -> None:
    ids = prompt(60)
    await target.open_import(ImportSpec(run_id=RunId("a"), token_ids=ids, max_tokens=900, salt=SALT))
    with pytest.raises(Overloaded):
        await target.open_import(ImportSpec(run_id=RunId("b"), token_ids=ids, max_tokens=900, salt=SALT))
    assert len((await run(target, run_spec("r", ids, greedy(4)))).ids) == 4
    await target.release(RunId("a"))
    assert (await target.load()).kv_used_tokens == 0
