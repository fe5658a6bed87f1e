"""The StepModel over the compiled kernels: chunks and block tables to the arrays that they take."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray

from core_node.engine.blocks import blocks_for
from core_node.engine.kv_pool import KvPool
from core_node.engine.rope import rope_table
from core_node.engine.sampler import Logits
from core_node.engine.scheduler import Chunk
from core_node.engine.weights import WeightSource, load_ends, load_layers
from core_node.kernels.build import Variant, best_variant, library
from core_node.kernels.llama_step import LlamaStep, StepInput, StepShape
from mesh.model.description import ModelDescription

_CPU = torch.device("cpu")


class KernelStep:
    """Greedy rows never become Python objects but for their id; logits are kept only if a row asks for them."""

    def __init__(self, step: LlamaStep, name: str, n_threads: int) -> None:
        self.step = step
        self.name = name
        self.n_threads = n_threads

    @classmethod
    def load(
        cls,
        description: ModelDescription,
        source: WeightSource,
        *,
        max_positions: int,
        max_rows: int,
        max_sequences: int,
        n_threads: int,
        int8: bool,
        variant: Variant | None = None,
    ) -> KernelStep:
        """Build the kernels if need be, then pack the weights layer by layer. `variant`: None for the best here.

        Raises NotImplementedHere, with the reason, where this machine or this model's shape is not for them."""
        d = description
        variant = variant or best_variant()
        shape = StepShape(
            n_layers=d.n_layers,
            hidden=d.hidden_size,
            n_heads=d.n_heads,
            n_kv_heads=d.n_kv_heads,
            head_dim=d.head_dim,
            ffn=d.ffn_size,
            vocab=d.vocab_size,
            norm_eps=d.norm_eps,
            max_rows=max_rows,
            max_logit_rows=max_sequences,
        )
        shape.check()
        rope = rope_table(d.head_dim, d.rope_base, d.rope_scaling, max_positions)
        step = LlamaStep(library(variant), shape, rope, n_threads=n_threads, amx=variant.amx, int8=int8)
        ends = load_ends(d, source, torch.bfloat16, _CPU)
        step.set_ends(embedding=ends.embedding, norm=ends.norm, head=ends.head)
        for i, layer in enumerate(load_layers(d, source, torch.bfloat16, _CPU)):
            step.set_layer(
                i,
                attention_norm=layer.attention_norm,
                ffn_norm=layer.ffn_norm,
                qkv=layer.qkv,
                attention_out=layer.attention_out,
                gate_up=layer.gate_up,
                down=layer.down,
            )
        return cls(step, f"kernels, {variant.name}", n_threads)

    def compute(self, chunks: Seq[Chunk], wants_logits: Seq[bool], pool: KvPool, *, only_best: bool) -> Logits:
        output = self.step.run(step_input(chunks, wants_logits, keep_logits=not only_best), pool.k, pool.v)

        def row(i: int) -> NDArray[np.float32]:
            assert output.logits is not None, "only the best was asked for"
            values: NDArray[np.float32] = output.logits[i]
            return values

        finite = (output.best_ids >= 0) & np.isfinite(output.best)
        return Logits(best_ids=output.best_ids.tolist(), finite=finite.tolist(), row=row)


def step_input(chunks: Seq[Chunk], wants_logits: Seq[bool], *, keep_logits: bool) -> StepInput:
    """Arrays of one step."""
    token_ids: list[int] = []
    tables: list[int] = []
    row_start, table_start, logit_row = [0], [], []
    n_logit_rows = 0
    for chunk, wanted in zip(chunks, wants_logits, strict=True):
        sequence = chunk.sequence
        token_ids += sequence.token_ids[chunk.start : chunk.stop]
        row_start.append(len(token_ids))
        table_start.append(len(tables))
        tables += sequence.blocks[: blocks_for(chunk.stop)]
        logit_row.append(n_logit_rows if wanted else -1)
        n_logit_rows += wanted
    return StepInput(
        token_ids=np.array(token_ids, dtype=np.int32),
        row_start=np.array(row_start, dtype=np.int32),
        position=np.array([chunk.start for chunk in chunks], dtype=np.int32),
        table_start=np.array(table_start, dtype=np.int32),
        tables=np.array(tables, dtype=np.int32),
        logit_row=np.array(logit_row, dtype=np.int32),
        n_logit_rows=n_logit_rows,
        keep_logits=keep_logits,
    )
