"""Each architecture against transformers, on small random checkpoints, from a folder and from a GGUF.

transformers is the judge of the forward pass and of what its own config.json means: it writes the folder. The GGUF is
written from the same weights by the tests' own converter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from core_node.engine.architectures import architecture_of
from core_node.engine.attention import lay_out
from core_node.engine.decoder import DecoderModel
from core_node.engine.kv_pool import KvPool
from core_node.engine.loading import load_engine, open_weights
from core_node.engine.scheduler import Chunk
from core_node.engine.sequence import Sequence
from core_node.engine.weights import load_weights
from mesh.errors import InvalidRequest
from mesh.kv.geometry import KvDtype
from mesh.model.architectures import ARCHITECTURES
from mesh.model.description import describe
from mesh.model.rope_scaling import inverse_frequencies
from mesh.node.engine import RunId
from tests.core_node.engine.checkpoints import TinyConfig, random_weights, write_folder, write_gguf, write_tokenizer
from tests.core_node.engine.conftest import reference_of, tiny_settings

CPU = torch.device("cpu")
PROMPT = list(range(5, 75))
SHAPE: dict[str, Any] = {
    "vocab_size": TinyConfig().vocab_size,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
# name: (class, changes to SHAPE)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2": ("Llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}),
    "llama3": ("Llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"tie_word_embeddings": False, "sliding_window": None, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    "qwen3 tied, wide heads": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 32, "num_attention_heads": 6}),
}


@pytest.fixture(scope="module", params=list(MODELS))
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A folder as transformers saves it, and transformers' logits [tokens, vocab] of PROMPT."""
    import transformers  # seconds, so not before a test needs it

    kind, changes = MODELS[request.param]
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    with torch.inference_mode():
        for name, tensor in model.named_parameters():
            if "norm" in name:  # they start as ones, which would hide a norm that is left out
                tensor += 0.3 * torch.randn(tensor.shape)
        want = model(torch.tensor([PROMPT])).logits[0]
    folder = tmp_path_factory.mktemp("judged") / request.param.split()[0]
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder, want


def engine_logits(path: Path, kv_dtype: KvDtype = KvDtype.F32) -> torch.Tensor:
    """Logits after each chunk: of 19 tokens, then one by one, over scattered blocks. [tokens - 18, vocab]"""
    d = describe(path)
    model = DecoderModel(d, load_weights(d, open_weights(d), torch.float32, CPU), d.context_tokens)
    pool = KvPool(d.geometry, 8, kv_dtype, CPU)
    sequence = Sequence(run_id=RunId("r"), token_ids=PROMPT, root=b"", blocks=[5, 2, 7, 0, 3])
    chunks = [Chunk(sequence, 0, 19), *(Chunk(sequence, i, 1) for i in range(19, len(PROMPT)))]
    with torch.inference_mode():
        return torch.cat([model.forward(lay_out([c], [True], model.query_form), pool) for c in chunks])


def test_a_folder_equals_transformers(judged: tuple[Path, torch.Tensor]) -> None:
    folder, want = judged
    torch.testing.assert_close(engine_logits(folder), want[18:], atol=2e-4, rtol=2e-4)


