"""Our own OpenAI-compatible HTTP: an entry and one core node, two processes, as `kvmesh up` starts them. Arguments:
model (a file), threads of the core node, dtype."""

import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from urllib.parse import urlsplit

import protocol

protocol.claim_stdout()

from mesh import __version__  # noqa: E402
from mesh.bench import http_load  # noqa: E402
from mesh.local.commands import make_plan  # noqa: E402
from mesh.local.local_mesh import LocalMesh  # noqa: E402


async def main(model, threads, dtype):
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        plan = make_plan(core=1, edge="", state=Path(folder), model=model, device="cpu", core_threads=threads)
        plan = replace(plan, core_dtype=dtype)
        async with LocalMesh.running(plan, lambda line: print(line, file=sys.stderr)) as (_, ready):
            server = http_load.Server(
                urlsplit(ready.core.http).port,
                body={"model": plan.model_id},
                headers={"Authorization": f"Bearer {ready.api_key}"},
            )
            protocol.say({"ready": f"kvmesh {__version__}: entry and one core node, {dtype}, {threads} threads"})
            while line := await asyncio.to_thread(sys.stdin.readline):
                request = json.loads(line)
                burst = await server.work(request["prompts"], request["max_tokens"], request["at_s"])
                protocol.say({**asdict(burst), "ids": None})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
