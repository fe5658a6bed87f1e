"""What a model file says of itself: everything that the mesh must know without loading weights.

`describe` reads a GGUF file or a Hugging Face folder. Only what both engines can compute exactly is accepted; the
rest is refused by name here, at the rim, before an engine sees it.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGMLQuantizationType, LlamaFileType

from mesh.errors import InvalidRequest
from mesh.kv.geometry import KvGeometry
from mesh.model.architectures import architecture_facts, facts_of_hf_class
from mesh.model.gguf_file import GgufFile, read_gguf
from mesh.model.rope_scaling import recognise_llama3, scaling_text
from mesh.model.vocabulary import Vocabulary, parse_object, read_text, vocabulary_of_folder, vocabulary_of_gguf

_PRECISION = re.compile(
    r"(?<![a-z0-9])(i?q[1-8](_[0-9ksmlx]+)*|iq[1-4]_[a-z]+|tq[12]_0|mxfp4|nvfp4|[bf]p?f?(4|8|16|32)|int[48]|gguf|awq|gptq)"
    r"(?![a-z0-9])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """One model on disk. `rope_scaling` is canonical text, "none" if there is none. `weights_lineage` is equal for
    different precisions of one checkpoint. `path` is the GGUF file or the Hugging Face folder."""

    model_id: str
    path: Path
    architecture: str
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    rope_base: float
    rope_scaling: str
    norm_eps: float
    vocab_size: int
    context_tokens: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    add_bos: bool
    tied_embeddings: bool
    weights_dtype: str  # for people: "Q4_1", "BF16"
    weights_lineage: str
    chat_template: str | None
    geometry: KvGeometry

    def __post_init__(self) -> None:
        for field in ("n_layers", "hidden_size", "n_heads", "n_kv_heads", "head_dim", "ffn_size", "context_tokens"):
            value = getattr(self, field)
            if not 1 <= value <= 1 << 24:
                raise InvalidRequest(f"{self.path.name}: {field} is {value}", field=field)
        if self.n_heads % self.n_kv_heads or self.head_dim % 2:
            raise InvalidRequest(
                f"{self.path.name}: {self.n_heads} heads over {self.n_kv_heads} KV heads of {self.head_dim} dimensions",
                field="n_kv_heads",
            )
        for field in ("rope_base", "norm_eps"):
            if not (math.isfinite(getattr(self, field)) and getattr(self, field) > 0):
                raise InvalidRequest(f"{self.path.name}: {field} is {getattr(self, field)}", field=field)

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the file (of a folder: over the names and digests of its files). Reads all of it the first
        time; cached while size and time of change stay the same."""
        return model_digest(self.path)


def describe(path: Path, *, model_id: str | None = None, weights_lineage: str | None = None) -> ModelDescription:
    """Describe a GGUF file or a Hugging Face folder. Blocks on disk (well under a second).

    `model_id` defaults to the file's name without precision; `weights_lineage` to one made of the model's name and
    its KV layout: set it where two precisions of one checkpoint are named differently. Raises InvalidRequest."""
    if path.is_dir():
        return _describe_folder(path, model_id, weights_lineage)
    return _describe_gguf(read_gguf(path), model_id, weights_lineage)


def model_digest(path: Path) -> str:
    """See ModelDescription.digest."""
    if not path.is_dir():
        stat = path.stat()
        return _file_digest(path, stat.st_size, stat.st_mtime_ns)
    digest = hashlib.sha256()
    for file in sorted(p for p in path.iterdir() if p.suffix in (".json", ".safetensors")):
        digest.update(f"{file.name}\0{model_digest(file)}\n".encode())
    return digest.hexdigest()


