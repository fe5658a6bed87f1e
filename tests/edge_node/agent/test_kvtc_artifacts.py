"""Artifacts of the mesh's core nodes come to an edge by digest, over real gRPC; those of another model do not stay."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from edge_node.agent.kvtc_artifacts import ArtifactKeeper, wanted
from mesh.errors import NodeUnreachable, NotFound
from mesh.kv.codec_profile import CodecProfile
from mesh.kv.codecs import codec_named
from mesh.kv.kvtc import shelf
from mesh.kv.kvtc.artifact import make_artifact
from mesh.rpc.blobs.fetch import FetchLimits
from mesh.rpc.blobs.servicer import BlobsServicer
from mesh.rpc.blobs.shelf import BlobShelf
from mesh.rpc.errors import ErrorInterceptor
from mesh.v1 import blobs_pb2_grpc
from placement.entry.mesh_view import ModelFacts, NodeFacts, NodeState
from tests.fakes.mesh import place_of
from tests.mesh.kv.kvtc.synthetic import GEOMETRY, artifact_parts
from tests.placement.entry.test_mesh_view import MODEL

OURS = replace(MODEL, layout_hash=GEOMETRY.layout_hash, weights_lineage="synthetic", codecs=())
QUICK = FetchLimits(max_bytes=4 << 20, silence_s=0.5, attempts=2, pause_s=0.01)


def made(**how: Any) -> tuple[str, bytes]:
    """An artifact's digest and file."""
    lineage = how.pop("lineage", "synthetic")
    parts: dict[str, Any] = {**artifact_parts(**how), "weights_lineage": lineage}
    artifact, data = make_artifact(**parts)
    return artifact.digest, data


def declaring(*digests: str, node: str = "core-1", address: str = "x:1", model: ModelFacts = OURS) -> NodeFacts:
    codecs = tuple(
        CodecProfile(
            codec=f"kvtc:{digest[:16]}:fine", ratio=20.0, loss_ratio=0.005, encode_tokens_per_s=1.0,
            decode_tokens_per_s=1.0,
        )
        for digest in digests
    )  # fmt: skip
    models = (replace(model, codecs=codecs),)
    return NodeFacts(place=place_of(node), address=address, state=NodeState.READY, models=models)


class Core:
    """A node that gives files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = ""
        self.shelf = BlobShelf()

    def give(self, data: bytes, name: str = "m.kvtc") -> None:
        path = self.folder / name
        path.write_bytes(data)
        self.shelf.offer(path, name=name, kind="kvtc")


@pytest.fixture
async def core(tmp_path: Path) -> AsyncIterator[Core]:
    (tmp_path / "core").mkdir()
    node = Core(tmp_path / "core")
    server = grpc.aio.server(interceptors=(ErrorInterceptor(),))
    anybody: Any = lambda context: SimpleNamespace(node_id="paris")  # noqa: E731
    blobs_pb2_grpc.add_BlobsServicer_to_server(BlobsServicer(node.shelf, anybody), server)
    node.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield node
    await server.stop(0)


class Box:
    """An edge's keeper, and what it declares."""

    def __init__(self, folder: Path, limits: FetchLimits = QUICK) -> None:
        self.folder = folder
        self.codecs: list[CodecProfile] = []
        self.keeper = ArtifactKeeper(
            folder, GEOMETRY, "synthetic", dial=lambda peer: grpc.aio.insecure_channel(peer.address),
            on_codecs=self.codecs.extend, limits=limits,
        )  # fmt: skip
        self.codecs += self.keeper.load()

    async def look(self, *nodes: NodeFacts) -> None:
        await self.keeper.look(nodes, replace(OURS, codecs=tuple(self.codecs)))

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path / "edge")


@pytest.fixture(autouse=True)
def _empty_shelf() -> Any:
    yield
    while (artifact := shelf.for_model(GEOMETRY, "synthetic")) is not None:
        shelf.remove(artifact)


