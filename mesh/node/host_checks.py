"""What a node checks of an order before its engine sees any of it. Pure."""

from __future__ import annotations

from mesh.errors import InvalidRequest, UnknownModel
from mesh.node.engine import EngineInfo
from mesh.node.host_frames import KvOpen
from mesh.node.port import RunOrder, WorkContext


def check_run(order: RunOrder, info: EngineInfo) -> None:
    """Raise UnknownModel or InvalidRequest (naming the field) unless the engine of `info` can run this."""
    check_model(order.context, info)
    n_tokens, limit = len(order.token_ids), info.max_context_tokens
    if not n_tokens:
        raise InvalidRequest("a run needs at least one token", field="token_ids")
    # A prefill may fill the context; a run needs room for one more token.
    if n_tokens > limit or (n_tokens == limit and not order.prefill_only):
        raise InvalidRequest(
            f"{n_tokens} tokens leave no room in the model's context of {limit} tokens", field="token_ids"
        )
    check_ids(order.token_ids, info)
    if not 1 <= order.prompt_tokens <= n_tokens:
        raise InvalidRequest(
            f"prompt_tokens must be in [1, {n_tokens}], got {order.prompt_tokens}", field="prompt_tokens"
        )
    generated = n_tokens - order.prompt_tokens
    if generated >= order.sampling.max_tokens and not order.prefill_only:
        raise InvalidRequest(
            f"{generated} of at most {order.sampling.max_tokens} tokens are generated already", field="max_tokens"
        )
    deadline_s = order.context.deadline_s
    if deadline_s is not None and not deadline_s > 0:
        raise InvalidRequest(f"deadline_s must be above 0, got {deadline_s}", field="deadline_s")


def check_import(order: KvOpen, info: EngineInfo) -> int:
    """Raise unless the engine of `info` can take such an import; returns the positions to make room for."""
    check_model(order.context, info)
    check_ids(order.token_ids, info)
    if not max(1, len(order.token_ids)) <= order.max_tokens:
        raise InvalidRequest(
            f"max_tokens must be at least the {len(order.token_ids)} known tokens, got {order.max_tokens}",
            field="max_tokens",
        )
    if len(order.token_ids) > info.max_context_tokens:
        raise InvalidRequest(
            f"{len(order.token_ids)} tokens are over the model's context of {info.max_context_tokens}", field="tokens"
        )
    return min(order.max_tokens, info.max_context_tokens)


def check_model(context: WorkContext, info: EngineInfo) -> None:
    """Raise UnknownModel unless the engine serves the context's model."""
    if context.model != info.model_id:
        raise UnknownModel(f"this node serves {info.model_id!r}, not {context.model!r}", model=context.model)


def check_ids(token_ids: tuple[int, ...], info: EngineInfo) -> None:
    """Raise InvalidRequest unless all ids are in the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < info.vocab_size):
        raise InvalidRequest(f"token ids must be in [0, {info.vocab_size})", field="token_ids")
