"""Whether a run or an import may be taken at all. Pure; each raises and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from core_node.engine.sequence import Sequence
from mesh.errors import InvalidRequest, Overloaded
from mesh.node.engine import EngineInfo, ImportSpec, RunSpec


def check_run(spec: RunSpec, info: EngineInfo) -> None:
    """Raise InvalidRequest, or Overloaded with the arithmetic if it could never fit."""
    _check_tokens(spec.token_ids, info)
    n, context, capacity = len(spec.token_ids), info.max_context_tokens, info.kv_capacity_tokens
    if not 1 <= spec.prompt_tokens <= n:
        raise InvalidRequest(f"prompt_tokens must be in [1, {n}], got {spec.prompt_tokens}", field="prompt_tokens")
    if n > capacity:
        raise Overloaded(f"{n} tokens can never fit the KV pool of {capacity} tokens")
    if n + (0 if spec.prefill_only else 1) > context:
        raise InvalidRequest(
            f"{n} tokens leave no room in a context of {context} tokens", field="token_ids", limit=str(context)
        )


def check_import(spec: ImportSpec, info: EngineInfo) -> None:
    """Raise InvalidRequest, or Overloaded with the arithmetic if it could never fit."""
    _check_tokens(spec.token_ids, info)
    n, context, capacity = len(spec.token_ids), info.max_context_tokens, info.kv_capacity_tokens
    if spec.max_tokens > capacity:
        raise Overloaded(f"an import of {spec.max_tokens} tokens can never fit the KV pool of {capacity} tokens")
    if not n <= spec.max_tokens <= context:
        raise InvalidRequest(f"max_tokens must be in [{n}, {context}], got {spec.max_tokens}", field="max_tokens")


def check_continues(spec: RunSpec, hold: Sequence, root: bytes) -> None:
    """Raise InvalidRequest unless the hold's KV is of a prefix of the run's tokens, in its namespace."""
    if hold.root != root:
        raise InvalidRequest(f"hold {spec.kv_from} belongs to another cache namespace", field="salt")
    known = min(hold.computed, hold.n_tokens)
    if hold.computed > len(spec.token_ids) or hold.token_ids[:known] != list(spec.token_ids[:known]):
        raise InvalidRequest(f"hold {spec.kv_from} is not of a prefix of the run's tokens", field="kv_from")


def _check_tokens(token_ids: Seq[int], info: EngineInfo) -> None:
    # The rim has checked them; one bad id would fail everybody's step, so look again.
    if not token_ids:
        raise InvalidRequest("there are no tokens", field="token_ids")
    if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
        raise InvalidRequest(f"a token id is outside [0, {info.vocab_size})", field="token_ids")