async def test_is_fetched_declared_and_usable_and_not_fetched_again(core: Core, box: Box) -> None:
    digest, data = made()
    core.give(data)
    await box.look(declaring(digest, address=core.address))
    assert [c.codec for c in box.codecs] == [f"kvtc:{digest[:16]}:fine"]
    assert codec_named(f"kvtc:{digest[:16]}:fine").name == box.codecs[0].codec
    assert box.files == [f"{digest}.kvtc"]
    await box.look(declaring(digest, address="127.0.0.1:1"))  # nobody there: not asked


async def test_the_next_start_has_it_without_a_mesh(core: Core, box: Box) -> None:
    digest, data = made()
    core.give(data)
    await box.look(declaring(digest, address=core.address))
    again = Box(box.folder)
    assert [c.codec for c in again.codecs] == [f"kvtc:{digest[:16]}:fine"]


async def test_one_of_another_model_is_thrown_away_for_good(core: Core, box: Box) -> None:
    digest, data = made(lineage="other")
    core.give(data)
    await box.look(declaring(digest, address=core.address))
    await box.look(declaring(digest, address="127.0.0.1:1"))  # refused: not asked again
    assert box.codecs == []
    assert box.files == []


async def test_damaged_bytes_under_their_own_digest_are_thrown_away(core: Core, box: Box) -> None:
    data = made()[1][:-3]
    core.give(data)
    await box.look(declaring(hashlib.sha256(data).hexdigest(), address=core.address))
    assert (box.codecs, box.files) == ([], [])


async def test_a_node_that_declares_and_does_not_give_is_an_error_for_now(core: Core, box: Box) -> None:
    digest, data = made()
    with pytest.raises(NotFound, match="core-1 declares"):
        await box.look(declaring(digest, address=core.address))
    core.give(data)
    await box.look(declaring(digest, address=core.address))
    assert len(box.codecs) == 1


async def test_a_node_that_is_gone_is_an_error_for_now(box: Box) -> None:
    with pytest.raises(NodeUnreachable):
        await box.look(declaring(made()[0], address="127.0.0.1:1"))


async def test_no_more_than_the_limit_is_taken(core: Core, tmp_path: Path) -> None:
    digest, data = made()
    core.give(data)
    small = Box(tmp_path / "small", FetchLimits(max_bytes=1000, attempts=1, pause_s=0.01))
    await small.look(declaring(digest, address=core.address))
    assert (small.codecs, small.files) == ([], [])


async def test_keeps_two_and_no_more(core: Core, box: Box) -> None:
    all_made = [made(step=0.04 + 0.01 * i) for i in range(3)]
    for i, (_, data) in enumerate(all_made):
        core.give(data, f"{i}.kvtc")
    await box.look(declaring(*(digest for digest, _ in all_made), address=core.address))
    assert len(box.codecs) == len(box.files) == 2


def test_damaged_files_of_an_earlier_start_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "edge"
    folder.mkdir()
    digest, data = made()
    (folder / f"{digest}.kvtc").write_bytes(data[:100])
    (folder / f"{'0' * 64}.kvtc").write_bytes(data)  # sound, under another's name
    box = Box(folder)
    assert (box.codecs, box.files) == ([], [])


def test_what_most_core_nodes_declare_comes_first() -> None:
    a, b = "a" * 64, "b" * 64
    nodes = (declaring(a, b), declaring(b, node="core-2"), declaring(a, node="paris"))
    assert [w.digest_head for w in wanted(nodes, OURS, known=())] == ["b" * 16, "a" * 16]
    assert [w.digest_head for w in wanted(nodes, OURS, known={"b" * 16})] == ["a" * 16]


def test_other_models_and_nodes_without_an_address_are_passed_over() -> None:
    other = replace(OURS, weights_lineage="other")
    nodes = (declaring("a" * 64, model=other), declaring("b" * 64, address=""))
    assert wanted(nodes, OURS, known=()) == ()
