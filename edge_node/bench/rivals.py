"""The two servers that `kvmesh bench edge` compares: an edge agent in a mesh, and llama.cpp's own server.

Both get the same model file, threads, slots, KV cells (f16, flash attention) and tokens in a batch. The agent runs as
in the field: API keys, policy and detectors on each request, an uplink with mutual TLS, a signed receipt synced to
disk. llama.cpp's server has none of that.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from mesh.bench.http_load import Server
from mesh.errors import Internal, InvalidRequest
from mesh.local.commands import make_plan
from mesh.local.local_mesh import LocalMesh
from mesh.settings import EdgeEngine

SITE = "paris"
_POLL_S = 0.2
_READY_S = 120.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before the fork


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What both get."""

    model: str
    model_path: Path
    threads: int
    slots: int
    slot_tokens: int
    batch_tokens: int

    @property
    def cells(self) -> int:
        """KV cells in all."""
        return self.slots * self.slot_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """One server that is up. `pids`: its processes, of which the first computes."""

    name: str
    server: Server
    pids: tuple[int, ...]
    said: str


@asynccontextmanager
async def running_agent(sizes: Sizes, folder: Path) -> AsyncIterator[Rival]:
    """A mesh of a placement service and one edge agent."""
    plan = make_plan(core=0, edge=SITE, state=folder, model=sizes.model, device="cpu", edge_threads=sizes.threads)
    engine = EdgeEngine(
        n_threads=sizes.threads,
        n_ctx_tokens=sizes.cells,
        max_step_tokens=sizes.batch_tokens,
        max_running=sizes.slots,
        max_sequences=max(32, 2 * sizes.slots),
    )
    async with LocalMesh.running(replace(plan, edge_engine=engine), lambda line: None) as (_, ready):
        server = Server(
            urlsplit(ready.edges[SITE].http).port or 0,
            body={"model": plan.model_id},
            headers={"Authorization": f"Bearer {ready.api_key}"},
        )
        agent = ready.pids[f"edge-{SITE}"]
        said = (
            f"agent: {sizes.threads} threads, {sizes.slots} slots, {sizes.cells} cells f16 unified, "
            f"{sizes.batch_tokens} tokens in a step; API keys, policy, detectors, signed and synced receipts, "
            "mutual TLS to the mesh"
        )
        yield Rival(name="agent", server=server, pids=(agent, ready.pids["placement-1"]), said=said)


@asynccontextmanager
async def running_llama_server(sizes: Sizes, program: Path, *, unified: bool, log: Path) -> AsyncIterator[Rival]:
    """llama.cpp's server. Raises InvalidRequest if it was not built, Internal if it does not start."""
    if not await asyncio.to_thread(program.is_file):
        raise InvalidRequest(
            f"no llama-server at {program}: python3 deploy/llama_cpp/build_server.py {program.parents[1]}",
            field="peers_folder",
        )
    port = _free_port()
    t, b = str(sizes.threads), str(sizes.batch_tokens)
    flags = ["-t", t, "-tb", t, "-np", str(sizes.slots), "-c", str(sizes.cells), "-b", b, "-ub", b, "-fa", "on"]
    flags += ["-ctk", "f16", "-ctv", "f16", "-kvu" if unified else "-no-kvu"]
    server = Server(port, body={})
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            str(program), "-m", str(sizes.model_path), "--host", "127.0.0.1", "--port", str(port), *flags,
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=_die_with_parent,
        )  # fmt: skip
        try:
            await _until_ready(server, process, log)
            name = "llama-server" if unified else "llama-server, split KV"
            yield Rival(name=name, server=server, pids=(process.pid,), said=f"{name}: {' '.join(flags)}")
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
            await process.wait()


async def _until_ready(server: Server, process: asyncio.subprocess.Process, log: Path) -> None:
    try:
        async with asyncio.timeout(_READY_S):
            while await server.get("/health") != 200:
                if process.returncode is not None:
                    tail = (await asyncio.to_thread(log.read_text, errors="replace"))[-500:]
                    raise Internal(f"llama-server ended with code {process.returncode}: {tail}")
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise Internal(f"llama-server was not ready within {_READY_S:g} s") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
