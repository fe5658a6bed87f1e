"""Which StepModel runs a model: the compiled kernels where they can, torch everywhere else. Chosen once, at load."""

from __future__ import annotations

from dataclasses import replace

import structlog
import torch

from core_node.engine.kernel_step import KernelStep
from core_node.engine.llama import LlamaModel
from core_node.engine.runner import StepModel, TorchStep
from core_node.engine.settings import CoreEngineSettings
from core_node.engine.weights import LlamaWeights, WeightSource, load_weights
from mesh.errors import InvalidRequest, NotImplementedHere
from mesh.kv.geometry import KvDtype
from mesh.model.description import ModelDescription

_log = structlog.get_logger(__name__)


def load_model(
    settings: CoreEngineSettings,
    description: ModelDescription,
    source: WeightSource,
    device: torch.device,
    max_positions: int,
    kv_dtype: KvDtype,
) -> tuple[StepModel, str]:
    """The model and what runs it, for people. Raises InvalidRequest if `settings.backend` cannot."""
    refusal = "the settings say so"
    if settings.backend != "torch":
        try:
            if settings.dtype == "f32" or kv_dtype is not KvDtype.BF16 or device.type != "cpu":
                raise NotImplementedHere(
                    f"the kernels compute bf16 over bf16 KV on the CPU, "
                    f"this is {settings.dtype} over {kv_dtype.value} on {device.type}"
                )
            model = KernelStep.load(
                description,
                source,
                max_positions=max_positions,
                max_rows=settings.max_step_tokens,
                max_sequences=settings.max_running,
                n_threads=settings.n_threads or torch.get_num_threads(),
                int8=settings.dtype == "int8",
            )
        except NotImplementedHere as exc:
            refusal = str(exc)
            if settings.backend == "kernels":
                raise InvalidRequest(f"backend kernels cannot run: {refusal}", field="backend") from exc
        else:
            _log.info("engine backend", backend=model.name, threads=model.n_threads, dtype=settings.dtype)
            return model, model.name
    _log.info("engine backend", backend="torch", because=refusal, dtype=settings.dtype)
    dtype = torch.float32 if settings.dtype == "f32" else torch.bfloat16
    weights = load_weights(description, source, dtype, device)
    if settings.dtype == "int8":
        weights = rounded_to_int8(weights)
    return TorchStep(LlamaModel(description, weights, max_positions)), "torch"


def rounded_to_int8(weights: LlamaWeights) -> LlamaWeights:
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
