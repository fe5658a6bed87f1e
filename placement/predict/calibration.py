"""What a node's answers really took over what was predicted, as an entry measures it. Pure.

For each node a window of the last ratios of measured to predicted time (before any correction), for TTFT and for TPOT;
the median of the window corrects later predictions. Half of the window may be wrong without moving a median far, so
a stalled client or a lucky hit does no harm; what is old is left out; with few samples the correction is drawn towards
1; it is bounded. A node that tells speeds or loads that are not true is found out here: it is predicted by what it
does, and named once it is far from what it says. Memory: `_MOST_NODES` nodes with `_WINDOW` samples of both kinds,
about 1.5 KiB a node.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from statistics import median

_WINDOW = 32
_MEMORY_S = 300.0
_MOST_NODES = 16_384
_PRIOR_SAMPLES = 2.0  # as many samples that say 1
_MOST_SCALE = 32.0
_LIAR_RATIO = 3.0
_LIAR_SAMPLES = 8
_UNKNOWN_ERROR_RATIO = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What to multiply predictions by, and how far corrected ones usually are off (share of the measured time; 1.0:
    nothing is known)."""

    ttft: float = 1.0
    tpot: float = 1.0
    error_ratio: float = _UNKNOWN_ERROR_RATIO


NEUTRAL = Scale()


class _Window:
    """Log ratios of one kind at one node, with their times."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def add(self, ratio: float, now_s: float) -> None:
        bound = math.log(_MOST_SCALE)
        self._samples.append((now_s, min(max(math.log(ratio), -bound), bound)))

    def fresh(self, now_s: float) -> list[float]:
        """Samples that are not too old. A clock that went back makes none older."""
        return [value for at, value in self._samples if now_s - at <= _MEMORY_S]

    def scale(self, now_s: float) -> tuple[float, float, int]:
        """Correction, usual error of corrected predictions, number of samples."""
        values = self.fresh(now_s)
        if not values:
            return 1.0, _UNKNOWN_ERROR_RATIO, 0
        middle = median(values) * len(values) / (len(values) + _PRIOR_SAMPLES)
        spread = median(abs(math.exp(min(v - middle, 1.0)) - 1.0) for v in values)
        doubt = _PRIOR_SAMPLES / (len(values) + _PRIOR_SAMPLES)  # few samples: the error is drawn towards "unknown"
        return math.exp(middle), spread * (1 - doubt) + _UNKNOWN_ERROR_RATIO * doubt, len(values)


class Calibration:
    """Owned by an entry; on one thread. The node that was seen least lately is forgotten first."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[str, tuple[_Window, _Window]] = OrderedDict()

    def saw(
        self, node_id: str, *, ttft_ratio: float | None = None, tpot_ratio: float | None = None, now_s: float
    ) -> None:
        """A request ran at this node alone: measured over predicted (uncorrected). What cannot be is ignored."""
        windows = self._nodes.get(node_id)
        if windows is None:
            windows = self._nodes[node_id] = (_Window(), _Window())
            if len(self._nodes) > _MOST_NODES:
                self._nodes.popitem(last=False)
        self._nodes.move_to_end(node_id)
        for window, ratio in zip(windows, (ttft_ratio, tpot_ratio), strict=True):
            if ratio is not None and 0 < ratio < math.inf:
                window.add(ratio, now_s)

    def scale(self, node_id: str, now_s: float) -> Scale:
        """What to make of predictions for this node."""
        windows = self._nodes.get(node_id)
        if windows is None:
            return NEUTRAL
        (ttft, ttft_error, _), (tpot, tpot_error, _) = (window.scale(now_s) for window in windows)
        return Scale(ttft=ttft, tpot=tpot, error_ratio=max(ttft_error, tpot_error))

    def liar(self, node_id: str, now_s: float) -> float:
        """How many times slower than it says a node is found to be, if that is far beyond noise; else 0."""
        windows = self._nodes.get(node_id)
        if windows is None:
            return 0.0
        worst = 0.0
        for window in windows:
            values = window.fresh(now_s)
            if len(values) >= _LIAR_SAMPLES:
                worst = max(worst, math.exp(median(values)))
        return worst if worst >= _LIAR_RATIO else 0.0

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Nodes of which something is known."""
        return tuple(self._nodes)
