from mesh.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MoveTactic(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MOVE_TACTIC_UNSPECIFIED: _ClassVar[MoveTactic]
    MOVE_TACTIC_PRECOPY: _ClassVar[MoveTactic]
    MOVE_TACTIC_STOP_AND_COPY: _ClassVar[MoveTactic]
    MOVE_TACTIC_REPLAY: _ClassVar[MoveTactic]
MOVE_TACTIC_UNSPECIFIED: MoveTactic
MOVE_TACTIC_PRECOPY: MoveTactic
MOVE_TACTIC_STOP_AND_COPY: MoveTactic
MOVE_TACTIC_REPLAY: MoveTactic

class PutPolicyRequest(_message.Message):
    __slots__ = ("tenant", "yaml", "expected_version")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    YAML_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    yaml: str
    expected_version: int
    def __init__(self, tenant: _Optional[str] = ..., yaml: _Optional[str] = ..., expected_version: _Optional[int] = ...) -> None: ...

class PutPolicyResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class StoredPolicy(_message.Message):
    __slots__ = ("tenant", "yaml", "version", "stored_unix_s", "stored_by", "deleted")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    YAML_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STORED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    STORED_BY_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    yaml: str
    version: int
    stored_unix_s: float
    stored_by: str
    deleted: bool
    def __init__(self, tenant: _Optional[str] = ..., yaml: _Optional[str] = ..., version: _Optional[int] = ..., stored_unix_s: _Optional[float] = ..., stored_by: _Optional[str] = ..., deleted: _Optional[bool] = ...) -> None: ...

class PolicyHistoryRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class PolicyHistoryResponse(_message.Message):
    __slots__ = ("policies",)
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    policies: _containers.RepeatedCompositeFieldContainer[StoredPolicy]
    def __init__(self, policies: _Optional[_Iterable[_Union[StoredPolicy, _Mapping]]] = ...) -> None: ...

class GetPolicyRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class GetPolicyResponse(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: StoredPolicy
    def __init__(self, policy: _Optional[_Union[StoredPolicy, _Mapping]] = ...) -> None: ...

class ListPoliciesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPoliciesResponse(_message.Message):
    __slots__ = ("policies",)
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    policies: _containers.RepeatedCompositeFieldContainer[StoredPolicy]
    def __init__(self, policies: _Optional[_Iterable[_Union[StoredPolicy, _Mapping]]] = ...) -> None: ...

class DeletePolicyRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class DeletePolicyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ValidatePolicyRequest(_message.Message):
    __slots__ = ("yaml",)
    YAML_FIELD_NUMBER: _ClassVar[int]
    yaml: str
    def __init__(self, yaml: _Optional[str] = ...) -> None: ...

class ValidatePolicyResponse(_message.Message):
    __slots__ = ("problems", "warnings")
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    problems: _containers.RepeatedCompositeFieldContainer[PolicyProblem]
    warnings: _containers.RepeatedCompositeFieldContainer[PolicyProblem]
    def __init__(self, problems: _Optional[_Iterable[_Union[PolicyProblem, _Mapping]]] = ..., warnings: _Optional[_Iterable[_Union[PolicyProblem, _Mapping]]] = ...) -> None: ...

class PolicyProblem(_message.Message):
    __slots__ = ("line", "column", "path", "message")
    LINE_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    line: int
    column: int
    path: str
    message: str
    def __init__(self, line: _Optional[int] = ..., column: _Optional[int] = ..., path: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class CreateTenantRequest(_message.Message):
    __slots__ = ("tenant", "sites")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    sites: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tenant: _Optional[str] = ..., sites: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateTenantResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetTenantSitesRequest(_message.Message):
    __slots__ = ("tenant", "sites")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    sites: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tenant: _Optional[str] = ..., sites: _Optional[_Iterable[str]] = ...) -> None: ...

class SetTenantSitesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[Tenant]
    def __init__(self, tenants: _Optional[_Iterable[_Union[Tenant, _Mapping]]] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("tenant", "keys", "sites")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    keys: _containers.RepeatedCompositeFieldContainer[KeyInfo]
    sites: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tenant: _Optional[str] = ..., keys: _Optional[_Iterable[_Union[KeyInfo, _Mapping]]] = ..., sites: _Optional[_Iterable[str]] = ...) -> None: ...

class KeyInfo(_message.Message):
    __slots__ = ("key_id", "role", "created_unix_s", "revoked")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    role: str
    created_unix_s: int
    revoked: bool
    def __init__(self, key_id: _Optional[str] = ..., role: _Optional[str] = ..., created_unix_s: _Optional[int] = ..., revoked: _Optional[bool] = ...) -> None: ...

class IssueKeyRequest(_message.Message):
    __slots__ = ("tenant", "role")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    role: str
    def __init__(self, tenant: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class IssueKeyResponse(_message.Message):
    __slots__ = ("key_id", "api_key")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    API_KEY_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    api_key: str
    def __init__(self, key_id: _Optional[str] = ..., api_key: _Optional[str] = ...) -> None: ...

class RevokeKeyRequest(_message.Message):
    __slots__ = ("key_id",)
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    def __init__(self, key_id: _Optional[str] = ...) -> None: ...

class RevokeKeyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeView(_message.Message):
    __slots__ = ("node_id", "tier", "site", "region", "jurisdiction", "state", "address", "models", "running", "waiting", "waiting_prefill_tokens", "kv_used_tokens", "kv_capacity_tokens", "prefill_tokens_per_s", "decode_tokens_per_s", "age_s", "rtt_s", "goodput_bytes_per_s", "draining", "role", "prefill_token_s", "prefill_growth_s", "fit", "models_as_before")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    JURISDICTION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_GROWTH_S_FIELD_NUMBER: _ClassVar[int]
    FIT_FIELD_NUMBER: _ClassVar[int]
    MODELS_AS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    tier: str
    site: str
    region: str
    jurisdiction: str
    state: str
    address: str
    models: _containers.RepeatedCompositeFieldContainer[NodeModel]
    running: int
    waiting: int
    waiting_prefill_tokens: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    age_s: float
    rtt_s: float
    goodput_bytes_per_s: float
    draining: bool
    role: str
    prefill_token_s: float
    prefill_growth_s: float
    fit: _common_pb2.LatencyFit
    models_as_before: bool
    def __init__(self, node_id: _Optional[str] = ..., tier: _Optional[str] = ..., site: _Optional[str] = ..., region: _Optional[str] = ..., jurisdiction: _Optional[str] = ..., state: _Optional[str] = ..., address: _Optional[str] = ..., models: _Optional[_Iterable[_Union[NodeModel, _Mapping]]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_prefill_tokens: _Optional[int] = ..., kv_used_tokens: _Optional[int] = ..., kv_capacity_tokens: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_tokens_per_s: _Optional[float] = ..., age_s: _Optional[float] = ..., rtt_s: _Optional[float] = ..., goodput_bytes_per_s: _Optional[float] = ..., draining: _Optional[bool] = ..., role: _Optional[str] = ..., prefill_token_s: _Optional[float] = ..., prefill_growth_s: _Optional[float] = ..., fit: _Optional[_Union[_common_pb2.LatencyFit, _Mapping]] = ..., models_as_before: _Optional[bool] = ...) -> None: ...

class NodeModel(_message.Message):
    __slots__ = ("id", "weights_dtype", "max_context_tokens", "layout_hash", "weights_lineage", "digest", "kv_bytes_per_token", "codecs")
    ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    id: str
    weights_dtype: str
    max_context_tokens: int
    layout_hash: str
    weights_lineage: str
    digest: str
    kv_bytes_per_token: int
    codecs: _containers.RepeatedCompositeFieldContainer[KvCodec]
    def __init__(self, id: _Optional[str] = ..., weights_dtype: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., layout_hash: _Optional[str] = ..., weights_lineage: _Optional[str] = ..., digest: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., codecs: _Optional[_Iterable[_Union[KvCodec, _Mapping]]] = ...) -> None: ...

class KvCodec(_message.Message):
    __slots__ = ("name", "ratio", "loss_ratio", "encode_tokens_per_s", "decode_tokens_per_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    LOSS_RATIO_FIELD_NUMBER: _ClassVar[int]
    ENCODE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    ratio: float
    loss_ratio: float
    encode_tokens_per_s: float
    decode_tokens_per_s: float
    def __init__(self, name: _Optional[str] = ..., ratio: _Optional[float] = ..., loss_ratio: _Optional[float] = ..., encode_tokens_per_s: _Optional[float] = ..., decode_tokens_per_s: _Optional[float] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("version", "nodes", "registry_age_s", "made_unix_s", "sequence", "is_delta", "gone")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_AGE_S_FIELD_NUMBER: _ClassVar[int]
    MADE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IS_DELTA_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    version: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeView]
    registry_age_s: float
    made_unix_s: float
    sequence: int
    is_delta: bool
    gone: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeView, _Mapping]]] = ..., registry_age_s: _Optional[float] = ..., made_unix_s: _Optional[float] = ..., sequence: _Optional[int] = ..., is_delta: _Optional[bool] = ..., gone: _Optional[_Iterable[str]] = ...) -> None: ...

class GetSnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSnapshotResponse(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ...) -> None: ...

class WatchSnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchSnapshotResponse(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ...) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("request_id", "node_id", "tier", "tactic")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    TACTIC_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    node_id: str
    tier: str
    tactic: MoveTactic
    def __init__(self, request_id: _Optional[str] = ..., node_id: _Optional[str] = ..., tier: _Optional[str] = ..., tactic: _Optional[_Union[MoveTactic, str]] = ...) -> None: ...

class MigrateResponse(_message.Message):
    __slots__ = ("from_node_id", "to_node_id", "kv_wire_bytes", "kv_tokens", "pause_s")
    FROM_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TO_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    KV_WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    from_node_id: str
    to_node_id: str
    kv_wire_bytes: int
    kv_tokens: int
    pause_s: float
    def __init__(self, from_node_id: _Optional[str] = ..., to_node_id: _Optional[str] = ..., kv_wire_bytes: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., pause_s: _Optional[float] = ...) -> None: ...

class SetNodeRoleRequest(_message.Message):
    __slots__ = ("node_id", "role")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    role: str
    def __init__(self, node_id: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class SetNodeRoleResponse(_message.Message):
    __slots__ = ("previous_role",)
    PREVIOUS_ROLE_FIELD_NUMBER: _ClassVar[int]
    previous_role: str
    def __init__(self, previous_role: _Optional[str] = ...) -> None: ...

class RunningRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "model", "label", "shape", "entry_node_id", "node_id", "moving", "prompt_tokens", "generated_tokens", "max_tokens", "kv_bytes", "age_s", "token_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    ENTRY_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    model: str
    label: str
    shape: str
    entry_node_id: str
    node_id: str
    moving: bool
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int
    kv_bytes: int
    age_s: float
    token_s: float
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., label: _Optional[str] = ..., shape: _Optional[str] = ..., entry_node_id: _Optional[str] = ..., node_id: _Optional[str] = ..., moving: _Optional[bool] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., age_s: _Optional[float] = ..., token_s: _Optional[float] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "silent_entry_node_ids")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SILENT_ENTRY_NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RunningRequest]
    silent_entry_node_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, requests: _Optional[_Iterable[_Union[RunningRequest, _Mapping]]] = ..., silent_entry_node_ids: _Optional[_Iterable[str]] = ...) -> None: ...
