"""What `kvmesh bench kvtc` measures beside the curve: allocation against simpler ones, the joint basis against one a
head, and speeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from core_node.kvtc.design import GROUP, Measured, grouped, measure
from core_node.kvtc.twin import torch_maps
from mesh.kv.chunks import CHUNK_TOKENS
from mesh.kv.codecs import codec_named
from mesh.kv.elements import convert
from mesh.kv.geometry import KvDtype
from mesh.kv.kvtc.allocate import allocate, greedy
from mesh.kv.kvtc.artifact import Artifact
from mesh.kv.kvtc.codec import SINK_TOKENS, WINDOW_TOKENS, KvtcCodec
from mesh.kv.kvtc.quantise import code_bits, quantise, zones_of
from mesh.kv.kvtc.transform import blockwise, features_of
from mesh.kv.slab import KvSlab

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
_Q8_RATIO = 16 / 8.5
_TOKENS_EVERY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Studies:
    """`joint_gain`: coefficients that bases of single heads need over those of the joint one, at its error with half
    its rank (the lesser of K and V). The errors of the allocation over uniform's and greedy's: the worst over rates."""

    joint_gain: float
    dp_over_uniform: float
    dp_over_greedy: float
    notes: tuple[str, ...]


def context_ratio(ratio: float, n_tokens: int) -> float:
    """f16 bytes over bytes of a whole context, sinks and window in q8_0."""
    kept = SINK_TOKENS + WINDOW_TOKENS
    return n_tokens / ((n_tokens - kept) / ratio + kept / _Q8_RATIO)


def studies(artifact: Artifact, slabs: Sequence[KvSlab]) -> Studies:
    """Over weighted features of test windows: a third to fit on, a third to design on, a third to report."""
    parts = [_weighted(artifact, slab) for slab in slabs]
    thirds = [np.concatenate(parts[i::3], axis=1) for i in range(3)] if len(parts) >= 3 else [parts[0]] * 3
    fit, middle, last = (_coded(artifact, x) for x in thirds)
    measured = measure(fit, [middle], artifact.ranks[0], [0.0])
    report = _measure_again(measured, last)
    uniform, best_greedy, lines = [], [], []
    for choice in range(1, measured.bits.shape[1]):
        budget = float(measured.bits[:, choice].sum())
        if not 500 < budget < 20_000:
            continue
        chosen = allocate(grouped(measured.bits), grouped(measured.errors), budget)
        simple = greedy(grouped(measured.bits), grouped(measured.errors), budget)
        error, rate = _total(report, chosen)
        uniform.append(error / report.errors[:, choice].sum())
        best_greedy.append(
            grouped(measured.errors)[np.arange(len(chosen)), chosen].sum()
            / grouped(measured.errors)[np.arange(len(chosen)), simple].sum()
        )
        lines.append(f"{rate:.0f} bits: {uniform[-1]:.3f} of uniform ({report.bits[:, choice].sum():.0f} bits)")
    gains = [_joint_gain(artifact, thirds[0][s], thirds[2][s], s) for s in range(2)]
    return Studies(
        joint_gain=min(gains),
        dp_over_uniform=max(uniform, default=float("nan")),
        dp_over_greedy=max(best_greedy, default=float("nan")),
        notes=("DP's error on text it was not designed on: " + "; ".join(lines),
               f"per-head over joint coefficients: K {gains[0]:.2f}, V {gains[1]:.2f}"),
    )  # fmt: skip


def speeds(artifact: Artifact, setting: str, slab: KvSlab, threads: int) -> Mapping[str, float]:
    """Tokens a second: `encode` of several chunks at a time on the core's threads, `decode_wall` of one in numpy;
    `encode_core` and `decode` over the CPU time of the process, which is what other work on the machine does
    not change, with one thread for products."""
    torch.set_num_threads(threads)
    exact = codec_named("q8_0")
    chosen = artifact.setting(setting)
    twin = KvtcCodec(artifact, chosen, exact, torch_maps(artifact))
    plain = KvtcCodec(artifact, chosen, exact)
    half = convert(slab, KvDtype.F16).tokens(SINK_TOKENS, SINK_TOKENS + CHUNK_TOKENS)
    data = twin.encode(half)

    def decode() -> None:
        plain.decode(data, start=half.start, n_tokens=half.n_tokens, geometry=artifact.geometry, dtype=KvDtype.F16)

    with ThreadPoolExecutor(threads) as pool:
        at_once = 2 * threads
        encode = _best(lambda: list(pool.map(twin.encode, [half] * at_once)))
    with threadpool_limits(1):
        one, back = _best(lambda: plain.encode(half)), _best(decode)
    return {
        "encode": at_once * half.n_tokens / encode[0],
        "encode_core": half.n_tokens / one[1],
        "decode_wall": half.n_tokens / back[0],
        "decode": half.n_tokens / back[1],
        "basis_mb": artifact.basis_bytes / 1e6,
    }


def _best(work: Callable[[], object], times: int = 12) -> tuple[float, float]:
    """Least wall and CPU seconds of a call."""
    wall, cpu = [], []
    for _ in range(times):
        started, used = time.perf_counter(), time.process_time()
        work()
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - used)
    return min(wall), min(cpu)


def _weighted(artifact: Artifact, slab: KvSlab) -> F32:
    features = features_of(slab, artifact.geometry)[:, SINK_TOKENS::_TOKENS_EVERY]
    return blockwise(np.ascontiguousarray(features - artifact.mean[:, None]), artifact.weights)


def _coded(artifact: Artifact, weighted: F32) -> F32:
    """Coefficients of weighted features, K's beside V's, V's less what K's tell of them."""
    k, v = (weighted[s] @ artifact.basis[s] for s in range(2))
    v[:, : artifact.predict.shape[1]] -= k @ artifact.predict
    return np.concatenate([k, v], axis=1)


def _measure_again(measured: Measured, coefficients: F32) -> Measured:
    """Rates and errors of the same steps and tables on other text."""
    bits, errors = np.zeros_like(measured.bits), np.empty_like(measured.errors)
    errors[:, 0] = np.square(coefficients).mean(axis=0)
    zones = zones_of(measured.tables)
    for i, step in enumerate(measured.steps):
        q = quantise(coefficients, step, zones.of(measured.contexts[:, i + 1]))
        errors[:, i + 1] = np.square(coefficients - q * step).mean(axis=0)
        contexts = np.broadcast_to(measured.contexts[:, i + 1], q.shape)
        bits[:, i + 1] = code_bits(q, contexts, measured.tables).mean(axis=0)
    return Measured(
        steps=measured.steps,
        bits=bits,
        errors=errors,
        contexts=measured.contexts,
        gains=measured.gains,
        window_errors=errors[None],
        outside=measured.outside,
        tables=measured.tables,
        rank_k=measured.rank_k,
    )


def _total(measured: Measured, chosen: NDArray[np.intp]) -> tuple[float, float]:
    """Error and bits."""
    each = np.repeat(chosen, GROUP)
    rows = np.arange(len(each))
    return float(measured.errors[rows, each].sum()), float(measured.bits[rows, each].sum())


def _joint_gain(artifact: Artifact, fit: F32, test: F32, stream: int) -> float:
    """Coefficients of per-head bases (the largest over all heads, fit on text of the test's own kind) for the joint
    basis's error with half its rank, over that half."""
    blocks, dim = artifact.weights.shape[1:3]
    half = artifact.ranks[stream] // 2
    total = float(np.square(test).sum())
    target = total - float(np.square(test @ artifact.basis[stream][:, :half]).sum())
    parts = fit.reshape(-1, blocks, dim).transpose(1, 0, 2)
    _, vectors = np.linalg.eigh(np.matmul(parts.transpose(0, 2, 1), parts))
    own = np.matmul(test.reshape(-1, blocks, dim).transpose(1, 0, 2), vectors)
    usual = np.square(np.matmul(parts, vectors)).mean(axis=1).ravel()
    energy = np.square(own).sum(axis=1).ravel()[np.argsort(-usual)]
    left = total - np.cumsum(energy)
    return float((np.argmax(left <= target) + 1) / half)
