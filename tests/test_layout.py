"""The source tree as a whole: sizes, import contracts, wire contract, lint and types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("mesh", "placement", "core_node", "edge_node")
MAX_LINES = 600
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.static


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if (ROOT / "mesh" / "v1") not in path.parents]


def passes(*command: str | Path) -> None:
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_module_is_too_long() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources(*PACKAGES, "tests", "deploy")
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}, f"split these; at most {MAX_LINES} lines"


def test_no_module_is_named_utils() -> None:
    assert [path for path in sources(*PACKAGES) if path.stem in {"utils", "util", "helpers", "common", "misc"}] == []


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in sources(*PACKAGES)
        if (text := path.read_text().strip()) and not text.startswith(('"""', 'r"""'))
    ]
    assert silent == []


def test_every_folder_is_a_package() -> None:
    bare = {str(p.parent.relative_to(ROOT)) for p in sources(*PACKAGES) if not (p.parent / "__init__.py").exists()}
    assert bare == set()


def test_imports_point_one_way() -> None:
    passes(BIN / "lint-imports", "--no-cache")


def test_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    protos = sorted((ROOT / "proto" / "mesh" / "v1").glob("*.proto"))
    assert protos
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    passes(sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", *out, *(p.relative_to(ROOT) for p in protos))
    made = {p.name: p.read_text() for p in sorted((tmp_path / "mesh" / "v1").iterdir())}
    kept = {p.name: p.read_text() for p in sorted((ROOT / "mesh" / "v1").glob("*_pb2*"))}
    assert sorted(made) == sorted(kept), "run make proto"
    assert [name for name in made if made[name] != kept[name]] == [], "run make proto"


def test_nothing_else_lives_among_the_stubs() -> None:
    others = [p.name for p in (ROOT / "mesh" / "v1").iterdir() if "_pb2" not in p.name and p.name != "__pycache__"]
    assert others == ["__init__.py"]


def test_lint() -> None:
    passes(BIN / "ruff", "check", ".")
    passes(BIN / "ruff", "format", "--check", ".")


def test_types() -> None:
    passes(BIN / "mypy")
