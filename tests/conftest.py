"""What all tests share: data files that lie beside the clone, and how Hypothesis runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Where tests run two at a time: a file's stay together, and meshes of real processes are never beside one
    another."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::", 1)[0]
            return "tests/e2e" if path.startswith("tests/e2e/") else path

    return ByFile(config, log)
