"""Samples of a node on its own disk, until placement has them: bounded, with their own times, delivered once.

A sample is a line; lines lie in segments of SEGMENT_SAMPLES. What placement keeps is removed a segment at a time; what
finds no room pushes out the oldest segment and is counted. Lines are not synced: a power cut costs the last seconds of
telemetry and nothing else. A line that cannot be read is left out. Blocking; one owner.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Final

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from mesh.identity.files import make_private_folder, write_error, write_private
from mesh.v1 import uplink_pb2

SEGMENT_SAMPLES: Final = 512
MAX_SEGMENTS: Final = 128  # 65,536 samples: a week at one each 10 s, about 25 MB
MAX_ANSWER_SAMPLES: Final = 512
_NAME_FILE: Final = "spool"


class TelemetrySpool:
    """One per node. `append` never raises for a full disk: the sample is dropped and counted."""

    def __init__(self, folder: Path, *, max_segments: int = MAX_SEGMENTS) -> None:
        """Raises Overloaded or Internal if the folder cannot be made."""
        self._folder = folder
        self._max_segments = max_segments
        self.dropped_total = 0
        make_private_folder(folder)
        self.name = self._read_name()
        segments = self._segments()
        last = self._read(segments[-1]) if segments else []
        newest = last[-1].sequence if last else 0
        # A torn last line may have been told already, so its number is not used again.
        self._next = max(newest, segments[-1][0] if segments else 0) + 1 + bool(segments)
        self._kept = 0
        if segments:
            self._end_torn_line(segments[-1][1])

    def append(self, sample: uplink_pb2.TelemetrySample) -> None:
        """Number the sample and keep it."""
        sample.sequence = self._next
        self._next += 1
        line = json.dumps(MessageToDict(sample, preserving_proto_field_name=True), separators=(",", ":"))
        first = (sample.sequence - 1) // SEGMENT_SAMPLES * SEGMENT_SAMPLES + 1
        try:
            with self._path(first).open("ab") as file:
                file.write(line.encode() + b"\n")
        except OSError:
            self.dropped_total += 1
            return
        segments = self._segments()
        for old in segments[: max(0, len(segments) - self._max_segments)]:
            self.dropped_total += sum(s.sequence > self._kept for s in self._read(old))
            old[1].unlink(missing_ok=True)

    def answer(self, request: uplink_pb2.TelemetryRequest) -> uplink_pb2.TelemetryResponse:
        """The oldest samples that placement does not have; what it has is removed, as far as whole segments go."""
        kept = request.kept_sequence if request.kept_spool == self.name else 0
        self._kept = kept
        most = min(request.most_samples or MAX_ANSWER_SAMPLES, MAX_ANSWER_SAMPLES)
        found: list[uplink_pb2.TelemetrySample] = []
        for segment in self._segments():
            if segment[0] + SEGMENT_SAMPLES - 1 <= kept:
                segment[1].unlink(missing_ok=True)
                continue
            found += [sample for sample in self._read(segment) if sample.sequence > kept]
            if len(found) >= most:
                break
        return uplink_pb2.TelemetryResponse(spool=self.name, samples=found[:most], dropped_total=self.dropped_total)

    @staticmethod
    def _end_torn_line(path: Path) -> None:
        """What a crash left half-written must not swallow the next line."""
        try:
            if path.read_bytes()[-1:] not in (b"", b"\n"):
                with path.open("ab") as file:
                    file.write(b"\n")
        except OSError as error:
            raise write_error(path, error) from error

    def _read_name(self) -> str:
        file = self._folder / _NAME_FILE
        try:
            name = file.read_text().strip()
        except FileNotFoundError:
            name = secrets.token_hex(8)
            write_private(file, name.encode())
        except OSError as error:
            raise write_error(file, error) from error
        return name

    def _path(self, first: int) -> Path:
        return self._folder / f"samples-{first:012d}.jsonl"

    def _segments(self) -> list[tuple[int, Path]]:
        """First sequence and file of each, the oldest first."""
        found = ((path.stem.partition("-")[2], path) for path in self._folder.glob("samples-*.jsonl"))
        return sorted((int(first), path) for first, path in found if first.isdecimal())

    @staticmethod
    def _read(segment: tuple[int, Path]) -> list[uplink_pb2.TelemetrySample]:
        try:
            lines = segment[1].read_bytes().splitlines()
        except OSError:
            return []
        return [sample for line in lines if (sample := read_sample(line)) is not None]


def read_sample(line: bytes) -> uplink_pb2.TelemetrySample | None:
    """A kept line; None if it is damaged."""
    try:
        facts = json.loads(line)
        if not isinstance(facts, dict):
            return None
        sample: uplink_pb2.TelemetrySample = ParseDict(facts, uplink_pb2.TelemetrySample(), ignore_unknown_fields=True)
    except (ValueError, ParseError, RecursionError):
        return None
    return sample
