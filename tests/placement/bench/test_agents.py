"""`kvmesh bench agents` with a few agents: real placement process, real sessions, one storm."""

from __future__ import annotations

import pytest

from mesh.bench.types import BenchContext
from placement.bench.agents import BENCH


@pytest.mark.e2e
async def test_fifty_agents_attach_stay_and_come_back() -> None:
    settings = {**BENCH.defaults, "agents": 50, "hold_s": 3.0, "lease_s": 10.0, "heartbeat_s": 2.0}
    settings["reconnect_max_s"] = 1.0
    result = await BENCH.run(BenchContext(settings=settings, progress=lambda done, total, what: None))
    (row,) = result.rows
    assert row["agents"] == 50
    assert row["lost_holding"] == 0
    assert row["lost_after_storm"] == 0
    assert all(goal.value == goal.value for goal in result.goals)
    for column in ("attach_s", "storm_s"):
        assert float(str(row[column])) >= 0  # a NaN would not be: all came (back)
