"""Checkpoints in: GGUF and safetensors give the same logits as an independent forward pass; bad ones are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf.quants
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from core_node.engine.attention import lay_out
from core_node.engine.decoder import DecoderModel
from core_node.engine.gguf_weights import GgufWeights
from core_node.engine.kv_pool import KvPool
from core_node.engine.loading import load_engine
from core_node.engine.safetensors_weights import SafetensorsWeights, canonical_name, to_adjacent_pairs
from core_node.engine.scheduler import Chunk
from core_node.engine.sequence import Sequence
from core_node.engine.weights import load_weights
from mesh.errors import InvalidRequest
from mesh.kv.geometry import KvDtype
from mesh.model.description import describe
from mesh.model.rope_scaling import inverse_frequencies, scaling_text
from mesh.node.engine import RunId
from tests.core_node.engine.checkpoints import TinyConfig, random_weights, write_folder, write_gguf
from tests.core_node.engine.conftest import TINY, reference_of, tiny_settings

CPU = torch.device("cpu")
PROMPT = list(range(5, 45))


def engine_logits(path: Path, token_ids: list[int] = PROMPT, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits after the last token, computed in two unequal chunks over scattered blocks."""
    d = describe(path)
    source = SafetensorsWeights(d) if path.is_dir() else GgufWeights(path)
    model = DecoderModel(d, load_weights(d, source, dtype, CPU), d.context_tokens)
    pool = KvPool(d.geometry, 8, KvDtype.F32, CPU)
    sequence = Sequence(run_id=RunId("r"), token_ids=token_ids, root=b"", blocks=[5, 2, 7])
    with torch.inference_mode():
        model.forward(lay_out([Chunk(sequence, 0, 19)], [False], model.query_form), pool)
        return model.forward(lay_out([Chunk(sequence, 19, len(token_ids) - 19)], [True], model.query_form), pool)[0]


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_and_folder_equal_the_reference(tied: bool, tmp_path: Path) -> None:
    config = TinyConfig(tied=tied, n_layers=2)
    weights = random_weights(config, seed=3)
    want = reference_of(weights, config).logits(PROMPT)[-1]
    from_gguf = engine_logits(write_gguf(tmp_path / "m.gguf", weights, config))
    from_folder = engine_logits(write_folder(tmp_path / "hf", weights, config))
    torch.testing.assert_close(from_gguf, want, atol=1e-4, rtol=1e-4)
    assert torch.equal(from_gguf, from_folder)


