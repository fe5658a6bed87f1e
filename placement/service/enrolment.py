"""How boxes join, stay and leave: mesh.v1.Enrolment and Sites on the public listener, Certificates on the node one.

The place of a box comes from its token, which an operator had made for a site; of the box's own request only the key
and its proof count. What is done is in the audit log before it is done.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import grpc.aio
from cryptography import x509

from mesh.errors import InvalidRequest, MeshError, NotImplementedHere, Unauthenticated
from mesh.identity.ca import CertificateAuthority
from mesh.identity.certificates import load_certificate
from mesh.identity.enrolment import (
    DEFAULT_VALID_S,
    Box,
    SiteRecord,
    Terms,
    Token,
    TokenRecord,
    check_node_id_free,
    site_of_token,
)
from mesh.identity.place import Place, check_name
from mesh.identity.requests import certificate_digest, certified_key, key_digest, requested_key
from mesh.identity.tls_names import names_of
from mesh.rpc.peer import peer_certificate
from mesh.telemetry.log import get_logger
from mesh.v1 import enrolment_pb2 as pb
from mesh.v1 import enrolment_pb2_grpc as pb_grpc
from placement.service.admin import RecordAdmin
from placement.service.sites import SiteStore

log = get_logger(__name__)

RecordJoin = Callable[[dict[str, str]], Awaitable[None]]
"""Keeps in the audit log which box is about to join, with which token."""
CutOff = Callable[[], Awaitable[Sequence[str]]]
"""Ends the sessions of nodes that are none any more; returns their ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issuer:
    """An authority that may be used here, and for how long what it signs is valid."""

    authority: CertificateAuthority
    lifetime: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Where a box that joined finds placement, and what the entry has to offer."""

    node_address: str
    node_id: str
    model_ids: tuple[str, ...]


class EnrolmentServicer(pb_grpc.EnrolmentServicer):
    """First contact. `issuer` None: this placement service has no authority, and says so."""

    def __init__(
        self, store: SiteStore, issuer: Issuer | None, ca_pem: bytes, reach: Reach, record: RecordJoin
    ) -> None:
        self._store = store
        self._issuer = issuer
        self._ca_pem = ca_pem
        self._reach = reach
        self._record = record

    async def GetAuthority(
        self, request: pb.GetAuthorityRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetAuthorityResponse:
        return pb.GetAuthorityResponse(ca_pem=self._ca_pem)

    async def Join(self, request: pb.JoinRequest, context: grpc.aio.ServicerContext) -> pb.JoinResponse:
        issuer = _required(self._issuer)
        token = Token.parse(request.token)
        key = requested_key(request.csr)
        now_s = time.time()
        if not math.isfinite(request.clock_unix_s):
            raise InvalidRequest("clock_unix_s must be finite", field="clock_unix_s")
        site = site_of_token(self._store.sites, token)
        try:
            record = site.check_token(token, key_digest(key), now_s)
        except Unauthenticated:
            await self._store.change(site.site, lambda stored: stored.with_wrong_attempt(token))
            raise
        place = site.place(issuer.authority.mesh, record.node_id)
        origin = _origin(context)
        facts = {"site": site.site, "node_id": place.node_id, "token_id": token.token_id, "from": origin}
        await self._record(facts)
        cert_pem = await asyncio.to_thread(
            issuer.authority.certify,
            key,
            place,
            dns_names=record.dns_names,
            ip_addresses=record.ip_addresses,
            lifetime=issuer.lifetime,
        )
        box = Box(
            node_id=place.node_id,
            key=key_digest(key),
            joined_unix_s=now_s,
            joined_from=origin,
            not_after_unix_s=_not_after(cert_pem).timestamp(),
            clock_skew_s=request.clock_unix_s - now_s,
        )

        def use(stored: SiteRecord) -> SiteRecord:
            return stored.with_box(stored.check_token(token, box.key, now_s), box, now_s)

        await self._store.change(site.site, use)
        log.info("box_joined", site=site.site, peer=place.node_id, skew_s=round(box.clock_skew_s, 1))
        return pb.JoinResponse(
            cert_pem=cert_pem,
            node_address=self._reach.node_address,
            placement_node_id=self._reach.node_id,
            clock_unix_s=time.time(),
            model_ids=self._reach.model_ids,
        )


class CertificatesServicer(pb_grpc.CertificatesServicer):
    """Renewal. `admit` reads the caller's place and refuses who is no node any more."""

    def __init__(
        self, store: SiteStore, issuer: Issuer | None, admit: Callable[[grpc.aio.ServicerContext], Place]
    ) -> None:
        self._store = store
        self._issuer = issuer
        self._admit = admit

    async def Renew(self, request: pb.RenewRequest, context: grpc.aio.ServicerContext) -> pb.RenewResponse:
        issuer = _required(self._issuer)
        place = self._admit(context)
        key = requested_key(request.csr)
        shown = peer_certificate(context)
        if key != shown.public_key():
            raise InvalidRequest(
                f"{place.node_id} asks for a certificate of another key than it has; a box with a new key joins anew",
                field="csr",
            )
        cert_pem = await asyncio.to_thread(renew, issuer, place, shown)
        not_after_s = _not_after(cert_pem).timestamp()
        if place.site in {site.site for site in self._store.sites}:
            await self._store.change(
                place.site, lambda stored: stored.with_expiry(place.node_id, key_digest(key), not_after_s)
            )
        log.info("certificate_renewed_for", peer=place.node_id)
        return pb.RenewResponse(cert_pem=cert_pem, clock_unix_s=time.time())


