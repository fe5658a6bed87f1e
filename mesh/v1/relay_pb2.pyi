from mesh.v1 import node_pb2 as _node_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RelayRequest(_message.Message):
    __slots__ = ("call", "answer", "sealed")
    CALL_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    call: RelayCall
    answer: RelayAnswer
    sealed: bytes
    def __init__(self, call: _Optional[_Union[RelayCall, _Mapping]] = ..., answer: _Optional[_Union[RelayAnswer, _Mapping]] = ..., sealed: _Optional[bytes] = ...) -> None: ...

class RelayCall(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class RelayAnswer(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    def __init__(self, ticket: _Optional[bytes] = ...) -> None: ...

class RelayResponse(_message.Message):
    __slots__ = ("ready", "sealed")
    READY_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    ready: RelayReady
    sealed: bytes
    def __init__(self, ready: _Optional[_Union[RelayReady, _Mapping]] = ..., sealed: _Optional[bytes] = ...) -> None: ...

class RelayReady(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class SealedFrame(_message.Message):
    __slots__ = ("kv", "run", "event", "release", "error", "done")
    KV_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    kv: _node_pb2.KvFrame
    run: _node_pb2.RunOrder
    event: _node_pb2.RunEvent
    release: str
    error: SealedError
    done: bool
    def __init__(self, kv: _Optional[_Union[_node_pb2.KvFrame, _Mapping]] = ..., run: _Optional[_Union[_node_pb2.RunOrder, _Mapping]] = ..., event: _Optional[_Union[_node_pb2.RunEvent, _Mapping]] = ..., release: _Optional[str] = ..., error: _Optional[_Union[SealedError, _Mapping]] = ..., done: _Optional[bool] = ...) -> None: ...

class SealedError(_message.Message):
    __slots__ = ("reason", "message", "details")
    class DetailsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    details: _containers.ScalarMap[str, str]
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., details: _Optional[_Mapping[str, str]] = ...) -> None: ...
