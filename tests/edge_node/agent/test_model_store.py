"""Whatever happens while a new model is made ready, the old one is whole and in force; a bad one is gone back from."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge_node.agent import model_store
from edge_node.agent.model_store import ModelStore, check_header, from_file
from edge_node.engine.selftest import SelfTestOutcome, SelfTestResult
from mesh.errors import InvalidRequest, NodeUnreachable, NotFound, Overloaded, PayloadCorrupt
from tests.mesh.model.gguf_writer import tiny_gguf

ROOT = Path(__file__).parents[3]


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """Two that differ by what follows the tensors."""
    (tmp_path / "stick").mkdir()
    made = tiny_gguf(tmp_path / "stick")
    found = []
    for name in ("one", "two"):
        path = tmp_path / "stick" / f"{name}.gguf"
        path.write_bytes(made.read_bytes() + name.encode())
        found.append(path)
    return found


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


async def install(store: ModelStore, path: Path, digest: str = "") -> None:
    await store.install(digest or digest_of(path), path.stem, from_file(path), n_threads=1, self_test=False)


def in_force(store: ModelStore) -> str:
    now = store.current()
    assert now is not None
    assert digest_of(now.path) == now.record.digest
    return now.record.model_id


async def test_one_beside_the_other(store: ModelStore, models: list[Path]) -> None:
    assert (store.current(), store.start()) == (None, None)
    await install(store, models[0])
    assert in_force(store) == "one"
    await install(store, models[0])  # nothing to do
    await install(store, models[1])
    assert in_force(store) == "two"
    assert {s: i and i.record.model_id for s, i in store.slots().items()} == {"a": "one", "b": "two"}
    assert store.back("an operator said so").record.model_id == "one"
    assert in_force(store) == "one"
    with pytest.raises(NotFound, match="no other model"):
        store.back("and again")


async def test_what_cannot_be_had_or_is_not_it_changes_nothing(store: ModelStore, models: list[Path]) -> None:
    await install(store, models[0])

    async def broken(path: Path) -> None:
        raise NodeUnreachable("the link is down")

    with pytest.raises(NodeUnreachable):
        await store.install("b" * 64, "two", broken, n_threads=1, self_test=False)
    with pytest.raises(PayloadCorrupt, match="was changed"):
        await install(store, models[1], digest="b" * 64)
    assert in_force(store) == "one"
    assert store.slots()["b"] is None


@pytest.mark.parametrize(
    "data", [b"", b"GGUF", b"GGUF" + b"\xff" * 64, random.Random(4).randbytes(4096), b"PK\x03\x04" * 100]
)
async def test_a_hostile_file_is_refused_before_llama_cpp_sees_it(
    store: ModelStore, models: list[Path], tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await install(store, models[0])
    monkeypatch.setattr(model_store, "run_self_test", lambda *_: pytest.fail("llama.cpp was asked"))
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    with pytest.raises(InvalidRequest):
        await store.install(digest_of(bad), "bad", from_file(bad), n_threads=1)
    assert in_force(store) == "one"


async def test_one_that_fails_the_self_test_is_not_put_in_force(
    store: ModelStore, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    await install(store, models[0])
    crashed = SelfTestResult(outcome=SelfTestOutcome.CRASHED, says="llama.cpp died of SIGILL", remedy="another build")
    monkeypatch.setattr(model_store, "run_self_test", lambda *_: crashed)
    with pytest.raises(InvalidRequest, match="SIGILL"):
        await store.install(digest_of(models[1]), "two", from_file(models[1]), n_threads=1)
    assert in_force(store) == "one"


async def test_a_full_disk_changes_nothing(
    store: ModelStore, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    await install(store, models[0])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(Overloaded, match="free some"):
        await install(store, models[1])
    assert in_force(store) == "one"


async def test_an_agent_that_was_never_ready_with_a_new_model_goes_back(store: ModelStore, models: list[Path]) -> None:
    await install(store, models[0])
    assert store.start() is not None
    store.started()
    await install(store, models[1])
    first = store.start()
    assert first is not None
    assert first.record.model_id == "two"  # ... and dies before it is ready
    again = ModelStore(store.folder).start()
    assert again is not None
    assert again.record.model_id == "one"
    failed = store.slots()["b"]
    assert failed is not None
    assert "never ready" in failed.record.failed
    proven = ModelStore(store.folder).start()
    assert proven is not None
    assert proven.record.model_id == "one"


async def test_the_only_proven_model_is_not_overwritten(store: ModelStore, models: list[Path]) -> None:
    await install(store, models[0])
    store.started()
    await install(store, models[1])  # on trial
    with pytest.raises(InvalidRequest, match="which works, is overwritten"):
        await install(store, models[0].with_name("third.gguf"), digest="c" * 64)
    store.started()
    await install(store, models[0])
    assert in_force(store) == "one"


async def test_a_file_that_rots_is_found_at_the_start(store: ModelStore, models: list[Path]) -> None:
    for model in models:
        await install(store, model)
        store.start()
        store.started()
    rotten = store.folder / "b" / "model.gguf"
    rotten.write_bytes(rotten.read_bytes()[:-1] + b"x")
    now = store.start()
    assert now is not None
    assert now.record.model_id == "one"
    other = store.folder / "a" / "model.gguf"
    other.write_bytes(b"x")
    with pytest.raises(NotFound, match="was changed"):
        ModelStore(store.folder).start()


@pytest.mark.parametrize("count", [5, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_killed_at_any_point_the_old_or_the_new_model_is_in_force(
    store: ModelStore, models: list[Path], count: int
) -> None:
    for n, path in enumerate(models):  # long enough to be hit while they are copied
        path.write_bytes(random.Random(n).randbytes(6 << 20))
    rng, seen = random.Random(7), set[str]()
    script = Path(__file__).with_name("install_again.py")
    for n in range(count):
        process = subprocess.Popen(
            [sys.executable, str(script), str(store.folder), *map(str, models)],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline()  # one is in force, the next is being made ready
        time.sleep(rng.uniform(0.0, 0.2))
        process.kill()
        process.wait()
        process.stdout.close()
        seen.add(in_force(store))
        started = ModelStore(store.folder).start()
        assert started is not None, f"after kill {n} no model is in force"
        assert digest_of(started.path) == started.record.digest
    assert seen <= {"one", "two"}


def test_a_header_that_takes_for_ever_or_a_crash_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").write_bytes(b"x")
    monkeypatch.setattr(model_store.sys, "executable", shutil.which("false"))
    with pytest.raises(InvalidRequest, match="ended with 1"):
        check_header(tmp_path / "x.gguf")
