"""A GGUF file as a Hugging Face folder: the same model, by our own reading of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core_node.bench.engines.hf_folder import hf_name, write_hf_folder
from core_node.engine.gguf_weights import GgufWeights
from core_node.engine.safetensors_weights import SafetensorsWeights
from mesh.errors import InvalidRequest
from mesh.model.description import describe
from mesh.model.tokenizer import load_tokenizer
from tests.core_node.engine.checkpoints import TinyConfig, random_weights, write_gguf


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_tokenizer_survive(tied: bool, tmp_path: Path) -> None:
    config = TinyConfig(tied=tied)
    model = tmp_path / "tiny.gguf"
    write_gguf(model, random_weights(config), config)
    write_hf_folder(model, tmp_path / "hf")
    written, read = describe(model), describe(tmp_path / "hf")
    for field in ("n_layers", "n_heads", "rope_base", "norm_eps", "context_tokens", "tied_embeddings"):
        assert getattr(written, field) == getattr(read, field), field
    source, target = GgufWeights(model), SafetensorsWeights(read)
    assert source.shapes == target.shapes
    for name in source.shapes:
        assert torch.equal(source.load(name).to(torch.bfloat16), target.load(name).to(torch.bfloat16)), name
    text = "near and far in its own tone"
    assert load_tokenizer(tmp_path / "hf").encode(text) == load_tokenizer(model).encode(text)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.ffn_gate_exps.weight", "rope_freqs.weight"])
def test_a_tensor_that_llama_has_not_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="has no place"):
        hf_name(name)
