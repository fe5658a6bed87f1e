"""The doctor's check of llama.cpp: a child process loads the model, prefills 64 tokens and decodes two."""

from __future__ import annotations

from collections.abc import Sequence

from edge_node.engine.selftest import run_self_test
from mesh.cli.checks import Check, Examined, Finding, fail, ok

N_THREADS = 1
TIMEOUT_S = 120.0


def checks() -> Sequence[Check]:
    """Entry point of `kvmesh.checks`."""
    return (Check(name="llama.cpp", run=_llama),)


def _llama(examined: Examined) -> Finding:
    if examined.model_path is None:
        return fail("not tested: there is no model", "give one with --model")
    result = run_self_test(examined.model_path, N_THREADS, TIMEOUT_S)
    return ok(result.says) if result.ok else fail(result.says, result.remedy)
