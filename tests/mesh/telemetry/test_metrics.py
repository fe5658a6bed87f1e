"""Metrics: what is counted, and that label values cannot grow without bound."""

from __future__ import annotations

from mesh.errors import NoNodeNow
from mesh.node.engine import EngineLoad
from mesh.node.host_counters import Counters
from mesh.telemetry.metrics import Metrics, MoveCause, Shape


def shown(metrics: Metrics) -> dict[str, float]:
    rows = [line.rsplit(" ", 1) for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in rows}


def test_requests_are_counted_by_outcome_and_shape() -> None:
    metrics = Metrics(node_id="p", role="placement")
    metrics.request_ended(outcome="OK", shape=Shape.SPLIT, prompt_tokens=7, generated_tokens=3, ttft_s=0.2)
    metrics.request_ended(outcome=NoNodeNow.reason, shape=Shape.NONE)
    metrics.request_moved(cause=MoveCause.OPERATOR, outcome="OK", pause_s=0.01)
    values = shown(metrics)
    assert values['kvmesh_requests_total{outcome="OK",shape="split"}'] == 1
    assert values['kvmesh_requests_total{outcome="NO_NODE_NOW",shape="none"}'] == 1
    assert values['kvmesh_request_tokens_total{kind="prompt"}'] == 7
    assert values['kvmesh_request_ttft_seconds_bucket{le="0.25",shape="split"}'] == 1
    assert values['kvmesh_request_moves_total{cause="operator",outcome="OK"}'] == 1


def test_an_unknown_outcome_makes_no_new_series() -> None:
    metrics = Metrics(node_id="p", role="placement")
    for i in range(10):
        metrics.request_ended(outcome=f"WORD_{i}", shape=Shape.CORE)
    assert shown(metrics)['kvmesh_requests_total{outcome="INTERNAL",shape="core"}'] == 10


def test_a_nodes_own_counts_are_read_at_each_scrape() -> None:
    metrics, counters = Metrics(node_id="c", role="core"), Counters()
    metrics.watch_host(lambda: counters.freeze(running=0, holds=2, transfers=1))
    counters.sent_bytes += 10
    counters.run_failures["OVERLOADED"] += 1
    first = shown(metrics)
    counters.sent_bytes += 5
    second = shown(metrics)
    assert first['kvmesh_kv_wire_bytes_total{direction="sent"}'] == 10
    assert second['kvmesh_kv_wire_bytes_total{direction="sent"}'] == 15
    assert second['kvmesh_runs_total{outcome="OVERLOADED"}'] == 1
    assert second["kvmesh_holds"] == 2


def test_load_is_absent_until_there_is_one() -> None:
    metrics = Metrics(node_id="c", role="core")
    loads: list[EngineLoad] = []
    metrics.watch_load(lambda: loads[-1] if loads else None)
    assert "kvmesh_engine_running" not in shown(metrics)
    loads.append(
        EngineLoad(
            running=2,
            waiting=1,
            waiting_prefill_tokens=9,
            kv_used_tokens=5,
            kv_capacity_tokens=10,
            prefill_tokens_per_s=100.0,
            decode_tokens_per_s=10.0,
            preempted_total=4,
            steps_total=3,
            step_seconds_total=(("compute", 0.5),),
        )
    )
    values = shown(metrics)
    assert values["kvmesh_engine_running"] == 2
    assert values["kvmesh_engine_preempted_total"] == 4
    assert values["kvmesh_engine_kv_used_ratio"] == 0.5
    assert values["kvmesh_engine_steps_total"] == 3
    assert values['kvmesh_engine_step_seconds_total{part="compute"}'] == 0.5


def test_times_of_tokens_are_histograms() -> None:
    metrics, counters = Metrics(node_id="c", role="core"), Counters()
    metrics.watch_host(lambda: counters.freeze(running=0, holds=0, transfers=0))
    for seconds in (0.01, 0.02, 100.0):
        counters.ttft.observe(seconds)
    values = shown(metrics)
    buckets = {n: v for n, v in values.items() if n.startswith("kvmesh_run_ttft_seconds_bucket")}
    assert buckets['kvmesh_run_ttft_seconds_bucket{le="0.005"}'] == 0
    assert buckets['kvmesh_run_ttft_seconds_bucket{le="0.01"}'] == 1
    assert buckets['kvmesh_run_ttft_seconds_bucket{le="60.0"}'] == 2
    assert buckets['kvmesh_run_ttft_seconds_bucket{le="+Inf"}'] == 3
    assert values["kvmesh_run_ttft_seconds_count"] == 3
    assert abs(values["kvmesh_run_ttft_seconds_sum"] - 100.03) < 1e-9
    assert values["kvmesh_run_inter_token_seconds_count"] == 0


def test_two_processes_metrics_do_not_meet() -> None:
    first, second = Metrics(node_id="a", role="core"), Metrics(node_id="b", role="edge")
    first.request_ended(outcome="OK", shape=Shape.CORE)
    assert 'kvmesh_requests_total{outcome="OK",shape="core"}' not in shown(second)
