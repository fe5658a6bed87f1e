"""What agent and llama.cpp process say to each other: small frozen messages, and their framing.

A frame is a u32 length (little-endian) and JSON. A message is an object whose "@" names its class; fields are
plain values, bytes as hex, or further messages. Nothing is ever evaluated or unpickled: a name that is not in the
table, a missing or an extra field is an error. KV bytes go through shared memory (arena.py), not through here.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from mesh.errors import Internal, MeshError, by_reason
from mesh.node.engine import (
    EngineLoad,
    Finished,
    FinishReason,
    Held,
    ImportSpec,
    Prefilled,
    RunEvent,
    RunId,
    RunSpec,
    SelfTest,
    Tokens,
)
from mesh.node.latency_model import LatencyCurve
from mesh.node.sampling import SamplingParams

MAX_FRAME_BYTES: Final = 64 << 20
LENGTH: Final = struct.Struct("<I")


# --- to the child -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """First message: load this model. Geometry as the checked header says it."""

    model_path: str
    n_threads: int
    n_ctx_tokens: int
    max_context_tokens: int
    max_running: int
    max_sequences: int
    max_step_tokens: int
    max_waiting: int
    max_stall_s: float
    slot_bytes: int
    n_layers: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Submit:
    """Run it; events come back under `key`."""

    key: int
    spec: RunSpec


@dataclass(frozen=True, slots=True)
class Cancel:
    """Forget the run of this key, if it is still there."""

    key: int


@dataclass(frozen=True, slots=True)
class Pause:
    run_id: RunId


@dataclass(frozen=True, slots=True)
class Release:
    run_id: RunId


@dataclass(frozen=True, slots=True)
class KvTokens:
    run_id: RunId


@dataclass(frozen=True, slots=True)
class Export:
    """Write K, then V, of positions [start, stop) into arena slot `slot`."""

    run_id: RunId
    start: int
    stop: int
    slot: int


@dataclass(frozen=True, slots=True)
class OpenImport:
    spec: ImportSpec


@dataclass(frozen=True, slots=True)
class Write:
    """Append K and V of positions [start, stop) from arena slot `slot`."""

    run_id: RunId
    start: int
    stop: int
    slot: int


@dataclass(frozen=True, slots=True)
class Join:
    """Put hold `head` in front of the import."""

    run_id: RunId
    head: RunId


@dataclass(frozen=True, slots=True)
class CachedTokens:
    token_ids: tuple[int, ...]
    salt: bytes


@dataclass(frozen=True, slots=True)
class GetLoad:
    pass


@dataclass(frozen=True, slots=True)
class RunSelfTest:
    pass


@dataclass(frozen=True, slots=True)
class CheckIntegrity:
    """Answered by None, or by a text that says what is off."""


Request = (
    Pause
    | Release
    | KvTokens
    | Export
    | OpenImport
    | Write
    | Join
    | CachedTokens
    | GetLoad
    | RunSelfTest
    | CheckIntegrity
)


@dataclass(frozen=True, slots=True)
class Call:
    """A request that is answered by a Reply or a Failure of the same id."""

    id: int
    request: Request


# --- from the child -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded. `build` names the versions that fix the meaning of a KV blob."""

    build: str


@dataclass(frozen=True, slots=True)
class Event:
    """Something of the run submitted under `key`."""

    key: int
    event: RunEvent


@dataclass(frozen=True, slots=True)
class Reply:
    id: int
    value: int | str | EngineLoad | SelfTest | None


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of mesh.errors, by its reason word. `of`: "run" (id is a key), "call" or "start"."""

    of: str
    id: int
    reason: str
    message: str
    details: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_error(cls, of: str, id: int, error: MeshError) -> Failure:
        return cls(of, id, error.reason, error.message, tuple(error.details.items()))

    def error(self) -> MeshError:
        """The error again."""
        return by_reason(self.reason)(self.message, **dict(self.details))


ToChild = Start | Submit | Cancel | Call
FromChild = Ready | Event | Reply | Failure

_CLASSES: Final[dict[str, type[Any]]] = {
    cls.__name__: cls
    for cls in (
        *(Start, Submit, Cancel, Call, Ready, Event, Reply, Failure),
        *typing.get_args(Request),
        *(RunSpec, ImportSpec, SamplingParams, EngineLoad, LatencyCurve, SelfTest, Prefilled, Tokens, Finished, Held),
    )
}


# --- framing ------------------------------------------------------------------------------------------------------


def encode(message: ToChild | FromChild) -> bytes:
    """One frame."""
    body = json.dumps(message, default=_plain, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Any:
    """The message of a frame's body. Raises Internal if it is not one of ours."""
    try:
        return _read(None, json.loads(body))
    except (ValueError, TypeError, KeyError) as exc:
        raise Internal(f"a message of the llama.cpp process is malformed: {type(exc).__name__}") from exc


def _plain(value: object) -> object:
    if type(value).__name__ in _CLASSES and dataclasses.is_dataclass(value):
        return {"@": type(value).__name__} | {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, FinishReason):
        return value.value
    raise TypeError(f"{type(value).__name__} has no place in a message")


def _read(hint: Any, value: Any) -> Any:
    """`value` as the type that the field's annotation asks for."""
    if isinstance(value, dict):
        fields = dict(value)
        cls = _CLASSES[fields.pop("@")]
        readers = _readers(cls.__name__)
        return cls(**{name: readers[name](item) for name, item in fields.items()})
    if hint is bytes:
        return bytes.fromhex(value)
    if hint is FinishReason:
        return FinishReason(value)
    if isinstance(value, list):
        inner = typing.get_args(hint)
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(value) if inner[0] in (int, str) else tuple(_read(inner[0], item) for item in value)
        return tuple(_read(one, item) for one, item in zip(inner, value, strict=True))
    return value


@functools.cache
def _readers(name: str) -> dict[str, Callable[[Any], Any]]:
    hints = typing.get_type_hints(_CLASSES[name])
    return {field: functools.partial(_read, _bare(hint)) for field, hint in hints.items()}


def _bare(hint: Any) -> Any:
    """An optional type without its None; other unions are of messages, which name their class themselves."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        rest = [h for h in typing.get_args(hint) if h is not types.NoneType]
        return rest[0] if len(rest) == 1 else None
    return hint
