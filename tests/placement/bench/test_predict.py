"""The prediction benchmark: small runs give their rows, and what it is to show shows in them."""

from __future__ import annotations

from mesh.bench.types import BenchContext
from placement.bench.predict import BENCH, Scene, simulate


def context(requests: int) -> BenchContext:
    return BenchContext(settings={**BENCH.defaults, "requests": requests}, progress=lambda done, total, what: None)


def test_under_steady_load_half_of_the_predictions_are_near() -> None:
    row = simulate(Scene(name="half", load=0.5), context(160))
    assert row["requests"] == 100
    for kind in ("ttft", "tpot", "total"):
        assert float(str(row[f"{kind}_median_error_ratio"])) < 0.3
    assert row["found_liar"] is False


def test_a_node_that_tells_a_multiple_of_its_speed_is_found_out() -> None:
    row = simulate(Scene(name="liar", load=0.4, lie=6.0), context(160))
    assert row["found_liar"] is True
    assert float(str(row["tpot_median_error_ratio"])) < 0.3
