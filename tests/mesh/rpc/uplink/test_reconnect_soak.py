"""Reconnecting for long must cost nothing that stays: grpc.aio has leaked calls and tasks there before."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from mesh.bench.link import LinkProxy
from mesh.errors import MeshError
from tests.mesh.rpc.uplink.harness import collect, eventually, mesh, run_order

_RECONNECTS = 400


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.soak
async def test_many_reconnects_leave_no_tasks_and_little_memory() -> None:
    async with mesh() as m, LinkProxy("127.0.0.1", m.port) as link:
        site = m.site("edge-1", port=link.port)
        await site.agent.start()
        site.host.gate.clear()
        tasks, resident = 0, 0
        for i in range(_RECONNECTS):
            await site.agent.wait_connected()
            await eventually(lambda: len(m.hub.attached()) == 1)
            run = asyncio.create_task(collect(m.hub.port("edge-1").run(run_order(f"run-{i}"))))
            await site.host.until(lambda i=i: site.host.started[-1:] == [f"run-{i}"])  # type: ignore[misc]
            await link.cut()
            with pytest.raises(MeshError):
                await run
            await site.agent.wait_disconnected()
            link.mend()
            if i == _RECONNECTS // 4:  # warmed up
                gc.collect()
                tasks, resident = len(asyncio.all_tasks()), resident_bytes()
        gc.collect()
        assert len(asyncio.all_tasks()) <= tasks + 5
        assert site.host.running == 0
        grown_bytes = resident_bytes() - resident
        kib_each = grown_bytes / (0.75 * _RECONNECTS) / 1024
        assert kib_each < 32, f"{kib_each:.1f} KiB stay from each reconnect"
