"""From settings to a ready engine core: describe, check what fits, load, warm up. Blocks for seconds."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import torch

from core_node.engine.blocks import blocks_for
from core_node.engine.core import EngineCore
from core_node.engine.gguf_weights import GgufWeights
from core_node.engine.kv_pool import KvPool
from core_node.engine.models import load_model
from core_node.engine.runner import Runner
from core_node.engine.safetensors_weights import SafetensorsWeights
from core_node.engine.scheduler import SchedulerLimits
from core_node.engine.settings import CoreEngineSettings
from core_node.engine.weights import check_shapes, n_parameters
from mesh.errors import InvalidRequest, Overloaded
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.hashing import BLOCK_TOKENS
from mesh.model.description import ModelDescription, describe
from mesh.model.tokenizer import load_tokenizer
from mesh.node.engine import EngineInfo

_WEIGHT_BYTES = {"bf16": 2, "f32": 4, "int8": 1}
_DEFAULT_POOL_CONTEXTS = 4  # sequences of full context that a pool of default size can hold
_DEFAULT_POOL_RATIO = 0.5  # of the memory that is left after the weights, at most
_WATERMARK_RATIO = 0.02
_WARM_UP_TOKENS = 32
_MIB = 1024 * 1024


def load_engine(settings: CoreEngineSettings) -> EngineCore:
    """Everything that Engine.start does. Call on the engine thread: torch's thread count is set for it here.

    Raises InvalidRequest (bad model file or device) or Overloaded (does not fit, with the sum)."""
    if settings.n_threads:
        torch.set_num_threads(settings.n_threads)
    device = _device(settings.device)
    description = describe(settings.model_path, model_id=settings.model_id)
    tokenizer = load_tokenizer(settings.model_path)
    kv_dtype = settings.kv_dtype or (KvDtype.F32 if settings.dtype == "f32" else KvDtype.BF16)
    source = SafetensorsWeights(description) if settings.model_path.is_dir() else GgufWeights(settings.model_path)
    check_shapes(description, source.shapes)  # before the arithmetic: a wrong file is the better message
    n_blocks = _pool_blocks(settings, description, kv_dtype, device)
    max_context = min(settings.max_context_tokens or description.context_tokens, n_blocks * BLOCK_TOKENS)
    model, backend = load_model(settings, description, source, device, max_context, kv_dtype)
    pool = KvPool(description.geometry, n_blocks, kv_dtype, device)
    runner = Runner(model, pool, description.eos_token_ids)
    runner.warm_up(min(_WARM_UP_TOKENS, max_context - 1, settings.max_step_tokens))
    info = EngineInfo(
        model_id=settings.model_id,
        geometry=description.geometry,
        weights_lineage=description.weights_lineage,
        weights_dtype=f"{description.weights_dtype} as {settings.dtype}",
        kv_dtype=kv_dtype,
        max_context_tokens=max_context,
        kv_capacity_tokens=n_blocks * BLOCK_TOKENS,
        vocab_size=description.vocab_size,
        eos_token_ids=description.eos_token_ids,
        build=f"kvmesh-core {version('kvmesh')} torch {torch.__version__} {device.type} {backend}",
    )
    limits = SchedulerLimits(
        max_step_tokens=settings.max_step_tokens,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        watermark_blocks=int(n_blocks * _WATERMARK_RATIO),
    )
    return EngineCore(info, runner, limits, tokenizer.stream)


def kv_bytes_per_token(geometry: KvGeometry, dtype: KvDtype) -> int:
    """Bytes of K and V of one position over all layers."""
    return geometry.n_layers * geometry.n_kv_heads * geometry.head_dim * 2 * dtype.storage.itemsize


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as exc:
        raise InvalidRequest(f"device {name!r} cannot be used: {exc}", field="device") from exc
    return device


def _pool_blocks(
    settings: CoreEngineSettings, description: ModelDescription, dtype: KvDtype, device: torch.device
) -> int:
    """Blocks of the pool. Raises Overloaded with the arithmetic if weights and pool exceed the free memory."""
    per_token = kv_bytes_per_token(description.geometry, dtype)
    weights_bytes = n_parameters(description) * _WEIGHT_BYTES[settings.dtype]
    free_bytes = _free_bytes(device)
    left_bytes = free_bytes - weights_bytes
    if settings.kv_pool_tokens:
        n_blocks = settings.kv_pool_tokens // BLOCK_TOKENS
    elif settings.kv_pool_bytes:
        n_blocks = settings.kv_pool_bytes // (per_token * BLOCK_TOKENS)
    else:
        context = settings.max_context_tokens or description.context_tokens
        wanted = blocks_for(context) * _DEFAULT_POOL_CONTEXTS
        n_blocks = min(wanted, int(max(0, left_bytes) * _DEFAULT_POOL_RATIO) // (per_token * BLOCK_TOKENS))
    pool_bytes = n_blocks * BLOCK_TOKENS * per_token
    if n_blocks < 1 or pool_bytes > left_bytes:
        raise Overloaded(
            f"{description.model_id} does not fit on {device}: weights {weights_bytes // _MIB} MiB + KV pool "
            f"{pool_bytes // _MIB} MiB ({n_blocks} blocks of {per_token * BLOCK_TOKENS} bytes) against "
            f"{free_bytes // _MIB} MiB free"
        )
    return n_blocks


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