def test_shapes_that_are_not_square(tmp_path: Path) -> None:
    """Heads times head_dim need not be the hidden size, and there may be one KV head."""
    config = TinyConfig(n_layers=2, n_heads=6, n_kv_heads=1, head_dim=24, hidden_size=32, ffn_size=160)
    weights = random_weights(config, seed=4)
    want = reference_of(weights, config).logits(PROMPT)[-1]
    torch.testing.assert_close(
        engine_logits(write_gguf(tmp_path / "m.gguf", weights, config)), want, atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(
        engine_logits(write_folder(tmp_path / "hf", weights, config)), want, atol=1e-4, rtol=1e-4
    )


def test_several_files_are_one_checkpoint(tiny_weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    one = engine_logits(write_folder(tmp_path / "one", tiny_weights, TINY))
    three = engine_logits(write_folder(tmp_path / "three", tiny_weights, TINY, n_files=3))
    assert torch.equal(one, three)


def test_a_bf16_folder(tiny_weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    rounded = {name: w.bfloat16().float() for name, w in tiny_weights.items()}
    want = reference_of(rounded, TINY).logits(PROMPT)[-1]
    got = engine_logits(write_folder(tmp_path / "hf", tiny_weights, TINY, dtype=torch.bfloat16))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_llama3_scaling_from_both_sources(tmp_path: Path) -> None:
    """A folder gives the parameters, a GGUF the divisors; both mean the same layout and the same logits."""
    config = TinyConfig(n_layers=2, rope_base=500_000.0)
    weights = random_weights(config, seed=6)
    published = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
    text = scaling_text("llama3", original_context=8192, **published)
    plain = inverse_frequencies(config.head_dim, config.rope_base, "none")
    scaled = inverse_frequencies(config.head_dim, config.rope_base, text)
    extra = {"rope_freqs.weight": (plain / scaled).astype(np.float32)}
    gguf_path = write_gguf(tmp_path / "m.gguf", weights, config, extra=extra)
    folder = write_folder(tmp_path / "hf", weights, config)
    values = json.loads((folder / "config.json").read_text())
    values["rope_scaling"] = {"rope_type": "llama3", "original_max_position_embeddings": 8192, **published}
    (folder / "config.json").write_text(json.dumps(values))
    assert describe(gguf_path).geometry == describe(folder).geometry
    assert describe(gguf_path).rope_scaling == text
    want = replace(reference_of(weights, config), inverse_frequencies=tuple(scaled)).logits(PROMPT)[-1]
    torch.testing.assert_close(engine_logits(gguf_path), want, atol=1e-4, rtol=1e-4)
    assert torch.equal(engine_logits(gguf_path), engine_logits(folder))


QUANTISED = [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_types(kind: Kind, tmp_path: Path) -> None:
    """The engine computes exactly what the file says: the reference runs on the dequantised tensors."""
    config = TinyConfig(n_layers=2)
    weights = random_weights(config, seed=5)

    def through(name: str, w: torch.Tensor) -> torch.Tensor:
        if w.ndim == 1:
            return w
        # Rows are quantised one by one, so the order of rows does not matter here.
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(w.numpy(), kind), kind).copy())

    want = reference_of({n: through(n, w) for n, w in weights.items()}, config).logits(PROMPT)[-1]
    got = engine_logits(write_gguf(tmp_path / "m.gguf", weights, config, kind=kind))
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


def test_bf16_arithmetic_is_close(tiny_weights: dict[str, torch.Tensor], tiny_gguf: Path) -> None:
    want = reference_of(tiny_weights, TINY).logits(PROMPT)[-1]
    got = engine_logits(tiny_gguf, dtype=torch.bfloat16)
    assert got.dtype is torch.float32
    assert torch.nn.functional.cosine_similarity(got, want, dim=0) > 0.99


def test_adjacent_pairs() -> None:
    rows = torch.arange(8.0)[:, None]  # two heads of four: pairs are (0, 2) and (1, 3)
    assert to_adjacent_pairs(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_canonical_names() -> None:
    assert canonical_name("model.layers.12.mlp.up_proj.weight", {}) == "blk.12.ffn_up.weight"
    assert canonical_name("lm_head.weight", {}) == "output.weight"
    assert canonical_name("model.layers.0.self_attn.q_proj.bias", {}) == "model.layers.0.self_attn.q_proj.bias"


# --- bad files ------------------------------------------------------------------------------------------------------


def refused(path: Path, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        load_engine(tiny_settings(path))


def test_a_missing_file(tmp_path: Path) -> None:
    refused(tmp_path / "none.gguf", "cannot read the model file")


def test_a_truncated_gguf(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for keep in (10, 1000, tiny_gguf.stat().st_size - 100):
        path.write_bytes(tiny_gguf.read_bytes()[:keep])
        refused(path, "truncated|too short")


def test_another_architecture(tiny_weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    refused(write_gguf(tmp_path / "m.gguf", tiny_weights, TINY, architecture="gpt2"), "'gpt2' is not supported")


def test_a_missing_tensor(tiny_weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_weights, TINY, drop="blk.1.ffn_up.weight")
    refused(path, r"tensor blk\.1\.ffn_up\.weight is missing")


def test_a_tensor_of_a_wrong_shape(tiny_weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    extra = {"blk.0.ffn_up.weight": np.zeros((32, 64), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tiny_weights, TINY, extra=extra)
    refused(path, r"blk\.0\.ffn_up\.weight is \(32, 64\), it must be \(96, 64\)")


def test_a_tensor_without_a_use(tiny_weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tiny_weights, TINY, extra=extra)
    refused(path, r"cannot use, such as blk\.0\.attn_q\.bias")


@pytest.fixture
def folder(tiny_weights: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    return write_folder(tmp_path / "hf", tiny_weights, TINY, n_files=2)


def test_a_folder_without_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    refused(folder, "there is no .safetensors file")


def test_a_folder_that_lacks_a_part(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()
    refused(folder, "is missing")


def test_a_truncated_safetensors_file(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])
    refused(folder, "not a readable safetensors file")


def test_a_tensor_twice(folder: Path) -> None:
    first = sorted(folder.glob("*.safetensors"))[0]
    shutil.copy(first, folder / "model-copy.safetensors")
    refused(folder, "is in both")


def test_an_integer_checkpoint(tiny_weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = write_folder(tmp_path / "hf", tiny_weights, TINY, dtype=torch.int8)
    refused(path, "is I8; only float checkpoints")


def test_a_folder_of_another_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["GemmaForCausalLM"]}))
    refused(folder, "is not supported")


def test_a_rope_scaling_that_is_not_known(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    scaling = {"rope_type": "yarn", "factor": 4.0}
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    refused(folder, "yarn")


def test_rope_divisors_that_are_not_known(tiny_weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.linspace(1, 3, TINY.head_dim // 2, dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tiny_weights, TINY, extra=extra)
    refused(path, "not those of a known scaling")