class SitesServicer(pb_grpc.SitesServicer):
    """Sites, for operators. `nodes`: the places of all nodes that are known, this one's too."""

    def __init__(
        self,
        store: SiteStore,
        ca_pem: bytes,
        record: RecordAdmin,
        *,
        can_issue: bool,
        attached: Callable[[], frozenset[str]],
        nodes: Callable[[], Iterable[Place]],
        cut_off: CutOff,
    ) -> None:
        self._store = store
        self._ca_sha256 = certificate_digest(ca_pem)
        self._record = record
        self._can_issue = can_issue
        self._attached = attached
        self._nodes = nodes
        self._cut_off = cut_off

    async def Create(self, request: pb.CreateSiteRequest, context: grpc.aio.ServicerContext) -> pb.CreateSiteResponse:
        self._check_issuer()
        now_s = time.time()
        site = SiteRecord(
            site=request.site, region=request.region, jurisdiction=request.jurisdiction, created_unix_s=now_s
        )
        terms = self._checked(request.site, request.terms)
        made, token, record = site.with_token(terms, self._ca_sha256, now_s)
        facts = {"site": site.site, "region": site.region, "jurisdiction": site.jurisdiction}
        await self._record("site.create", {**facts, "node_id": record.node_id, "token_id": record.token_id})
        await self._store.create(made)
        log.info("site_created", site=site.site)
        return pb.CreateSiteResponse(token=_token_to_wire(token, record))

    async def IssueToken(
        self, request: pb.IssueTokenRequest, context: grpc.aio.ServicerContext
    ) -> pb.IssueTokenResponse:
        self._check_issuer()
        terms = self._checked(request.site, request.terms)
        self._store.named(request.site).check_not_revoked()
        await self._record("site.token", {"site": request.site, "node_id": terms.node_id})
        made: list[tuple[Token, TokenRecord]] = []

        def add(stored: SiteRecord) -> SiteRecord:
            changed, token, record = stored.with_token(terms, self._ca_sha256, time.time())
            made.append((token, record))
            return changed

        await self._store.change(request.site, add)
        return pb.IssueTokenResponse(token=_token_to_wire(*made[-1]))

    async def List(self, request: pb.ListSitesRequest, context: grpc.aio.ServicerContext) -> pb.ListSitesResponse:
        attached, now_s = self._attached(), time.time()
        return pb.ListSitesResponse(sites=[_site_to_wire(site, attached, now_s) for site in self._store.sites])

    async def Revoke(self, request: pb.RevokeSiteRequest, context: grpc.aio.ServicerContext) -> pb.RevokeSiteResponse:
        check_name("site", request.site)
        self._store.named(request.site)
        await self._record("site.revoke", {"site": request.site})
        before = self._attached()
        await self._store.revoke(request.site, time.time())
        ended = await self._cut_off()
        boxes = {box.node_id for box in self._store.named(request.site).boxes}
        log.warning("site_revoked", site=request.site, cut_off=len(ended))
        return pb.RevokeSiteResponse(cut_off=sorted({*ended, *(boxes & before)}))

    def _checked(self, site: str, wire: pb.TokenTerms) -> Terms:
        terms = _terms(site, wire)
        check_node_id_free(self._store.sites, self._nodes(), site, terms.node_id)
        return terms

    def _check_issuer(self) -> None:
        if not self._can_issue:
            raise _no_authority()


