"""How a process proves itself to Consul: TLS files, and an ACL token that is read from a file of its own.

A token is a secret: it is held to what an HTTP header may carry, and no error names it.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import InvalidRequest

MAX_TOKEN_BYTES = 4096
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsulTls:
    """`ca_file`: PEM of who signed Consul's certificate; nothing else is trusted. `cert_file` and `key_file`: this
    process' own, where Consul asks for one (both or none)."""

    ca_file: Path
    cert_file: Path | None = None
    key_file: Path | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest on half a pair, or a file that cannot be read."""
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidRequest("a certificate for Consul needs cert_file and key_file, both", field="registry.tls")
        for file in (self.ca_file, self.cert_file, self.key_file):
            if file is not None and not os.access(file, os.R_OK):
                raise InvalidRequest(f"cannot read {file}", field="registry.tls")

    @property
    def client_pair(self) -> tuple[str, str] | None:
        """What this process shows; None: nothing."""
        return None if self.cert_file is None else (str(self.cert_file), str(self.key_file))


def read_token(file: Path) -> str:
    """The token in `file`, white space around it left out. Blocking. Raises InvalidRequest, which says nothing of
    what is in it, if the file cannot be read, lets everybody in, or holds no token."""
    try:
        mode = file.stat().st_mode
        with file.open("rb") as opened:
            raw = opened.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"cannot read {file}: {error.strerror}", field="registry.token_file") from None
    if mode & stat.S_IRWXO:
        raise InvalidRequest(
            f"{file} holds a secret but every user of this machine may read or change it; run chmod 600 on it",
            field="registry.token_file",
        )
    token = raw.decode("latin-1").strip()
    if len(raw) > MAX_TOKEN_BYTES or not _TOKEN.fullmatch(token):
        raise InvalidRequest(f"{file} does not hold one token of printable characters", field="registry.token_file")
    return token
