"""Does llama.cpp work on this machine? Load, prefill 64 tokens, decode two, in a process that may crash.

A build for another CPU, or one that GCC 12 miscompiled for AMX, dies with an illegal instruction in the first
prefill, and decoding alone does not show it. So the test prefills, and turns a crash, a hang or an error into one
line that says what to do.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from edge_node.engine.openmp import openmp_environment
from mesh.errors import Internal, InvalidRequest, MeshError
from mesh.kv.geometry import KvGeometry
from mesh.model.description import describe

PREFILL_TOKENS: Final = 64  # the fewest that llama.cpp's tiled attention and matrix units are used for
DECODE_TOKENS: Final = 2

_REBUILD: Final = (
    "rebuild llama-cpp-python with the header deploy/llama_cpp/amx_tile.h force-included (`make setup` does it)"
)
_INSTALL: Final = "install it with `make setup`, or pip install 'kvmesh[edge]'"
_ANOTHER_MODEL: Final = "choose or download another model file"
_CRASHES: Final = {
    signal.SIGILL: f"this llama.cpp build does not suit this CPU or was miscompiled; {_REBUILD}",
    signal.SIGKILL: "it was killed, most likely for want of memory; free some, or use a smaller model",
    signal.SIGBUS: "the model file cannot be read through; check the disk and download the model again",
}


class SelfTestOutcome(Enum):
    """How it went."""

    OK = "ok"
    BAD_MODEL = "bad_model"  # the file is refused before llama.cpp sees it, or by llama.cpp
    CRASHED = "crashed"
    HUNG = "hung"
    FAILED = "failed"  # llama.cpp or Python reported an error


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestResult:
    """`says` is what was found, `remedy` what to do about it (empty if it is OK). Speeds are 0.0 unless it is OK."""

    outcome: SelfTestOutcome
    says: str
    remedy: str = ""
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.outcome is SelfTestOutcome.OK

    @property
    def message(self) -> str:
        """Both in one line."""
        return f"{self.says}; {self.remedy}" if self.remedy else self.says


def run_self_test(model_path: Path, n_threads: int, timeout_s: float) -> SelfTestResult:
    """Test llama.cpp with this model in a child process. Blocks, for at most about `timeout_s`; never raises for
    what is wrong with the model, the build or the machine."""
    try:
        describe(model_path)
    except MeshError as error:
        return SelfTestResult(outcome=SelfTestOutcome.BAD_MODEL, says=error.message, remedy=_ANOTHER_MODEL)
    command = (sys.executable, "-P", "-m", "edge_node.engine.selftest", str(model_path), str(n_threads))
    return run_command(command, timeout_s, openmp_environment(n_threads))


def run_command(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> SelfTestResult:
    """Run a self-test process and read what became of it."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return SelfTestResult(
            outcome=SelfTestOutcome.HUNG,
            says=f"llama.cpp did not finish within {timeout_s:g} s",
            remedy="use no more threads than there are free cores, and see what else the machine is doing",
        )
    return interpret(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def interpret(returncode: int, stdout: str, stderr: str) -> SelfTestResult:
    """What an ended self-test process says. Pure."""
    if returncode < 0:
        number = signal.Signals(-returncode)
        return SelfTestResult(
            outcome=SelfTestOutcome.CRASHED,
            says=f"llama.cpp crashed ({number.name})",
            remedy=_CRASHES.get(number, f"this is a fault in llama.cpp or its build: {_REBUILD}"),
        )
    try:
        report = json.loads(stdout)
        if returncode == 0:
            speeds = float(report["prefill_tokens_per_s"]), float(report["decode_tokens_per_s"])
            return SelfTestResult(
                outcome=SelfTestOutcome.OK,
                says=f"llama.cpp works: {speeds[0]:.0f} tokens/s prefill, {speeds[1]:.0f} tokens/s decode",
                prefill_tokens_per_s=speeds[0],
                decode_tokens_per_s=speeds[1],
            )
        return SelfTestResult(
            outcome=SelfTestOutcome(report["outcome"]), says=str(report["says"]), remedy=str(report["remedy"])
        )
    except (ValueError, KeyError, TypeError):
        last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "it said nothing")
        return SelfTestResult(
            outcome=SelfTestOutcome.FAILED,
            says=f"the self-test of llama.cpp ended with code {returncode}: {last}",
            remedy=_REBUILD,
        )


def _measure(model_path: Path, n_threads: int) -> dict[str, object]:
    """In the child process. Raises errors of mesh.errors."""
    from edge_node.engine.backend import BatchItem, DecodeStatus
    from edge_node.engine.blob import BlobLayout
    from edge_node.engine.llama import LlamaBackend
    from edge_node.engine.probe import probe_layout

    geometry: KvGeometry = (model := describe(model_path)).geometry
    backend = LlamaBackend(
        model_path=model_path, n_threads=n_threads, n_ctx_tokens=256, n_sequences=1, max_step_tokens=PREFILL_TOKENS
    )
    probe_layout(backend, BlobLayout.of(geometry), model.vocab_size)
    token_ids = [i % model.vocab_size for i in range(PREFILL_TOKENS + DECODE_TOKENS)]
    times = [time.perf_counter()]
    for start, stop in ((0, PREFILL_TOKENS), *((i, i + 1) for i in range(PREFILL_TOKENS, len(token_ids)))):
        status = backend.decode([BatchItem(0, start, token_ids[start:stop], True)])
        if status is not DecodeStatus.OK:
            raise Internal(f"llama.cpp could not compute: {backend.last_errors() or 'no reason given'}")
        row = backend.logits(0)
        if not abs(row).max() < float("inf"):
            raise Internal("llama.cpp computed numbers that are not finite")
        times.append(time.perf_counter())
    backend.close()
    return {
        "prefill_tokens_per_s": PREFILL_TOKENS / (times[1] - times[0]),
        "decode_tokens_per_s": DECODE_TOKENS / (times[-1] - times[1]),
    }


def _main(model_path: Path, n_threads: int) -> int:
    def failed(outcome: SelfTestOutcome, says: str, remedy: str) -> dict[str, object]:
        return {"outcome": outcome.value, "says": says, "remedy": remedy}

    code = 1
    try:
        report, code = _measure(model_path, n_threads), 0
    except ImportError as error:
        report = failed(SelfTestOutcome.FAILED, f"llama.cpp cannot be loaded: {error}", _INSTALL)
    except InvalidRequest as error:
        report = failed(SelfTestOutcome.BAD_MODEL, error.message, _ANOTHER_MODEL)
    except MeshError as error:
        report = failed(SelfTestOutcome.FAILED, error.message, _REBUILD)
    sys.stdout.write(json.dumps(report))
    return code


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), int(sys.argv[2])))
