"""Settings of one edge engine. Checked on construction; plain values, so that they can go to the child process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mesh.errors import InvalidRequest

MAX_SEQUENCES: Final = 255  # llama.cpp allows 256; one is our scratch sequence
EXACT_STEP_TOKENS: Final = 63
"""Up to this many tokens in one batch, llama.cpp's CPU attention (build 0.3.36) gives the same bits whatever else
is in the batch and however a prompt is cut, as long as a sequence's cells lie in the order of its positions. They
do until the cache has been full and freed cells are taken again. From 64 tokens on attention works in tiles, about
three times faster in prefill, and a row depends on its cells' places modulo 64 as well. The differences are those of
rounding activations to 8 bits: up to 0.9 in a logit of the demo model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeEngineSettings:
    """See the comment of each field; all sizes are per engine.

    `max_step_tokens` bounds a step and with it how long a running sequence waits for another's prompt. At most
    `EXACT_STEP_TOKENS` makes results independent of what else runs, at the price of prefill speed; see there.
    """

    model_path: Path
    model_id: str
    n_threads: int
    n_ctx_tokens: int = 4096  # KV cells shared by all runs, holds and kept prefixes
    max_context_tokens: int | None = None  # of one run; None: the smaller of the model's context and n_ctx_tokens
    max_running: int = 8  # sequences that compute at the same time
    max_sequences: int = 32  # runs, holds, imports and kept prefixes together
    max_step_tokens: int = 256
    max_stall_s: float = 0.5  # how long running sequences may wait for others' prompts in one step, about
    max_waiting: int = 64  # runs in the queue; more are refused with Overloaded
    transfer_bytes: int = 16 << 20  # one of two shared-memory slots that KV crosses in
    start_timeout_s: float = 180.0
    hang_timeout_s: float = 30.0  # a child that owes an answer and neither says nor computes anything so long
    restart_wait_s: float = 10.0  # how long a new run waits for a child that is being restarted
    restart_backoff_s: tuple[float, float] = (0.25, 30.0)  # first and longest pause before a restart

    def __post_init__(self) -> None:
        _at_least("n_threads", self.n_threads, 1)
        _at_least("n_ctx_tokens", self.n_ctx_tokens, 64)
        _at_least("max_running", self.max_running, 1)
        _at_least("max_sequences", self.max_sequences, self.max_running + 1)
        if self.max_sequences > MAX_SEQUENCES:
            raise InvalidRequest(f"max_sequences is {self.max_sequences}, at most {MAX_SEQUENCES}")
        _at_least("max_step_tokens", self.max_step_tokens, self.max_running)
        _at_least("max_waiting", self.max_waiting, 0)
        _at_least("transfer_bytes", self.transfer_bytes, 4096)
        if self.max_context_tokens is not None:
            _at_least("max_context_tokens", self.max_context_tokens, 1)
        for name, value in (
            ("max_stall_s", self.max_stall_s),
            ("start_timeout_s", self.start_timeout_s),
            ("restart_wait_s", self.restart_wait_s),
            ("hang_timeout_s", self.hang_timeout_s),
            ("restart_backoff_s", min(self.restart_backoff_s)),
        ):
            if not value > 0:
                raise InvalidRequest(f"{name} must be above 0, got {value}", field=name)


def _at_least(field: str, value: int, low: int) -> None:
    if value < low:
        raise InvalidRequest(f"{field} must be at least {low}, got {value}", field=field)
