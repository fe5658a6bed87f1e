"""What nodes measured, as placement keeps it: a file for each node, each sample once, in the order and with the times
of its node. Bounded: of each node the newest MAX_FILE_BYTES to twice that. Blocking; one owner."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from google.protobuf.json_format import MessageToDict

from mesh.errors import PayloadCorrupt
from mesh.identity.files import make_private_folder, write_error
from mesh.identity.place import check_name
from mesh.telemetry.spool import read_sample
from mesh.v1 import uplink_pb2

MAX_FILE_BYTES: Final = 32 << 20
_SPOOL = re.compile(r"[0-9a-f]{16}")
FOLDER: Final = "telemetry"
"""Name of the folder inside a process' state folder, at both ends."""


class TelemetryHistory:
    """Owned by the placement service."""

    def __init__(self, folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Raises Overloaded or Internal if the folder cannot be made."""
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._newest: dict[str, tuple[str, int]] = {}
        make_private_folder(folder)

    def newest(self, node_id: str) -> tuple[str, int]:
        """Spool and sequence of the last sample of a node; ("", 0): none."""
        if node_id not in self._newest:
            self._newest[node_id] = ("", 0)
            for spool, sample in read_history(self._path(node_id)):
                self._newest[node_id] = (spool, sample.sequence)
        return self._newest[node_id]

    def take(self, node_id: str, answer: uplink_pb2.TelemetryResponse) -> int:
        """Keep the samples that are new; how many. Raises PayloadCorrupt for an answer that is out of order, Overloaded
        or Internal if it cannot be written: nothing of it counts as kept then."""
        if not answer.samples:
            return 0
        if not _SPOOL.fullmatch(answer.spool):
            raise PayloadCorrupt(f"telemetry of {node_id} comes from no spool", node=node_id)
        spool, newest = self.newest(node_id)
        after = newest if spool == answer.spool else 0
        lines = []
        for sample in answer.samples:
            if sample.sequence <= after:
                raise PayloadCorrupt(f"telemetry of {node_id} came twice or out of order", node=node_id)
            after = sample.sequence
            facts = MessageToDict(sample, preserving_proto_field_name=True)
            lines.append(json.dumps({"spool": answer.spool, **facts}, separators=(",", ":")).encode() + b"\n")
        path = self._path(node_id)
        try:
            if path.exists() and path.stat().st_size > self._max_file_bytes:
                path.replace(path.with_suffix(".old"))
            with path.open("ab") as file:
                file.write(b"".join(lines))
        except OSError as error:
            self._newest.pop(node_id, None)
            raise write_error(path, error) from error
        self._newest[node_id] = (answer.spool, after)
        return len(lines)

    def _path(self, node_id: str) -> Path:
        check_name("node_id", node_id)
        return self._folder / f"{node_id}.jsonl"


def read_history(path: Path) -> Iterator[tuple[str, uplink_pb2.TelemetrySample]]:
    """Samples of one node with their spools, older file first; damaged lines are left out."""
    for file in (path.with_suffix(".old"), path):
        if not file.exists():
            continue
        with file.open("rb") as opened:
            for line in opened:
                sample = read_sample(line)
                if sample is not None and sample.sequence:
                    yield str(json.loads(line).get("spool", "")), sample


def open_metrics(folder: Path) -> Iterator[str]:
    """All samples of all nodes as OpenMetrics text with their own times, which
    `promtool tsdb create-blocks-from openmetrics` takes. One family after the other, as the format asks for."""
    nodes = sorted({path.stem for path in folder.glob("*.jsonl")})
    for name, kind, read in _FAMILIES:
        family = name.removesuffix("_total")
        yield f"# TYPE {family} {kind}"
        for node_id in nodes:
            last_s = 0.0
            for _, sample in read_history(folder / f"{node_id}.jsonl"):
                if sample.unix_s > last_s:  # a clock that was set back would make samples out of order
                    last_s = sample.unix_s
                    yield f'{name}{{node="{node_id}"}} {read(sample):g} {sample.unix_s:.3f}'
    yield "# EOF"


_FAMILIES: Final[tuple[tuple[str, str, Callable[[uplink_pb2.TelemetrySample], float]], ...]] = (
    ("kvmesh_site_connected", "gauge", lambda s: float(s.connected)),
    ("kvmesh_site_running", "gauge", lambda s: float(s.load.running)),
    ("kvmesh_site_waiting", "gauge", lambda s: float(s.load.waiting)),
    ("kvmesh_site_kv_used_tokens", "gauge", lambda s: float(s.load.kv_used_tokens)),
    ("kvmesh_site_prefill_tokens_per_second", "gauge", lambda s: float(s.load.prefill_tokens_per_s)),
    ("kvmesh_site_decode_tokens_per_second", "gauge", lambda s: float(s.load.decode_tokens_per_s)),
    ("kvmesh_site_requests_ok_total", "counter", lambda s: float(s.requests_ok_total)),
    ("kvmesh_site_requests_failed_total", "counter", lambda s: float(s.requests_failed_total)),
    ("kvmesh_site_generated_tokens_total", "counter", lambda s: float(s.generated_tokens_total)),
)
