"""Progress of loading on a terminal and in a log."""

from __future__ import annotations

import io

from rich.console import Console
from structlog.testing import capture_logs

from core_node.load_view import LoadView

MIB = 1 << 20


def test_a_log_gets_a_line_each_quarter() -> None:
    with capture_logs() as lines, LoadView("m", Console(file=io.StringIO())) as view:
        for done in range(0, 101, 5):
            view.show(done * MIB, 100 * MIB)
    assert [line["done_mib"] for line in lines] == [0, 25, 50, 75, 100]
    assert {line["total_mib"] for line in lines} == {100}
    assert {line["model_id"] for line in lines} == {"m"}


def test_a_terminal_gets_a_bar_with_sizes() -> None:
    out = io.StringIO()
    with capture_logs() as lines, LoadView("m", Console(file=out, force_terminal=True, width=100)) as view:
        view.show(0, 100 * MIB)
        view.show(100 * MIB, 100 * MIB)
        before = out.tell()
    assert not lines
    assert "loading m" in out.getvalue()
    assert "100.0/100.0 MiB" in out.getvalue()
    assert out.tell() == before  # it stood still once all was read


def test_an_empty_model_and_a_failed_load() -> None:
    with LoadView("m", Console(file=io.StringIO(), force_terminal=True)) as view:
        view.show(0, 0)
