"""Telemetry from a site's disk to placement's: once, in order, with its own times, bounded at both ends."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from mesh.errors import InvalidRequest, PayloadCorrupt
from mesh.node.engine import EngineLoad
from mesh.rpc.uplink.wire import load_to_wire
from mesh.telemetry import spool as spool_module
from mesh.telemetry.history import TelemetryHistory, open_metrics, read_history
from mesh.telemetry.spool import TelemetrySpool, read_sample
from mesh.v1 import uplink_pb2

LOAD = EngineLoad(
    running=1, waiting=2, waiting_prefill_tokens=3, kv_used_tokens=4, kv_capacity_tokens=5, prefill_tokens_per_s=6.5,
    decode_tokens_per_s=7.5,
)  # fmt: skip


def sample(unix_s: float, **facts: int) -> uplink_pb2.TelemetrySample:
    return uplink_pb2.TelemetrySample(unix_s=unix_s, load=load_to_wire(LOAD, draining=False), **facts)


def fetch(spool: TelemetrySpool, history: TelemetryHistory, most: int = 0, node: str = "edge-paris") -> int:
    name, sequence = history.newest(node)
    request = uplink_pb2.TelemetryRequest(kept_spool=name, kept_sequence=sequence, most_samples=most)
    return history.take(node, spool.answer(request))


def times(folder: Path, node: str = "edge-paris") -> list[float]:
    return [s.unix_s for _, s in read_history(folder / f"{node}.jsonl")]


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "SEGMENT_SAMPLES", 8)


def test_what_was_measured_while_cut_off_comes_with_its_times(tmp_path: Path) -> None:
    spool, history = TelemetrySpool(tmp_path / "a"), TelemetryHistory(tmp_path / "b")
    for t in range(30):
        spool.append(sample(1000.0 + t))
    assert fetch(spool, history) == 30
    assert fetch(spool, history) == 0
    for t in range(30, 40):
        spool.append(sample(1000.0 + t))
    assert fetch(spool, history, most=4) == 4
    assert fetch(spool, history) == 6
    assert times(tmp_path / "b") == [1000.0 + t for t in range(40)]


@pytest.mark.parametrize("seed", range(8))
def test_each_sample_once_whatever_is_lost_on_the_way(tmp_path: Path, seed: int) -> None:
    """Answers that get lost, restarts of either side, and lines that were torn by a crash."""
    rng = random.Random(seed)
    spool, history = TelemetrySpool(tmp_path / "a"), TelemetryHistory(tmp_path / "b")
    written: list[float] = []
    for t in range(200):
        spool.append(sample(float(t + 1)))
        written.append(float(t + 1))
        fate = rng.random()
        if fate < 0.1:
            fetch(spool, history, most=rng.choice([0, 1, 3]))
        elif fate < 0.15:  # the answer is lost
            name, sequence = history.newest("edge-paris")
            spool.answer(uplink_pb2.TelemetryRequest(kept_spool=name, kept_sequence=sequence))
        elif fate < 0.2:
            spool = TelemetrySpool(tmp_path / "a")
        elif fate < 0.25:
            history = TelemetryHistory(tmp_path / "b")
        elif fate < 0.3:  # a crash in the middle of a write
            with max((tmp_path / "a").glob("samples-*")).open("ab") as file:
                file.write(b'{"sequence": "99')
            spool = TelemetrySpool(tmp_path / "a")
    while fetch(spool, history):
        pass
    assert times(tmp_path / "b") == written
    assert spool.dropped_total == 0


def test_a_full_spool_drops_the_oldest_and_counts(tmp_path: Path) -> None:
    spool, history = TelemetrySpool(tmp_path / "a", max_segments=3), TelemetryHistory(tmp_path / "b")
    for t in range(100):
        spool.append(sample(float(t + 1)))
    kept = fetch(spool, history)
    assert kept <= 24
    assert times(tmp_path / "b")[-1] == 100.0
    assert spool.dropped_total == 100 - kept
    assert len(list((tmp_path / "a").glob("samples-*"))) <= 3


def test_a_disk_that_takes_nothing_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = TelemetrySpool(tmp_path / "a")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    spool.append(sample(1.0))
    monkeypatch.undo()
    spool.append(sample(2.0))
    assert spool.dropped_total == 1
    assert [s.unix_s for s in spool.answer(uplink_pb2.TelemetryRequest()).samples] == [2.0]


def test_what_is_kept_elsewhere_is_removed(tmp_path: Path) -> None:
    spool, history = TelemetrySpool(tmp_path / "a"), TelemetryHistory(tmp_path / "b")
    for t in range(40):
        spool.append(sample(float(t + 1)))
    fetch(spool, history)
    fetch(spool, history)
    assert len(list((tmp_path / "a").glob("samples-*"))) <= 1


def test_a_box_that_was_set_up_anew_begins_anew(tmp_path: Path) -> None:
    history = TelemetryHistory(tmp_path / "b")
    for name, start in (("a", 1.0), ("a2", 101.0)):
        spool = TelemetrySpool(tmp_path / name)
        for t in range(3):
            spool.append(sample(start + t))
        assert fetch(spool, history) == 3
    assert times(tmp_path / "b") == [1.0, 2.0, 3.0, 101.0, 102.0, 103.0]


def test_history_is_bounded(tmp_path: Path) -> None:
    spool, history = TelemetrySpool(tmp_path / "a"), TelemetryHistory(tmp_path / "b", max_file_bytes=2000)
    for t in range(200):
        spool.append(sample(float(t + 1)))
        fetch(spool, history)
    assert sum(file.stat().st_size for file in (tmp_path / "b").iterdir()) < 6000
    assert times(tmp_path / "b")[-1] == 200.0


def answer(*sequences: int, spool: str = "a" * 16) -> uplink_pb2.TelemetryResponse:
    samples = [uplink_pb2.TelemetrySample(sequence=s, unix_s=1.0) for s in sequences]
    return uplink_pb2.TelemetryResponse(spool=spool, samples=samples)


@pytest.mark.parametrize(
    "bad", [answer(5, 4), answer(4, 4), answer(0), answer(3), answer(1, spool=""), answer(1, spool="../../etc")]
)
def test_an_answer_that_cannot_be_is_refused_whole(tmp_path: Path, bad: uplink_pb2.TelemetryResponse) -> None:
    history = TelemetryHistory(tmp_path)
    history.take("n", answer(1, 2, 3))
    before = (tmp_path / "n.jsonl").read_bytes()
    with pytest.raises(PayloadCorrupt):
        history.take("n", bad)
    assert (tmp_path / "n.jsonl").read_bytes() == before


def test_a_node_cannot_name_a_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        TelemetryHistory(tmp_path).take("../x", answer(1))


@pytest.mark.parametrize("line", [b"", b"[]", b"{", b'{"sequence": "x"}', b'{"sequence": -1}', b"[" * 50_000, b"\xff"])
def test_damaged_lines(line: bytes) -> None:
    assert read_sample(line) is None


def test_prometheus_takes_the_export(tmp_path: Path) -> None:
    history = TelemetryHistory(tmp_path / "b")
    for node in ("edge-paris", "edge-osaka"):
        spool = TelemetrySpool(tmp_path / node)
        for t in range(20):
            back = 15.0 if t == 10 else 0.0  # the clock was set back
            spool.append(sample(1_760_000_000.0 + 10 * t - back, requests_ok_total=t))
        fetch(spool, history, node=node)
    text = "\n".join(open_metrics(tmp_path / "b")) + "\n"
    assert text.count('kvmesh_site_requests_ok_total{node="edge-osaka"}') == 19
    assert 'kvmesh_site_running{node="edge-paris"} 1 1760000190.000' in text
    assert text.endswith("# EOF\n")
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus); the text was checked")
    (tmp_path / "export").write_text(text)
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(tmp_path / "export"), str(tmp_path / "db")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
