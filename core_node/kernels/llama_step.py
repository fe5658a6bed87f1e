"""The compiled forward step of a `llama` model (src/llama_step.cpp) behind ctypes, which releases the GIL.

bf16 or int8 weights (int8: one scale a row, made here from bf16), bf16 KV. Knows no engine: rows, positions and block
tables come as arrays.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mesh.errors import NotImplementedHere, Overloaded

PHASES = ("embed", "qkv", "rope", "attention", "attention_out", "norm", "gate_up", "down", "head", "choose")
MULTIPLE = 32  # of hidden size, head size and feed-forward size
_MAX_GROUP = 96


class _Shape(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("n_layers", "hidden", "n_q", "n_kv", "head_dim", "ffn", "vocab")),
        *((name, c_int32) for name in ("max_rows", "max_logit_rows", "n_threads", "amx", "int8")),
        ("norm_eps", c_float),
    )


class _LayerSource(Structure):
    _fields_ = tuple(
        (name, c_void_p) for name in ("attention_norm", "ffn_norm", "qkv", "attention_out", "gate_up", "down")
    )


class _Step(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("n_sequences", "n_logit_rows", "keep_logits")),
        *(
            (n, c_void_p)
            for n in ("row_start", "position", "table_start", "logit_row", "token_ids", "tables", "k", "v")
        ),
        ("layer_size", c_int64),
        *((name, c_void_p) for name in ("logits", "best_ids", "best", "phase_ns")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Of a model and of the largest step that it will be asked for."""

    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    max_rows: int
    max_logit_rows: int

    def check(self) -> None:
        """Raise NotImplementedHere if the step was not written for this shape."""
        for name in ("hidden", "head_dim", "ffn"):
            if getattr(self, name) % MULTIPLE:
                raise NotImplementedHere(f"{name} is {getattr(self, name)}, not a multiple of {MULTIPLE}")
        if self.n_heads // self.n_kv_heads > _MAX_GROUP:
            raise NotImplementedHere(f"{self.n_heads // self.n_kv_heads} query heads share a KV head")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInput:
    """int32 arrays. Sequence i has rows [row_start[i], row_start[i + 1]), the first of them at position[i]; its block
    table begins at tables[table_start[i]]. `logit_row[i]`: which row of logits its last row's are, or -1.
    `keep_logits`: the logits themselves are wanted, not only the best of each row."""

    token_ids: NDArray[np.int32]
    row_start: NDArray[np.int32]
    position: NDArray[np.int32]
    table_start: NDArray[np.int32]
    tables: NDArray[np.int32]
    logit_row: NDArray[np.int32]
    n_logit_rows: int
    keep_logits: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutput:
    """Views of the step's own memory, good until its next run. `best_ids` [rows]: of the largest logit (the lowest id
    on a tie), -1 if one is NaN; `best` f32 [rows]; `logits` f32 [rows, vocab] if they were kept."""

    best_ids: NDArray[np.int32]
    best: NDArray[np.float32]
    logits: NDArray[np.float32] | None


