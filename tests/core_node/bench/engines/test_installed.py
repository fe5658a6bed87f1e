"""Which engines a run takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core_node.bench.engines.installed import OURS, PEERS, Bench, chosen, vllm_dtype
from mesh.errors import InvalidRequest


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A folder where llama.cpp's server is installed and nothing else."""
    program = tmp_path / "peers" / "llama-server" / "bin" / "llama-server"
    program.parent.mkdir(parents=True)
    program.touch()
    (tmp_path / "model.gguf").touch()
    return Bench(model=tmp_path / "model.gguf", peers_folder=tmp_path / "peers", threads=3)


@pytest.mark.parametrize(("ours", "peers", "field"), [("kvmesh", "nobody", "peers"), ("vllm", "none", "ours")])
def test_an_unknown_name_is_refused_with_those_there_are(bench: Bench, ours: str, peers: str, field: str) -> None:
    with pytest.raises(InvalidRequest, match="there are") as caught:
        chosen(bench, ours, peers)
    assert caught.value.details["field"] == field


def test_auto_takes_what_is_installed_and_a_name_what_is_missing_too(bench: Bench) -> None:
    assert [e.name for e in chosen(bench, "kvmesh", "auto")] == ["kvmesh", "llama-server"]
    assert [e.name for e in chosen(bench, "", "none")] == []
    (vllm,) = chosen(bench, "", "vllm")
    assert vllm.missing == [bench.peers_folder / "vllm/venv/bin/python", bench.peers_folder / "hf-model/config.json"]
    found = chosen(bench, ",".join(OURS), ",".join(PEERS))
    assert [e.name for e in found] == [*OURS, *PEERS]
    assert [e.name for e in found if not e.missing] == [*OURS, "llama-server"]


def test_every_engine_gets_the_threads(bench: Bench) -> None:
    for engine in chosen(bench, ",".join(OURS), ",".join(PEERS)):
        words = [*engine.command, *engine.environment.values()]
        if engine.command[1].endswith("http_driver.py") and not engine.ours:
            setting = json.loads(engine.command[2])
            words = [*setting["command"], *setting["environment"].values()]
        assert "3" in words or "0-2" in words, engine.name


@pytest.mark.parametrize(
    ("asked", "flags", "dtype"),
    [("auto", {"avx2"}, "float32"), ("auto", {"avx2", "avx512f"}, "bfloat16"), ("bfloat16", {"avx2"}, "bfloat16")],
)
def test_vllm_gets_the_dtype_that_is_fast_for_it(asked: str, flags: set[str], dtype: str) -> None:
    assert vllm_dtype(asked, frozenset(flags)) == dtype
