"""Reading certificates: PEM and DER in, places out. Pure; trusts nothing that it reads."""

from __future__ import annotations

from datetime import datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mesh.errors import InvalidRequest, MeshError, Unauthenticated
from mesh.identity.place import Place


def load_certificate(pem: bytes, what: str) -> x509.Certificate:
    """The first certificate of a PEM text. Raises InvalidRequest, naming `what`."""
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise InvalidRequest(f"{what} is not a PEM certificate", field="certificate") from error


def load_key(pem: bytes, what: str) -> ec.EllipticCurvePrivateKey:
    """An ECDSA P-256 private key. Raises InvalidRequest, naming `what`; never repeats its content."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"{what} is not an unencrypted PEM private key", field="key") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidRequest(f"{what} is not an ECDSA P-256 key", field="key")
    return key


def place_of(certificate: x509.Certificate) -> Place:
    """The place in the SAN. Raises InvalidRequest unless there is exactly one URI and it is a place."""
    try:
        san = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound as error:
        raise InvalidRequest("the certificate has no SAN, so it names no place", field="san") from error
    uris = san.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise InvalidRequest(f"the certificate's SAN has {len(uris)} URIs instead of one", field="san")
    return Place.from_uri(uris[0])


def mesh_of_authority(certificate: x509.Certificate) -> str:
    """The mesh that an authority signs for: its subject's organisation. Raises InvalidRequest if it is none."""
    names = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    if len(names) != 1:
        raise InvalidRequest("the authority's certificate does not name one mesh as its organisation", field="ca")
    return str(names[0].value)


def check_issued(certificate: x509.Certificate, authority: x509.Certificate, at_time: datetime) -> Place:
    """The place of a node certificate that `authority` issued and that is valid at `at_time` (aware).

    Raises Unauthenticated if any of it does not hold, saying what."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError) as error:
        raise Unauthenticated("the certificate was not issued by this mesh's authority") from error
    for name, checked in (("authority's", authority), ("node's", certificate)):
        if not checked.not_valid_before_utc <= at_time <= checked.not_valid_after_utc:
            raise Unauthenticated(
                f"the {name} certificate is valid from {checked.not_valid_before_utc:%Y-%m-%d %H:%M} "
                f"to {checked.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, not at {at_time:%Y-%m-%d %H:%M}"
            )
    if _is_authority(certificate) or not _is_authority(authority):
        raise Unauthenticated("an authority's certificate was used as a node's, or the other way round")
    try:
        place = place_of(certificate)
        mesh = mesh_of_authority(authority)
    except MeshError as error:
        raise Unauthenticated(error.message) from error
    if place.mesh != mesh:
        raise Unauthenticated(f"the certificate is of mesh {place.mesh!r}, the authority of {mesh!r}")
    return place


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False
