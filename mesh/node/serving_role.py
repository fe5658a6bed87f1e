"""Which half of a request a node does: prefill, decode, or both. Pure.

A `prefill` node computes KV for others and ships it; a `decode` node goes on from KV that came, and computes at most
one block of a prompt itself. Only core nodes are told apart; an edge does both. The role rules what is admitted: work
that was taken before a change of role goes on.
"""

from __future__ import annotations

from enum import Enum

from mesh.errors import InvalidRequest, WrongRole
from mesh.kv.hashing import BLOCK_TOKENS

MOST_PREFILL_AT_DECODE_TOKENS = BLOCK_TOKENS
"""What a decode node may compute of a prompt: what is left when all full blocks have come."""


class ServingRole(Enum):
    """The values are the words of the wire, the registry and the command line."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def prefills(self) -> bool:
        """It computes whole prompts."""
        return self is not ServingRole.DECODE

    @property
    def decodes(self) -> bool:
        """It generates."""
        return self is not ServingRole.PREFILL


def serving_role(word: str) -> ServingRole:
    """The role of a word; empty: both, as an older node means it. Raises InvalidRequest."""
    try:
        return ServingRole(word or "both")
    except ValueError:
        words = ", ".join(role.value for role in ServingRole)
        raise InvalidRequest(f"a node's role is one of {words}, got {word[:40]!r}", field="role") from None


def check_run_role(role: ServingRole, node: str, *, to_prefill_tokens: int, prefill_only: bool) -> None:
    """Raise WrongRole unless a node of this role takes a run that has so many tokens to compute before it samples."""
    if prefill_only:
        if not role.prefills:
            raise WrongRole(f"node {node} has the role decode, it does not prefill for others", node=node)
    elif not role.decodes:
        raise WrongRole(f"node {node} has the role prefill, it does not decode", node=node)
    elif not role.prefills and to_prefill_tokens > MOST_PREFILL_AT_DECODE_TOKENS:
        raise WrongRole(
            f"node {node} has the role decode: it computes at most {MOST_PREFILL_AT_DECODE_TOKENS} tokens of a "
            f"prompt, not {to_prefill_tokens}; the rest has to come as KV",
            node=node,
        )


def check_import_role(role: ServingRole, node: str) -> None:
    """Raise WrongRole unless a node of this role takes KV to go on from."""
    if not role.decodes:
        raise WrongRole(f"node {node} has the role prefill, it takes no KV to go on from", node=node)
