from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from mesh.errors import InvalidRequest
from mesh.model.description import describe
from tests.mesh.model.gguf_writer import tiny_folder, tiny_gguf


def test_describes_a_gguf_file(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path)
    model = describe(path)
    assert model.model_id == "tiny-test"
    assert (model.n_layers, model.hidden_size, model.n_heads, model.n_kv_heads, model.head_dim) == (2, 8, 2, 1, 4)
    assert model.norm_eps == 1e-5
    assert model.rope_scaling == "none"
    assert model.eos_token_ids == {0, 2}
    assert model.bos_token_id == 0
    assert not model.add_bos
    assert model.tied_embeddings
    assert model.weights_dtype == "F32"
    assert model.chat_template is None
    assert model.digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_folder_of_the_same_model_may_exchange_kv_with_the_file(tmp_path: Path) -> None:
    a, b = describe(tiny_gguf(tmp_path)), describe(tiny_folder(tmp_path))
    assert a.geometry == b.geometry
    assert a.weights_lineage == b.weights_lineage
    assert a.weights_dtype == "F32"
    assert b.weights_dtype == "BF16"
    assert (a.model_id, a.eos_token_ids, a.add_bos) == (b.model_id, b.eos_token_ids, b.add_bos)


@pytest.mark.parametrize(
    "name", ["Tiny Test", "tiny-test-BF16", "Tiny_Test.Q4_K_M", "tiny test IQ4_XS", "tiny test fp16"]
)
def test_lineage_does_not_depend_on_precision(tmp_path: Path, name: str) -> None:
    base = describe(tiny_gguf(tmp_path)).weights_lineage
    assert describe(tiny_gguf(tmp_path, general__name=name)).weights_lineage == base


@pytest.mark.parametrize("change", [{"general__name": "Tiny Test v2"}, {"llama__rope__freq_base": 5000.0}])
def test_lineage_depends_on_name_and_layout(tmp_path: Path, change: dict[str, Any]) -> None:
    base = describe(tiny_gguf(tmp_path)).weights_lineage
    assert describe(tiny_gguf(tmp_path, **change)).weights_lineage != base


def test_id_and_lineage_can_be_set(tmp_path: Path) -> None:
    model = describe(tiny_gguf(tmp_path), model_id="mine", weights_lineage="line")
    assert (model.model_id, model.weights_lineage) == ("mine", "line")


def test_digest_of_a_folder_changes_with_a_file(tmp_path: Path) -> None:
    model = describe(tiny_folder(tmp_path))
    before = model.digest
    (model.path / "model.safetensors").write_bytes(b"changed")
    assert model.digest != before


def test_linear_scaling_is_part_of_the_layout(tmp_path: Path) -> None:
    plain = describe(tiny_gguf(tmp_path)).geometry
    scaled = describe(
        tiny_gguf(tmp_path, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    ).geometry
    assert scaled.rope_scaling == "linear:factor=4"
    assert scaled.layout_hash != plain.layout_hash


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"general__architecture": "mamba"}, "'mamba' is not supported; supported: llama"),
        ({"general__architecture": None}, "lacks general.architecture"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer 'llama'"),
        ({"tokenizer__ggml__token_type": [1]}, "1 token types"),
        ({"tokenizer__ggml__eos_token_id": 99}, "eos_token_id 99"),
        ({"tokenizer__ggml__bos_token_id": 99}, "bos_token_id 99"),
        ({"tokenizer__ggml__tokens": ["x"] * 3, "tokenizer__ggml__token_type": [1] * 3}, "does not have a row"),
        ({"llama__block_count": 0}, "n_layers is 0"),
        ({"llama__attention__head_count": 0}, "n_heads is 0"),
        ({"llama__attention__head_count_kv": 0}, "n_kv_heads is 0"),
        ({"llama__attention__head_count": 4, "llama__attention__head_count_kv": 3}, "4 heads over 3"),
        ({"llama__attention__value_length": 2}, "different sizes"),
        ({"llama__rope__dimension_count": 2}, "a part of each head"),
        ({"llama__expert_count": 8}, "mixtures of experts"),
        ({"llama__rope__freq_base": -1.0}, "rope_base"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "finite"),
        ({"llama__rope__scaling__type": "yarn"}, "yarn is not supported"),
        ({"llama__context_length": None}, "lacks llama.context_length"),
    ],
)
def test_files_that_no_engine_can_run_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        describe(tiny_gguf(tmp_path, **change))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
        ({"architectures": None}, "none"),
        ({"hidden_size": "8"}, "hidden_size must be an integer"),
        ({"hidden_size": None}, "hidden_size must be an integer"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"rope_theta": "x"}, "rope_theta must be a number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "yarn is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "high_freq_factor must be a number"),
        ({"eos_token_id": 1000}, "eos_token_id 1000"),
        ({"vocab_size": 10**9}, "more than the limit"),
    ],
)
def test_folders_that_no_engine_can_run_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        describe(tiny_folder(tmp_path, **change))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("config.json", "{", "not JSON"),
        ("config.json", "[]", "not a JSON object"),
        ("tokenizer.json", '{"model": {"type": "WordPiece"}}', "byte-level BPE"),
        ("tokenizer.json", '{"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}}', "format"),
    ],
)
def test_broken_folders_are_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    folder = tiny_folder(tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(InvalidRequest, match=says):
        describe(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match="safetensors"):
        describe(folder)
