"""A model's weights on a device, from a GGUF file or a Hugging Face folder.

Both sources give the same tensors by the same (GGUF's) names, Q and K rows in the architecture's order, in one dtype.
Every tensor that the model needs must be there with its exact shape, and a tensor that it has no use for (a bias,
an expert) is refused: a model that is computed only in part would answer, and wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from core_node.engine.architectures import architecture_of
from core_node.engine.layers import LayerWeights
from mesh.errors import InvalidRequest
from mesh.model.description import ModelDescription


class WeightSource(Protocol):
    """Named tensors of one model on disk."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor by canonical name, rows first ([out, in] for a matrix)."""
        ...

    def load(self, name: str) -> torch.Tensor:
        """That tensor on the CPU, dequantised; Q and K rows in the order of the architecture's RopePairs."""
        ...

    def size_bytes(self, name: str) -> int:
        """What that tensor takes on disk."""
        ...


OnLoad = Callable[[int, int], None]  # bytes read so far, of how many


class ReportingSource:
    """A WeightSource that tells how far it has been read."""

    def __init__(self, source: WeightSource, on_load: OnLoad) -> None:
        self._source = source
        self._on_load = on_load
        self._total = sum(map(source.size_bytes, source.shapes))
        self._done = 0
        self._read: set[str] = set()
        on_load(0, self._total)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._source.shapes

    def size_bytes(self, name: str) -> int:
        return self._source.size_bytes(name)

    def load(self, name: str) -> torch.Tensor:
        tensor = self._source.load(name)
        if name not in self._read:
            self._read.add(name)
            self._done += self._source.size_bytes(name)
            self._on_load(self._done, self._total)
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """All weights; `head` is `embedding` itself if they are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


def expected_shapes(d: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model and its shape."""
    q, kv = d.n_heads * d.head_dim, d.n_kv_heads * d.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (d.vocab_size, d.hidden_size),
        "output_norm.weight": (d.hidden_size,),
    }
    if not d.tied_embeddings:
        shapes["output.weight"] = (d.vocab_size, d.hidden_size)
    for i in range(d.n_layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (d.hidden_size,),
            f"blk.{i}.attn_q.weight": (q, d.hidden_size),
            f"blk.{i}.attn_k.weight": (kv, d.hidden_size),
            f"blk.{i}.attn_v.weight": (kv, d.hidden_size),
            f"blk.{i}.attn_output.weight": (d.hidden_size, q),
            f"blk.{i}.ffn_norm.weight": (d.hidden_size,),
            f"blk.{i}.ffn_gate.weight": (d.ffn_size, d.hidden_size),
            f"blk.{i}.ffn_up.weight": (d.ffn_size, d.hidden_size),
            f"blk.{i}.ffn_down.weight": (d.hidden_size, d.ffn_size),
        }
        shapes |= {f"blk.{i}.{e.name}.weight": (e.size(d),) for e in architecture_of(d).extra}
    return shapes


def check_shapes(d: ModelDescription, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise InvalidRequest unless `shapes` are exactly those of the model."""
    expected = expected_shapes(d)
    for name, shape in expected.items():
        if name not in shapes:
            raise InvalidRequest(f"{d.path.name}: tensor {name} is missing", field="model")
        if shapes[name] != shape:
            raise InvalidRequest(f"{d.path.name}: tensor {name} is {shapes[name]}, it must be {shape}", field="model")
    if unknown := sorted(shapes.keys() - expected.keys()):
        raise InvalidRequest(
            f"{d.path.name}: {len(unknown)} tensors that this engine cannot use, such as {unknown[0]}", field="model"
        )


def load_weights(d: ModelDescription, source: WeightSource, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Read all tensors. Blocks for seconds; raises InvalidRequest."""
    ends = load_ends(d, source, dtype, device)
    return replace(ends, layers=tuple(load_layers(d, source, dtype, device)))


def load_ends(d: ModelDescription, source: WeightSource, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """All but the layers. Raises InvalidRequest if the tensors are not those of the model."""
    check_shapes(d, source.shapes)
    load = _Loader(source, dtype, device)
    embedding = load.matrix("token_embd.weight")
    return ModelWeights(
        embedding=embedding,
        layers=(),
        norm=load.norm("output_norm.weight"),
        head=embedding if d.tied_embeddings else load.matrix("output.weight"),
    )


def load_layers(
    d: ModelDescription, source: WeightSource, dtype: torch.dtype, device: torch.device
) -> Iterator[LayerWeights]:
    """The layers in order, each read when it is asked for."""
    load = _Loader(source, dtype, device)
    extra = [e.name for e in architecture_of(d).extra]
    return (load.layer(i, extra) for i in range(d.n_layers))


class _Loader:
    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._dtype = dtype
        self._device = device

    def matrix(self, *names: str) -> torch.Tensor:
        parts = [self._source.load(name).to(self._dtype) for name in names]
        # Always into torch's own, aligned memory: what a matrix product rounds to may depend on the alignment.
        return torch.cat(parts).to(self._device)

    def norm(self, name: str) -> torch.Tensor:
        return self._source.load(name).float().to(self._device)  # norms are computed in f32 whatever the dtype

    def layer(self, i: int, extra: Sequence[str]) -> LayerWeights:
        return LayerWeights(
            attention_norm=self.norm(f"blk.{i}.attn_norm.weight"),
            qkv=self.matrix(*(f"blk.{i}.attn_{x}.weight" for x in "qkv")),
            attention_out=self.matrix(f"blk.{i}.attn_output.weight"),
            ffn_norm=self.norm(f"blk.{i}.ffn_norm.weight"),
            gate_up=self.matrix(f"blk.{i}.ffn_gate.weight", f"blk.{i}.ffn_up.weight"),
            down=self.matrix(f"blk.{i}.ffn_down.weight"),
            extra={name: self.norm(f"blk.{i}.{name}.weight") for name in extra},
        )


def n_parameters(d: ModelDescription) -> int:
    """Weights of the model, for the arithmetic of what fits."""
    return sum(torch.Size(shape).numel() for shape in expected_shapes(d).values())
