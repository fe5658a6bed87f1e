"""Certificate signing requests: a key that never leaves the box, and the proof that the asker has it.

Only the public key and the signature of a request count; the subject and extensions that it may ask for do not, for
a node's place is given to it. Pure but for making keys.
"""

from __future__ import annotations

import hashlib

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from mesh.errors import InvalidRequest
from mesh.identity.certificates import load_key

MAX_REQUEST_BYTES = 4096


def new_key_pem() -> bytes:
    """A fresh private key, ECDSA P-256, PEM without a password."""
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def signing_request(key_pem: bytes) -> bytes:
    """A request by this key, DER. Raises InvalidRequest if it is no P-256 key."""
    key = load_key(key_pem, "the node key")
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)


def requested_key(csr: bytes) -> ec.EllipticCurvePublicKey:
    """The key of a request whose signature holds. Raises InvalidRequest on anything else."""
    if len(csr) > MAX_REQUEST_BYTES:
        raise InvalidRequest(f"a certificate request has at most {MAX_REQUEST_BYTES} bytes", field="csr")
    try:
        request = x509.load_der_x509_csr(csr)
        key = request.public_key()
        signed = request.is_signature_valid
    except Exception as error:  # whatever a parser makes of hostile bytes
        raise InvalidRequest("the certificate request cannot be read", field="csr") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidRequest("the certificate request is not by an ECDSA P-256 key", field="csr")
    if not signed:
        raise InvalidRequest("the certificate request is not signed by its own key", field="csr")
    return key


def certified_key(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    """The key of a node's certificate. Raises InvalidRequest if it is no elliptic curve's."""
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InvalidRequest("the certificate is not of an ECDSA key", field="certificate")
    return key


def key_digest(key: object) -> str:
    """SHA-256 of a public key, hex: names a box by its key. Raises InvalidRequest if it is no P-256 key."""
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InvalidRequest("not an ECDSA key", field="key")
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def certificate_digest(pem: bytes) -> str:
    """SHA-256 of a certificate (its DER), hex. Raises InvalidRequest."""
    try:
        return x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex()
    except ValueError as error:
        raise InvalidRequest("not a PEM certificate", field="certificate") from error
