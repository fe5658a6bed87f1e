"""Loading: what is told while it goes on, what is said in the end, and how running out of memory looks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from core_node.engine import loading, models
from core_node.engine.loading import load_engine
from core_node.engine.models import kernels_refusal, weights_bytes
from core_node.kernels.build import AVX2, Variant
from mesh.errors import InvalidRequest, NotImplementedHere, Overloaded
from mesh.kv.geometry import KvDtype
from mesh.model.description import describe
from tests.core_node.engine.checkpoints import write_folder
from tests.core_node.engine.conftest import TINY, tiny_settings

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_progress_goes_up_to_the_size_of_all_tensors(
    kind: str, tiny_gguf: Path, tiny_weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = tiny_gguf if kind == "gguf" else write_folder(tmp_path / "hf", tiny_weights, TINY)
    told: list[tuple[int, int]] = []
    load_engine(tiny_settings(path), lambda done, total: told.append((done, total)))
    size = sum(w.numel() * 4 for w in tiny_weights.values())
    assert told[0] == (0, size)
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted({done for done, _ in told})


def test_one_line_says_what_was_decided_and_why(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "usable_threads", lambda: 2)
    monkeypatch.setattr(loading, "_free_bytes", lambda _: 1 << 30)
    try:
        with capture_logs() as lines:
            load_engine(tiny_settings(tiny_gguf, n_threads=0, kv_pool_tokens=0))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    (line,) = [entry for entry in lines if entry["event"] == "engine_ready"]
    assert (line["dtype"], line["n_threads"], line["kv_blocks"], line["backend"]) == ("f32", 2, 128, "torch")
    assert line["reason"] == (
        "llama, F32 as f32, 0.4 MiB of weights; KV pool 2,048 tokens, 128 blocks, 1.5 MiB in f32: "
        "4 contexts of 512 tokens fit; 1,024 MiB were free; 2 threads: the CPUs that this process may use; "
        "attention by torch: the kernels compute bf16 over bf16 KV on the CPU, this is f32 over f32 on cpu"
    )


@pytest.mark.parametrize(
    "failure",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes. Error code 12"),
        torch.OutOfMemoryError("CUDA out of memory."),
    ],
)
def test_memory_that_runs_out_is_told_with_the_numbers(
    failure: Exception, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(loading, "KvPool", fail)
    with pytest.raises(Overloaded, match=r"memory ran out while tiny was loaded: .* kv_pool_tokens=512 halves"):
        load_engine(tiny_settings(tiny_gguf))


def test_any_other_failure_is_not_taken_for_it(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(loading, "KvPool", fail)
    with pytest.raises(RuntimeError, match="something else"):
        load_engine(tiny_settings(tiny_gguf))


def test_what_weights_take(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps bf16 whatever int8 says, so int8 is no way out there."""
    d = describe(tiny_gguf)
    n = models.n_parameters(d)
    table = d.vocab_size * d.hidden_size

    def lacking() -> Variant:
        raise NotImplementedHere("the processor has no legs")

    monkeypatch.setattr(models, "best_variant", lacking)
    bf16 = tiny_settings(tiny_gguf, dtype="bf16")
    assert kernels_refusal(bf16, d, KvDtype.BF16, CPU) == "the processor has no legs"
    assert weights_bytes(bf16, d, CPU) == {"bf16": 2 * n, "f32": 4 * n}
    assert weights_bytes(tiny_settings(tiny_gguf, dtype="int8"), d, CPU)["int8"] == 2 * n
    monkeypatch.setattr(models, "best_variant", lambda: AVX2)
    assert kernels_refusal(bf16, d, KvDtype.BF16, CPU) is None
    assert weights_bytes(bf16, d, CPU) == {"bf16": 2 * (n + table), "f32": 4 * n, "int8": n + 2 * table}


def test_kernels_that_were_asked_for_and_cannot_be(tiny_gguf: Path) -> None:
    with pytest.raises(InvalidRequest, match="backend kernels cannot run: the kernels compute bf16"):
        load_engine(tiny_settings(tiny_gguf, backend="kernels"))
