"""`kvmesh demo` and `kvmesh up` as a user runs them: real processes, the real model, unmodified clients."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mesh.client_sync import SyncMeshClient
from mesh.model.catalogue import DEMO_MODEL

KVMESH = (sys.executable, "-m", "mesh.cli.main")
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600.0

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT_S)]


def test_the_tour(tmp_path: Path) -> None:
    command = [*KVMESH, "demo", "--json", "--state", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(step["step"], step["ok"]) for step in steps] == [(n, True) for n in range(1, 7)], done.stdout + done.stderr
    assert done.returncode == 0
    assert steps[3]["move"]["kv_wire_bytes"] > 0
    assert (steps[4]["tokens_lost"], steps[4]["tokens_twice"]) == (0, 0)
    assert steps[5]["refusal"]["code"] == "UNAVAILABLE"


class Up:
    """A `kvmesh up --json` process that is ready."""

    def __init__(self, state: Path, *arguments: str) -> None:
        command = [*KVMESH, "up", "--json", "--state", str(state), *arguments]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._reader.start()
        line = self.process.stdout.readline()
        assert line, self._said()
        self.ready: dict[str, Any] = json.loads(line)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        self.said.extend(self.process.stderr)

    def _said(self) -> str:
        self._reader.join(10)
        return "".join(self.said)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    state = tmp_path_factory.mktemp("up")
    running = Up(state, "--edge", "paris")
    assert (state / "up.json").stat().st_mode & 0o777 == 0o600
    yield running
    if running.process.poll() is None:
        assert running.stop() == 0
        assert not (state / "up.json").exists()


def test_the_unmodified_openai_client(up: Up) -> None:
    for base in (up.ready["http"], up.ready["edges"]["paris"]["http"]):
        client = openai.OpenAI(base_url=f"{base}/v1", api_key=up.ready["api_key"], max_retries=0)
        with client:
            assert [model.id for model in client.models.list()] == [DEMO_MODEL]
            answer = client.chat.completions.create(
                model=DEMO_MODEL, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0
            )
            assert answer.choices[0].message.content
            assert answer.usage is not None
            assert answer.usage.completion_tokens <= 8
            stream = client.chat.completions.create(
                model=DEMO_MODEL, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0,
                stream=True, stream_options={"include_usage": True},
            )  # fmt: skip
            chunks = list(stream)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens <= 8


def test_wrong_keys_are_refused(up: Up) -> None:
    client = openai.OpenAI(base_url=f"{up.ready['http']}/v1", api_key="wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_the_python_client(up: Up) -> None:
    with SyncMeshClient(up.ready["grpc"], up.ready["api_key"]) as mesh:
        done = mesh.complete("Once upon a time", max_tokens=6, temperature=0.0)
        assert len(done.ids) == 6


def test_health_and_metrics(up: Up) -> None:
    for base in (up.ready["http"], up.ready["edges"]["paris"]["http"]):
        assert httpx.get(f"{base}/healthz").status_code == 200
        assert "kvmesh_build_info" in httpx.get(f"{base}/metrics").text


def test_a_second_mesh_in_the_same_folder_is_refused(up: Up) -> None:
    state = Path(up.ready["ca_file"]).parents[1]
    command = [*KVMESH, "up", "--state", str(state), "--edge", ""]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "another mesh runs in" in done.stderr
    assert up.process.poll() is None


def test_a_model_that_is_none(tmp_path: Path) -> None:
    truncated = tmp_path / "m.gguf"
    truncated.write_bytes(b"GGUF\x03\x00\x00\x00")
    command = [*KVMESH, "up", "--state", str(tmp_path / "state"), "--edge", "", "--model", str(truncated)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "placement-1 ended with code 1" in done.stderr
    assert "m.gguf" in done.stderr
    assert "Traceback" not in done.stderr
