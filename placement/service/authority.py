"""The placement service's own use of the mesh's authority: whether it has one, and its own certificate's renewal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

from mesh.errors import InvalidRequest
from mesh.identity.ca import CertificateAuthority
from mesh.identity.certificates import load_certificate
from mesh.identity.keyring import Keyring
from mesh.settings import Authority
from placement.service.enrolment import Issuer, renew


def open_authority(settings: Authority | None, keyring: Keyring) -> Issuer | None:
    """The authority that settings name; None if they name none. Blocking. Raises InvalidRequest if it is not there or
    is another one than the own certificate is of."""
    if settings is None:
        return None
    if not settings.folder.is_dir():
        raise InvalidRequest(
            f"there is no authority in {settings.folder}; make one with `kvmesh ca init`", field="authority.folder"
        )
    authority = CertificateAuthority.create_or_load(settings.folder, keyring.now.place.mesh)
    if authority.ca_pem != keyring.now.ca_pem:
        raise InvalidRequest(
            f"{settings.folder} holds another authority than the one in the identity folder", field="authority.folder"
        )
    return Issuer(authority=authority, lifetime=timedelta(seconds=settings.lifetime_s))


def own_renewal(issuer: Issuer, keyring: Keyring) -> Callable[[], Awaitable[bytes]]:
    """Signs the own next certificate."""

    async def sign() -> bytes:
        shown = load_certificate(keyring.now.cert_pem, "the own certificate")
        return await asyncio.to_thread(renew, issuer, keyring.now.place, shown)

    return sign
