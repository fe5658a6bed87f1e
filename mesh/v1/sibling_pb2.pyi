from mesh.v1 import common_pb2 as _common_pb2
from mesh.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ShareRequest(_message.Message):
    __slots__ = ("sequence", "in_flight", "opened", "entries", "end")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    in_flight: InFlight
    opened: CopiedRequest
    entries: CopiedEntries
    end: CopiedEnd
    def __init__(self, sequence: _Optional[int] = ..., in_flight: _Optional[_Union[InFlight, _Mapping]] = ..., opened: _Optional[_Union[CopiedRequest, _Mapping]] = ..., entries: _Optional[_Union[CopiedEntries, _Mapping]] = ..., end: _Optional[_Union[CopiedEnd, _Mapping]] = ...) -> None: ...

class ShareResponse(_message.Message):
    __slots__ = ("sequence", "request_id", "followed")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    request_id: str
    followed: bool
    def __init__(self, sequence: _Optional[int] = ..., request_id: _Optional[str] = ..., followed: _Optional[bool] = ...) -> None: ...

class InFlight(_message.Message):
    __slots__ = ("decided",)
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    decided: _containers.RepeatedCompositeFieldContainer[Decided]
    def __init__(self, decided: _Optional[_Iterable[_Union[Decided, _Mapping]]] = ...) -> None: ...

class Decided(_message.Message):
    __slots__ = ("node_id", "prefill_tokens", "age_s", "request_id")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    prefill_tokens: int
    age_s: float
    request_id: str
    def __init__(self, node_id: _Optional[str] = ..., prefill_tokens: _Optional[int] = ..., age_s: _Optional[float] = ..., request_id: _Optional[str] = ...) -> None: ...

class CopiedRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "fingerprint", "request", "label", "seed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    fingerprint: bytes
    request: _inference_pb2.GenerateRequest
    label: str
    seed: int
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., request: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ..., label: _Optional[str] = ..., seed: _Optional[int] = ...) -> None: ...

class CopiedEntries(_message.Message):
    __slots__ = ("request_id", "entries")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    entries: _containers.RepeatedCompositeFieldContainer[CopiedEntry]
    def __init__(self, request_id: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[CopiedEntry, _Mapping]]] = ...) -> None: ...

class CopiedEntry(_message.Message):
    __slots__ = ("token", "event")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    token: CopiedToken
    event: _inference_pb2.GenerateResponse
    def __init__(self, token: _Optional[_Union[CopiedToken, _Mapping]] = ..., event: _Optional[_Union[_inference_pb2.GenerateResponse, _Mapping]] = ...) -> None: ...

class CopiedToken(_message.Message):
    __slots__ = ("id", "text", "node_id", "logprobs")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    node_id: str
    logprobs: _common_pb2.PositionLogprobs
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ..., node_id: _Optional[str] = ..., logprobs: _Optional[_Union[_common_pb2.PositionLogprobs, _Mapping]] = ...) -> None: ...

class CopiedEnd(_message.Message):
    __slots__ = ("request_id", "error_reason", "error_message", "error_details")
    class ErrorDetailsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_DETAILS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    error_reason: str
    error_message: str
    error_details: _containers.ScalarMap[str, str]
    def __init__(self, request_id: _Optional[str] = ..., error_reason: _Optional[str] = ..., error_message: _Optional[str] = ..., error_details: _Optional[_Mapping[str, str]] = ...) -> None: ...
