"""Calibration of a kvtc artifact: one basis for K and one for V over all layers and heads, settings by measured rate
and error, and what each setting does to the continuation of held-out text.

Steps: prefill windows of varied text; from most of them mean and covariance of the features, and from some the
gradients of the continuation by the features (so that the basis spends its coefficients on what the output feels);
eigenvectors; from the windows held out, rates and errors of every step, an allocation for each target ratio, and the
perplexity of the last tokens of each window when all before but sinks and window went through the codec.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

import numpy as np
import torch
from numpy.typing import NDArray

from core_node.kvtc.design import GROUP, Measured, design, measure, predict_v
from core_node.kvtc.probe import ModelProbe
from core_node.kvtc.quality_probe import HeldOut, Loss, loss_of
from core_node.kvtc.statistics import Covariance, Sensitivity, fast_dtype, leading_eigenvectors, weigh_both_sides
from core_node.kvtc.texts import Text, windows
from mesh.errors import InvalidRequest
from mesh.kv.chunks import CHUNK_TOKENS
from mesh.kv.codec_types import Codec
from mesh.kv.codecs import codec_named
from mesh.kv.elements import convert
from mesh.kv.geometry import KvDtype
from mesh.kv.kvtc.artifact import Artifact, Probed, Quality, Setting, make_artifact, n_features
from mesh.kv.kvtc.codec import SINK_TOKENS, WINDOW_TOKENS, KvtcCodec
from mesh.kv.kvtc.quantise import quantise
from mesh.kv.kvtc.transform import NumpyMaps, features_of
from mesh.kv.slab import KvSlab
from mesh.model.description import ModelDescription
from mesh.model.tokenizer import load_tokenizer

Progress = Callable[[int, int, str], None]
_F16_BITS = 16
_PLAIN = ("q8_0", "q4")  # probed too, each with Zstandard over it
_KEPT_EVERY = 2  # of the fit windows' tokens are kept for the prediction of V
_STATISTICS_EVERY = 4  # of these for magnitudes
_RESIDUAL_EVERY = 8
_MAX_HELD_OUT_TOKENS = 2500  # for rates and errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to measure. `targets`: f16 bits over coded bits, before what the error bound adds."""

    rank_k: int = 608  # with more, settings of 30 times and more gain next to nothing, and all speeds fall
    rank_v: int = 1120  # V is less redundant
    window_tokens: int = 1024
    fit_windows: int = 16
    held_out_windows: int = 4
    sensitivity_every: int = 2  # of the fit windows
    continuation_tokens: int = 128
    targets: tuple[int, ...] = (24, 32, 44, 60, 80)
    typical_ratio: float = 32.0  # that K is quantised for when V's prediction is learned
    shrink_ratio: float = 0.1
    floor_ratio: float = 0.02
    bound_ratio: float = 1.05  # of the error of the middle one of the held-out windows
    seed: int = 1

    def __post_init__(self) -> None:
        least = SINK_TOKENS + WINDOW_TOKENS + self.continuation_tokens
        if self.window_tokens < 2 * least or self.fit_windows < 1 or self.held_out_windows < 1 or not self.targets:
            raise InvalidRequest(f"calibration needs windows of at least {2 * least} tokens", field="window_tokens")
        if self.rank_k % GROUP or self.rank_v % GROUP:
            raise InvalidRequest(f"ranks must be multiples of {GROUP}", field="rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """`measured`: the table that settings were designed from."""

    artifact: Artifact
    data: bytes
    measured: Measured


def calibrate(
    description: ModelDescription,
    texts: Sequence[Text],
    plan: Plan,
    progress: Progress = lambda done, total, what: None,
) -> Calibration:
    """Blocks for minutes; uses torch's threads. Raises InvalidRequest (text too short, model that cannot be read)."""
    generator = torch.Generator().manual_seed(plan.seed)
    fit, held_out = _split(texts, description, plan)
    probe = ModelProbe(description, fast_dtype(), plan.window_tokens)
    basis = _learn(probe, fit, plan, generator, progress)
    held: list[HeldOut] = []
    for i, (kind, ids) in enumerate(held_out):
        progress(i, len(held_out), "held-out windows")
        held.append(
            HeldOut(kind=kind, ids=ids, slab=probe.prefill(ids[: plan.window_tokens - plan.continuation_tokens]))
        )
    if probe.dtype is not torch.float32:  # small losses drown in the noise of lesser arithmetic
        probe = ModelProbe(description, torch.float32, plan.window_tokens)
    measured = _measure(basis, held, description, plan)
    settings = tuple(
        design(measured, name=f"{target}x", bits_per_token=_bits(description) / target, bound_ratio=plan.bound_ratio)
        for target in plan.targets
        if _bits(description) / target >= 1
    )
    parts = _Parts(description, basis, measured, _residual(basis, held, description), _notes(fit, held_out))
    draft = parts.artifact(settings)[0]
    artifact, data = parts.artifact(*_probe_all(draft, held, probe, plan, progress))
    return Calibration(artifact=artifact, data=data, measured=measured)


@dataclass(frozen=True, slots=True)
class _Basis:
    """f32: `mean` [2, F], `weights` [2, B, D, D], `vectors` [F, R_K] and [F, R_V], `predict` [R_K, P]; `fit`: what is
    coded of some tokens' coefficients, K's beside V's; `k_step`: a usual quantiser's."""

    mean: NDArray[np.float32]
    weights: NDArray[np.float32]
    vectors: tuple[NDArray[np.float32], NDArray[np.float32]]
    predict: NDArray[np.float32]
    fit: NDArray[np.float32]
    k_step: float

    def weigh(self, features: NDArray[np.float32]) -> torch.Tensor:
        """Weighted distance to the mean [2, n, F]."""
        blocks, dim = self.weights.shape[1:3]
        centred = torch.from_numpy(features - self.mean[:, None]).view(2, -1, blocks, dim).transpose(1, 2)
        return (centred @ torch.from_numpy(self.weights)).transpose(1, 2).reshape(features.shape)

    def coefficients(self, weighted: torch.Tensor) -> torch.Tensor:
        """[n, R_K + R_V]."""
        return torch.cat([weighted[s] @ torch.from_numpy(self.vectors[s]) for s in range(2)], dim=1)

    def coded(self, coefficients: NDArray[np.float32]) -> NDArray[np.float32]:
        """The same with V's less what K's, once quantised, tell of them."""
        rank_k, predicted = self.predict.shape
        out = coefficients.copy()
        k = quantise(coefficients[:, :rank_k], np.float32(self.k_step)) * np.float32(self.k_step)
        out[:, rank_k : rank_k + predicted] -= k @ self.predict
        return out


@dataclass(frozen=True, slots=True)
class _Parts:
    description: ModelDescription
    basis: _Basis
    measured: Measured
    residual: NDArray[np.float32]
    notes: str

    def artifact(self, settings: tuple[Setting, ...], probed: tuple[Probed, ...] = ()) -> tuple[Artifact, bytes]:
        return make_artifact(
            geometry=self.description.geometry,
            weights_lineage=self.description.weights_lineage,
            mean=self.basis.mean,
            weights=self.basis.weights,
            basis=self.basis.vectors,
            predict=self.basis.predict,
            residual=self.residual,
            frequencies=self.measured.tables.frequencies.astype(np.uint16),
            settings=settings,
            probed=probed,
            notes=self.notes,
        )


def _bits(description: ModelDescription) -> int:
    return _bits_of(n_features(description.geometry))


def _bits_of(features: int) -> int:
    return 2 * features * _F16_BITS


def _split(
    texts: Sequence[Text], description: ModelDescription, plan: Plan
) -> tuple[list[tuple[str, NDArray[np.int64]]], list[tuple[str, NDArray[np.int64]]]]:
    """Windows to fit on and windows held out, each kind in both if it has two windows."""
    n = plan.fit_windows + plan.held_out_windows
    cut = windows(texts, load_tokenizer(description.path), n_windows=n, window_tokens=plan.window_tokens)
    every = max(2, round(n / plan.held_out_windows))
    total = Counter(kind for kind, _ in cut)
    out_of = {kind: max(1, round(m / every)) if m > 1 else 0 for kind, m in total.items()}
    middles = {kind: {(2 * i + 1) * total[kind] // (2 * h) for i in range(h)} for kind, h in out_of.items()}
    seen: Counter[str] = Counter()
    fit: list[tuple[str, NDArray[np.int64]]] = []
    held_out: list[tuple[str, NDArray[np.int64]]] = []
    for kind, ids in cut:
        (held_out if seen[kind] in middles[kind] else fit).append((kind, ids))
        seen[kind] += 1
    if not held_out:
        held_out, fit = fit[-1:], fit[:-1] or fit
    return fit, held_out


def _learn(
    probe: ModelProbe,
    fit: Sequence[tuple[str, NDArray[np.int64]]],
    plan: Plan,
    generator: torch.Generator,
    progress: Progress,
) -> _Basis:
    geometry = probe.geometry
    n, blocks, dim = n_features(geometry), geometry.n_layers * geometry.n_kv_heads, geometry.head_dim
    covariances = [Covariance(n), Covariance(n)]
    felt = [Sensitivity(blocks, dim), Sensitivity(blocks, dim)]
    start = plan.window_tokens - plan.continuation_tokens
    some: list[NDArray[np.float32]] = []
    for i, (_, ids) in enumerate(fit):
        progress(i, len(fit), "windows")
        features = features_of(probe.prefill(ids), geometry)[:, SINK_TOKENS:]
        some.append(features[:, ::_KEPT_EVERY].astype(np.float16))
        for s in range(2):
            covariances[s].add(torch.from_numpy(features[s]))
        if i % plan.sensitivity_every == 0:
            gradients = probe.sensitivity(ids, start, generator)[:, SINK_TOKENS : start - WINDOW_TOKENS]
            for s in range(2):
                felt[s].add(torch.from_numpy(np.ascontiguousarray(gradients[s])))
    progress(len(fit), len(fit), "basis")
    unit = (felt[0].mean + felt[1].mean) / 2  # K and V in one unit: a bit goes where it saves most in either
    means, weights, vectors = [], [], []
    for s, rank in enumerate((plan.rank_k, plan.rank_v)):
        mean, covariance = covariances[s].result()
        root = felt[s].weights(plan.shrink_ratio, plan.floor_ratio, unit).half().float()
        leading = leading_eigenvectors(weigh_both_sides(covariance, root), min(rank, n // GROUP * GROUP), generator)
        vectors.append(leading.numpy())
        means.append(mean)
        weights.append(root)
    basis = _Basis(
        mean=torch.stack(means).numpy(),
        weights=torch.stack(weights).numpy(),
        vectors=(vectors[0], vectors[1]),
        predict=np.empty((vectors[0].shape[1], 0), dtype=np.float32),
        fit=np.empty((0, 0), dtype=np.float32),
        k_step=1.0,
    )
    fitted = [basis.coefficients(basis.weigh(x.astype(np.float32))).numpy() for x in some]
    coefficients = np.concatenate(fitted)
    k_step, predict = predict_v(coefficients, basis.vectors[0].shape[1], _bits_of(n) / plan.typical_ratio)
    basis = replace(basis, predict=predict, k_step=k_step)
    return replace(basis, fit=basis.coded(coefficients[::_STATISTICS_EVERY]))


def _middle(slab_features: NDArray[np.float32], plan: Plan) -> NDArray[np.float32]:
    stop = plan.window_tokens - plan.continuation_tokens - WINDOW_TOKENS
    return slab_features[:, SINK_TOKENS:stop]


def _measure(basis: _Basis, held: Sequence[HeldOut], description: ModelDescription, plan: Plan) -> Measured:
    every = max(1, len(held) * plan.window_tokens // _MAX_HELD_OUT_TOKENS)
    coefficients, outside = [], []
    for window in held:
        features = _middle(features_of(window.slab, description.geometry), plan)[:, ::every]
        weighted = basis.weigh(np.ascontiguousarray(features))
        c = basis.coefficients(weighted)
        outside.append(max(0.0, float(weighted.square().sum() - c.square().sum()) / len(c)))
        coefficients.append(basis.coded(c.numpy()))
    return measure(basis.fit, coefficients, basis.vectors[0].shape[1], outside)


def _residual(basis: _Basis, held: Sequence[HeldOut], description: ModelDescription) -> NDArray[np.float32]:
    """Mean magnitude of what all coefficients leave, by block, over its mean."""
    blocks, dim = basis.weights.shape[1:3]
    total = np.zeros((2, blocks))
    for window in held:
        features = features_of(window.slab, description.geometry)[:, SINK_TOKENS::_RESIDUAL_EVERY]
        weighted = basis.weigh(np.ascontiguousarray(features)).numpy()
        for s in range(2):
            rest = weighted[s] - (weighted[s] @ basis.vectors[s]) @ basis.vectors[s].T
            total[s] += np.abs(rest).reshape(-1, blocks, dim).sum(axis=(0, 2))
    relative: NDArray[np.float64] = np.maximum(total / total.mean(), 1e-3)
    return relative.astype(np.float32)


def _probe_all(
    draft: Artifact, held: Sequence[HeldOut], probe: ModelProbe, plan: Plan, progress: Progress
) -> tuple[tuple[Setting, ...], tuple[Probed, ...]]:
    """The settings with their quality, by kind of text, and that of codecs that need no basis. Zstandard loses nothing
    more, so that only its ratio is measured."""
    exact = codec_named("q8_0")
    maps = NumpyMaps(draft)
    codecs: list[Codec] = [KvtcCodec(draft, setting, exact, maps) for setting in draft.settings]
    codecs += [codec_named(name) for name in _PLAIN]
    found: dict[tuple[str, str], list[Loss]] = {}
    for i, window in enumerate(held):
        progress(i, len(held), "perplexity of every setting")
        stop = plan.window_tokens - plan.continuation_tokens
        for codec, loss in zip(codecs, loss_of(probe, window, codecs, stop), strict=True):
            found.setdefault((codec.name, window.kind), []).append(loss)
            if codec.name in _PLAIN:
                packed = replace(loss, coded_ratio=loss.coded_ratio * _zstd_gain(codec, window.slab))
                found.setdefault((f"{codec.name}+zstd", window.kind), []).append(packed)

    def quality(name: str) -> tuple[Quality, ...]:
        return tuple(_quality(kind, losses) for (codec, kind), losses in found.items() if codec == name)

    settings = tuple(replace(s, quality=quality(codec.name)) for s, codec in zip(draft.settings, codecs, strict=False))
    return settings, tuple(
        Probed(codec=name + suffix, quality=quality(name + suffix)) for name in _PLAIN for suffix in ("", "+zstd")
    )


def _zstd_gain(codec: Codec, slab: KvSlab) -> float:
    """Plain bytes over compressed ones, of one chunk of the window."""
    part = convert(slab.tokens(SINK_TOKENS, SINK_TOKENS + CHUNK_TOKENS), KvDtype.F16)
    return len(codec.encode(part)) / len(codec_named(f"{codec.name}+zstd").encode(part))


def _quality(kind: str, losses: Sequence[Loss]) -> Quality:
    nll, divergence, ratio = np.asarray([(x.nll, x.divergence, x.coded_ratio) for x in losses]).T
    spread = float(nll.std(ddof=1)) if len(nll) > 1 else math.nan
    return Quality(
        text=kind,
        loss_ratio=math.expm1(float(nll.mean())),
        loss_stderr_ratio=0.0 if math.isnan(spread) else spread / math.sqrt(len(nll)),
        divergence_ratio=math.expm1(float(divergence.mean())),
        coded_ratio=float(1.0 / (1.0 / ratio).mean()),
        windows=len(nll),
    )


def _notes(fit: Sequence[tuple[str, object]], held_out: Sequence[tuple[str, object]]) -> str:
    counts = {kind: sum(k == kind for k, _ in fit) for kind, _ in fit}
    text = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    return f"kvmesh {version('kvmesh')}; fit on windows of {text}; {len(held_out)} held out"
