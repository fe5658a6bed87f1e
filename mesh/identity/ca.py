"""The local certificate authority of a mesh, and the credentials it gives to nodes.

One self-signed ECDSA P-256 authority per mesh, kept in a folder of mode 0700; one certificate per node. The
SAN of a node's certificate holds its place as a URI (what peers read), the TLS names of mesh.identity.tls_names
(what TLS itself checks on dialling), and the host names and addresses of its public listener. A larger
operator's own authority can issue the same form; nothing else here depends on who signed.

Blocking: key generation and file I/O, milliseconds.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mesh.errors import InvalidRequest
from mesh.identity.certificates import load_certificate, load_key, mesh_of_authority, place_of
from mesh.identity.files import make_private_folder, write_error, write_private
from mesh.identity.place import Place, check_name
from mesh.identity.tls_names import check_host_names, names_of

CA_LIFETIME = timedelta(days=3650)
NODE_LIFETIME = timedelta(days=90)
CLOCK_SKEW = timedelta(minutes=5)  # a node whose clock is a little behind must take a fresh certificate

_CA_KEY, _CA_CERT = "ca_key.pem", "ca_cert.pem"
NODE_KEY_FILE, NODE_CERT_FILE, NODE_CA_FILE = "node_key.pem", "node_cert.pem", "ca_cert.pem"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCredentials:
    """A node's private key and certificate and the authority that all nodes of its mesh trust; PEM each."""

    key_pem: bytes = field(repr=False)
    cert_pem: bytes
    ca_pem: bytes

    @property
    def place(self) -> Place:
        """The place in the certificate. Raises InvalidRequest if there is none."""
        return place_of(load_certificate(self.cert_pem, "the node certificate"))

    @property
    def not_after(self) -> datetime:
        """When the certificate expires (aware, UTC)."""
        return load_certificate(self.cert_pem, "the node certificate").not_valid_after_utc

    def save(self, folder: Path) -> None:
        """Write to a folder of mode 0700, key first, certificate last: where it is, the others are."""
        make_private_folder(folder)
        write_private(folder / NODE_KEY_FILE, self.key_pem)
        write_private(folder / NODE_CA_FILE, self.ca_pem)
        write_private(folder / NODE_CERT_FILE, self.cert_pem)

    @classmethod
    def load(cls, folder: Path) -> NodeCredentials:
        """Read what `save` wrote. Raises InvalidRequest if a file is missing, not PEM, or key and certificate
        are not of one pair."""
        credentials = cls(
            key_pem=_read(folder / NODE_KEY_FILE),
            cert_pem=_read(folder / NODE_CERT_FILE),
            ca_pem=_read(folder / NODE_CA_FILE),
        )
        certificate = load_certificate(credentials.cert_pem, str(folder / NODE_CERT_FILE))
        key = load_key(credentials.key_pem, str(folder / NODE_KEY_FILE))
        if key.public_key() != certificate.public_key():
            raise InvalidRequest(f"key and certificate in {folder} do not belong together", field="credentials")
        return credentials


class CertificateAuthority:
    """Issues node certificates of one mesh. Create with `create_or_load`."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        self.mesh = mesh_of_authority(certificate)

    @property
    def ca_pem(self) -> bytes:
        """The authority's certificate, which everybody trusts; PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @classmethod
    def create_or_load(cls, folder: Path, mesh: str) -> CertificateAuthority:
        """Load the authority in `folder`, or make one there. Safe against a second process doing the same.

        Raises InvalidRequest if the folder holds another mesh's authority, half of one, or files that are not
        PEM; Overloaded on a full disk."""
        check_name("mesh", mesh)
        make_private_folder(folder)
        with _locked(folder / ".lock"):
            here = [name for name in (_CA_KEY, _CA_CERT) if (folder / name).exists()]
            if not here:
                key, certificate = _new_authority(mesh)
                # The certificate goes last: a crash in between leaves half an authority, which is refused
                # below, and never a certificate that nodes trust without its key.
                write_private(folder / _CA_KEY, _key_pem(key))
                write_private(folder / _CA_CERT, certificate.public_bytes(serialization.Encoding.PEM))
                return cls(key, certificate)
            if len(here) == 1:
                raise InvalidRequest(
                    f"{folder} holds {here[0]} alone; restore the other file, or remove it to start a new authority "
                    "(every node then needs a new certificate)",
                    field="folder",
                )
        certificate = load_certificate(_read(folder / _CA_CERT), str(folder / _CA_CERT))
        authority = cls(load_key(_read(folder / _CA_KEY), str(folder / _CA_KEY)), certificate)
        if authority.mesh != mesh:
            raise InvalidRequest(f"{folder} is the authority of mesh {authority.mesh!r}, not {mesh!r}", field="mesh")
        return authority

    def issue(
        self,
        place: Place,
        *,
        dns_names: Iterable[str] = (),
        ip_addresses: Iterable[str] = (),
        lifetime: timedelta = NODE_LIFETIME,
        now: datetime | None = None,
    ) -> NodeCredentials:
        """A new key and certificate for `place`. Names and addresses are those of its public listener.

        Raises InvalidRequest if the place is of another mesh, an address is not one, or a name is none of a host."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert_pem = self.certify(
            key.public_key(), place, dns_names=dns_names, ip_addresses=ip_addresses, lifetime=lifetime, now=now
        )
        return NodeCredentials(key_pem=_key_pem(key), cert_pem=cert_pem, ca_pem=self.ca_pem)

    def certify(
        self,
        key: ec.EllipticCurvePublicKey,
        place: Place,
        *,
        dns_names: Iterable[str] = (),
        ip_addresses: Iterable[str] = (),
        lifetime: timedelta = NODE_LIFETIME,
        now: datetime | None = None,
    ) -> bytes:
        """A certificate, PEM, for a key that its owner made; otherwise as `issue`."""
        if place.mesh != self.mesh:
            raise InvalidRequest(f"this authority signs for mesh {self.mesh!r}, not {place.mesh!r}", field="mesh")
        dns_names = tuple(dns_names)
        check_host_names(dns_names)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(place.uri)]
        try:
            names += [x509.DNSName(name) for name in (*names_of(place), *dns_names)]
            names += [x509.IPAddress(ipaddress.ip_address(address)) for address in ip_addresses]
        except ValueError as error:
            raise InvalidRequest(f"not a host name or IP address: {error}", field="san") from error
        subject = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, place.mesh),
                x509.NameAttribute(NameOID.COMMON_NAME, place.node_id),
            ]
        )
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            _builder(subject, self._certificate.subject, key, now or datetime.now(UTC), lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(ca=False), critical=True)
            .add_extension(usages, critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)


def _new_authority(mesh: str) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, mesh),
            x509.NameAttribute(NameOID.COMMON_NAME, "kvmesh authority"),
        ]
    )
    certificate = (
        _builder(name, name, key.public_key(), datetime.now(UTC), CA_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, lifetime: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + lifetime)
    )


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror or error}", field="credentials") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`, waiting for it."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise write_error(path, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
