"""The Grafana dashboard as code: writes kvmesh-dashboard.json beside this file.

    python3 deploy/grafana/make_dashboard.py

Standard library only. A test compares the file with what this writes, and every metric name in it with what the
processes export.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("kvmesh-dashboard.json")
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 8, 8  # of 24 columns

Query = tuple[str, str]  # PromQL, legend

ROWS: tuple[tuple[str, tuple[tuple[str, str, str, tuple[Query, ...]], ...]], ...] = (
    (
        "What clients see",
        (
            ("Requests by plan", "timeseries", "reqps", (("sum by (shape) (rate(kvmesh_requests_total[$__rate_interval]))", "{{shape}}"),)),
            ("Outcomes that are not OK", "timeseries", "reqps", (('sum by (outcome) (rate(kvmesh_requests_total{outcome!="OK"}[$__rate_interval]))', "{{outcome}}"),)),
            ("First token", "timeseries", "s", tuple((f"histogram_quantile({q}, sum by (le) (rate(kvmesh_request_ttft_seconds_bucket[$__rate_interval])))", name) for q, name in ((0.5, "p50"), (0.99, "p99")))),
            ("Tokens", "timeseries", "ops", (("sum by (kind) (rate(kvmesh_request_tokens_total[$__rate_interval]))", "{{kind}}"),)),
            ("Between two tokens, p99", "timeseries", "s", (("histogram_quantile(0.99, sum by (le, instance) (rate(kvmesh_run_inter_token_seconds_bucket[$__rate_interval])))", "{{instance}}"),)),
            ("Moves of running requests", "timeseries", "ops", (("sum by (cause, outcome) (rate(kvmesh_request_moves_total[$__rate_interval]))", "{{cause}} {{outcome}}"), ("histogram_quantile(0.95, sum by (le) (rate(kvmesh_move_pause_seconds_bucket[$__rate_interval])))", "pause p95, s"))),
        ),
    ),
    (
        "Sites and links",
        (
            ("Ready", "stat", "none", (("max by (site) (kvmesh_node_ready)", "{{site}}"),)),
            ("Round trip to placement", "timeseries", "s", (("kvmesh_node_rtt_seconds", "{{node}}"),)),
            ("Goodput to placement", "timeseries", "Bps", (("kvmesh_node_goodput_bytes_per_second", "{{node}}"),)),
            ("Queue", "timeseries", "none", (("kvmesh_node_waiting", "{{node}} waits"), ("kvmesh_node_running", "{{node}} runs"))),
            ("KV in use", "timeseries", "percentunit", (("kvmesh_node_kv_used_tokens / (kvmesh_node_kv_capacity_tokens > 0)", "{{node}}"),)),
            ("Measured decode speed of one sequence, tokens/s", "timeseries", "none", (("kvmesh_node_decode_tokens_per_second", "{{node}}"),)),
            ("Age of the figures", "timeseries", "s", (("kvmesh_node_load_age_seconds", "{{node}}"), ("kvmesh_registry_age_seconds", "registry"))),
            ("Uplink, where an agent is scraped on site", "timeseries", "none", (("kvmesh_uplink_connected", "{{instance}}"),)),
        ),
    ),
    (
        "KV in motion",
        (
            ("Bytes on the wire", "timeseries", "Bps", (("sum by (instance, direction) (rate(kvmesh_kv_wire_bytes_total[$__rate_interval]))", "{{instance}} {{direction}}"),)),
            ("Tokens moved, skipped, computed meanwhile", "timeseries", "ops", (("sum by (direction) (rate(kvmesh_kv_tokens_total[$__rate_interval]))", "{{direction}}"), ("sum(rate(kvmesh_kv_skipped_tokens_total[$__rate_interval]))", "the receiver had"), ("sum(rate(kvmesh_kv_own_tokens_total[$__rate_interval]))", "computed meanwhile"))),
            ("Failures", "timeseries", "ops", (("sum by (reason) (rate(kvmesh_kv_transfer_failures_total[$__rate_interval]))", "{{reason}}"),)),
        ),
    ),
    (
        "Engines that are scraped",
        (
            ("Speed, tokens/s", "timeseries", "none", (("kvmesh_engine_prefill_tokens_per_second", "{{instance}} prefill"), ("kvmesh_engine_decode_tokens_per_second", "{{instance}} decode"))),
            ("Time of steps by part", "timeseries", "percentunit", (("sum by (part) (rate(kvmesh_engine_step_seconds_total[$__rate_interval]))", "{{part}}"),)),
            ("Prefix hits", "timeseries", "percentunit", (("sum by (instance) (rate(kvmesh_engine_cached_tokens_total[$__rate_interval])) / sum by (instance) (rate(kvmesh_engine_prompt_tokens_total[$__rate_interval]))", "{{instance}}"),)),
            ("Preempted", "timeseries", "ops", (("rate(kvmesh_engine_preempted_total[$__rate_interval])", "{{instance}}"),)),
            ("Memory of processes", "timeseries", "bytes", (('process_resident_memory_bytes{job="kvmesh"}', "{{instance}}"),)),
            ("Builds", "table", "none", (("kvmesh_build_info", "{{node_id}} {{version}}"),)),
        ),
    ),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The whole of it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append({"type": "row", "title": title, "id": len(panels) + 1, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})  # fmt: skip
        y += 1
        for i, (name, kind, unit, queries) in enumerate(row):
            place = {"x": i * WIDTH % 24, "y": y + i * WIDTH // 24 * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(panel(len(panels) + 1, name, kind, unit, queries, place))
        y += -(-len(row) * WIDTH // 24) * HEIGHT
    return {
        "uid": "kvmesh",
        "title": "kvmesh",
        "tags": ["kvmesh"],
        "schemaVersion": 39,
        "editable": False,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {
            "list": [{"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}]
        },
        "panels": panels,
    }


def panel(number: int, title: str, kind: str, unit: str, queries: tuple[Query, ...], place: dict[str, int]) -> dict[str, Any]:  # fmt: skip
    """One panel; a table shows the moment's values only."""
    return {
        "id": number,
        "type": kind,
        "title": title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "options": {},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": expr,
                "legendFormat": legend,
                **({"instant": True, "format": "table"} if kind == "table" else {}),
            }
            for i, (expr, legend) in enumerate(queries)
        ],
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
