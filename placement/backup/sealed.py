"""A file that is encrypted and checked piece by piece, so that its size does not matter. Blocking.

AES-256-GCM over pieces of 1 MiB; a piece's nonce is a random prefix, its number and whether it is the last, so that
pieces cannot be taken out, moved or cut off (the STREAM construction of Hoang, Reyhanitabar, Rogaway and Vizar,
"Online Authenticated-Encryption and its Nonce-Reuse Misuse-Resistance", 2015). The header is authenticated with every
piece. The key comes from a passphrase by scrypt (RFC 7914), or from a key file by HKDF-SHA256 (RFC 5869), each with a
salt of the archive's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from mesh.errors import InvalidRequest, PayloadCorrupt

MAGIC = b"kvmesh backup 1\n"
PIECE_BYTES = 1 << 20
MIN_PASSPHRASE_CHARS, MIN_KEY_BYTES = 12, 32
SCRYPT_LOG_N = 17  # 128 MiB and about half a second
_MAX_HEADER_BYTES, _MAX_SECRET_BYTES = 4096, 1 << 16
_TAG_BYTES, _SALT_BYTES, _PREFIX_BYTES = 16, 16, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """What an archive is locked with. Never printed."""

    kind: str  # "passphrase" or "key"
    raw: bytes

    def __repr__(self) -> str:
        return f"Secret({self.kind})"

    @classmethod
    def read(cls, passphrase_file: Path | None, key_file: Path | None) -> Secret:
        """From exactly one file. Raises InvalidRequest, which says nothing of what is in it."""
        if (passphrase_file is None) == (key_file is None):
            raise InvalidRequest("give --passphrase-file or --key-file, one of them", field="--passphrase-file")
        file = passphrase_file or key_file
        assert file is not None
        try:
            with file.open("rb") as opened:
                raw = opened.read(_MAX_SECRET_BYTES + 1)
        except OSError as error:
            raise InvalidRequest(f"cannot read {file}: {error.strerror}", field="secret") from None
        if len(raw) > _MAX_SECRET_BYTES:
            raise InvalidRequest(f"{file} is larger than a secret may be", field="secret")
        if key_file is not None:
            if len(raw) < MIN_KEY_BYTES:
                raise InvalidRequest(f"{file} has {len(raw)} bytes; a key has at least {MIN_KEY_BYTES}", field="secret")
            return cls(kind="key", raw=raw)
        raw = raw.rstrip(b"\r\n")
        if len(raw.decode("utf-8", "replace")) < MIN_PASSPHRASE_CHARS:
            raise InvalidRequest(f"a passphrase has at least {MIN_PASSPHRASE_CHARS} characters", field="secret")
        return cls(kind="passphrase", raw=raw)

    def key(self, salt: bytes, log_n: int) -> bytes:
        """32 bytes."""
        if self.kind == "key":
            return HKDF(algorithm=hashes.SHA256(), length=32, salt=salt, info=MAGIC).derive(self.raw)
        return Scrypt(salt=salt, length=32, n=1 << log_n, r=8, p=1).derive(self.raw)


class SealedWriter:
    """A file object to write to, in order; `finish` ends it, and without that the archive is of no use."""

    def __init__(self, file: BinaryIO, secret: Secret, *, log_n: int = SCRYPT_LOG_N) -> None:
        self._file = file
        salt, self._prefix = os.urandom(_SALT_BYTES), os.urandom(_PREFIX_BYTES)
        header = {"lock": secret.kind, "salt": salt.hex(), "prefix": self._prefix.hex(), "scrypt_log_n": log_n}
        self._header = MAGIC + json.dumps(header, sort_keys=True).encode() + b"\n"
        self._cipher = AESGCM(secret.key(salt, log_n))
        self._count = 0
        self._buffer = bytearray()
        file.write(self._header)

    def write(self, data: bytes) -> int:
        self._buffer += data
        while len(self._buffer) > PIECE_BYTES:
            self._piece(bytes(self._buffer[:PIECE_BYTES]), last=False)
            del self._buffer[:PIECE_BYTES]
        return len(data)

    def finish(self) -> None:
        """The last piece."""
        self._piece(bytes(self._buffer), last=True)
        self._buffer.clear()

    def _piece(self, data: bytes, *, last: bool) -> None:
        self._file.write(self._cipher.encrypt(_nonce(self._prefix, self._count, last), data, self._header))
        self._count += 1


def opened(file: BinaryIO, secret: Secret) -> Iterator[bytes]:
    """The pieces in order. Raises InvalidRequest if it is no archive, or locked the other way; PayloadCorrupt for a
    wrong secret or an archive that was damaged or cut off, at the first piece that shows it."""
    header = _read_header(file)
    facts = _facts(header)
    if facts.lock != secret.kind:
        raise InvalidRequest(f"the archive is locked with a {facts.lock}, not with a {secret.kind}", field="secret")
    cipher, count = AESGCM(secret.key(facts.salt, facts.log_n)), 0
    piece = file.read(PIECE_BYTES + _TAG_BYTES)
    while True:
        following = file.read(PIECE_BYTES + _TAG_BYTES)
        try:
            yield cipher.decrypt(_nonce(facts.prefix, count, not following), piece, header)
        except (InvalidTag, ValueError) as error:
            what = (
                "the secret is wrong, or the archive is damaged" if not count else "the archive is damaged or cut off"
            )
            raise PayloadCorrupt(f"{what} (piece {count})") from error
        if not following:
            return
        piece, count = following, count + 1


def _nonce(prefix: bytes, count: int, last: bool) -> bytes:
    return prefix + count.to_bytes(4, "big") + (b"\1" if last else b"\0")


def _read_header(file: BinaryIO) -> bytes:
    magic = file.read(len(MAGIC))
    line = file.readline(_MAX_HEADER_BYTES)
    if magic != MAGIC or not line.endswith(b"\n"):
        raise InvalidRequest("this is no backup of kvmesh", field="archive")
    return magic + line


@dataclass(frozen=True, slots=True)
class _Header:
    lock: str
    salt: bytes
    prefix: bytes
    log_n: int


def _facts(header: bytes) -> _Header:
    try:
        facts = json.loads(header[len(MAGIC) :])
        lock, salt, prefix, log_n = (facts[name] for name in ("lock", "salt", "prefix", "scrypt_log_n"))
        right = (
            lock in ("passphrase", "key")
            and len(bytes.fromhex(salt)) == _SALT_BYTES
            and len(bytes.fromhex(prefix)) == _PREFIX_BYTES
            and isinstance(log_n, int)
            and 10 <= log_n <= 22  # 4 GiB of memory: more would be an attack
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest("the archive's header cannot be read", field="archive") from error
    if not right:
        raise InvalidRequest("the archive's header is not one that this build writes", field="archive")
    return _Header(lock, bytes.fromhex(salt), bytes.fromhex(prefix), log_n)