def test_a_gguf_equals_transformers(judged: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder, want = judged
    path = as_gguf(folder, tmp_path / "m.gguf")
    assert describe(path).geometry == describe(folder).geometry
    torch.testing.assert_close(engine_logits(path), want[18:], atol=2e-4, rtol=2e-4)


def as_gguf(folder: Path, path: Path) -> Path:
    """A folder's weights in a GGUF, by what its description says."""
    from safetensors.torch import load_file

    d = describe(folder)
    config = TinyConfig(
        architecture=d.architecture,
        n_layers=d.n_layers,
        hidden_size=d.hidden_size,
        n_heads=d.n_heads,
        n_kv_heads=d.n_kv_heads,
        head_dim=d.head_dim,
        ffn_size=d.ffn_size,
        rope_base=d.rope_base,
        norm_eps=d.norm_eps,
        tied=d.tied_embeddings,
    )
    extra = {}
    if d.rope_scaling != "none":
        scaled = inverse_frequencies(d.head_dim, d.rope_base, d.rope_scaling)
        extra["rope_freqs.weight"] = (inverse_frequencies(d.head_dim, d.rope_base, "none") / scaled).astype(np.float32)
    return write_gguf(path, load_file(folder / "model.safetensors"), config, extra=extra)


def test_what_is_accepted_is_computed() -> None:
    from types import SimpleNamespace

    for name in ARCHITECTURES:
        assert architecture_of(SimpleNamespace(architecture=name)).name == name  # type: ignore[arg-type]


def test_qwen3_equals_the_reference_from_both_sources(tmp_path: Path) -> None:
    config = TinyConfig(architecture="qwen3", n_layers=2, tied=False)
    weights = random_weights(config, seed=8)
    want = reference_of(weights, config).logits(PROMPT)[18:]
    from_gguf = engine_logits(write_gguf(tmp_path / "m.gguf", weights, config))
    torch.testing.assert_close(from_gguf, want, atol=2e-4, rtol=2e-4)
    assert torch.equal(from_gguf, engine_logits(write_folder(tmp_path / "hf", weights, config)))


def test_a_qwen3_without_its_head_norms_is_refused(tmp_path: Path) -> None:
    config = TinyConfig(architecture="qwen3")
    path = write_gguf(tmp_path / "m.gguf", random_weights(config), config, drop="blk.1.attn_k_norm.weight")
    with pytest.raises(InvalidRequest, match=r"blk\.1\.attn_k_norm\.weight is missing"):
        load_engine(tiny_settings(path))


def test_a_llama_with_head_norms_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", random_weights(TinyConfig()), TinyConfig(), extra=extra)
    with pytest.raises(InvalidRequest, match=r"cannot use, such as blk\.0\.attn_q_norm"):
        load_engine(tiny_settings(path))


def test_qwen3_runs_through_torch_and_says_so(tmp_path: Path) -> None:
    config = TinyConfig(architecture="qwen3", hidden_size=64, head_dim=32, ffn_size=96)
    path = write_gguf(tmp_path / "m.gguf", random_weights(config), config)
    core = load_engine(tiny_settings(path, dtype="bf16"))
    assert core.info.build.endswith(" torch")
    with pytest.raises(InvalidRequest, match="backend kernels cannot run: the kernels do not compute qwen3"):
        load_engine(tiny_settings(path, dtype="bf16", backend="kernels"))


# --- what a config.json may ask for and is not computed -------------------------------------------------------------


def changed(folder: Path, **changes: object) -> Path:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = TinyConfig(architecture="qwen3", n_layers=1)
    return write_folder(tmp_path / "hf", random_weights(config), config)


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"use_sliding_window": True, "sliding_window": 128}, r"sliding-window attention \(128 of 512 tokens\)"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 256}, "max_position_embeddings at most 256"),
    ({"sliding_window": "all"}, "sliding-window"),
    ({"attention_bias": True}, "biases"),
    ({"hidden_act": "gelu"}, "activations other than silu"),
    ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}}, "yarn is not supported"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "longrope is not supported"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "only a part of each head"),
    ({"partial_rotary_factor": 0.25}, "only a part of each head"),
    ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta must be a number"),
    ({"architectures": ["Qwen3MoeForCausalLM"]}, "'Qwen3MoeForCausalLM' is not supported; supported: Llama"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(folder: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        describe(changed(folder, **changes))


def test_a_window_that_is_never_left_is_fine(folder: Path) -> None:
    assert describe(changed(folder, sliding_window=512)).architecture == "qwen3"
    assert describe(changed(folder, sliding_window=4, use_sliding_window=False)).architecture == "qwen3"
    mistral = changed(folder, architectures=["MistralForCausalLM"], sliding_window=None)
    assert describe(mistral).architecture == "llama"


def test_both_ways_to_write_rope_mean_the_same(folder: Path) -> None:
    old = describe(changed(folder, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}))
    new = describe(
        changed(
            folder,
            rope_theta=...,
            rope_scaling=...,
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        )
    )
    assert (old.rope_base, old.rope_scaling) == (new.rope_base, new.rope_scaling) == (5e5, "linear:factor=2")


def test_a_sliding_window_in_a_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TinyConfig()
    add = gguf.GGUFWriter.add_rope_freq_base

    def with_window(self: gguf.GGUFWriter, value: float) -> None:
        add(self, value)
        self.add_sliding_window(128)

    monkeypatch.setattr(gguf.GGUFWriter, "add_rope_freq_base", with_window)
    path = write_gguf(tmp_path / "m.gguf", random_weights(config), config)
    with pytest.raises(InvalidRequest, match="sliding-window"):
        describe(path)
