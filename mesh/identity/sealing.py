"""What a box keeps on its disk, sealed with a key that is not on that disk.

AES-256-GCM with random nonces (NIST SP 800-38D: at most 2^32 seals under one key, which at 100 a second is 16 months;
each purpose has a key of its own, derived by HKDF, RFC 5869). The name of what is sealed goes in as associated data, so
that one file cannot be passed off as another. Whoever has the disk alone can neither read nor forge; an older state can
be put back.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from mesh.errors import InvalidRequest, PayloadCorrupt

MAGIC: Final = b"kvmS1"
_NONCE_BYTES, _TAG_BYTES, _LEAST_KEY_BYTES, _MOST_KEY_BYTES = 12, 16, 32, 4096
OVERHEAD_BYTES: Final = len(MAGIC) + _NONCE_BYTES + _TAG_BYTES


class Sealer:
    """Seals for one purpose. Safe from any thread."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def seal(self, data: bytes, name: str) -> bytes:
        """`data` under its name, OVERHEAD_BYTES longer."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return MAGIC + nonce + self._cipher.encrypt(nonce, data, name.encode())

    def open(self, sealed: bytes, name: str) -> bytes:
        """The data. Raises PayloadCorrupt if it was sealed with another key or under another name, or was changed."""
        if not sealed.startswith(MAGIC) or len(sealed) < OVERHEAD_BYTES:
            raise PayloadCorrupt(f"{name} is not sealed, or is cut off")
        nonce = sealed[len(MAGIC) : len(MAGIC) + _NONCE_BYTES]
        try:
            return self._cipher.decrypt(nonce, sealed[len(MAGIC) + _NONCE_BYTES :], name.encode())
        except InvalidTag:
            raise PayloadCorrupt(f"{name} was sealed with another key, or was changed") from None


class StateKey:
    """The key of a box. Keys of purposes come from it; it is not used itself."""

    def __init__(self, secret: bytes) -> None:
        if not _LEAST_KEY_BYTES <= len(secret) <= _MOST_KEY_BYTES:
            raise InvalidRequest(
                f"a state key has {_LEAST_KEY_BYTES} to {_MOST_KEY_BYTES} bytes, got {len(secret)}", field="state_key"
            )
        self._secret = secret

    @classmethod
    def load(cls, path: Path) -> StateKey:
        """From a file of random bytes, such as a systemd credential. Raises InvalidRequest if it cannot be read, is
        too short, or others may read it."""
        try:
            others = _open_to(path.stat())
            secret = path.read_bytes()
        except OSError as error:
            raise InvalidRequest(f"cannot read the state key {path}: {error.strerror}", field="state_key") from error
        if others:
            raise InvalidRequest(f"{path} can be read by others: chmod 600 it", field="state_key")
        return cls(secret)

    @classmethod
    def create(cls, path: Path) -> StateKey:
        """A new one in a new file, mode 0600. Raises InvalidRequest if there is a file."""
        secret = secrets.token_bytes(_LEAST_KEY_BYTES)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise InvalidRequest(f"cannot make the state key {path}: {error.strerror}", field="state_key") from error
        with os.fdopen(handle, "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
        return cls(secret)

    def sealer(self, purpose: str) -> Sealer:
        """For what is sealed for this purpose and no other."""
        return Sealer(HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose.encode()).derive(self._secret))


def _open_to(stat: os.stat_result) -> int:
    """Mode bits of those who should not read it. A credential of systemd is root's and of mode 0440, where the group's
    bit is the mask of the list that lets the service in (acl(5))."""
    if stat.st_uid == stat.st_gid == 0 and stat.st_mode & 0o777 == 0o440:
        return 0
    return stat.st_mode & 0o077


def is_sealed(data: bytes) -> bool:
    """Whether these bytes came from a Sealer."""
    return data.startswith(MAGIC)
