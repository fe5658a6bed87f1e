"""One run at a modelled node, and what the node tells of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Listener(Protocol):
    """Whoever ordered a run; called at the node, in virtual time."""

    def on_prefilled(self, job: Job) -> None:
        """The prompt has KV; in the same step it made its first token, unless it is for its KV only."""
        ...

    def on_ended(self, job: Job) -> None:
        """All of its tokens are made, or its KV is there."""
        ...

    def on_held(self, job: Job) -> None:
        """It was asked to stop and did, between two tokens."""
        ...

    def on_failed(self, job: Job) -> None:
        """The node is down, or never had room for it."""
        ...


class Job:
    """Mutable; owned by its node while it is there. `made` is current when the listener is called."""

    __slots__ = (
        "base_made",
        "block_tokens",
        "blocks",
        "cached_tokens",
        "finish_step",
        "gone",
        "join_step",
        "kv_tokens",
        "listener",
        "made",
        "node_id",
        "output_tokens",
        "pinned",
        "position",
        "prefill_only",
        "private_tokens",
        "prompt_tokens",
        "run_id",
        "stopping",
        "submitted_s",
    )

    def __init__(
        self,
        *,
        run_id: str,
        prompt_tokens: int,
        output_tokens: int,
        blocks: Sequence[int],
        block_tokens: int,
        listener: Listener,
        kv_tokens: int = 0,
        prefill_only: bool = False,
    ) -> None:
        self.run_id = run_id
        self.prompt_tokens = prompt_tokens  # what it starts from: prompt and tokens made elsewhere
        self.output_tokens = output_tokens  # to make here
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.listener = listener
        self.kv_tokens = kv_tokens  # of the prompt, that came along
        self.prefill_only = prefill_only
        self.node_id = ""
        self.position = 0
        self.cached_tokens = 0
        self.pinned: list[int] = []
        self.private_tokens = 0
        self.made = 0
        self.join_step = 0
        self.finish_step = 0
        self.gone = False  # cancelled, failed or ended
        self.stopping = False
        self.submitted_s = 0.0

    @property
    def total_tokens(self) -> int:
        """Positions that it may need."""
        return self.prompt_tokens + self.output_tokens