def renew(issuer: Issuer, place: Place, shown: x509.Certificate) -> bytes:
    """A new certificate, PEM, for the key, place and names of one that is still valid."""
    try:
        san = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound as error:
        raise Unauthenticated("the certificate has no names") from error
    dns = [name for name in san.get_values_for_type(x509.DNSName) if name not in names_of(place)]
    addresses = [str(address) for address in san.get_values_for_type(x509.IPAddress)]
    return issuer.authority.certify(
        certified_key(shown), place, dns_names=dns, ip_addresses=addresses, lifetime=issuer.lifetime
    )


def _terms(site: str, wire: pb.TokenTerms) -> Terms:
    if not math.isfinite(wire.valid_s):
        raise InvalidRequest("valid_s must be finite", field="valid_s")
    return Terms(
        node_id=wire.node_id or f"edge-{site}",
        valid_s=wire.valid_s or DEFAULT_VALID_S,
        dns_names=tuple(wire.dns_names),
        ip_addresses=tuple(wire.ip_addresses),
    )


def _token_to_wire(token: Token, record: TokenRecord) -> pb.EnrolmentToken:
    return pb.EnrolmentToken(token=str(token), node_id=record.node_id, expires_unix_s=record.expires_unix_s)


def _site_to_wire(site: SiteRecord, attached: frozenset[str], now_s: float) -> pb.SiteView:
    return pb.SiteView(
        site=site.site,
        region=site.region,
        jurisdiction=site.jurisdiction,
        created_unix_s=site.created_unix_s,
        revoked_unix_s=site.revoked_unix_s,
        boxes=[
            pb.SiteBox(
                node_id=box.node_id,
                joined_unix_s=box.joined_unix_s,
                joined_from=box.joined_from,
                not_after_unix_s=box.not_after_unix_s,
                attached=box.node_id in attached,
                clock_skew_s=box.clock_skew_s,
            )
            for box in site.boxes
        ],
        open_tokens=sum(token.is_open(now_s) for token in site.tokens),
    )


def _required(issuer: Issuer | None) -> Issuer:
    if issuer is None:
        raise _no_authority()
    return issuer


def _no_authority() -> MeshError:
    return NotImplementedHere(
        "this placement service has no authority to sign with: set `authority.folder` in its settings, or issue "
        "certificates by hand with `kvmesh ca issue`"
    )


def _origin(context: grpc.aio.ServicerContext) -> str:
    """Where a caller comes from, as grpc tells it, without its port: ipv4:192.0.2.7."""
    peer = str(context.peer())
    return peer.rpartition(":")[0][:100] or peer[:100]


def _not_after(cert_pem: bytes) -> datetime:
    return load_certificate(cert_pem, "the new certificate").not_valid_after_utc.astimezone(UTC)
