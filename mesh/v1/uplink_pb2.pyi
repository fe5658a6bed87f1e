from mesh.v1 import admin_pb2 as _admin_pb2
from mesh.v1 import common_pb2 as _common_pb2
from mesh.v1 import node_pb2 as _node_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("hello", "heartbeat", "work_event", "work_result", "command_result")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    WORK_EVENT_FIELD_NUMBER: _ClassVar[int]
    WORK_RESULT_FIELD_NUMBER: _ClassVar[int]
    COMMAND_RESULT_FIELD_NUMBER: _ClassVar[int]
    hello: AgentHello
    heartbeat: Heartbeat
    work_event: WorkEvent
    work_result: WorkResult
    command_result: CommandResult
    def __init__(self, hello: _Optional[_Union[AgentHello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., work_event: _Optional[_Union[WorkEvent, _Mapping]] = ..., work_result: _Optional[_Union[WorkResult, _Mapping]] = ..., command_result: _Optional[_Union[CommandResult, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("lease", "renewal", "run", "move_kv", "cancel", "config", "snapshot", "command")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    RENEWAL_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    MOVE_KV_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    lease: SessionLease
    renewal: LeaseRenewal
    run: WorkRun
    move_kv: WorkMoveKv
    cancel: WorkCancel
    config: SiteConfig
    snapshot: _admin_pb2.Snapshot
    command: Command
    def __init__(self, lease: _Optional[_Union[SessionLease, _Mapping]] = ..., renewal: _Optional[_Union[LeaseRenewal, _Mapping]] = ..., run: _Optional[_Union[WorkRun, _Mapping]] = ..., move_kv: _Optional[_Union[WorkMoveKv, _Mapping]] = ..., cancel: _Optional[_Union[WorkCancel, _Mapping]] = ..., config: _Optional[_Union[SiteConfig, _Mapping]] = ..., snapshot: _Optional[_Union[_admin_pb2.Snapshot, _Mapping]] = ..., command: _Optional[_Union[Command, _Mapping]] = ...) -> None: ...

class AgentHello(_message.Message):
    __slots__ = ("protocol", "build", "models", "load", "clock_unix_s", "snapshot_deltas")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CLOCK_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_DELTAS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    build: str
    models: _containers.RepeatedCompositeFieldContainer[_admin_pb2.NodeModel]
    load: _node_pb2.NodeLoad
    clock_unix_s: float
    snapshot_deltas: bool
    def __init__(self, protocol: _Optional[int] = ..., build: _Optional[str] = ..., models: _Optional[_Iterable[_Union[_admin_pb2.NodeModel, _Mapping]]] = ..., load: _Optional[_Union[_node_pb2.NodeLoad, _Mapping]] = ..., clock_unix_s: _Optional[float] = ..., snapshot_deltas: _Optional[bool] = ...) -> None: ...

class SessionLease(_message.Message):
    __slots__ = ("session_id", "lease_s", "heartbeat_s", "clock_unix_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    lease_s: float
    heartbeat_s: float
    clock_unix_s: float
    def __init__(self, session_id: _Optional[str] = ..., lease_s: _Optional[float] = ..., heartbeat_s: _Optional[float] = ..., clock_unix_s: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence", "load", "rtt_s", "models")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    load: _node_pb2.NodeLoad
    rtt_s: float
    models: _containers.RepeatedCompositeFieldContainer[_admin_pb2.NodeModel]
    def __init__(self, sequence: _Optional[int] = ..., load: _Optional[_Union[_node_pb2.NodeLoad, _Mapping]] = ..., rtt_s: _Optional[float] = ..., models: _Optional[_Iterable[_Union[_admin_pb2.NodeModel, _Mapping]]] = ...) -> None: ...

class LeaseRenewal(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class WorkRun(_message.Message):
    __slots__ = ("work_id", "order")
    WORK_ID_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    work_id: int
    order: _node_pb2.RunOrder
    def __init__(self, work_id: _Optional[int] = ..., order: _Optional[_Union[_node_pb2.RunOrder, _Mapping]] = ...) -> None: ...

class WorkMoveKv(_message.Message):
    __slots__ = ("work_id", "open", "peer_address", "peer_place")
    WORK_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PEER_PLACE_FIELD_NUMBER: _ClassVar[int]
    work_id: int
    open: _node_pb2.KvOpen
    peer_address: str
    peer_place: _common_pb2.Place
    def __init__(self, work_id: _Optional[int] = ..., open: _Optional[_Union[_node_pb2.KvOpen, _Mapping]] = ..., peer_address: _Optional[str] = ..., peer_place: _Optional[_Union[_common_pb2.Place, _Mapping]] = ...) -> None: ...

class WorkCancel(_message.Message):
    __slots__ = ("work_id", "run_id")
    WORK_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    work_id: int
    run_id: str
    def __init__(self, work_id: _Optional[int] = ..., run_id: _Optional[str] = ...) -> None: ...

class WorkEvent(_message.Message):
    __slots__ = ("work_id", "event")
    WORK_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    work_id: int
    event: _node_pb2.RunEvent
    def __init__(self, work_id: _Optional[int] = ..., event: _Optional[_Union[_node_pb2.RunEvent, _Mapping]] = ...) -> None: ...

class WorkResult(_message.Message):
    __slots__ = ("work_id", "error_reason", "error_message", "kv_report", "error_details")
    class ErrorDetailsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORK_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    KV_REPORT_FIELD_NUMBER: _ClassVar[int]
    ERROR_DETAILS_FIELD_NUMBER: _ClassVar[int]
    work_id: int
    error_reason: str
    error_message: str
    kv_report: _node_pb2.KvReport
    error_details: _containers.ScalarMap[str, str]
    def __init__(self, work_id: _Optional[int] = ..., error_reason: _Optional[str] = ..., error_message: _Optional[str] = ..., kv_report: _Optional[_Union[_node_pb2.KvReport, _Mapping]] = ..., error_details: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SiteConfig(_message.Message):
    __slots__ = ("version", "policies", "keys", "salts", "epoch", "directory_revision")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SALTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_REVISION_FIELD_NUMBER: _ClassVar[int]
    version: int
    policies: _containers.RepeatedCompositeFieldContainer[_admin_pb2.StoredPolicy]
    keys: _containers.RepeatedCompositeFieldContainer[TenantKeyHash]
    salts: _containers.RepeatedCompositeFieldContainer[TenantSalt]
    epoch: str
    directory_revision: int
    def __init__(self, version: _Optional[int] = ..., policies: _Optional[_Iterable[_Union[_admin_pb2.StoredPolicy, _Mapping]]] = ..., keys: _Optional[_Iterable[_Union[TenantKeyHash, _Mapping]]] = ..., salts: _Optional[_Iterable[_Union[TenantSalt, _Mapping]]] = ..., epoch: _Optional[str] = ..., directory_revision: _Optional[int] = ...) -> None: ...

class TenantKeyHash(_message.Message):
    __slots__ = ("key_id", "tenant", "role", "hash")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    tenant: str
    role: str
    hash: bytes
    def __init__(self, key_id: _Optional[str] = ..., tenant: _Optional[str] = ..., role: _Optional[str] = ..., hash: _Optional[bytes] = ...) -> None: ...

class TenantSalt(_message.Message):
    __slots__ = ("tenant", "secret")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    secret: bytes
    def __init__(self, tenant: _Optional[str] = ..., secret: _Optional[bytes] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("command_id", "migrate", "witness", "attend", "list_requests", "telemetry", "audit", "tenant", "target")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    MIGRATE_FIELD_NUMBER: _ClassVar[int]
    WITNESS_FIELD_NUMBER: _ClassVar[int]
    ATTEND_FIELD_NUMBER: _ClassVar[int]
    LIST_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    command_id: int
    migrate: _admin_pb2.MigrateRequest
    witness: WitnessRequest
    attend: RelayAttend
    list_requests: _admin_pb2.ListRequestsRequest
    telemetry: TelemetryRequest
    audit: AuditFetch
    tenant: str
    target: _admin_pb2.NodeView
    def __init__(self, command_id: _Optional[int] = ..., migrate: _Optional[_Union[_admin_pb2.MigrateRequest, _Mapping]] = ..., witness: _Optional[_Union[WitnessRequest, _Mapping]] = ..., attend: _Optional[_Union[RelayAttend, _Mapping]] = ..., list_requests: _Optional[_Union[_admin_pb2.ListRequestsRequest, _Mapping]] = ..., telemetry: _Optional[_Union[TelemetryRequest, _Mapping]] = ..., audit: _Optional[_Union[AuditFetch, _Mapping]] = ..., tenant: _Optional[str] = ..., target: _Optional[_Union[_admin_pb2.NodeView, _Mapping]] = ...) -> None: ...

class RelayAttend(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    def __init__(self, ticket: _Optional[bytes] = ...) -> None: ...

class CommandResult(_message.Message):
    __slots__ = ("command_id", "error_reason", "error_message", "migrate", "witness", "error_details", "requests", "telemetry", "audit")
    class ErrorDetailsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MIGRATE_FIELD_NUMBER: _ClassVar[int]
    WITNESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_DETAILS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    command_id: int
    error_reason: str
    error_message: str
    migrate: _admin_pb2.MigrateResponse
    witness: WitnessResponse
    error_details: _containers.ScalarMap[str, str]
    requests: _admin_pb2.ListRequestsResponse
    telemetry: TelemetryResponse
    audit: AuditEntries
    def __init__(self, command_id: _Optional[int] = ..., error_reason: _Optional[str] = ..., error_message: _Optional[str] = ..., migrate: _Optional[_Union[_admin_pb2.MigrateResponse, _Mapping]] = ..., witness: _Optional[_Union[WitnessResponse, _Mapping]] = ..., error_details: _Optional[_Mapping[str, str]] = ..., requests: _Optional[_Union[_admin_pb2.ListRequestsResponse, _Mapping]] = ..., telemetry: _Optional[_Union[TelemetryResponse, _Mapping]] = ..., audit: _Optional[_Union[AuditEntries, _Mapping]] = ...) -> None: ...

class AuditFetch(_message.Message):
    __slots__ = ("chain", "from_seq", "max_bytes")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    chain: str
    from_seq: int
    max_bytes: int
    def __init__(self, chain: _Optional[str] = ..., from_seq: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class AuditEntries(_message.Message):
    __slots__ = ("chain", "lines", "head_seq")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    HEAD_SEQ_FIELD_NUMBER: _ClassVar[int]
    chain: str
    lines: _containers.RepeatedScalarFieldContainer[bytes]
    head_seq: int
    def __init__(self, chain: _Optional[str] = ..., lines: _Optional[_Iterable[bytes]] = ..., head_seq: _Optional[int] = ...) -> None: ...

class WitnessRequest(_message.Message):
    __slots__ = ("head", "kept_chain", "kept_seq")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    KEPT_CHAIN_FIELD_NUMBER: _ClassVar[int]
    KEPT_SEQ_FIELD_NUMBER: _ClassVar[int]
    head: _common_pb2.SignedRecord
    kept_chain: str
    kept_seq: int
    def __init__(self, head: _Optional[_Union[_common_pb2.SignedRecord, _Mapping]] = ..., kept_chain: _Optional[str] = ..., kept_seq: _Optional[int] = ...) -> None: ...

class WitnessResponse(_message.Message):
    __slots__ = ("head",)
    HEAD_FIELD_NUMBER: _ClassVar[int]
    head: _common_pb2.SignedRecord
    def __init__(self, head: _Optional[_Union[_common_pb2.SignedRecord, _Mapping]] = ...) -> None: ...

class TelemetryRequest(_message.Message):
    __slots__ = ("kept_spool", "kept_sequence", "most_samples")
    KEPT_SPOOL_FIELD_NUMBER: _ClassVar[int]
    KEPT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MOST_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    kept_spool: str
    kept_sequence: int
    most_samples: int
    def __init__(self, kept_spool: _Optional[str] = ..., kept_sequence: _Optional[int] = ..., most_samples: _Optional[int] = ...) -> None: ...

class TelemetryResponse(_message.Message):
    __slots__ = ("spool", "samples", "dropped_total")
    SPOOL_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    spool: str
    samples: _containers.RepeatedCompositeFieldContainer[TelemetrySample]
    dropped_total: int
    def __init__(self, spool: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[TelemetrySample, _Mapping]]] = ..., dropped_total: _Optional[int] = ...) -> None: ...

class TelemetrySample(_message.Message):
    __slots__ = ("sequence", "unix_s", "connected", "load", "requests_ok_total", "requests_failed_total", "generated_tokens_total")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_OK_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FAILED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    unix_s: float
    connected: bool
    load: _node_pb2.NodeLoad
    requests_ok_total: int
    requests_failed_total: int
    generated_tokens_total: int
    def __init__(self, sequence: _Optional[int] = ..., unix_s: _Optional[float] = ..., connected: _Optional[bool] = ..., load: _Optional[_Union[_node_pb2.NodeLoad, _Mapping]] = ..., requests_ok_total: _Optional[int] = ..., requests_failed_total: _Optional[int] = ..., generated_tokens_total: _Optional[int] = ...) -> None: ...
