from mesh.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlanShape(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAN_SHAPE_UNSPECIFIED: _ClassVar[PlanShape]
    PLAN_SHAPE_LOCAL: _ClassVar[PlanShape]
    PLAN_SHAPE_CORE: _ClassVar[PlanShape]
    PLAN_SHAPE_SPLIT: _ClassVar[PlanShape]
    PLAN_SHAPE_OFFLOAD: _ClassVar[PlanShape]
    PLAN_SHAPE_DISAGGREGATED: _ClassVar[PlanShape]

class KvShipment(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_SHIPMENT_UNSPECIFIED: _ClassVar[KvShipment]
    KV_SHIPMENT_SHIP: _ClassVar[KvShipment]
    KV_SHIPMENT_BOTH: _ClassVar[KvShipment]
PLAN_SHAPE_UNSPECIFIED: PlanShape
PLAN_SHAPE_LOCAL: PlanShape
PLAN_SHAPE_CORE: PlanShape
PLAN_SHAPE_SPLIT: PlanShape
PLAN_SHAPE_OFFLOAD: PlanShape
PLAN_SHAPE_DISAGGREGATED: PlanShape
KV_SHIPMENT_UNSPECIFIED: KvShipment
KV_SHIPMENT_SHIP: KvShipment
KV_SHIPMENT_BOTH: KvShipment

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class LatencyWish(_message.Message):
    __slots__ = ("ttft_s", "tpot_s", "deadline_s")
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    ttft_s: float
    tpot_s: float
    deadline_s: float
    def __init__(self, ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class PlacementWish(_message.Message):
    __slots__ = ("shape", "node_id", "site", "codec", "shipment")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SHIPMENT_FIELD_NUMBER: _ClassVar[int]
    shape: PlanShape
    node_id: str
    site: str
    codec: str
    shipment: KvShipment
    def __init__(self, shape: _Optional[_Union[PlanShape, str]] = ..., node_id: _Optional[str] = ..., site: _Optional[str] = ..., codec: _Optional[str] = ..., shipment: _Optional[_Union[KvShipment, str]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "tokens", "sampling", "label", "latency", "placement", "idempotency_key", "resume_offset_tokens", "attributes", "continues")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    RESUME_OFFSET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: Chat
    tokens: _common_pb2.TokenIds
    sampling: _common_pb2.SamplingParams
    label: str
    latency: LatencyWish
    placement: PlacementWish
    idempotency_key: str
    resume_offset_tokens: int
    attributes: _containers.ScalarMap[str, str]
    continues: str
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., tokens: _Optional[_Union[_common_pb2.TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., label: _Optional[str] = ..., latency: _Optional[_Union[LatencyWish, _Mapping]] = ..., placement: _Optional[_Union[PlacementWish, _Mapping]] = ..., idempotency_key: _Optional[str] = ..., resume_offset_tokens: _Optional[int] = ..., attributes: _Optional[_Mapping[str, str]] = ..., continues: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("decision", "tokens", "migration", "finish")
    DECISION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIGRATION_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    decision: Decision
    tokens: TokenDelta
    migration: Migration
    finish: Finish
    def __init__(self, decision: _Optional[_Union[Decision, _Mapping]] = ..., tokens: _Optional[_Union[TokenDelta, _Mapping]] = ..., migration: _Optional[_Union[Migration, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("request_id", "plan", "label", "policy_version", "prompt_tokens", "model", "findings", "not_looked_at", "continued_label", "conditions", "continuation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    NOT_LOOKED_AT_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_LABEL_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    plan: Plan
    label: str
    policy_version: int
    prompt_tokens: int
    model: str
    findings: _containers.RepeatedCompositeFieldContainer[LabelFinding]
    not_looked_at: str
    continued_label: str
    conditions: _containers.RepeatedScalarFieldContainer[str]
    continuation: str
    def __init__(self, request_id: _Optional[str] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., label: _Optional[str] = ..., policy_version: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., model: _Optional[str] = ..., findings: _Optional[_Iterable[_Union[LabelFinding, _Mapping]]] = ..., not_looked_at: _Optional[str] = ..., continued_label: _Optional[str] = ..., conditions: _Optional[_Iterable[str]] = ..., continuation: _Optional[str] = ...) -> None: ...

class LabelFinding(_message.Message):
    __slots__ = ("kind", "start", "end")
    KIND_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    kind: str
    start: int
    end: int
    def __init__(self, kind: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("shape", "legs", "fallbacks", "candidates", "refused", "rule", "predicted_ttft_s", "predicted_total_s", "shipping", "why", "predicted_tpot_s", "error_ratio")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LEGS_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    SHIPPING_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TPOT_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_RATIO_FIELD_NUMBER: _ClassVar[int]
    shape: PlanShape
    legs: _containers.RepeatedCompositeFieldContainer[PlanLeg]
    fallbacks: _containers.RepeatedCompositeFieldContainer[Plan]
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    refused: _containers.RepeatedCompositeFieldContainer[RefusedCount]
    rule: str
    predicted_ttft_s: float
    predicted_total_s: float
    shipping: _containers.RepeatedCompositeFieldContainer[ShipOption]
    why: str
    predicted_tpot_s: float
    error_ratio: float
    def __init__(self, shape: _Optional[_Union[PlanShape, str]] = ..., legs: _Optional[_Iterable[_Union[PlanLeg, _Mapping]]] = ..., fallbacks: _Optional[_Iterable[_Union[Plan, _Mapping]]] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., refused: _Optional[_Iterable[_Union[RefusedCount, _Mapping]]] = ..., rule: _Optional[str] = ..., predicted_ttft_s: _Optional[float] = ..., predicted_total_s: _Optional[float] = ..., shipping: _Optional[_Iterable[_Union[ShipOption, _Mapping]]] = ..., why: _Optional[str] = ..., predicted_tpot_s: _Optional[float] = ..., error_ratio: _Optional[float] = ...) -> None: ...

class ShipOption(_message.Message):
    __slots__ = ("codec", "own_tokens", "ttft_s", "refused")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    OWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    codec: str
    own_tokens: int
    ttft_s: float
    refused: str
    def __init__(self, codec: _Optional[str] = ..., own_tokens: _Optional[int] = ..., ttft_s: _Optional[float] = ..., refused: _Optional[str] = ...) -> None: ...

class PlanLeg(_message.Message):
    __slots__ = ("kind", "node_id", "site", "codec", "own_tokens")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    OWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    node_id: str
    site: str
    codec: str
    own_tokens: int
    def __init__(self, kind: _Optional[str] = ..., node_id: _Optional[str] = ..., site: _Optional[str] = ..., codec: _Optional[str] = ..., own_tokens: _Optional[int] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("shape", "prefill_node_id", "decode_node_id", "cost_s", "ttft_s", "total_s", "codec", "own_tokens", "tpot_s", "error_ratio")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    OWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_RATIO_FIELD_NUMBER: _ClassVar[int]
    shape: PlanShape
    prefill_node_id: str
    decode_node_id: str
    cost_s: float
    ttft_s: float
    total_s: float
    codec: str
    own_tokens: int
    tpot_s: float
    error_ratio: float
    def __init__(self, shape: _Optional[_Union[PlanShape, str]] = ..., prefill_node_id: _Optional[str] = ..., decode_node_id: _Optional[str] = ..., cost_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., total_s: _Optional[float] = ..., codec: _Optional[str] = ..., own_tokens: _Optional[int] = ..., tpot_s: _Optional[float] = ..., error_ratio: _Optional[float] = ...) -> None: ...

class RefusedCount(_message.Message):
    __slots__ = ("reason", "count", "node_ids")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    count: int
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reason: _Optional[str] = ..., count: _Optional[int] = ..., node_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("offset_tokens", "ids", "text", "logprobs", "node_id")
    OFFSET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    offset_tokens: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    node_id: str
    def __init__(self, offset_tokens: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., node_id: _Optional[str] = ...) -> None: ...

class Migration(_message.Message):
    __slots__ = ("from_node_id", "to_node_id", "offset_tokens", "kv_wire_bytes", "kv_tokens", "codec", "cause", "pause_s", "transfer_s", "recomputed", "own_tokens")
    FROM_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TO_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    OWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    from_node_id: str
    to_node_id: str
    offset_tokens: int
    kv_wire_bytes: int
    kv_tokens: int
    codec: str
    cause: str
    pause_s: float
    transfer_s: float
    recomputed: bool
    own_tokens: int
    def __init__(self, from_node_id: _Optional[str] = ..., to_node_id: _Optional[str] = ..., offset_tokens: _Optional[int] = ..., kv_wire_bytes: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., codec: _Optional[str] = ..., cause: _Optional[str] = ..., pause_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., recomputed: _Optional[bool] = ..., own_tokens: _Optional[int] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "usage", "receipt", "ttft_s", "total_s", "stop_string")
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    usage: _common_pb2.Usage
    receipt: _common_pb2.Receipt
    ttft_s: float
    total_s: float
    stop_string: str
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., receipt: _Optional[_Union[_common_pb2.Receipt, _Mapping]] = ..., ttft_s: _Optional[float] = ..., total_s: _Optional[float] = ..., stop_string: _Optional[str] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: Chat
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _common_pb2.TokenIds
    def __init__(self, tokens: _Optional[_Union[_common_pb2.TokenIds, _Mapping]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("id", "max_context_tokens", "node_ids")
    ID_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    max_context_tokens: int
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., node_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: bool
    def __init__(self, aborted: _Optional[bool] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: GenerateRequest
    def __init__(self, request: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("decision", "refusal", "refusal_reason", "snapshot_age_s", "nodes")
    DECISION_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_REASON_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    decision: Decision
    refusal: str
    refusal_reason: str
    snapshot_age_s: float
    nodes: _containers.RepeatedCompositeFieldContainer[NodeVerdict]
    def __init__(self, decision: _Optional[_Union[Decision, _Mapping]] = ..., refusal: _Optional[str] = ..., refusal_reason: _Optional[str] = ..., snapshot_age_s: _Optional[float] = ..., nodes: _Optional[_Iterable[_Union[NodeVerdict, _Mapping]]] = ...) -> None: ...

class NodeVerdict(_message.Message):
    __slots__ = ("node_id", "site", "tier", "refused")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    site: str
    tier: str
    refused: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_id: _Optional[str] = ..., site: _Optional[str] = ..., tier: _Optional[str] = ..., refused: _Optional[_Iterable[str]] = ...) -> None: ...
