"""KV that travels in kvtc between two hosts: negotiated by the basis's digest, refused and counted where an end lacks
it or has another, recomputed and never guessed at."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import numpy as np
import pytest

from mesh.errors import KvIncompatible, PayloadCorrupt
from mesh.kv.codecs import codec_named
from mesh.kv.geometry import KvGeometry
from mesh.kv.kvtc import shelf
from mesh.kv.kvtc.artifact import Artifact, Setting, make_artifact, n_features
from mesh.kv.kvtc.codec import KvtcCodec
from mesh.kv.kvtc.quantise import laplace_counts
from mesh.kv.kvtc.rans import normalise
from mesh.kv.transfer_frames import Chunk, Piece
from mesh.node.engine import RunId
from mesh.node.port import KvDirection, KvSource
from tests.fakes.fake_engine import GEOMETRY as TOY
from tests.fakes.fake_engine import tokens_of
from tests.fakes.fake_node import collect, prompt, run_order
from tests.mesh.node.test_host_transfer import Pair, make_pair, undisturbed

GEOMETRY = replace(TOY, architecture="llama")  # one whose rotation is known
RANK = 16


def made_for(geometry: KvGeometry, seed: int = 0) -> Artifact:
    """A basis that knows nothing of the toy engine's KV, under a bound that demands exactness: every token travels in
    q8_0 within kvtc chunks."""
    n = n_features(geometry)
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((n, RANK)))[0].astype(np.float32)
    blocks = geometry.n_layers * geometry.n_kv_heads
    steps = np.ones((2, RANK), dtype=np.float32)
    artifact, _ = make_artifact(
        geometry=geometry,
        weights_lineage="toy",
        mean=np.zeros((2, n), dtype=np.float32),
        weights=np.broadcast_to(np.eye(geometry.head_dim, dtype=np.float32), (2, blocks, *2 * (geometry.head_dim,))),
        basis=(basis, basis),
        predict=np.zeros((RANK, 0), dtype=np.float32),
        residual=np.ones((2, blocks), dtype=np.float32),
        frequencies=normalise(laplace_counts()),
        settings=(
            Setting(name="s", steps=steps, restore=steps, contexts=np.full((2, RANK), 30, dtype=np.uint8), bound=1e-9),
        ),
        notes="",
    )
    return artifact


@pytest.fixture
def artifact() -> Iterator[Artifact]:
    made = made_for(GEOMETRY)
    shelf.put(made)
    yield made
    shelf.remove(made)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with make_pair(geometry=GEOMETRY) as made:
        yield made


def name_of(artifact: Artifact) -> str:
    return f"kvtc:{artifact.digest[:16]}:s"


@pytest.mark.parametrize("direction", list(KvDirection))
async def test_a_prefill_streams_in_kvtc(pair: Pair, artifact: Artifact, direction: KvDirection) -> None:
    ids = prompt(601)
    source = KvSource(run_id=RunId("p"), prefill=run_order("p", ids[:-1], prefill_only=True))
    report = await pair.move(direction, ids[:-1], source, codec=name_of(artifact))
    assert (report.codec, report.tokens) == (name_of(artifact), 600)
    there, engine = (pair.edge, pair.edge_engine) if direction is KvDirection.PULL else (pair.core, pair.core_engine)
    assert tokens_of(await engine.export_kv(RunId("target"), 0, 600)) == ids[:-1]
    outcome = await collect(there, run_order("r", ids, kv_from=RunId("target")))
    assert outcome.ids == await undisturbed(ids, 8)


async def refused(pair: Pair, codec: str, error: type[Exception] = KvIncompatible) -> None:
    """The order fails on both sides, is counted, leaves nothing, and f16 goes on working."""
    ids = prompt(301)
    source = KvSource(run_id=RunId("p"), prefill=run_order("p", ids[:-1], prefill_only=True))
    with pytest.raises(error):
        await pair.move(KvDirection.PULL, ids[:-1], source, codec=codec)
    failures = dict(pair.edge.statistics().transfer_failures)
    assert sum(failures.values()) == 1
    assert pair.edge_engine.hold_ids == []
    again = KvSource(run_id=RunId("p2"), prefill=run_order("p2", ids[:-1], prefill_only=True))
    assert (await pair.move(KvDirection.PULL, ids[:-1], again, codec="f16")).tokens == 300


async def test_a_basis_that_an_end_lacks_is_refused_and_counted(pair: Pair) -> None:
    await refused(pair, name_of(made_for(GEOMETRY, seed=5)))


async def test_a_setting_that_the_basis_lacks_is_refused_and_counted(pair: Pair, artifact: Artifact) -> None:
    await refused(pair, f"kvtc:{artifact.digest[:16]}:finer")


async def test_a_basis_of_another_geometry_is_refused_and_counted(pair: Pair) -> None:
    other = made_for(replace(GEOMETRY, rope_base=5e5))
    shelf.put(other)
    try:
        await refused(pair, name_of(other))
    finally:
        shelf.remove(other)


async def test_bytes_of_another_basis_under_this_ones_name_are_refused(pair: Pair, artifact: Artifact) -> None:
    """A sender that lies: its chunks are those of another calibration with another number of coefficients."""
    liar = made_for(GEOMETRY, seed=9)
    steps = liar.settings[0].steps.copy()
    steps[:, RANK // 2 :] = 0.0
    setting = replace(liar.settings[0], steps=steps, restore=steps, bound=1e9)
    false = KvtcCodec(liar, setting, codec_named("q8_0"))
    engine = pair.core_engine
    ids = prompt(64)
    await collect(pair.core, run_order("h", ids, prefill_only=True))
    slab = await engine.export_kv(RunId("h"), 16, 48)
    with pytest.raises(PayloadCorrupt):
        codec_named(name_of(artifact)).decode(
            false.encode(slab), start=16, n_tokens=32, geometry=GEOMETRY, dtype=slab.dtype
        )


async def test_chunks_are_smaller_than_their_limit_and_of_any_size(pair: Pair, artifact: Artifact) -> None:
    ids = prompt(601)
    source = KvSource(run_id=RunId("p"), prefill=run_order("p", ids[:-1], prefill_only=True))
    await pair.move(KvDirection.PULL, ids[:-1], source, codec=name_of(artifact))
    sent = pair.network.streams[0][1].sent
    sizes = [f.size_bytes for f in sent if isinstance(f, Chunk)]
    assert sum(sizes) == sum(len(f.data) for f in sent if isinstance(f, Piece))
