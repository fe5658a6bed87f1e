from mesh.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvDirection(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_DIRECTION_UNSPECIFIED: _ClassVar[KvDirection]
    KV_DIRECTION_PUSH: _ClassVar[KvDirection]
    KV_DIRECTION_PULL: _ClassVar[KvDirection]
KV_DIRECTION_UNSPECIFIED: KvDirection
KV_DIRECTION_PUSH: KvDirection
KV_DIRECTION_PULL: KvDirection

class WorkContext(_message.Message):
    __slots__ = ("request_id", "tenant", "label", "model", "salt", "policy_version", "deadline_s", "entry_site", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    ENTRY_SITE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    label: str
    model: str
    salt: bytes
    policy_version: int
    deadline_s: float
    entry_site: str
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., label: _Optional[str] = ..., model: _Optional[str] = ..., salt: _Optional[bytes] = ..., policy_version: _Optional[int] = ..., deadline_s: _Optional[float] = ..., entry_site: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class RunOrder(_message.Message):
    __slots__ = ("context", "run_id", "tokens", "prompt_tokens", "sampling", "priority", "kv_from", "prefill_only")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    KV_FROM_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ONLY_FIELD_NUMBER: _ClassVar[int]
    context: WorkContext
    run_id: str
    tokens: _common_pb2.TokenIds
    prompt_tokens: int
    sampling: _common_pb2.SamplingParams
    priority: int
    kv_from: str
    prefill_only: bool
    def __init__(self, context: _Optional[_Union[WorkContext, _Mapping]] = ..., run_id: _Optional[str] = ..., tokens: _Optional[_Union[_common_pb2.TokenIds, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., kv_from: _Optional[str] = ..., prefill_only: _Optional[bool] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("order",)
    ORDER_FIELD_NUMBER: _ClassVar[int]
    order: RunOrder
    def __init__(self, order: _Optional[_Union[RunOrder, _Mapping]] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: RunEvent
    def __init__(self, event: _Optional[_Union[RunEvent, _Mapping]] = ...) -> None: ...

class RunEvent(_message.Message):
    __slots__ = ("prefilled", "tokens", "finished", "held")
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    prefilled: Prefilled
    tokens: NewTokens
    finished: RunFinished
    held: RunHeld
    def __init__(self, prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., tokens: _Optional[_Union[NewTokens, _Mapping]] = ..., finished: _Optional[_Union[RunFinished, _Mapping]] = ..., held: _Optional[_Union[RunHeld, _Mapping]] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("tokens", "cached_tokens")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    cached_tokens: int
    def __init__(self, tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class NewTokens(_message.Message):
    __slots__ = ("ids", "logprobs")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...

class RunFinished(_message.Message):
    __slots__ = ("reason", "stop_string", "leg")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    stop_string: str
    leg: _common_pb2.SignedRecord
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_string: _Optional[str] = ..., leg: _Optional[_Union[_common_pb2.SignedRecord, _Mapping]] = ...) -> None: ...

class RunHeld(_message.Message):
    __slots__ = ("kv_tokens", "leg")
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    kv_tokens: int
    leg: _common_pb2.SignedRecord
    def __init__(self, kv_tokens: _Optional[int] = ..., leg: _Optional[_Union[_common_pb2.SignedRecord, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TransferKvRequest(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: KvFrame
    def __init__(self, frame: _Optional[_Union[KvFrame, _Mapping]] = ...) -> None: ...

class TransferKvResponse(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: KvFrame
    def __init__(self, frame: _Optional[_Union[KvFrame, _Mapping]] = ...) -> None: ...

class KvFrame(_message.Message):
    __slots__ = ("open", "offer", "want", "chunk", "piece", "commit", "done", "abort", "ack", "resume", "resumed")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    open: KvOpen
    offer: KvOffer
    want: KvWant
    chunk: KvChunk
    piece: KvPiece
    commit: KvCommit
    done: KvDone
    abort: KvAbort
    ack: KvAck
    resume: KvResume
    resumed: KvResumed
    def __init__(self, open: _Optional[_Union[KvOpen, _Mapping]] = ..., offer: _Optional[_Union[KvOffer, _Mapping]] = ..., want: _Optional[_Union[KvWant, _Mapping]] = ..., chunk: _Optional[_Union[KvChunk, _Mapping]] = ..., piece: _Optional[_Union[KvPiece, _Mapping]] = ..., commit: _Optional[_Union[KvCommit, _Mapping]] = ..., done: _Optional[_Union[KvDone, _Mapping]] = ..., abort: _Optional[_Union[KvAbort, _Mapping]] = ..., ack: _Optional[_Union[KvAck, _Mapping]] = ..., resume: _Optional[_Union[KvResume, _Mapping]] = ..., resumed: _Optional[_Union[KvResumed, _Mapping]] = ...) -> None: ...

class KvOpen(_message.Message):
    __slots__ = ("transfer_id", "direction", "context", "source_run_id", "prefill", "pause", "target_run_id", "tokens", "max_tokens", "codec", "token", "own_tokens", "stop_first", "pace_s")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    TARGET_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    OWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIRST_FIELD_NUMBER: _ClassVar[int]
    PACE_S_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    direction: KvDirection
    context: WorkContext
    source_run_id: str
    prefill: RunOrder
    pause: bool
    target_run_id: str
    tokens: _common_pb2.TokenIds
    max_tokens: int
    codec: str
    token: bytes
    own_tokens: int
    stop_first: bool
    pace_s: float
    def __init__(self, transfer_id: _Optional[str] = ..., direction: _Optional[_Union[KvDirection, str]] = ..., context: _Optional[_Union[WorkContext, _Mapping]] = ..., source_run_id: _Optional[str] = ..., prefill: _Optional[_Union[RunOrder, _Mapping]] = ..., pause: _Optional[bool] = ..., target_run_id: _Optional[str] = ..., tokens: _Optional[_Union[_common_pb2.TokenIds, _Mapping]] = ..., max_tokens: _Optional[int] = ..., codec: _Optional[str] = ..., token: _Optional[bytes] = ..., own_tokens: _Optional[int] = ..., stop_first: _Optional[bool] = ..., pace_s: _Optional[float] = ...) -> None: ...

class KvManifest(_message.Message):
    __slots__ = ("format", "layout_hash", "weights_lineage", "dtype", "codec", "first_position", "count_tokens", "block_hashes", "label", "tenant", "expires_unix_s", "producer_build")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    COUNT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_BUILD_FIELD_NUMBER: _ClassVar[int]
    format: int
    layout_hash: str
    weights_lineage: str
    dtype: str
    codec: str
    first_position: int
    count_tokens: int
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    label: str
    tenant: str
    expires_unix_s: float
    producer_build: str
    def __init__(self, format: _Optional[int] = ..., layout_hash: _Optional[str] = ..., weights_lineage: _Optional[str] = ..., dtype: _Optional[str] = ..., codec: _Optional[str] = ..., first_position: _Optional[int] = ..., count_tokens: _Optional[int] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., label: _Optional[str] = ..., tenant: _Optional[str] = ..., expires_unix_s: _Optional[float] = ..., producer_build: _Optional[str] = ...) -> None: ...

class KvOffer(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: KvManifest
    def __init__(self, manifest: _Optional[_Union[KvManifest, _Mapping]] = ...) -> None: ...

class KvWant(_message.Message):
    __slots__ = ("from_position", "layout_hash", "weights_lineage", "dtype", "window_bytes")
    FROM_POSITION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    from_position: int
    layout_hash: str
    weights_lineage: str
    dtype: str
    window_bytes: int
    def __init__(self, from_position: _Optional[int] = ..., layout_hash: _Optional[str] = ..., weights_lineage: _Optional[str] = ..., dtype: _Optional[str] = ..., window_bytes: _Optional[int] = ...) -> None: ...

class KvChunk(_message.Message):
    __slots__ = ("index", "start", "stop", "size_bytes", "digest", "prefix_hash")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    index: int
    start: int
    stop: int
    size_bytes: int
    digest: bytes
    prefix_hash: bytes
    def __init__(self, index: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., size_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ..., prefix_hash: _Optional[bytes] = ...) -> None: ...

class KvPiece(_message.Message):
    __slots__ = ("chunk_index", "offset_bytes", "data", "digest")
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    chunk_index: int
    offset_bytes: int
    data: bytes
    digest: bytes
    def __init__(self, chunk_index: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., digest: _Optional[bytes] = ...) -> None: ...

class KvCommit(_message.Message):
    __slots__ = ("chunks", "stop", "digest", "leg")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    stop: int
    digest: bytes
    leg: _common_pb2.SignedRecord
    def __init__(self, chunks: _Optional[int] = ..., stop: _Optional[int] = ..., digest: _Optional[bytes] = ..., leg: _Optional[_Union[_common_pb2.SignedRecord, _Mapping]] = ...) -> None: ...

class KvDone(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    def __init__(self, tokens: _Optional[int] = ...) -> None: ...

class KvAck(_message.Message):
    __slots__ = ("consumed_frames",)
    CONSUMED_FRAMES_FIELD_NUMBER: _ClassVar[int]
    consumed_frames: int
    def __init__(self, consumed_frames: _Optional[int] = ...) -> None: ...

class KvResume(_message.Message):
    __slots__ = ("transfer_id", "token", "received_frames")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FRAMES_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    token: bytes
    received_frames: int
    def __init__(self, transfer_id: _Optional[str] = ..., token: _Optional[bytes] = ..., received_frames: _Optional[int] = ...) -> None: ...

class KvResumed(_message.Message):
    __slots__ = ("received_frames",)
    RECEIVED_FRAMES_FIELD_NUMBER: _ClassVar[int]
    received_frames: int
    def __init__(self, received_frames: _Optional[int] = ...) -> None: ...

class KvAbort(_message.Message):
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

class MoveKvRequest(_message.Message):
    __slots__ = ("open", "peer_address", "peer_place")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PEER_PLACE_FIELD_NUMBER: _ClassVar[int]
    open: KvOpen
    peer_address: str
    peer_place: _common_pb2.Place
    def __init__(self, open: _Optional[_Union[KvOpen, _Mapping]] = ..., peer_address: _Optional[str] = ..., peer_place: _Optional[_Union[_common_pb2.Place, _Mapping]] = ...) -> None: ...

class MoveKvResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: KvReport
    def __init__(self, report: _Optional[_Union[KvReport, _Mapping]] = ...) -> None: ...

class KvReport(_message.Message):
    __slots__ = ("transfer_id", "tokens", "skipped_tokens", "wire_bytes", "codec", "duration_s", "first_chunk_s", "leg", "own_tokens")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_S_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    OWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    tokens: int
    skipped_tokens: int
    wire_bytes: int
    codec: str
    duration_s: float
    first_chunk_s: float
    leg: _common_pb2.SignedRecord
    own_tokens: int
    def __init__(self, transfer_id: _Optional[str] = ..., tokens: _Optional[int] = ..., skipped_tokens: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., codec: _Optional[str] = ..., duration_s: _Optional[float] = ..., first_chunk_s: _Optional[float] = ..., leg: _Optional[_Union[_common_pb2.SignedRecord, _Mapping]] = ..., own_tokens: _Optional[int] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("place", "build", "clock_unix_s")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    CLOCK_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    place: _common_pb2.Place
    build: str
    clock_unix_s: float
    def __init__(self, place: _Optional[_Union[_common_pb2.Place, _Mapping]] = ..., build: _Optional[str] = ..., clock_unix_s: _Optional[float] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchLoadResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: NodeLoad
    def __init__(self, load: _Optional[_Union[NodeLoad, _Mapping]] = ...) -> None: ...

class NodeLoad(_message.Message):
    __slots__ = ("running", "waiting", "waiting_prefill_tokens", "kv_used_tokens", "kv_capacity_tokens", "prefill_tokens_per_s", "decode_tokens_per_s", "draining", "role", "prefill_token_s", "prefill_growth_s", "fit")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_GROWTH_S_FIELD_NUMBER: _ClassVar[int]
    FIT_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_prefill_tokens: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    draining: bool
    role: str
    prefill_token_s: float
    prefill_growth_s: float
    fit: _common_pb2.LatencyFit
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_prefill_tokens: _Optional[int] = ..., kv_used_tokens: _Optional[int] = ..., kv_capacity_tokens: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_tokens_per_s: _Optional[float] = ..., draining: _Optional[bool] = ..., role: _Optional[str] = ..., prefill_token_s: _Optional[float] = ..., prefill_growth_s: _Optional[float] = ..., fit: _Optional[_Union[_common_pb2.LatencyFit, _Mapping]] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: str
    def __init__(self, role: _Optional[str] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("previous_role",)
    PREVIOUS_ROLE_FIELD_NUMBER: _ClassVar[int]
    previous_role: str
    def __init__(self, previous_role: _Optional[str] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("payload", "reply_bytes")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    REPLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    reply_bytes: int
    def __init__(self, payload: _Optional[bytes] = ..., reply_bytes: _Optional[int] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...
