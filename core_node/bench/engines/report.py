"""From the record to what people read: rows, goals, a plot. Figures of one engine are medians over the parts that
count; ratios are medians of the ratios within each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from core_node.bench.engines.installed import EngineCommand, Kind
from core_node.bench.engines.probe import Speed
from core_node.bench.engines.record import Record
from core_node.bench.engines.work import COLD, OPEN_LOOP
from core_node.engine.weights import expected_shapes
from mesh.bench.types import Cell, Direction, Goal
from mesh.errors import InvalidRequest
from mesh.model.description import ModelDescription

OUTPUT, PREFILL, DECODE, TTFT, GOODPUT = (
    "output_tokens_per_s",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "ttft_p50_s",
    "goodput_per_s",
)
MEASURES = (PREFILL, DECODE, OUTPUT, TTFT, "ttft_p95_s", "tpot_p50_s", "tpot_p95_s", GOODPUT)
_FASTER, _AS_FAST, _INT8_FASTER = 1.15, 1.0, 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the machine and the model allow: decode reads all weights once a step, prefill multiplies each weight of
    the layers once a token."""

    speed: Speed
    weight_bytes: int
    layer_parameters: int

    @classmethod
    def of(cls, model: ModelDescription, speed: Speed) -> Limits:
        """Of a model in bf16; a tied embedding is read once, by the head."""
        sizes = {name: _product(shape) for name, shape in expected_shapes(model).items()}
        layers = sum(n for name, n in sizes.items() if name.startswith("blk."))
        head = sizes.get("output.weight", sizes["token_embd.weight"])
        return cls(speed=speed, weight_bytes=2 * (layers + head), layer_parameters=layers)

    def decode_ratio(self, tokens_per_s: float, sequences: int) -> float:
        """Share of the reads' limit that a decode speed of so many sequences together reaches."""
        return tokens_per_s / sequences * self.weight_bytes / self.speed.read_bytes_per_s

    def prefill_ratio(self, tokens_per_s: float) -> float:
        """Share of the products' limit that a prefill speed reaches."""
        return tokens_per_s * 2 * self.layer_parameters / self.speed.flop_per_s


def report_rows(record: Record, engines: Sequence[EngineCommand], limits: Limits) -> list[Mapping[str, Cell]]:
    """One row for each case and engine that was measured."""
    rows: list[Mapping[str, Cell]] = []
    for name in record.rows():
        for engine in engines:
            samples = record.samples(engine.name, name, OUTPUT)
            if not samples:
                continue
            values = {m: record.median(engine.name, name, m) for m in MEASURES}
            decode, prefill = values[DECODE], values[PREFILL]
            rows.append(
                {
                    "case": name,
                    "engine": engine.name,
                    "rounds": len(samples),
                    **{m: None if v is None else float(f"{v:.4g}") for m, v in values.items()},
                    "output_least": float(f"{min(samples):.4g}"),
                    "output_most": float(f"{max(samples):.4g}"),
                    "of_read_limit": _share(decode and limits.decode_ratio(decode, int(name.split()[0]))),
                    "of_flop_limit": _share(prefill and limits.prefill_ratio(prefill)),
                    "to_best_peer": _share(_to_best(record, engines, engine, name, _main_measure(name))),
                }
            )
    return rows


def report_goals(record: Record, engines: Sequence[EngineCommand]) -> list[Goal]:
    """Our engine against the best peer of each kind, and int8 against bf16."""
    goals: list[Goal] = []
    for name in record.rows():
        for ours in (e for e in engines if e.name in ("kvmesh", "kvmesh-http")):
            for measure, goal, direction in _targets(name):
                ratio = _to_best(record, engines, ours, name, measure)
                if ratio is not None:
                    text = f"{ours.kind.value}, {name}: {measure} to the best peer's, ratio"
                    goals.append(Goal(name=text, value=ratio, goal=goal, direction=direction))
    int8 = record.ratio("kvmesh-int8", "kvmesh", "1 at once", DECODE)
    if int8 is not None:
        name = "1 at once: int8 decode to bf16 decode, ratio"
        goals.append(Goal(name=name, value=int8, goal=_INT8_FASTER, direction=Direction.AT_LEAST))
    return goals


def _targets(name: str) -> list[tuple[str, float, Direction]]:
    at_least, at_most = Direction.AT_LEAST, Direction.AT_MOST
    if name == OPEN_LOOP:
        return [(GOODPUT, _AS_FAST, at_least), (TTFT, _AS_FAST, at_most)]
    output = (OUTPUT, _AS_FAST if name == COLD else _FASTER, at_least)
    prefill = [(PREFILL, _AS_FAST, at_least)] if name.endswith("at once") else []
    return [output, *prefill, (TTFT, _AS_FAST, at_most)]


def _main_measure(name: str) -> str:
    return GOODPUT if name == OPEN_LOOP else OUTPUT


def _to_best(
    record: Record, engines: Sequence[EngineCommand], engine: EngineCommand, row: str, measure: str
) -> float | None:
    """Ratio to the peer of the same kind against which it looks worst; None without one, and for a peer itself."""
    if not engine.ours:
        return None
    peers = [e.name for e in engines if not e.ours and e.kind is engine.kind]
    ratios = [r for peer in peers if (r := record.ratio(engine.name, peer, row, measure)) is not None]
    if not ratios:
        return None
    return max(ratios) if measure.endswith("_s") and not measure.endswith("per_s") else min(ratios)


def plot(record: Record, engines: Sequence[EngineCommand], path: Path) -> None:
    """Output tokens/s by case and engine, a panel for each kind; whiskers are the least and the most. Raises
    InvalidRequest without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise InvalidRequest("a plot needs matplotlib: install kvmesh[bench]", field="plot") from exc
    cases = record.rows()
    figure = Figure(figsize=(11, 7), layout="constrained")
    for axes, kind in zip(figure.subplots(len(Kind), 1), Kind, strict=True):
        shown = [e.name for e in engines if e.kind is kind and any(record.samples(e.name, c, OUTPUT) for c in cases)]
        width = 0.8 / max(1, len(shown))
        for i, name in enumerate(shown):
            for x, case in enumerate(cases):
                samples = record.samples(name, case, OUTPUT)
                middle = record.median(name, case, OUTPUT)
                if middle is None:
                    continue
                whiskers = [[middle - min(samples)], [max(samples) - middle]]
                label = name if case == next(c for c in cases if record.samples(name, c, OUTPUT)) else None
                axes.bar(x + i * width, middle, width, yerr=whiskers, capsize=2, color=f"C{i}", label=label)
        axes.set_xticks([x + 0.4 - width / 2 for x in range(len(cases))], cases)
        axes.set_ylabel("output tokens/s")
        axes.set_title(kind.value)
        if shown:
            axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _share(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for side in shape:
        product *= side
    return product
