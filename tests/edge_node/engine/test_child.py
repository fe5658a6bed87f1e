"""What is told of a worker that dies at once: tenants get the signal or the exit code, the log what it wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from structlog.testing import capture_logs

from edge_node.engine import child as child_module
from edge_node.engine.child import Child, cpu_ticks_of
from edge_node.engine.messages import Start
from mesh.errors import NodeUnreachable

START = Start(
    model_path="/models/m.gguf", n_threads=1, n_ctx_tokens=64, max_context_tokens=64, max_running=1, max_sequences=1,
    max_step_tokens=8, max_waiting=1, max_stall_s=1.0, slot_bytes=4096, n_layers=1, n_kv_heads=1, head_dim=1,
    vocab_size=8, eos_token_ids=(0,),
)  # fmt: skip


@pytest.mark.parametrize(
    ("end", "cause"),
    [("sys.exit(3)", "exit code 3"), ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV (a crash)")],
)
async def test_what_a_worker_wrote_is_for_the_log_alone(monkeypatch: pytest.MonkeyPatch, end: str, cause: str) -> None:
    code = f"import os, signal, sys\nprint('Fatal:\\n/srv/secret/m.gguf', file=sys.stderr, flush=True)\n{end}"

    def start(theirs: Any, arena: Any, stderr: Any, n_threads: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code], stderr=stderr)
        process.wait()  # before the socket ends: its own end is the cause
        return process

    monkeypatch.setattr(child_module, "_popen", start)
    with capture_logs() as lines, pytest.raises(NodeUnreachable) as caught:
        await Child.spawn(START, timeout_s=30)
    assert caught.value.details["cause"] == cause
    assert str(caught.value).endswith(cause)
    [line] = [line for line in lines if line["event"] == "llama_worker_ended"]
    assert (line["cause"], line["error"]) == (cause, "Fatal: | /srv/secret/m.gguf")


def test_cpu_time_of_a_process() -> None:
    ours = cpu_ticks_of(os.getpid())
    assert ours is not None
    assert ours > 0
    assert cpu_ticks_of(2**30) is None