class LlamaStep:
    """One model. Not for two threads at once; `run` releases the GIL and works on `n_threads` threads.

    `embedding` bf16 [vocab, hidden] is used in place and must not be changed; everything else is packed. `rope`: f32
    [positions, 2, head_dim / 2], cos then sin. Raises Overloaded if there is no memory."""

    def __init__(
        self,
        library: Path,
        shape: StepShape,
        rope: torch.Tensor,
        *,
        n_threads: int,
        amx: bool,
        int8: bool,
    ) -> None:
        shape.check()
        self.shape = shape
        self._library = ctypes.CDLL(str(library))
        self._library.kvmesh_open.restype = c_void_p
        if amx and self._library.kvmesh_amx() != 0:
            raise NotImplementedHere("the kernel does not grant AMX")
        rope = rope.contiguous().float()
        self._model = c_void_p(
            self._library.kvmesh_open(
                byref(
                    _Shape(
                        n_layers=shape.n_layers,
                        hidden=shape.hidden,
                        n_q=shape.n_heads,
                        n_kv=shape.n_kv_heads,
                        head_dim=shape.head_dim,
                        ffn=shape.ffn,
                        vocab=shape.vocab,
                        max_rows=shape.max_rows,
                        max_logit_rows=shape.max_logit_rows,
                        n_threads=n_threads,
                        amx=amx,
                        int8=int8,
                        norm_eps=shape.norm_eps,
                    )
                ),
                c_void_p(rope.data_ptr()),
                rope.shape[0],
            )
        )
        if not self._model:
            raise Overloaded("no memory for the model")
        self._logits = np.empty((shape.max_logit_rows, shape.vocab), dtype=np.float32)
        self._best_ids = np.empty(shape.max_logit_rows, dtype=np.int32)
        self._best = np.empty(shape.max_logit_rows, dtype=np.float32)
        self._embedding: torch.Tensor | None = None
        self._int8 = int8
        self.phase_ns: NDArray[np.int64] | None = None  # [len(PHASES)], added to if set

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self._library.kvmesh_close(self._model)

    def set_layer(
        self,
        index: int,
        *,
        attention_norm: torch.Tensor,
        ffn_norm: torch.Tensor,
        qkv: torch.Tensor,
        attention_out: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
    ) -> None:
        """Pack one layer: norms f32, matrices bf16 [out, in]."""
        s = self.shape
        q, kv = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
        source = _LayerSource(
            attention_norm=_pointer(attention_norm, (s.hidden,), torch.float32),
            ffn_norm=_pointer(ffn_norm, (s.hidden,), torch.float32),
            qkv=_pointer(qkv, (q + 2 * kv, s.hidden), torch.bfloat16),
            attention_out=_pointer(attention_out, (s.hidden, q), torch.bfloat16),
            gate_up=_pointer(gate_up, (2 * s.ffn, s.hidden), torch.bfloat16),
            down=_pointer(down, (s.hidden, s.ffn), torch.bfloat16),
        )
        if self._library.kvmesh_set_layer(self._model, index, byref(source)) != 0:
            raise Overloaded(f"no memory for the weights of layer {index}")

    def set_ends(self, *, embedding: torch.Tensor, norm: torch.Tensor, head: torch.Tensor) -> None:
        """Embedding, last norm and output head."""
        s = self.shape
        table = (s.vocab, s.hidden)
        failed = self._library.kvmesh_set_ends(
            self._model,
            c_void_p(_pointer(embedding, table, torch.bfloat16)),
            c_void_p(_pointer(norm, (s.hidden,), torch.float32)),
            c_void_p(_pointer(head, table, torch.bfloat16)),
        )
        if failed:
            raise Overloaded("no memory for the output head")
        self._embedding = embedding  # the step reads it in place

    @property
    def weight_bytes(self) -> int:
        """What a step reads of packed matrices, each once."""
        s = self.shape
        q, kv = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
        layer = s.hidden * (2 * q + 2 * kv + 3 * s.ffn)
        return (s.n_layers * layer + s.vocab * s.hidden) * (1 if self._int8 else 2)

    def run(self, step: StepInput, k: torch.Tensor, v: torch.Tensor) -> StepOutput:
        """Compute a step over the pool `k`, `v` bf16 [n_layers, slots, n_kv_heads, head_dim], writing its K and V."""
        s, n = self.shape, step.n_logit_rows
        assert len(step.token_ids) <= s.max_rows
        assert n <= s.max_logit_rows
        assert k.dtype is v.dtype is torch.bfloat16
        self._library.kvmesh_step(
            self._model,
            byref(
                _Step(
                    n_sequences=len(step.position),
                    n_logit_rows=n,
                    keep_logits=step.keep_logits,
                    row_start=step.row_start.ctypes.data,
                    position=step.position.ctypes.data,
                    table_start=step.table_start.ctypes.data,
                    logit_row=step.logit_row.ctypes.data,
                    token_ids=step.token_ids.ctypes.data,
                    tables=step.tables.ctypes.data,
                    k=k.data_ptr(),
                    v=v.data_ptr(),
                    layer_size=k.stride(0),
                    logits=self._logits.ctypes.data,
                    best_ids=self._best_ids.ctypes.data,
                    best=self._best.ctypes.data,
                    phase_ns=None if self.phase_ns is None else self.phase_ns.ctypes.data,
                )
            ),
        )
        return StepOutput(
            best_ids=self._best_ids[:n], best=self._best[:n], logits=self._logits[:n] if step.keep_logits else None
        )


def _pointer(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    assert tuple(tensor.shape) == shape, (tensor.shape, shape)
    assert tensor.dtype is dtype
    assert tensor.is_contiguous()
    return tensor.data_ptr()
