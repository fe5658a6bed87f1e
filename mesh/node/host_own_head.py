"""The part of a prompt that a receiver computes itself while KV of the rest comes (ship and recompute at once).

The head is a run of the engine like any other, under a name of its own; the tail is an import that begins where the
head ends, and takes it in at the end. Whatever happens in between, neither outlives a transfer that fails.
"""

from __future__ import annotations

import asyncio

from mesh.errors import Internal, InvalidRequest
from mesh.kv.hashing import BLOCK_TOKENS
from mesh.node.engine import Held, RunId, RunSpec
from mesh.node.host_frames import KvOpen
from mesh.node.host_transfer_parts import TransferParts
from mesh.node.sampling import SamplingParams


def check_own_tokens(order: KvOpen) -> None:
    """Raise InvalidRequest unless the order's `own_tokens` can be."""
    own = order.own_tokens
    if own and (order.source.pause or own % BLOCK_TOKENS or own + BLOCK_TOKENS > len(order.token_ids)):
        raise InvalidRequest(
            f"own_tokens is a multiple of {BLOCK_TOKENS} that leaves a block of the {len(order.token_ids)} known "
            f"tokens to a source that does not run, got {own}",
            field="own_tokens",
        )


class OwnHead:
    """Computes positions [0, tokens) of an order's prompt. One owner, who awaits `join` or `drop`."""

    def __init__(self, parts: TransferParts, order: KvOpen) -> None:
        self.tokens = order.own_tokens
        self._parts = parts
        self._order = order
        self._run_id = RunId(f"{order.target}/own")
        self._task = asyncio.create_task(self._compute(), name=f"own-head:{order.target}")

    @property
    def failed(self) -> bool:
        """Whether it has ended without KV: nothing that comes is of use any more."""
        return self._task.done() and (self._task.cancelled() or self._task.exception() is not None)

    async def _compute(self) -> None:
        order = self._order
        spec = RunSpec(
            run_id=self._run_id,
            token_ids=order.token_ids[: self.tokens],
            prompt_tokens=self.tokens,
            sampling=SamplingParams(max_tokens=1, seed=0, temperature=0.0),
            salt=order.context.salt,
            prefill_only=True,
        )
        last = None
        async for event in self._parts.engine.generate(spec):
            last = event
        if not isinstance(last, Held) or last.kv_tokens != self.tokens:
            raise Internal(f"the engine ended a prefill of {self.tokens} tokens otherwise than with their KV")

    async def join(self) -> None:
        """Wait for it and put it in front of the tail. Raises what kept it from being computed."""
        await self._task
        await self._parts.engine.join_kv(self._order.target, self._run_id)

    async def drop(self) -> None:
        """Stop it and free it; nothing of it is there afterwards."""
        self._task.cancel()
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            self._task.exception()  # seen: the transfer's own error is on its way
        await self._parts.free(self._run_id)
