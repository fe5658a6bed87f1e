"""What all tests share: data files that lie beside the clone, and how Hypothesis runs."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

# No deadline: nothing in these tests is measured in wall-clock time, and machines are shared.
hypothesis.settings.register_profile("kvmesh", deadline=None, print_blob=True)
hypothesis.settings.load_profile("kvmesh")

SHARED = Path(__file__).resolve().parents[1].parent / "shared"


@pytest.fixture(scope="session")
def wikitext() -> str:
    """Prose to prompt with: the validation part of WikiText-2. Skips where it does not lie beside the clone."""
    path = SHARED / "data" / "wikitext2_valid.txt"
    if not path.is_file():
        pytest.skip(f"no {path.name} in ../shared/data beside this clone")
    return path.read_text(encoding="utf-8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for pytest-xdist's loadgroup: tests that start processes or load a model are never beside one another,
    others stay together by file."""
    for item in items:
        heavy = any(item.get_closest_marker(mark) for mark in ("model", "consul", "e2e", "soak"))
        item.add_marker(pytest.mark.xdist_group("heavy" if heavy else str(item.path)))
