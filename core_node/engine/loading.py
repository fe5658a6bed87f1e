"""From settings to a ready engine core: describe, check what fits, load, warm up. Blocks for seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

import torch

from core_node.engine.block_copies import block_bytes
from core_node.engine.core import EngineCore
from core_node.engine.fitting import Demand, Fit, fit, mib
from core_node.engine.gguf_weights import GgufWeights
from core_node.engine.kv_pool import KvPool
from core_node.engine.models import load_model, weights_bytes
from core_node.engine.policies import find_policy
from core_node.engine.runner import Runner
from core_node.engine.safetensors_weights import SafetensorsWeights
from core_node.engine.scheduler import SchedulerLimits
from core_node.engine.settings import CoreEngineSettings
from core_node.engine.weights import OnLoad, ReportingSource, WeightSource, check_shapes
from mesh.errors import InvalidRequest, Overloaded
from mesh.kv.geometry import KvDtype, KvGeometry
from mesh.kv.hashing import BLOCK_TOKENS
from mesh.machine import available_bytes, usable_threads
from mesh.model.description import ModelDescription, describe
from mesh.model.tokenizer import load_tokenizer
from mesh.node.engine import Capability, EngineInfo
from mesh.telemetry.log import get_logger

_WATERMARK_RATIO = 0.02
_WARM_UP_TOKENS = 32
_log = get_logger(__name__)


def load_engine(settings: CoreEngineSettings, on_load: OnLoad | None = None) -> EngineCore:
    """Everything that Engine.start does. Call on the engine thread: torch's thread count is set for it here.
    `on_load` is told how many bytes of how many have been read, on the same thread.

    Raises InvalidRequest (bad model file or device) or Overloaded (does not fit, with the sum and what would)."""
    n_threads = settings.n_threads or usable_threads()
    torch.set_num_threads(n_threads)
    device = _device(settings.device)
    policy = find_policy(settings.policy)
    description = describe(settings.model_path, model_id=settings.model_id)
    tokenizer = load_tokenizer(settings.model_path)
    kv_dtype = settings.kv_dtype or (KvDtype.F32 if settings.dtype == "f32" else KvDtype.BF16)
    source = open_weights(description)
    check_shapes(description, source.shapes)  # before the arithmetic: a wrong file is the better message
    fitted = fit(_demand(settings, description, kv_dtype, device), _free_bytes(device))
    max_context = min(settings.max_context_tokens or description.context_tokens, fitted.pool_tokens)
    with _memory_errors(description, fitted):
        reporting = ReportingSource(source, on_load) if on_load is not None else source
        model, backend = load_model(settings, description, reporting, device, max_context, kv_dtype, n_threads)
        pool = KvPool(description.geometry, fitted.n_blocks, kv_dtype, device)
        runner = Runner(model, pool, description.eos_token_ids)
        runner.warm_up(min(_WARM_UP_TOKENS, max_context - 1, settings.max_step_tokens))
    because = "n_threads is set" if settings.n_threads else "the CPUs that this process may use"
    _log.info(
        "engine_ready",
        model_id=settings.model_id,
        backend=backend.name,
        dtype=settings.dtype,
        n_threads=n_threads,
        kv_blocks=fitted.n_blocks,
        reason=f"{description.architecture}, {description.weights_dtype} as {settings.dtype}, "
        f"{mib(fitted.weights_bytes)} of weights; KV pool {fitted.pool_tokens:,} tokens, {fitted.n_blocks:,} blocks, "
        f"{mib(fitted.pool_bytes)} in {kv_dtype.value}: {fitted.why}; {mib(fitted.free_bytes)} were free; "
        f"{n_threads} threads: {because}; attention by {backend.name}: {backend.reason}",
    )
    info = EngineInfo(
        model_id=settings.model_id,
        geometry=description.geometry,
        weights_lineage=description.weights_lineage,
        weights_dtype=f"{description.weights_dtype} as {settings.dtype}",
        kv_dtype=kv_dtype,
        max_context_tokens=max_context,
        kv_capacity_tokens=fitted.pool_tokens,
        vocab_size=description.vocab_size,
        eos_token_ids=description.eos_token_ids,
        build=f"kvmesh-core {version('kvmesh')} torch {torch.__version__} {device.type} {backend.name}",
        capabilities=frozenset({Capability.LOSSLESS_KV} | ({Capability.EXACT} if backend.exact else set())),
    )
    limits = SchedulerLimits(
        max_step_tokens=settings.max_step_tokens,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        watermark_blocks=int(fitted.n_blocks * _WATERMARK_RATIO),
        tpot_target_s=settings.tpot_target_s,
        host_blocks=settings.swap_bytes // block_bytes(pool),
        policy=policy,
        ageing_s=settings.ageing_s,
        starvation_s=settings.starvation_s,
    )
    core = EngineCore(info, runner, limits, tokenizer.stream)
    core.measure_copies()
    return core


def open_weights(description: ModelDescription) -> WeightSource:
    """The tensors of a described model. Raises InvalidRequest."""
    path = description.path
    return SafetensorsWeights(description) if path.is_dir() else GgufWeights(path)


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


def _demand(
    settings: CoreEngineSettings, description: ModelDescription, kv_dtype: KvDtype, device: torch.device
) -> Demand:
    return Demand(
        model_id=description.model_id,
        device=str(device),
        dtype=settings.dtype,
        weights_bytes=weights_bytes(settings, description, device),
        kv_bytes_per_token=kv_bytes_per_token(description.geometry, kv_dtype),
        context_tokens=settings.max_context_tokens or description.context_tokens,
        pool_tokens=settings.kv_pool_tokens,
        pool_bytes=settings.kv_pool_bytes,
    )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return available_bytes()


@contextmanager
def _memory_errors(description: ModelDescription, fitted: Fit) -> Iterator[None]:
    """Turns an allocation that failed, whoever says so, into Overloaded with the numbers."""
    try:
        yield
    except (MemoryError, RuntimeError) as exc:
        # torch.OutOfMemoryError is CUDA's; torch's CPU allocator raises a plain RuntimeError.
        if not isinstance(exc, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(exc):
            raise
        raise Overloaded(
            f"the memory ran out while {description.model_id} was loaded: weights {mib(fitted.weights_bytes)} + KV "
            f"pool {mib(fitted.pool_bytes)} seemed to fit in the {mib(fitted.free_bytes)} that were free; "
            f"kv_pool_tokens={max(BLOCK_TOKENS, fitted.pool_tokens // 2)} halves the pool"
        ) from exc
