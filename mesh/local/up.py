"""`kvmesh up`: a local mesh in the foreground until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mesh.identity.files import write_private
from mesh.kv.kvtc.shelf import path_beside
from mesh.local.layout import LocalPlan
from mesh.local.local_mesh import NODE_COMMAND, LocalMesh, MeshReady

UP_FILE = "up.json"


async def up(plan: LocalPlan, *, as_json: bool, node_command: Sequence[str] = NODE_COMMAND) -> int:
    """Run the mesh until a signal; returns the exit code: 0 after a drain, 1 if every process ended by itself.

    When ready, the object goes to stdout (`as_json`) or a table does, and the object to up.json beside the plan's
    folder, mode 0600. Raises MeshError if the mesh does not come up; what was started is ended then."""
    messages = Console(stderr=True, highlight=False)
    up_file = plan.folder.parent / UP_FILE

    def tell(line: str) -> None:
        messages.print(line, markup=False)

    async with (
        stop_signal() as stopped,
        _unless_stopped(stopped),
        LocalMesh.running(plan, tell, node_command) as (mesh, ready),
    ):
        record = json.dumps(ready.to_json())
        write_private(up_file, record.encode() + b"\n")
        try:
            if as_json:
                print(record, flush=True)
            else:
                print_ready(Console(), ready)
                if hint := kvtc_hint(plan.model_path):
                    tell(hint)
                tell("Ctrl-C stops it.")
            await mesh.watch()
        finally:
            up_file.unlink(missing_ok=True)
            tell("draining")
    return 0 if stopped.is_set() else 1


def kvtc_hint(model: Path) -> str:
    """What to do for KV thirty times smaller on thin links; empty where it is done."""
    if path_beside(model).is_file():
        return ""
    return f"KV travels in f16 or q8_0; for kvtc (minutes, once): kvmesh kvtc calibrate {model}, then start again"


def print_ready(console: Console, ready: MeshReady) -> None:
    """Addresses and keys for a person."""
    table = Table(title="kvmesh is up", title_justify="left")
    for column in ("entry", "gRPC", "OpenAI-compatible HTTP"):
        table.add_column(column)
    for name, entry in {"core": ready.core, **ready.edges}.items():
        table.add_row(name, entry.grpc, f"{entry.http}/v1")
    console.print(table)
    # Not wrapped, so that they can be copied.
    console.print(f"API key of tenant dev: {ready.api_key}", soft_wrap=True, highlight=False)
    console.print(f"admin key:             {ready.admin_key}", soft_wrap=True, highlight=False)
    console.print(f"authority:             {ready.ca_file}", soft_wrap=True, highlight=False)


@asynccontextmanager
async def stop_signal() -> AsyncIterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set, instead of ending the process."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        yield stopped
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def _unless_stopped(stopped: asyncio.Event) -> AsyncIterator[None]:
    """Cancel the body when `stopped` is set; its clean-up runs, and the caller goes on after it."""
    body = asyncio.current_task()
    assert body is not None

    async def watch() -> None:
        await stopped.wait()
        body.cancel()

    watcher = asyncio.create_task(watch(), name="stop-signal")
    try:
        yield
    except asyncio.CancelledError:
        if not stopped.is_set() or body.uncancel() > 0:
            raise
    finally:
        watcher.cancel()
