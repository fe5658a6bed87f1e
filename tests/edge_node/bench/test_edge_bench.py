"""What the edge benchmark makes of its measurements, and what it refuses; the servers themselves need a build."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge_node.bench import edge
from edge_node.bench.edge import BENCH, Measured, report
from edge_node.bench.rivals import Sizes, running_llama_server
from mesh.bench.http_load import Burst
from mesh.bench.types import BenchContext
from mesh.errors import InvalidRequest


def measured(tokens_per_s: float, ttft_s: float) -> Measured:
    return Measured(output_tokens_per_s=tokens_per_s, ttft_s=ttft_s, ttft_worst_s=ttft_s, cpu_ms_per_token=1.0)


def test_ratios_are_taken_within_a_round_against_the_best_peer() -> None:
    found = {
        ("4 at once", "agent"): [measured(100, 1.0), measured(50, 2.0), measured(90, 1.0)],
        ("4 at once", "split"): [measured(50, 2.0), measured(40, 2.0), measured(100, 1.0)],
        ("4 at once", "unified"): [measured(80, 4.0), measured(20, 4.0), measured(10, 0.5)],
    }
    result = report(found, ["split", "unified"], ())
    assert result.rows[0]["ratio"] == pytest.approx(1.25)  # of 1.25, 1.25, 0.9
    assert result.rows[0]["ratios"] == "1.25 1.25 0.90"
    goals = {goal.name: (goal.value, goal.ok) for goal in result.goals}
    assert goals == {"4 at once: output_ratio": (1.25, True), "4 at once: ttft_ratio": (1.0, True)}


def test_one_at_once_may_be_a_little_slower() -> None:
    found = {("1 at once", "agent"): [measured(98, 1.0)], ("1 at once", "p"): [measured(100, 1.0)]}
    assert [goal.ok for goal in report(found, ["p"], ()).goals] == [True, True]


def test_what_a_client_saw() -> None:
    burst = Burst(wall_s=2.0, first_s=(0.5, 1.5, 0.7), last_s=(2.0, 2.0, 2.0), n_tokens=(10, 20, 30))
    seen = Measured.of(burst, cpu_s=3.0)
    assert (seen.output_tokens_per_s, seen.ttft_s, seen.ttft_worst_s, seen.cpu_ms_per_token) == (30, 0.7, 1.5, 50)


def test_all_servers_get_the_same_new_prompts() -> None:
    first, again, other = (list(edge._cases(random.Random(s), [1, 4], 49152, shared=True)) for s in ("a", "a", "b"))
    assert first == again
    prompts = [p for case in (*first, *other) for p in case.prompts]
    assert len(set(prompts)) == len(prompts)
    shared = first[-1].prompts
    assert len({p[: edge.SHARED_TOKENS] for p in shared}) == 1
    assert {len(p) for p in shared} == {edge.SHARED_TOKENS + edge.OWN_TOKENS}


@pytest.mark.parametrize(("key", "value"), [("peers", "vllm"), ("peers", ""), ("plot", "x.png")])
async def test_settings_that_cannot_be_met_are_refused_before_anything_starts(
    key: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.bench.plot.importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)))
    context = BenchContext(settings={**BENCH.defaults, key: value}, progress=lambda *_: None)
    with pytest.raises(InvalidRequest):
        await BENCH.run(context)


async def test_a_server_that_was_not_built_is_named(tmp_path: Path) -> None:
    sizes = Sizes(model="m", model_path=tmp_path, threads=1, slots=1, slot_tokens=1, batch_tokens=1)
    with pytest.raises(InvalidRequest, match=r"build_server\.py"):
        async with running_llama_server(sizes, tmp_path / "no" / "bin" / "x", unified=True, log=tmp_path / "log"):
            pass
