from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetAuthorityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetAuthorityResponse(_message.Message):
    __slots__ = ("ca_pem",)
    CA_PEM_FIELD_NUMBER: _ClassVar[int]
    ca_pem: bytes
    def __init__(self, ca_pem: _Optional[bytes] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("token", "csr", "build", "clock_unix_s")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CSR_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    CLOCK_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    token: str
    csr: bytes
    build: str
    clock_unix_s: float
    def __init__(self, token: _Optional[str] = ..., csr: _Optional[bytes] = ..., build: _Optional[str] = ..., clock_unix_s: _Optional[float] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("cert_pem", "node_address", "placement_node_id", "clock_unix_s", "model_ids")
    CERT_PEM_FIELD_NUMBER: _ClassVar[int]
    NODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CLOCK_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_IDS_FIELD_NUMBER: _ClassVar[int]
    cert_pem: bytes
    node_address: str
    placement_node_id: str
    clock_unix_s: float
    model_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cert_pem: _Optional[bytes] = ..., node_address: _Optional[str] = ..., placement_node_id: _Optional[str] = ..., clock_unix_s: _Optional[float] = ..., model_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("csr",)
    CSR_FIELD_NUMBER: _ClassVar[int]
    csr: bytes
    def __init__(self, csr: _Optional[bytes] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("cert_pem", "clock_unix_s")
    CERT_PEM_FIELD_NUMBER: _ClassVar[int]
    CLOCK_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    cert_pem: bytes
    clock_unix_s: float
    def __init__(self, cert_pem: _Optional[bytes] = ..., clock_unix_s: _Optional[float] = ...) -> None: ...

class TokenTerms(_message.Message):
    __slots__ = ("node_id", "valid_s", "dns_names", "ip_addresses")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    VALID_S_FIELD_NUMBER: _ClassVar[int]
    DNS_NAMES_FIELD_NUMBER: _ClassVar[int]
    IP_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    valid_s: float
    dns_names: _containers.RepeatedScalarFieldContainer[str]
    ip_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_id: _Optional[str] = ..., valid_s: _Optional[float] = ..., dns_names: _Optional[_Iterable[str]] = ..., ip_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateSiteRequest(_message.Message):
    __slots__ = ("site", "region", "jurisdiction", "terms")
    SITE_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    JURISDICTION_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    site: str
    region: str
    jurisdiction: str
    terms: TokenTerms
    def __init__(self, site: _Optional[str] = ..., region: _Optional[str] = ..., jurisdiction: _Optional[str] = ..., terms: _Optional[_Union[TokenTerms, _Mapping]] = ...) -> None: ...

class CreateSiteResponse(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: EnrolmentToken
    def __init__(self, token: _Optional[_Union[EnrolmentToken, _Mapping]] = ...) -> None: ...

class IssueTokenRequest(_message.Message):
    __slots__ = ("site", "terms")
    SITE_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    site: str
    terms: TokenTerms
    def __init__(self, site: _Optional[str] = ..., terms: _Optional[_Union[TokenTerms, _Mapping]] = ...) -> None: ...

class IssueTokenResponse(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: EnrolmentToken
    def __init__(self, token: _Optional[_Union[EnrolmentToken, _Mapping]] = ...) -> None: ...

class EnrolmentToken(_message.Message):
    __slots__ = ("token", "node_id", "expires_unix_s")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    token: str
    node_id: str
    expires_unix_s: float
    def __init__(self, token: _Optional[str] = ..., node_id: _Optional[str] = ..., expires_unix_s: _Optional[float] = ...) -> None: ...

class ListSitesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSitesResponse(_message.Message):
    __slots__ = ("sites",)
    SITES_FIELD_NUMBER: _ClassVar[int]
    sites: _containers.RepeatedCompositeFieldContainer[SiteView]
    def __init__(self, sites: _Optional[_Iterable[_Union[SiteView, _Mapping]]] = ...) -> None: ...

class RevokeSiteRequest(_message.Message):
    __slots__ = ("site",)
    SITE_FIELD_NUMBER: _ClassVar[int]
    site: str
    def __init__(self, site: _Optional[str] = ...) -> None: ...

class RevokeSiteResponse(_message.Message):
    __slots__ = ("cut_off",)
    CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    cut_off: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cut_off: _Optional[_Iterable[str]] = ...) -> None: ...

class SiteView(_message.Message):
    __slots__ = ("site", "region", "jurisdiction", "created_unix_s", "revoked_unix_s", "boxes", "open_tokens")
    SITE_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    JURISDICTION_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    REVOKED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    OPEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    site: str
    region: str
    jurisdiction: str
    created_unix_s: float
    revoked_unix_s: float
    boxes: _containers.RepeatedCompositeFieldContainer[SiteBox]
    open_tokens: int
    def __init__(self, site: _Optional[str] = ..., region: _Optional[str] = ..., jurisdiction: _Optional[str] = ..., created_unix_s: _Optional[float] = ..., revoked_unix_s: _Optional[float] = ..., boxes: _Optional[_Iterable[_Union[SiteBox, _Mapping]]] = ..., open_tokens: _Optional[int] = ...) -> None: ...

class SiteBox(_message.Message):
    __slots__ = ("node_id", "joined_unix_s", "joined_from", "not_after_unix_s", "attached", "clock_skew_s")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    JOINED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    JOINED_FROM_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    CLOCK_SKEW_S_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    joined_unix_s: float
    joined_from: str
    not_after_unix_s: float
    attached: bool
    clock_skew_s: float
    def __init__(self, node_id: _Optional[str] = ..., joined_unix_s: _Optional[float] = ..., joined_from: _Optional[str] = ..., not_after_unix_s: _Optional[float] = ..., attached: _Optional[bool] = ..., clock_skew_s: _Optional[float] = ...) -> None: ...
