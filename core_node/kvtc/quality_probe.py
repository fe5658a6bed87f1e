"""What a codec does to how a model goes on: the continuation of a window from KV that went through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from core_node.kvtc.probe import ModelProbe
from mesh.kv.chunks import chunk_ranges
from mesh.kv.codec_types import Codec
from mesh.kv.elements import convert
from mesh.kv.geometry import KvDtype
from mesh.kv.kvtc.codec import SINK_TOKENS, WINDOW_TOKENS, KvtcCodec
from mesh.kv.slab import KvSlab


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldOut:
    """A window of text with its KV (f32), and of what kind it is."""

    kind: str
    ids: NDArray[np.int64]
    slab: KvSlab


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """`nll`: how much the mean negative log-likelihood of the continuation rose (nats a token). `divergence`: the mean
    Kullback-Leibler divergence from the undisturbed continuation: what `nll` comes to on text that the model itself
    would write, with far less noise. `coded_ratio`: f16 bytes over coded bytes, of the tokens that were coded;
    `excess_ratio`: the part of them that needed the excess or q8_0."""

    nll: float
    divergence: float
    coded_ratio: float
    excess_ratio: float


def loss_of(
    probe: ModelProbe,
    window: HeldOut,
    codecs: Sequence[Codec],
    stop: int,
    *,
    sinks: bool = True,
    recent: bool = True,
) -> Iterator[Loss]:
    """For each codec: the first `stop` tokens' KV through it in chunks as they travel (sinks and the latest tokens
    left alone, unless told otherwise), then the continuation."""
    half = convert(window.slab.tokens(0, stop), KvDtype.F16)
    first, last = SINK_TOKENS if sinks else 0, stop - (WINDOW_TOKENS if recent else 0)
    targets = torch.from_numpy(window.ids[stop + 1 :])[:, None]
    probe.load(half)
    reference = probe.continuation(window.ids, stop)
    reference_nll = -float(reference.gather(1, targets).mean())
    for codec in codecs:
        n_bytes, n_excess = 0, 0
        for start, end in chunk_ranges(first, last):
            data, more = _encode(codec, half.tokens(start, end), sinks)
            n_bytes += len(data)
            n_excess += more
            probe.load(
                codec.decode(data, start=start, n_tokens=end - start, geometry=probe.geometry, dtype=KvDtype.F16)
            )
        log_p = probe.continuation(window.ids, stop)
        yield Loss(
            nll=-float(log_p.gather(1, targets).mean()) - reference_nll,
            divergence=float((reference.exp() * (reference - log_p)).sum(dim=-1).mean()),
            coded_ratio=(last - first) * probe.geometry.f16_bytes_per_token / n_bytes,
            excess_ratio=n_excess / (last - first),
        )
        probe.load(half)


def _encode(codec: Codec, part: KvSlab, sinks: bool) -> tuple[bytes, int]:
    """The bytes, and how many tokens needed more than their coefficients."""
    if not isinstance(codec, KvtcCodec):
        return codec.encode(part), 0
    data, stats = codec.encode_with_stats(part, exact_from=part.stop, sinks=sinks)
    return data, stats.n_excess + stats.n_exact
