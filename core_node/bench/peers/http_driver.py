"""A peer's own OpenAI-compatible server, driven over HTTP. Arguments: one JSON object

    {"command": [word, ...], "environment": {name: value}, "ready_path": path, "body": object, "said": text}

`{port}` in the command becomes a free port. `body` goes into each request, `said` into what the driver says when ready.
"""

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict

import protocol

protocol.claim_stdout()

from mesh.bench import http_load  # noqa: E402

_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before the fork


def _die_with_parent():
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


async def main(setting):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [word.replace("{port}", str(port)) for word in setting["command"]]
    server = http_load.Server(port, body=setting["body"])
    # In our process group, which whoever started us stops, continues and ends as a whole.
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.DEVNULL,
        stdout=2,
        stderr=2,
        env={**os.environ, **setting["environment"]},
        preexec_fn=_die_with_parent,
    )
    try:
        while await server.get(setting["ready_path"]) != 200:
            if process.returncode is not None:
                raise RuntimeError(f"the server ended with code {process.returncode} before it was ready")
            await asyncio.sleep(_POLL_S)
        protocol.say({"ready": setting["said"]})
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            burst = await server.work(request["prompts"], request["max_tokens"], request["at_s"])
            protocol.say({**asdict(burst), "ids": None})
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
