"""Which engines can run here, and how each is started. Peers live in one folder, each in an environment of its own;
../README.md says how they get there."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from mesh.errors import InvalidRequest

DRIVERS = Path(__file__).parents[1] / "peers"
AUTO, NONE = "auto", "none"
_SLOTS, _SLOT_TOKENS = 32, 640  # of llama-server: as many sequences as any case has at once, each with room for it


class Kind(Enum):
    """How an engine is driven; only engines of one kind are compared."""

    LIBRARY = "in process"
    SERVER = "over HTTP"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """One engine: how its driver is started, and which files that needs."""

    name: str
    kind: Kind
    ours: bool
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[Path, ...] = ()

    @property
    def missing(self) -> list[Path]:
        """What it needs and is not there; then it cannot be started."""
        return [path for path in self.needs if not path.exists()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What the engines get: the model file, the folder of peers, compute threads; vLLM's dtype by its own name, and
    whether it compiles (its default) or computes eagerly."""

    model: Path
    peers_folder: Path
    threads: int
    vllm_dtype: str = "bfloat16"
    vllm_eager: bool = False


OURS = ("kvmesh", "kvmesh-int8", "kvmesh-http")
PEERS = ("openvino", "vllm", "vllm-serve", "llama-server", "llama-server-bf16", "xllamacpp")


def chosen(bench: Bench, ours: str, peers: str) -> list[EngineCommand]:
    """The engines of a run, ours first. `ours`: names with commas. `peers`: the same, or `auto` (all that are
    installed) or `none`. A peer that was named and is missing is among them. Raises InvalidRequest for a name that is
    unknown."""
    wanted = [*_names(ours, OURS, "ours")]
    if peers not in (AUTO, NONE):
        wanted += _names(peers, PEERS, "peers")
    found = [_find(bench, name) for name in wanted]
    if peers == AUTO:
        found += [e for e in (_find(bench, name) for name in PEERS) if not e.missing]
    return found


def _names(text: str, known: Sequence[str], field_name: str) -> list[str]:
    names = list(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))
    for name in names:
        if name not in known:
            raise InvalidRequest(f"no engine {name!r}; there are {', '.join(known)}", field=field_name)
    return names


def _find(bench: Bench, name: str) -> EngineCommand:
    if name in OURS:
        return _ours(bench, name)
    find = {
        "openvino": _openvino,
        "vllm": _vllm,
        "vllm-serve": _vllm_serve,
        "llama-server": _llama_server,
        "llama-server-bf16": _llama_server,
        "xllamacpp": _xllamacpp,
    }[name]
    return find(bench, name)


def _ours(bench: Bench, name: str) -> EngineCommand:
    driver = "ours_http_driver.py" if name == "kvmesh-http" else "ours_driver.py"
    dtype = "int8" if name == "kvmesh-int8" else "bf16"
    return EngineCommand(
        name=name,
        kind=Kind.SERVER if name == "kvmesh-http" else Kind.LIBRARY,
        ours=True,
        command=(sys.executable, str(DRIVERS / driver), str(bench.model), str(bench.threads), dtype),
        environment={"PYTHONPATH": str(Path(__file__).parents[3])},
    )


def _openvino(bench: Bench, name: str) -> EngineCommand:
    folder = bench.peers_folder / "openvino"
    model = folder / "model"
    python = folder / "venv" / "bin" / "python"
    return EngineCommand(
        name=name,
        kind=Kind.LIBRARY,
        ours=False,
        command=(str(python), str(DRIVERS / "openvino_driver.py"), str(model), str(bench.threads), "bf16"),
        needs=(python, model / "openvino_model.xml"),
    )


def _vllm(bench: Bench, name: str) -> EngineCommand:
    model = bench.peers_folder / "hf-model"
    python = bench.peers_folder / "vllm" / "venv" / "bin" / "python"
    return EngineCommand(
        name=name,
        kind=Kind.LIBRARY,
        ours=False,
        command=(
            str(python),
            str(DRIVERS / "vllm_driver.py"),
            str(model),
            str(bench.threads),
            bench.vllm_dtype,
            "eager" if bench.vllm_eager else "compiled",
        ),
        environment={**_vllm_environment(bench.threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        needs=(python, model / "config.json"),
    )


def vllm_dtype(asked: str, flags: frozenset[str]) -> str:
    """`auto`: the faster one on a CPU with these flags. Without AVX-512 oneDNN has no product in bf16, and what torch
    falls back to takes four to six times as long as one in f32."""
    if asked != AUTO:
        return asked
    return "bfloat16" if "avx512f" in flags else "float32"


def _vllm_environment(threads: int) -> dict[str, str]:
    return {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


def _vllm_serve(bench: Bench, name: str) -> EngineCommand:
    model = bench.peers_folder / "hf-model"
    python = bench.peers_folder / "vllm" / "venv" / "bin" / "python"
    flags = ["--dtype", bench.vllm_dtype, "--max-model-len", "2048", "--max-num-seqs", "64", "--enable-prefix-caching"]
    if bench.vllm_eager:
        flags.append("--enforce-eager")
    serve = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", "{port}",
        "--model", str(model), "--served-model-name", "bench", *flags,
    ]  # fmt: skip
    return _server(
        name,
        serve,
        needs=(python, model / "config.json"),
        said=f"vLLM's server, {' '.join(flags)}, {bench.threads} threads",
        environment=_vllm_environment(bench.threads),
        body={"model": "bench"},
    )


def _llama_server(bench: Bench, name: str) -> EngineCommand:
    folder = bench.peers_folder / "llama-server"
    model = folder / "model-BF16.gguf" if name.endswith("bf16") else bench.model
    program = folder / "bin" / "llama-server"
    threads = str(bench.threads)
    flags = ["-t", threads, "-tb", threads, "-np", str(_SLOTS), "-c", str(_SLOTS * _SLOT_TOKENS), "-fa", "on"]
    serve = [str(program), "-m", str(model), "--host", "127.0.0.1", "--port", "{port}", *flags]
    return _server(
        name, serve, needs=(program, model), said=f"llama.cpp's server, {model.name}, {' '.join(flags)}", body={}
    )


def _xllamacpp(bench: Bench, name: str) -> EngineCommand:
    python = bench.peers_folder / "xllamacpp" / "venv" / "bin" / "python"
    sizes = [str(bench.threads), str(_SLOTS), str(_SLOTS * _SLOT_TOKENS)]
    serve = [str(python), str(DRIVERS / "xllamacpp_server.py"), str(bench.model), "{port}", *sizes]
    said = (
        f"llama.cpp's server as xllamacpp carries it, {bench.model.name}, {bench.threads} threads, {_SLOTS} slots "
        f"of {_SLOT_TOKENS} tokens"
    )
    return _server(name, serve, needs=(python, bench.model), said=said, body={})


def _server(
    name: str,
    serve: Sequence[str],
    *,
    needs: tuple[Path, ...],
    said: str,
    body: Mapping[str, str],
    environment: Mapping[str, str] | None = None,
) -> EngineCommand:
    """A peer's server behind the HTTP driver, which runs in our own environment."""
    setting = {
        "command": list(serve),
        "environment": dict(environment or {}),
        "ready_path": "/health",
        "body": dict(body),
        "said": said,
    }
    command = (sys.executable, str(DRIVERS / "http_driver.py"), json.dumps(setting))
    return EngineCommand(name=name, kind=Kind.SERVER, ours=False, command=command, needs=needs)
