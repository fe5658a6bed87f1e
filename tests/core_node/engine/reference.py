"""A plain dense forward pass of the `llama` and `qwen3` architectures, written apart from the engine.

Whole sequence at once, no cache, no blocks, f32 (or f64), from weights in Hugging Face's layout with RoPE on
(i, i + head_dim / 2) pairs, heads repeated and scores made by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Weights by Hugging Face's names."""

    weights: Mapping[str, torch.Tensor]
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_base: float
    norm_eps: float
    inverse_frequencies: tuple[float, ...] | None = None  # None: those of rope_base, unscaled

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[n_tokens, vocab]: row i predicts token i + 1."""
        w, d, n = self.weights, self.head_dim, len(token_ids)
        x = w["model.embed_tokens.weight"][list(token_ids)]
        frequencies = self.rope_base ** (-torch.arange(0, d, 2).double() / d)
        if self.inverse_frequencies is not None:
            frequencies = torch.tensor(self.inverse_frequencies, dtype=torch.float64)
        angle = torch.arange(n)[:, None].double() * frequencies
        cos, sin = (f(torch.cat((angle, angle), -1)).to(x.dtype) for f in (torch.cos, torch.sin))
        past = torch.tril(torch.ones(n, n, dtype=torch.bool))
        for i in range(self.n_layers):
            p = f"model.layers.{i}."
            h = self._norm(x, w[p + "input_layernorm.weight"])
            q = self._heads(h @ w[p + "self_attn.q_proj.weight"].T)
            k = self._heads(h @ w[p + "self_attn.k_proj.weight"].T)
            v = self._heads(h @ w[p + "self_attn.v_proj.weight"].T)
            if p + "self_attn.q_norm.weight" in w:
                q, k = (self._norm(t, w[p + f"self_attn.{x}_norm.weight"]) for t, x in ((q, "q"), (k, "k")))
            q, k = q * cos + _half_turned(q) * sin, k * cos + _half_turned(k) * sin
            k, v = (t.repeat_interleave(self.n_heads // self.n_kv_heads, 0) for t in (k, v))
            scores = (q @ k.transpose(1, 2) / d**0.5).masked_fill(~past, float("-inf"))
            mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)
            x = x + mixed @ w[p + "self_attn.o_proj.weight"].T
            h = self._norm(x, w[p + "post_attention_layernorm.weight"])
            gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
            x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return self._norm(x, w["model.norm.weight"]) @ head.T

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], -1, self.head_dim).transpose(0, 1)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.norm_eps).sqrt() * weight


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


@dataclass(slots=True)
class Agreement:
    """Greedy tokens against the reference, teacher-forced along the engine's own output: if all agree, the
    engine's output is the reference's greedy output."""

    equal: int = 0
    near_ties: int = 0  # different, where the reference's two best logits are within `margin`
    wrong: int = 0
    margin: float = 1e-3

    def add(self, logits: torch.Tensor, prompt_tokens: int, generated: Sequence[int]) -> None:
        """`logits` of prompt and generated tokens (the last one's row is not used)."""
        rows = logits[prompt_tokens - 1 : prompt_tokens - 1 + len(generated)]
        best = rows.topk(2, dim=-1).values
        for token_id, choice, gap in zip(
            generated, rows.argmax(-1).tolist(), (best[:, 0] - best[:, 1]).tolist(), strict=True
        ):
            if token_id == choice:
                self.equal += 1
            elif gap <= self.margin:
                self.near_ties += 1
            else:
                self.wrong += 1

    def __str__(self) -> str:
        total = self.equal + self.near_ties + self.wrong
        return f"{total} tokens: {self.equal} equal, {self.near_ties} near ties that differ, {self.wrong} wrong"