@functools.lru_cache(maxsize=64)
def _file_digest(path: Path, _size_bytes: int, _mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _describe_gguf(file: GgufFile, model_id: str | None, lineage: str | None) -> ModelDescription:
    with _naming(file.path):
        a = architecture_facts(file.text("general.architecture")).name
    vocabulary = vocabulary_of_gguf(file)
    embedding = file.tensor("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != len(vocabulary.tokens):
        raise InvalidRequest(
            f"{file.path.name}: token_embd.weight does not have a row for each of {len(vocabulary.tokens)} tokens",
            field="model",
        )
    hidden, n_heads = file.integer(f"{a}.embedding_length"), file.integer(f"{a}.attention.head_count")
    head_dim = file.integer(f"{a}.attention.key_length", hidden // n_heads if n_heads > 0 else 0)
    if file.integer(f"{a}.attention.value_length", head_dim) != head_dim:
        raise InvalidRequest(f"{file.path.name}: K and V heads of different sizes are not supported", field="model")
    if file.integer(f"{a}.rope.dimension_count", head_dim) != head_dim:
        raise InvalidRequest(f"{file.path.name}: rotating only a part of each head is not supported", field="model")
    if file.integer(f"{a}.expert_count", 0):
        raise InvalidRequest(f"{file.path.name}: mixtures of experts are not supported", field="model")
    if file.integer(f"{a}.attention.sliding_window", 0):
        raise InvalidRequest(f"{file.path.name}: sliding-window attention is not supported", field="model")
    name = file.text("general.name", "") or file.text("general.basename", "") or file.path.stem
    template = file.text("tokenizer.chat_template", "")
    return _assemble(
        file.path, model_id, lineage, name, vocabulary,
        architecture=a, n_layers=file.integer(f"{a}.block_count"), hidden_size=hidden, n_heads=n_heads,
        n_kv_heads=file.integer(f"{a}.attention.head_count_kv", n_heads), head_dim=head_dim,
        ffn_size=file.integer(f"{a}.feed_forward_length"),
        rope_base=file.number(f"{a}.rope.freq_base", 10_000.0), rope_scaling=_gguf_scaling(file, a, head_dim),
        norm_eps=_short_float(file.number(f"{a}.attention.layer_norm_rms_epsilon")),
        context_tokens=file.integer(f"{a}.context_length"), tied_embeddings=file.tensor("output.weight") is None,
        weights_dtype=_gguf_dtype(file), chat_template=template or None,
    )  # fmt: skip


def _describe_folder(folder: Path, model_id: str | None, lineage: str | None) -> ModelDescription:
    path = folder / "config.json"
    config = parse_object(read_text(path), path)
    names = config.get("architectures") or ["(none)"]
    with _naming(folder):
        architecture = facts_of_hf_class(str(names[0])).name
    if not any(folder.glob("*.safetensors")):
        raise InvalidRequest(f"{folder}: there is no .safetensors file", field="model")
    _refuse_unsupported(config, path)
    rope = _hf_rope(config)
    hidden, n_heads = _whole(config, "hidden_size", path), _whole(config, "num_attention_heads", path)
    return _assemble(
        folder, model_id, lineage, str(config.get("_name_or_path") or folder.name).split("/")[-1],
        vocabulary_of_folder(folder, config),
        architecture=architecture, n_layers=_whole(config, "num_hidden_layers", path), hidden_size=hidden,
        n_heads=n_heads, n_kv_heads=_whole(config, "num_key_value_heads", path, n_heads),
        head_dim=_whole(config, "head_dim", path, hidden // n_heads if n_heads > 0 else 0),
        ffn_size=_whole(config, "intermediate_size", path),
        rope_base=_real(rope, "rope_theta", path, 10_000.0), rope_scaling=_hf_scaling(rope, path),
        norm_eps=_real(config, "rms_norm_eps", path, 1e-6),
        context_tokens=_whole(config, "max_position_embeddings", path, 2048),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        weights_dtype=_hf_dtype(config), chat_template=_hf_template(folder),
    )  # fmt: skip


def _assemble(
    path: Path, model_id: str | None, lineage: str | None, name: str, vocabulary: Vocabulary, **facts: Any
) -> ModelDescription:
    geometry = KvGeometry(
        architecture=facts["architecture"],
        n_layers=facts["n_layers"],
        n_kv_heads=facts["n_kv_heads"],
        head_dim=facts["head_dim"],
        rope_base=facts["rope_base"],
        rope_scaling=facts["rope_scaling"],
        tokenizer_hash=vocabulary.tokenizer_hash,
    )
    return ModelDescription(
        model_id=model_id or _slug(path.name.removesuffix(".gguf")),
        path=path,
        vocab_size=len(vocabulary.tokens),
        eos_token_ids=vocabulary.eos_token_ids,
        bos_token_id=vocabulary.bos_token_id,
        add_bos=vocabulary.add_bos,
        weights_lineage=lineage or f"{_slug(name)}-{geometry.layout_hash[:16]}",
        geometry=geometry,
        **facts,
    )


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except InvalidRequest as exc:
        raise InvalidRequest(f"{path.name}: {exc.message}", **exc.details) from exc


def _refuse_unsupported(config: dict[str, Any], path: Path) -> None:
    """What a config.json may ask for and no engine here computes."""
    if config.get("hidden_act", "silu") != "silu" or config.get("attention_bias") or config.get("mlp_bias"):
        raise InvalidRequest(f"{path}: biases and activations other than silu are not supported", field="model")
    window, switched_off = config.get("sliding_window"), config.get("use_sliding_window") is False
    context = _whole(config, "max_position_embeddings", path, 2048)
    if window is not None and not switched_off and not (isinstance(window, int) and window >= context):
        raise InvalidRequest(
            f"{path}: sliding-window attention ({window} of {context} tokens) is not supported; a copy of the model "
            f"with max_position_embeddings at most {window} in its config.json is, since it never leaves the window",
            field="model",
        )


def _hf_rope(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE's parameters in one place: newer files keep all in `rope_parameters`, older ones beside `rope_scaling`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    rope: dict[str, Any] = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if name in config}
    return rope | (scaling if isinstance(scaling, dict) else {})


def _slug(name: str) -> str:
    """Lower case, words joined by '-', precision words dropped: 'SmolLM2-135M.Q4_1' is 'smollm2-135m'."""
    bare = _PRECISION.sub("", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", bare).strip("-") or "model"


def _gguf_scaling(file: GgufFile, a: str, head_dim: int) -> str:
    kind = file.text(f"{a}.rope.scaling.type", "none")
    if (divisors := file.tensor("rope_freqs.weight")) is not None:
        text = None
        if kind == "none" and divisors.ggml_type is GGMLQuantizationType.F32:
            base = file.number(f"{a}.rope.freq_base", 10_000.0)
            text = recognise_llama3(file.tensor_bytes(divisors).view("<f4"), head_dim, base)
        if text is None:
            raise InvalidRequest(
                f"{file.path.name}: the RoPE divisors in rope_freqs.weight are not those of a known scaling",
                field="model",
            )
        return text
    parameters = {"factor": file.number(f"{a}.rope.scaling.factor", 1.0)} if kind == "linear" else {}
    return _scaling(file.path, kind, parameters)


def _hf_scaling(scaling: dict[str, Any], path: Path) -> str:
    if _real(scaling, "partial_rotary_factor", path, 1.0) != 1.0:
        raise InvalidRequest(f"{path}: rotating only a part of each head is not supported", field="model")
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    names = {"linear": ("factor",), "llama3": ("factor", "high_freq_factor", "low_freq_factor")}.get(kind, ())
    parameters = {name: _real(scaling, name, path) for name in names}
    if kind == "llama3":
        parameters["original_context"] = _real(scaling, "original_max_position_embeddings", path)
    return _scaling(path, "none" if kind == "default" else kind, parameters)


def _scaling(path: Path, kind: str, parameters: dict[str, float]) -> str:
    with _naming(path):
        return scaling_text(kind, **parameters)


def _gguf_dtype(file: GgufFile) -> str:
    number = file.integer("general.file_type", -1)
    try:
        return str(LlamaFileType(number).name).removeprefix("ALL_").removeprefix("MOSTLY_")
    except ValueError:
        sizes: Counter[str] = Counter()
        for tensor in file.tensors:
            sizes[tensor.ggml_type.name] += tensor.size_bytes
        return max(sizes, key=lambda name: sizes[name])


def _hf_dtype(config: dict[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(name, name.upper())


def _hf_template(folder: Path) -> str | None:
    if (file := folder / "chat_template.jinja").is_file():
        return read_text(file)
    path = folder / "tokenizer_config.json"
    template = parse_object(read_text(path), path).get("chat_template") if path.is_file() else None
    if isinstance(template, list):  # several named templates: the default one
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _whole(config: dict[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{path}: {key} must be an integer, it is {value!r}", field=key)
    return value


def _real(config: dict[str, Any], key: str, path: Path, default: float | None = None) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{path}: {key} must be a number, it is {value!r}", field=key)
    return float(value)


def _short_float(value: float) -> float:
    """The shortest decimal that is the same f32: a GGUF stores f32, so 1e-05 comes as 9.999999747378752e-06."""
    return float(f"{value:.7g}")
