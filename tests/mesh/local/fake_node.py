"""Stands in for `kvmesh placement|core|edge` in tests of the local mesh: reads its settings, announces itself,
waits for SIGTERM. A node whose folder holds a file `fail` ends at once with code 3; `hang` makes it deaf to SIGTERM."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

role, _, config = sys.argv[1:]
folder = Path(config).parent
# Without PyYAML, so that it starts in no time: the values that are needed stand on lines of their own.
settings = dict(line.strip().split(": ", 1) for line in Path(config).read_text().splitlines() if ": " in line)
if (folder / "fail").exists():
    print("no such luck")
    sys.exit(3)

stopping: list[int] = []
signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
state = Path(settings["state_folder"])
state.mkdir(parents=True, exist_ok=True)
if role == "placement":
    Path(settings["keys_file"]).write_text(json.dumps({"api_key": "kt", "admin_key": "ka"}))
else:
    assert settings["address"] == "127.0.0.1:1003"
facts = {"event": "ready", "grpc": "127.0.0.1:1001", "http": "http://127.0.0.1:1002", "node": "127.0.0.1:1003"}
(state / "new").write_text(json.dumps(facts))
(state / "new").rename(state / "ready.json")
while not stopping or (folder / "hang").exists():
    time.sleep(0.01)
print("drained")
