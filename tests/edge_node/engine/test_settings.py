"""Settings are checked when they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_node.engine.settings import EdgeEngineSettings
from mesh.errors import InvalidRequest

GOOD: dict[str, Any] = {"model_path": Path("m.gguf"), "model_id": "m", "n_threads": 1}


def test_defaults_are_sound() -> None:
    EdgeEngineSettings(**GOOD)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_threads", 0),
        ("n_ctx_tokens", 63),
        ("max_context_tokens", 0),
        ("max_running", 0),
        ("max_sequences", 8),  # all of them running, and none left for a hold
        ("max_sequences", 256),
        ("max_step_tokens", 7),
        ("max_waiting", -1),
        ("transfer_bytes", 0),
        ("max_stall_s", 0.0),
        ("start_timeout_s", -1.0),
        ("restart_wait_s", float("nan")),
        ("hang_timeout_s", 0.0),
        ("restart_backoff_s", (0.0, 1.0)),
    ],
)
def test_a_value_out_of_range_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field):
        EdgeEngineSettings(**{**GOOD, field: value})
