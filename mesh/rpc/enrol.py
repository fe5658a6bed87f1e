"""The box's side of joining and renewing: first contact by the token's digest, then ordinary TLS.

First contact (as in a k3s agent's: the token vouches for the authority, the authority for the server): take whatever
certificate the listener shows, trust it for one question only, the authority's certificate, which is nothing secret;
go on only if that has the digest in the token. The token itself crosses a connection that is verified by this
authority and by the role `placement`. A wrong clock on the box would make that verification fail without a word, so
it is looked at before.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import grpc
import grpc.aio
from cryptography import x509

from mesh.address import HostPort
from mesh.errors import InvalidRequest, NodeUnreachable, Unauthenticated
from mesh.identity.ca import NodeCredentials
from mesh.identity.certificates import check_issued, load_certificate
from mesh.identity.enrolment import Token
from mesh.identity.keyring import Keyring
from mesh.identity.place import Place, Role
from mesh.identity.requests import certificate_digest, new_key_pem, signing_request
from mesh.identity.tls_names import name_of_role
from mesh.rpc.channel import node_channel
from mesh.rpc.errors import translate_rpc_errors
from mesh.v1 import enrolment_pb2 as pb
from mesh.v1 import enrolment_pb2_grpc as pb_grpc

_CALL_TIMEOUT_S = 15.0
_CONNECT_TIMEOUT_S = 10.0
_WILDCARDS = ("0.0.0.0", "::")
MOST_SKEW_S = 60.0
"""A clock that is further off than this is told as a fault: certificates, deadlines and times in logs depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What a box has after it joined. `clock_skew_s`: its clock is ahead of the mesh's by so much, give or take half of
    `rtt_s`."""

    credentials: NodeCredentials
    node_address: HostPort
    placement_node_id: str
    model_ids: tuple[str, ...]
    clock_skew_s: float
    rtt_s: float

    @property
    def place(self) -> Place:
        """Where the mesh says that the box is."""
        return self.credentials.place


async def join(address: HostPort, token: Token, build: str, *, key_pem: bytes | None = None) -> Joined:
    """Join by the public listener at `address`. `key_pem`: the key of an attempt whose answer was lost; else a new one.

    Raises Unauthenticated (another mesh than the token's; token unknown or expired), AlreadyExists (token used),
    PolicyDenied (site revoked), InvalidRequest (clock, address), NodeUnreachable."""
    key_pem = key_pem or new_key_pem()
    async with _first_contact(address) as first:
        with translate_rpc_errors(str(address)):
            authority = await first.GetAuthority(pb.GetAuthorityRequest(), timeout=_CALL_TIMEOUT_S)
    if certificate_digest(authority.ca_pem) != token.ca_sha256:
        raise Unauthenticated(
            f"{address} is not of the mesh that this token is of: the digest of its authority is another one. "
            "Check the address; if it is right, somebody is in between"
        )
    request = pb.JoinRequest(token=str(token), csr=signing_request(key_pem), build=build)
    async with _verified(address, authority.ca_pem) as channel:
        sent_s, request.clock_unix_s = time.monotonic(), time.time()
        with translate_rpc_errors(str(address)):
            answer = await pb_grpc.EnrolmentStub(channel).Join(request, timeout=_CALL_TIMEOUT_S)
        rtt_s = time.monotonic() - sent_s
    credentials = NodeCredentials(key_pem=key_pem, cert_pem=answer.cert_pem, ca_pem=authority.ca_pem)
    node = HostPort.parse(answer.node_address)
    joined = Joined(
        credentials=credentials,
        node_address=HostPort(address.host, node.port) if node.host in _WILDCARDS else node,
        placement_node_id=answer.placement_node_id,
        model_ids=tuple(answer.model_ids),
        clock_skew_s=request.clock_unix_s + rtt_s / 2 - answer.clock_unix_s,
        rtt_s=rtt_s,
    )
    # By the mesh's clock: the own one may be a little off, which the caller tells.
    at_time = datetime.fromtimestamp(answer.clock_unix_s, UTC)
    own, ca = load_certificate(answer.cert_pem, "the new certificate"), load_certificate(authority.ca_pem, "the CA")
    check_issued(own, ca, at_time)
    return joined


async def renew(address: str, keyring: Keyring, placement_node_id: str) -> bytes:
    """A new certificate, PEM, over the node listener, from the placement service of this id. Raises what it says:
    PolicyDenied (revoked, replaced), NotImplementedHere (it has no authority), NodeUnreachable."""
    channel = node_channel(address, keyring.now, placement_node_id)
    try:
        request = pb.RenewRequest(csr=signing_request(keyring.now.key_pem))
        with translate_rpc_errors(placement_node_id):
            answer = await pb_grpc.CertificatesStub(channel).Renew(request, timeout=_CALL_TIMEOUT_S)
    finally:
        await channel.close()
    return bytes(answer.cert_pem)


def skew_words(skew_s: float) -> str:
    """How far a clock is off, for people."""
    ahead = "ahead of" if skew_s > 0 else "behind"
    span = abs(skew_s)
    if span < MOST_SKEW_S:
        return f"{span:.1f} s {ahead} the mesh's"
    size = f"{span / 3600:.1f} hours" if span >= 7200 else f"{span / 60:.1f} minutes"
    return f"{size} {ahead} the mesh's: set it (timedatectl set-ntp true), or certificates will be refused"


@asynccontextmanager
async def _first_contact(address: HostPort) -> AsyncIterator[pb_grpc.EnrolmentStub]:
    """A connection that trusts whatever certificate is shown there. Plain text on loopback, as public listeners are."""
    if address.is_loopback and not await asyncio.to_thread(_speaks_tls, address):
        channel = grpc.aio.insecure_channel(str(address), options=_OPTIONS)
    else:
        shown = await asyncio.to_thread(_shown_certificate, address)
        _check_clock(load_certificate(shown, f"the certificate of {address}"), address, datetime.now(UTC))
        channel = _secure(address, shown)
    try:
        yield pb_grpc.EnrolmentStub(channel)
    finally:
        await channel.close()


@asynccontextmanager
async def _verified(address: HostPort, ca_pem: bytes) -> AsyncIterator[grpc.aio.Channel]:
    if address.is_loopback and not await asyncio.to_thread(_speaks_tls, address):
        channel = grpc.aio.insecure_channel(str(address), options=_OPTIONS)
    else:
        channel = _secure(address, ca_pem)
    try:
        yield channel
    finally:
        await channel.close()


_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]


def _secure(address: HostPort, roots: bytes) -> grpc.aio.Channel:
    name = name_of_role(Role.PLACEMENT)
    tls = grpc.ssl_channel_credentials(root_certificates=roots)
    return grpc.aio.secure_channel(str(address), tls, options=[("grpc.ssl_target_name_override", name), *_OPTIONS])


def _shown_certificate(address: HostPort) -> bytes:
    """What the listener shows, PEM, verified by nobody. Raises NodeUnreachable."""
    try:
        return ssl.get_server_certificate((address.host, address.port), timeout=_CONNECT_TIMEOUT_S).encode()
    except OSError as error:  # names, timeouts and TLS alerts are such too
        raise NodeUnreachable(f"cannot reach {address}: {error}; check address, port and network") from error


def _speaks_tls(address: HostPort) -> bool:
    try:
        ssl.get_server_certificate((address.host, address.port), timeout=_CONNECT_TIMEOUT_S)
    except ssl.SSLError:
        return False
    except OSError as error:
        raise NodeUnreachable(f"cannot reach {address}: {error}; check address, port and network") from error
    return True


def _check_clock(shown: x509.Certificate, address: HostPort, now: datetime) -> None:
    """A server's certificate that is not valid by the own clock means, nearly always, that the own clock is wrong."""
    begin, end = shown.not_valid_before_utc, shown.not_valid_after_utc
    if begin <= now <= end:
        return
    where = "before" if now < begin else "after"
    raise InvalidRequest(
        f"this box's clock says {now:%Y-%m-%d %H:%M} UTC, which is {where} the time in which the certificate of "
        f"{address} is valid ({begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC). Set the clock "
        "(timedatectl set-ntp true) and try again",
        field="clock",
    )
