"""What is known of each way to write KV: how small, at what loss, how fast here. Pure values; no artifact, no clock.

A node makes its profiles when it has its model (mesh.kv.profiling.profiles_of) and declares them; placement chooses
among those that both ends declare, with `allowed` as the guard. `loss_ratio` is measured on the node's own model,
never assumed, except where nothing is lost (`raw`, `f16`) or no model is known to feel it (`q8_0`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DEFAULT_MAX_LOSS_RATIO = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecProfile:
    """One codec on one model and machine.

    `codec`: the name for `mesh.kv.codecs.codec_named`, such as "f16", "q8_0", "q4+zstd" or "kvtc:DIGEST16:30x"; equal
    names at two nodes mean the same format, basis included. `ratio`: f16 bytes over bytes, the worst kind of natural
    text of those measured, of the coded region. `loss_ratio`: rise of the continuation perplexity to reckon with (0.01
    is 1 %), on the worst kind of text measured. Speeds in tokens per second of one core, as measured on this machine.
    """

    codec: str
    ratio: float
    loss_ratio: float
    encode_tokens_per_s: float
    decode_tokens_per_s: float


def allowed(
    profiles: Iterable[CodecProfile], max_loss_ratio: float = DEFAULT_MAX_LOSS_RATIO
) -> tuple[CodecProfile, ...]:
    """Those that lose at most `max_loss_ratio`, the smallest first. A loss that is not a number is never allowed."""
    fit = [p for p in profiles if p.loss_ratio <= max_loss_ratio]
    return tuple(sorted(fit, key=lambda p: (-p.ratio, p.loss_ratio, p.codec)))
