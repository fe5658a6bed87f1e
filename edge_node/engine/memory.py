"""Will the model fit? Counted before llama.cpp is started: a box that swaps or kills is worse than an error. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mesh.errors import Overloaded

_MIB = 1 << 20
_RUNTIME_BYTES = 160 * _MIB  # interpreter, libraries and llama.cpp's work buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes that an engine takes."""

    weights_bytes: int
    kv_bytes: int
    logits_bytes: int
    transfer_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.logits_bytes + self.transfer_bytes + _RUNTIME_BYTES

    def check(self, available_bytes: int) -> None:
        """Raise Overloaded with the sum if it does not fit."""
        if self.total_bytes > available_bytes:
            parts = (
                ("weights", self.weights_bytes),
                ("KV", self.kv_bytes),
                ("logits", self.logits_bytes),
                ("transfer", self.transfer_bytes),
                ("runtime", _RUNTIME_BYTES),
            )
            terms = " + ".join(f"{name} {size // _MIB}" for name, size in parts)
            raise Overloaded(
                f"the model needs {self.total_bytes // _MIB} MiB ({terms}) and {available_bytes // _MIB} MiB are free; "
                "use a smaller n_ctx_tokens or model",
                need_bytes=str(self.total_bytes),
                available_bytes=str(available_bytes),
            )
