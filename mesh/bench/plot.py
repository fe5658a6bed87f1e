"""Pictures of a benchmark's result. matplotlib is optional: a plot that cannot be drawn is refused before measuring."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from mesh.errors import InvalidRequest


def check_plot(setting: str) -> Path | None:
    """The file of a `plot` setting; None for an empty one. Raises InvalidRequest without matplotlib."""
    if not setting:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequest("a plot needs matplotlib: install kvmesh[bench]", field="plot")
    return Path(setting)


def save_bars(path: Path, groups: Sequence[str], bars: Mapping[str, Sequence[float]], y_label: str) -> None:
    """Bars side by side: one group for each name, one bar of each series in it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(bars))
    for n, (name, values) in enumerate(bars.items()):
        axes.bar([i + n * width for i in range(len(values))], list(values), width, label=name)
    middle = width * (len(bars) - 1) / 2
    axes.set_xticks([i + middle for i in range(len(groups))], list(groups))
    axes.set_ylabel(y_label)
    axes.legend()
    figure.savefig(path)
