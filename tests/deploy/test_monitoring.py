"""Rules and dashboard against what the processes really export: every metric name in them, and every label."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from mesh.node.engine import EngineLoad
from mesh.node.host_counters import Counters
from mesh.rpc.uplink.types import LinkState
from mesh.telemetry.mesh_metrics import MeshCollector, UplinkCollector
from mesh.telemetry.metrics import Metrics, MoveCause, Shape
from mesh.v1 import admin_pb2

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "kvmesh.rules.yml"
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? \S+$")
NAME = re.compile(r"\b((?:kvmesh|process)_[a-z0-9_]+)")
SELECTOR = re.compile(r"\b((?:kvmesh|process)_[a-z0-9_]+)\{([^}]*)\}")
OF_PROMETHEUS = {"instance", "job", "role"}  # it adds these to every series
OWN_METRICS = {"up"}


def exported() -> dict[str, set[str]]:
    """Every series name of the three processes together, with its labels, from their real collectors."""
    metrics, counters = Metrics(node_id="n", role="core"), Counters()
    counters.run_failures["OVERLOADED"] += 1
    counters.transfer_failures["PAYLOAD_CORRUPT"] += 1
    metrics.watch_host(lambda: counters.freeze(running=0, holds=0, transfers=0))
    load = EngineLoad(
        running=1, waiting=0, waiting_prefill_tokens=0, kv_used_tokens=1, kv_capacity_tokens=2,
        prefill_tokens_per_s=1.0, decode_tokens_per_s=1.0, step_seconds_total=(("kernels", 1.0),),
    )  # fmt: skip
    metrics.watch_load(lambda: load)
    node = admin_pb2.NodeView(
        node_id="n", site="s", tier="edge", state="ready", prefill_tokens_per_s=1.0, decode_tokens_per_s=1.0, rtt_s=0.1,
        goodput_bytes_per_s=1.0,
    )  # fmt: skip
    metrics.watch(MeshCollector(lambda: admin_pb2.Snapshot(nodes=[node])))
    link = LinkState(
        connected=True, since_monotonic_s=0.0, session_id="x", heard_monotonic_s=0.0, rtt_s=0.1, last_error=None
    )
    metrics.watch(UplinkCollector(lambda: link, lambda: 1.0))
    metrics.request_ended(outcome="OK", shape=Shape.CORE, prompt_tokens=1, ttft_s=0.1)
    metrics.request_moved(cause=MoveCause.DRAIN, outcome="OK", pause_s=0.1)
    found: dict[str, set[str]] = defaultdict(set)
    for line in metrics.render().decode().splitlines():
        sample = SAMPLE.match(line)
        if sample is not None:
            found[sample[1]] |= set(re.findall(r'(\w+)="', sample[2] or ""))
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return list(json.loads((DEPLOY / "grafana" / "kvmesh-dashboard.json").read_text())["panels"])


def expressions() -> list[str]:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    found = [rule["expr"] for rule in rules()]
    found += [target["expr"] for panel in panels() for target in panel.get("targets", [])]
    assert len(found) > 30
    for name in recorded:  # what a rule records is another rule's to read
        found = [re.sub(rf"{re.escape(name)}(?![\w:])", "1", expr) for expr in found]
    return found


def test_every_metric_is_exported() -> None:
    names = exported()
    asked = {name for expr in expressions() for name in NAME.findall(expr)}
    assert asked - names.keys() == set()
    assert len(asked) > 25


def test_every_label_exists() -> None:
    names = exported()
    for expr in expressions():
        used = {name for match in re.findall(r"\bby \(([^)]*)\)", expr) for name in re.split(r",\s*", match)}
        there = {label for name in NAME.findall(expr) for label in names[name]} | OF_PROMETHEUS
        assert used <= there, expr
        for name, selector in SELECTOR.findall(expr):
            assert set(re.findall(r"(\w+)\s*[=!]", selector)) <= names[name] | OF_PROMETHEUS, expr


def test_a_legend_names_labels_that_its_query_leaves() -> None:
    names = exported()
    for panel in panels():
        for target in panel.get("targets", []):
            kept = re.findall(r"\bby \(([^)]*)\)", target["expr"])
            labels = set(re.split(r",\s*", kept[0])) if kept else {
                label for name in NAME.findall(target["expr"]) for label in names[name]
            } | OF_PROMETHEUS  # fmt: skip
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, target


def test_alerts_say_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) >= 8
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert set(alert["annotations"]) == {"summary", "action"}


def test_outcomes_that_are_no_failures_are_words_of_the_error_tree() -> None:
    from mesh.errors import walk

    (rule,) = [rule for rule in rules() if rule.get("record") == "kvmesh:request_failures:ratio5m"]
    (listed,) = re.findall(r'outcome!~"([^"]*)"', rule["expr"])
    assert set(listed.split("|")) <= {"OK", *(error.reason for error in walk())}


def test_the_dashboard_is_what_its_code_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_dashboard", DEPLOY / "grafana" / "make_dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert json.loads(module.FILE.read_text()) == module.dashboard(), "run deploy/grafana/make_dashboard.py"


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("arguments", [("check", "rules", "kvmesh.rules.yml"), ("test", "rules", "rules_test.yml")])
def test_prometheus_own_tool(arguments: tuple[str, ...]) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(["promtool", *arguments], cwd=RULES.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
