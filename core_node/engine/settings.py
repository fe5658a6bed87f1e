"""What a core engine is told at start."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import InvalidRequest
from mesh.kv.geometry import KvDtype
from mesh.kv.hashing import BLOCK_TOKENS

WEIGHT_DTYPES = ("bf16", "f32", "int8")
BACKENDS = ("auto", "kernels", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreEngineSettings:
    """Checked on construction; raises InvalidRequest naming the field.

    `dtype` is the precision of weights and arithmetic ("bf16" or "f32"; "int8": weights with one scale a row,
    arithmetic in bf16), `kv_dtype` that of the KV pool and of what is exported; None: that of the arithmetic.
    `backend`: the compiled "kernels" (CPU; bf16 or int8 over bf16 KV), "torch", or "auto": the kernels where they
    can run. `exact`: a sequence's logits do not depend, to the bit, on what else is in a step or on how its prompt
    was cut; the kernels are so anyway, torch is slower for it. The pool's size is `kv_pool_tokens`, or
    `kv_pool_bytes` if that is 0, or chosen by the engine if both are 0. `n_threads` 0: as many as the CPUs that this
    process may use (affinity and control group quota).
    `policy` names who is admitted first (see policies); `ageing_s` of waiting make up for one step of priority,
    `starvation_s` of it go before everything else. `tpot_target_s`: prefill beside decoding sequences is cut so that a
    step lasts no longer; 0: by `max_step_tokens` alone. `swap_bytes`: host memory for preempted KV; 0: none.
    """

    model_path: Path
    model_id: str
    dtype: str = "bf16"
    kv_dtype: KvDtype | None = None
    device: str = "cpu"
    n_threads: int = 0
    backend: str = "auto"
    exact: bool = False
    kv_pool_tokens: int = 0
    kv_pool_bytes: int = 0
    max_context_tokens: int = 0  # 0: the model's own
    max_step_tokens: int = 256
    max_running: int = 32
    max_waiting: int = 256
    policy: str = "priority"
    ageing_s: float = 10.0
    starvation_s: float = 30.0
    tpot_target_s: float = 0.0
    swap_bytes: int = 128 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.dtype not in WEIGHT_DTYPES:
            raise InvalidRequest(f"dtype must be one of {', '.join(WEIGHT_DTYPES)}, got {self.dtype!r}", field="dtype")
        if self.backend not in BACKENDS:
            raise InvalidRequest(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}", field="backend")
        for field in ("n_threads", "kv_pool_tokens", "kv_pool_bytes", "max_context_tokens"):
            self._at_least(field, 0)
        for field in ("max_step_tokens", "max_running", "max_waiting"):
            self._at_least(field, 1)
        for field in ("ageing_s", "starvation_s", "tpot_target_s", "swap_bytes"):
            self._at_least(field, 0)
        if self.kv_pool_tokens and self.kv_pool_bytes:
            raise InvalidRequest("set kv_pool_tokens or kv_pool_bytes, not both", field="kv_pool_bytes")
        if 0 < self.kv_pool_tokens < BLOCK_TOKENS:
            raise InvalidRequest(f"kv_pool_tokens must be 0 or at least {BLOCK_TOKENS}", field="kv_pool_tokens")
        if self.max_running > self.max_step_tokens:
            # Each running sequence decodes one token in each step, so that none starves.
            raise InvalidRequest(
                f"max_running ({self.max_running}) must not exceed max_step_tokens ({self.max_step_tokens})",
                field="max_running",
            )

    def _at_least(self, field: str, low: int) -> None:
        if not low <= getattr(self, field) < math.inf:  # a NaN is neither
            raise InvalidRequest(f"{field} must be at least {low}, got {getattr(self, field)}", field=field)
