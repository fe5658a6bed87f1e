"""llama.cpp through its low-level API: one model, one context, one owner thread. Runs in the child process only.

The context is unified (all sequences share one pool of cells, so that sharing a prefix is a tag), with flash
attention on (V not transposed) and an f16 cache, which is the form that KV travels in. ctypes releases the GIL in
every call.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import llama_cpp.llama_cpp as lib
import numpy as np
from llama_cpp import __version__ as binding_version
from numpy.typing import NDArray

from edge_node.engine.backend import BatchItem, DecodeStatus
from edge_node.engine.blob import Blob
from mesh.errors import InvalidRequest, Overloaded

_GGML_F16: Final = 1
_FLASH_ATTENTION_ON: Final = 1
_WARN, _ERROR, _CONTINUED = 2, 3, 5
_KEPT_LINES: Final = 8

_lines: deque[str] = deque(maxlen=_KEPT_LINES)


@lib.llama_log_callback  # type: ignore[untyped-decorator]
def _keep_errors(level: int, text: bytes, _user_data: object) -> None:
    # Silence: llama.cpp would write every line to stderr. Errors are kept, they say why a load failed.
    if level in (_WARN, _ERROR) or (level == _CONTINUED and _lines):
        _lines.append(text.decode(errors="replace").strip())


def last_errors() -> str:
    """The last warning and error lines of llama.cpp in this process, oldest first."""
    return "; ".join(line for line in _lines if line)


def build_name() -> str:
    """Versions that fix the meaning of a KV blob."""
    return f"llama-cpp-python {binding_version} (llama.cpp {lib.llama_version().decode()})"


class LlamaBackend:
    """Implements edge_node.engine.backend.Backend. Raises InvalidRequest if llama.cpp refuses the model, Overloaded
    if it finds no memory for the cache."""

    def __init__(
        self, *, model_path: Path, n_threads: int, n_ctx_tokens: int, n_sequences: int, max_step_tokens: int
    ) -> None:
        self._model: Any = None
        self._context: Any = None
        lib.llama_log_set(_keep_errors, None)
        lib.llama_backend_init()
        _lines.clear()
        self._model = _load_model(model_path)
        self._context = self._new_context(n_threads, n_ctx_tokens, n_sequences + 1, max_step_tokens)
        self._memory = lib.llama_get_memory(self._context)
        self._vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)))
        self._scratch = n_sequences
        self._batch = _Batch(max_step_tokens)
        self._outputs: list[int] = []
        self._row = ctypes.c_float * self._vocab_size

    def _new_context(self, n_threads: int, n_ctx: int, n_seq_max: int, n_batch: int) -> Any:
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = n_batch
        params.n_seq_max = n_seq_max
        params.n_outputs_max = min(n_seq_max, n_batch)  # one row of logits per sequence, not per token
        params.n_threads = params.n_threads_batch = n_threads
        params.kv_unified = True
        params.flash_attn_type = _FLASH_ATTENTION_ON
        params.type_k = params.type_v = _GGML_F16
        context = lib.llama_init_from_model(self._model, params)
        if not context:
            raise Overloaded(f"llama.cpp could not make a context of {n_ctx} tokens: {last_errors() or 'no reason'}")
        return context

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def scratch(self) -> int:
        return self._scratch

    def decode(self, items: Sequence[BatchItem]) -> DecodeStatus:
        self._outputs = self._batch.fill(items)
        status = int(lib.llama_decode(self._context, self._batch.struct))
        if status == 0:
            return DecodeStatus.OK
        return DecodeStatus.NO_SLOT if status == 1 else DecodeStatus.FAILED

    def logits(self, item: int) -> NDArray[np.float32]:
        pointer = lib.llama_get_logits_ith(self._context, self._outputs[item])
        if not pointer:
            raise RuntimeError("llama.cpp has no logits for this row")
        return np.frombuffer(memoryview(self._row.from_address(ctypes.addressof(pointer.contents))), np.float32)

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        lib.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def remove(self, sequence: int, start: int = 0) -> None:
        if not lib.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise RuntimeError(f"llama.cpp cannot cut this model's cache at position {start}")

    def extent(self, sequence: int) -> tuple[int, int]:
        low = int(lib.llama_memory_seq_pos_min(self._memory, sequence))
        return low, int(lib.llama_memory_seq_pos_max(self._memory, sequence))

    def save(self, sequence: int) -> Blob:
        size = int(lib.llama_state_seq_get_size(self._context, sequence))
        blob = np.empty(size, np.uint8)
        written = int(lib.llama_state_seq_get_data(self._context, _bytes(blob), size, sequence))
        return blob[:written]

    def restore(self, sequence: int, blob: Blob) -> bool:
        read = int(lib.llama_state_seq_set_data(self._context, _bytes(blob), blob.size, sequence))
        return read == blob.size

    def last_errors(self) -> str:
        return last_errors()

    def close(self) -> None:
        """Free the context and the model. Idempotent."""
        if self._context:
            lib.llama_free(self._context)
        if self._model:
            lib.llama_model_free(self._model)
        self._context = self._model = None


def _load_model(path: Path) -> Any:
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise InvalidRequest(f"llama.cpp cannot load {path.name}: {last_errors() or 'no reason given'}", field="model")
    return model


def _bytes(blob: Blob) -> Any:
    return blob.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


class _Batch:
    """A llama_batch over numpy arrays of ours, filled anew for each step."""

    def __init__(self, capacity: int) -> None:
        self._token = np.zeros(capacity, np.int32)
        self._position = np.zeros(capacity, np.int32)
        self._n_sequences = np.ones(capacity, np.int32)
        self._sequence = np.zeros(capacity, np.int32)
        self._output = np.zeros(capacity, np.int8)
        # seq_id is an array of pointers to arrays of ids; each row has one id, so pointer i is to element i.
        base = self._sequence.ctypes.data
        self._pointers = (ctypes.c_void_p * capacity)(*(base + 4 * i for i in range(capacity)))

        def pointer(array: NDArray[Any], kind: Any) -> Any:
            return array.ctypes.data_as(ctypes.POINTER(kind))

        self.struct = lib.llama_batch(
            n_tokens=0,
            token=pointer(self._token, ctypes.c_int32),
            embd=None,
            pos=pointer(self._position, ctypes.c_int32),
            n_seq_id=pointer(self._n_sequences, ctypes.c_int32),
            seq_id=ctypes.cast(self._pointers, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=pointer(self._output, ctypes.c_int8),
        )

    def fill(self, items: Sequence[BatchItem]) -> list[int]:
        """Lay the items out one after the other; returns the row of each item's last token."""
        at = 0
        last: list[int] = []
        for item in items:
            n = len(item.token_ids)
            self._token[at : at + n] = item.token_ids
            self._position[at : at + n] = np.arange(item.start, item.start + n)
            self._sequence[at : at + n] = item.sequence
            self._output[at : at + n] = 0
            at += n
            self._output[at - 1] = item.output
            last.append(at - 1)
        self.struct.n_tokens = at
        return last
