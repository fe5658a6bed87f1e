"""Tiny engines and checkpoints for the core engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core_node.engine.settings import CoreEngineSettings
from tests.core_node.engine.checkpoints import TinyConfig, random_weights, write_gguf
from tests.core_node.engine.reference import Reference

TINY = TinyConfig()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """For the reference passes on the test's own thread: torch's threads spin, and tests share few cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_weights() -> dict[str, torch.Tensor]:
    return random_weights(TINY)


@pytest.fixture(scope="session")
def tiny_gguf(tiny_weights: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.F32.gguf", tiny_weights, TINY)


@pytest.fixture(scope="session")
def tiny_reference(tiny_weights: dict[str, torch.Tensor]) -> Reference:
    return reference_of(tiny_weights, TINY)


def reference_of(weights: dict[str, torch.Tensor], config: TinyConfig) -> Reference:
    return Reference(
        weights=weights,
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        rope_base=config.rope_base,
        norm_eps=config.norm_eps,
    )


def tiny_settings(path: Path, **changes: object) -> CoreEngineSettings:
    values: dict[str, object] = {
        "model_path": path,
        "model_id": "tiny",
        "dtype": "f32",
        "n_threads": 1,
        "kv_pool_tokens": 1024,
        "max_step_tokens": 64,
        "max_running": 16,
    }
    return CoreEngineSettings(**{**values, **changes})  # type: ignore[arg-type]
