"""Which StepModel runs a model: the compiled kernels where they can, torch everywhere else. Chosen once, at load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from core_node.engine.architectures import architecture_of
from core_node.engine.bucket_step import BucketStep
from core_node.engine.decoder import DecoderModel
from core_node.engine.exact import ExactArithmetic
from core_node.engine.kernel_step import KernelStep
from core_node.engine.layers import FastArithmetic
from core_node.engine.runner import StepModel, TorchStep
from core_node.engine.settings import CoreEngineSettings
from core_node.engine.weights import ModelWeights, WeightSource, load_weights, n_parameters
from core_node.kernels.build import best_variant
from mesh.errors import InvalidRequest, NotImplementedHere
from mesh.kv.geometry import KvDtype
from mesh.model.description import ModelDescription

_ELEMENT_BYTES: Final = {"bf16": 2, "f32": 4, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What computes the steps, and why that. `exact`: rows do not depend on the batch, to the bit."""

    name: str
    reason: str
    exact: bool = False


def load_model(
    settings: CoreEngineSettings,
    description: ModelDescription,
    source: WeightSource,
    device: torch.device,
    max_positions: int,
    kv_dtype: KvDtype,
    n_threads: int,
) -> tuple[StepModel, Backend]:
    """The model and what runs it. Raises InvalidRequest if `settings.backend` cannot."""
    refusal = kernels_refusal(settings, description, kv_dtype, device)
    if refusal is None:
        try:
            step = KernelStep.load(
                description,
                source,
                max_positions=max_positions,
                max_rows=settings.max_step_tokens,
                max_sequences=settings.max_running,
                n_threads=n_threads,
                int8=settings.dtype == "int8",
            )
        except NotImplementedHere as exc:
            refusal = str(exc)
        else:
            batch = "; exact: their rows never depend on the batch" if settings.exact else ""
            return step, Backend(name=step.name, reason=f"this processor has what they need{batch}", exact=True)
    if settings.backend == "kernels":
        raise InvalidRequest(f"backend kernels cannot run: {refusal}", field="backend")
    dtype = torch.float32 if settings.dtype == "f32" else torch.bfloat16
    weights = load_weights(description, source, dtype, device)
    if settings.dtype == "int8":
        weights = rounded_to_int8(weights)
    arithmetic = ExactArithmetic() if settings.exact else FastArithmetic()
    model = DecoderModel(description, weights, max_positions, arithmetic)
    if device.type == "cuda" and not settings.exact:  # `exact` has shapes that a graph cannot hold
        return BucketStep(model, settings.max_running), Backend(name="torch, CUDA graphs", reason=refusal)
    return TorchStep(model), Backend(
        name="torch, exact" if settings.exact else "torch", reason=refusal, exact=settings.exact
    )


def kernels_refusal(
    settings: CoreEngineSettings, description: ModelDescription, kv_dtype: KvDtype, device: torch.device
) -> str | None:
    """Why the compiled kernels cannot be used, as far as that is known before they are built."""
    if settings.backend == "torch":
        return "the settings say so"
    if not architecture_of(description).kernels:
        return f"the kernels do not compute {description.architecture}"
    if settings.dtype == "f32" or kv_dtype is not KvDtype.BF16 or device.type != "cpu":
        return (
            f"the kernels compute bf16 over bf16 KV on the CPU, "
            f"this is {settings.dtype} over {kv_dtype.value} on {device.type}"
        )
    try:
        best_variant()
    except NotImplementedHere as exc:
        return str(exc)
    return None


def weights_bytes(settings: CoreEngineSettings, description: ModelDescription, device: torch.device) -> dict[str, int]:
    """Memory that the weights take in each dtype; int8 only where the kernels hold it, or where it was asked for."""
    n, table = n_parameters(description), description.vocab_size * description.hidden_size
    sizes = {"bf16": _ELEMENT_BYTES["bf16"] * n, "f32": _ELEMENT_BYTES["f32"] * n}
    as_int8 = replace(settings, dtype="int8")
    if kernels_refusal(as_int8, description, settings.kv_dtype or KvDtype.BF16, device) is None:
        # The embedding stays bf16, for look-ups; a tied head is packed beside it.
        packed = n - table if not description.tied_embeddings else n
        sizes["int8"] = _ELEMENT_BYTES["int8"] * packed + _ELEMENT_BYTES["bf16"] * table
        if settings.dtype == "bf16" and description.tied_embeddings:
            sizes["bf16"] += _ELEMENT_BYTES["bf16"] * table
    elif settings.dtype == "int8":
        sizes["int8"] = sizes["bf16"]  # torch rounds to what int8 can hold and keeps bf16
    return sizes


def rounded_to_int8(weights: ModelWeights) -> ModelWeights:
    """The same weights with the values that int8 can hold, one scale a row: int8's results where nothing runs it. The
    embedding is looked up in full."""
    return replace(
        weights,
        head=_rounded(weights.head),
        layers=tuple(
            replace(
                layer,
                qkv=_rounded(layer.qkv),
                attention_out=_rounded(layer.attention_out),
                gate_up=_rounded(layer.gate_up),
                down=_rounded(layer.down),
            )
            for layer in weights.layers
        ),
    )


def _rounded(matrix: torch.Tensor) -> torch.Tensor:
    scale = matrix.float().abs().amax(dim=1, keepdim=True) / 127.0
    return ((matrix.float() / scale.clamp_min(1e-30)).round() * scale).to(matrix.dtype)
