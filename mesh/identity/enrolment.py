"""Enrolment tokens and sites: what a box is given to join a mesh with, and what the mesh remembers of it.

A token is `kvj_<id>_<secret>_<digest>`: the id is public, the secret 256 random bits that are shown once and stored
as a hash only, the digest is SHA-256 of the authority's certificate, by which the box knows the mesh that it meets
for the first time. It is good for one key, until it expires or MOST_ATTEMPTS wrong secrets were tried with its id.
Its place comes from the site that it was issued for.

A SiteRecord is an immutable value: a change makes a new one, which its owner stores by compare-and-set, so that a
token is used once however many placement services there are. Pure but for the random source; the clock comes in.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mesh.errors import (
    AlreadyExists,
    InvalidRequest,
    MeshError,
    NotFound,
    PayloadCorrupt,
    PolicyDenied,
    Unauthenticated,
)
from mesh.identity.place import Place, Role, Tier, check_name
from mesh.identity.tls_names import check_host_names

FORMAT = 1
MOST_ATTEMPTS = 5
MOST_TOKENS = 64  # of one site; spent ones make room
MOST_BOXES = 64  # of one site
MOST_NAMES = 16  # host names and addresses of one box
DEFAULT_VALID_S, LEAST_VALID_S, MOST_VALID_S = 86_400.0, 60.0, 604_800.0

_TOKEN = re.compile(r"kvj_(?P<token_id>[0-9a-f]{16})_(?P<secret>[A-Za-z0-9_-]{43})_(?P<ca_sha256>[0-9a-f]{64})")
_REFUSED = "this enrolment token is not known here; make a new one with `kvmesh site token`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token as the box holds it."""

    token_id: str
    secret: str = field(repr=False)
    ca_sha256: str

    @classmethod
    def parse(cls, text: str) -> Token:
        """Raises InvalidRequest; never repeats the text."""
        match = _TOKEN.fullmatch(text.strip())
        if match is None:
            raise InvalidRequest("this is not a whole enrolment token (kvj_...); copy it again", field="token")
        return cls(**match.groupdict())

    def __str__(self) -> str:
        return f"kvj_{self.token_id}_{self.secret}_{self.ca_sha256}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a token is for. Names and addresses are those of the box's public listener."""

    node_id: str
    valid_s: float = DEFAULT_VALID_S
    dns_names: tuple[str, ...] = ()
    ip_addresses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name("node_id", self.node_id)
        if not LEAST_VALID_S <= self.valid_s <= MOST_VALID_S:
            raise InvalidRequest(
                f"a token is valid for {LEAST_VALID_S:g} to {MOST_VALID_S:g} seconds, got {self.valid_s:g}",
                field="valid_s",
            )
        if len(self.dns_names) + len(self.ip_addresses) > MOST_NAMES:
            raise InvalidRequest(f"at most {MOST_NAMES} names and addresses", field="dns_names")
        check_host_names(self.dns_names)
        for address in self.ip_addresses:
            try:
                ipaddress.ip_address(address)
            except ValueError:
                raise InvalidRequest(f"not an IP address: {address[:80]!r}", field="ip_addresses") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """A token without its secret. `used_by`: SHA-256 of the public key that it was used for; empty: unused."""

    token_id: str
    secret_hash: str
    node_id: str
    dns_names: tuple[str, ...]
    ip_addresses: tuple[str, ...]
    expires_unix_s: float
    attempts_left: int = MOST_ATTEMPTS
    used_by: str = ""
    used_unix_s: float = 0.0

    def is_open(self, now_unix_s: float) -> bool:
        """It can still be used."""
        return not self.used_by and self.attempts_left > 0 and now_unix_s < self.expires_unix_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A node that joined. `key`: SHA-256 of its public key."""

    node_id: str
    key: str
    joined_unix_s: float
    joined_from: str
    not_after_unix_s: float
    clock_skew_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRecord:
    """One site. `revoked_unix_s` 0: it is not revoked."""

    site: str
    region: str
    jurisdiction: str
    created_unix_s: float
    created_by: str = ""
    revoked_unix_s: float = 0.0
    tokens: tuple[TokenRecord, ...] = ()
    boxes: tuple[Box, ...] = ()

    def __post_init__(self) -> None:
        for name in ("site", "region", "jurisdiction"):
            check_name(name, getattr(self, name))

    def place(self, mesh: str, node_id: str) -> Place:
        """Where a box of this site is."""
        return Place(
            mesh=mesh,
            role=Role.EDGE,
            tier=Tier.EDGE,
            site=self.site,
            region=self.region,
            jurisdiction=self.jurisdiction,
            node_id=node_id,
        )

    def box(self, node_id: str) -> Box | None:
        """A box that joined; None if none did by that name."""
        return next((box for box in self.boxes if box.node_id == node_id), None)

    def with_token(self, terms: Terms, ca_pem_sha256: str, now_unix_s: float) -> tuple[SiteRecord, Token, TokenRecord]:
        """A fresh token. Raises PolicyDenied for a revoked site, InvalidRequest if too many are open."""
        self.check_not_revoked()
        kept = tuple(t for t in self.tokens if t.is_open(now_unix_s) or t.used_by)[-MOST_TOKENS + 1 :]
        if sum(t.is_open(now_unix_s) for t in kept) >= MOST_TOKENS - 1:
            raise InvalidRequest(f"site {self.site} has {MOST_TOKENS - 1} open tokens; use them first", field="site")
        token = Token(token_id=secrets.token_hex(8), secret=secrets.token_urlsafe(32), ca_sha256=ca_pem_sha256)
        record = TokenRecord(
            token_id=token.token_id,
            secret_hash=hash_secret(token),
            node_id=terms.node_id,
            dns_names=terms.dns_names,
            ip_addresses=terms.ip_addresses,
            expires_unix_s=now_unix_s + terms.valid_s,
        )
        return replace(self, tokens=(*kept, record)), token, record

    def check_token(self, token: Token, key: str, now_unix_s: float) -> TokenRecord:
        """The record of a token that may be used for `key` now. Raises Unauthenticated (unknown, wrong, expired),
        PolicyDenied (site revoked, identity given to another box since), AlreadyExists (used for another key). A token
        that was used for this very key may be used again until it expires: the answer may have been lost on its way."""
        record = next((t for t in self.tokens if t.token_id == token.token_id), None)
        if record is None or record.attempts_left <= 0 or not _same(record, token):
            raise Unauthenticated(_REFUSED)
        self.check_not_revoked()
        if now_unix_s >= record.expires_unix_s:
            raise Unauthenticated(
                f"this enrolment token expired {_ago(now_unix_s - record.expires_unix_s)} ago; make a new one with "
                f"`kvmesh site token {self.site}`",
                field="token",
            )
        if record.used_by and record.used_by != key:
            raise AlreadyExists(
                f"this enrolment token was used {_ago(now_unix_s - record.used_unix_s)} ago by a box with another key. "
                f"If that was not you, it was stolen: `kvmesh site revoke {self.site}`. Else make a new one with "
                f"`kvmesh site token {self.site}`",
                field="token",
            )
        if record.used_by:
            self._check_not_replaced(record.node_id, key)
        return record

    def with_wrong_attempt(self, token: Token) -> SiteRecord:
        """One attempt fewer for a token that was shown with a wrong secret; the same record if there is none."""
        return replace(
            self,
            tokens=tuple(
                replace(t, attempts_left=max(0, t.attempts_left - 1))
                if t.token_id == token.token_id and not _same(t, token)
                else t
                for t in self.tokens
            ),
        )

    def with_box(self, record: TokenRecord, box: Box, now_unix_s: float) -> SiteRecord:
        """The token is used, the box is known; a box of the same id is replaced. Raises InvalidRequest if there are
        too many boxes."""
        others = tuple(b for b in self.boxes if b.node_id != box.node_id)
        if len(others) >= MOST_BOXES:
            raise InvalidRequest(f"site {self.site} has {MOST_BOXES} boxes already", field="site")
        used = replace(record, used_by=box.key, used_unix_s=record.used_unix_s or now_unix_s)
        tokens = tuple(used if t.token_id == record.token_id else t for t in self.tokens)
        return replace(self, tokens=tokens, boxes=tuple(sorted((*others, box), key=lambda b: b.node_id)))

    def with_expiry(self, node_id: str, key: str, not_after_unix_s: float) -> SiteRecord:
        """A box's certificate was renewed; nothing changes for a node that did not join by token. Raises PolicyDenied
        for a revoked site."""
        self.check_not_revoked()
        return replace(
            self,
            boxes=tuple(
                replace(b, not_after_unix_s=not_after_unix_s) if (b.node_id, b.key) == (node_id, key) else b
                for b in self.boxes
            ),
        )

    def revoked(self, now_unix_s: float) -> SiteRecord:
        """Its boxes are no nodes any more and its tokens are void; again is fine."""
        return replace(self, revoked_unix_s=self.revoked_unix_s or now_unix_s, tokens=())

    def check_not_revoked(self) -> None:
        """Raises PolicyDenied (rule "site_revoked")."""
        if self.revoked_unix_s:
            raise PolicyDenied(
                f"site {self.site} was revoked; its boxes are no nodes of this mesh any more. Create a site of another "
                "name for a new start",
                rule="site_revoked",
                site=self.site,
            )

    def check_box(self, place: Place, key: str) -> None:
        """Whether a node of this site with this key is one of the mesh: not revoked, and not a box whose identity was
        given to another one since. A node that did not join by token (`kvmesh ca issue`) is no concern of this. Raises
        PolicyDenied."""
        self.check_not_revoked()
        self._check_not_replaced(place.node_id, key)

    def _check_not_replaced(self, node_id: str, key: str) -> None:
        box = self.box(node_id)
        if box is not None and box.key != key:
            raise PolicyDenied(
                f"the identity {node_id} was given to another box, which joined from {box.joined_from}; "
                "this box has to join anew, under another node id",
                rule="identity_replaced",
                node=node_id,
            )

    def to_json(self) -> bytes:
        """For the registry's value store."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> SiteRecord:
        """Read what `to_json` wrote. Raises PayloadCorrupt."""
        try:
            document: dict[str, Any] = json.loads(raw)
            if document.pop("format") != FORMAT:
                raise PayloadCorrupt("a site's record has an unknown format")
            tokens = tuple(_token_from(item) for item in document.pop("tokens"))
            boxes = tuple(Box(**item) for item in document.pop("boxes"))
            return cls(tokens=tokens, boxes=boxes, **document)
        except PayloadCorrupt:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MeshError) as error:
            raise PayloadCorrupt(f"a site's record cannot be read ({type(error).__name__})") from None


def hash_secret(token: Token) -> str:
    """The stored hash of a token's secret, hex. One fast hash: 256 random bits cannot be guessed at any speed."""
    digest = hashlib.blake2b(
        token.secret.encode(), digest_size=32, salt=token.token_id.encode()[:16], person=b"kvmesh-enrol"
    )
    return digest.hexdigest()


def site_of_token(sites: tuple[SiteRecord, ...], token: Token) -> SiteRecord:
    """The site that a token was issued for. Raises Unauthenticated."""
    found = next((site for site in sites if any(t.token_id == token.token_id for t in site.tokens)), None)
    if found is None:
        raise Unauthenticated(_REFUSED)
    return found


def check_node_id_free(sites: tuple[SiteRecord, ...], nodes: Iterable[Place], site: str, node_id: str) -> None:
    """Raise AlreadyExists if a node elsewhere in the mesh has this id: nodes know one another by it, so a box that had
    it too would pass for that one. A box of the same site may be replaced. `nodes`: all that are known."""
    elsewhere = [s for s in sites if s.site != site and not s.revoked_unix_s]
    named = {b.node_id for s in elsewhere for b in s.boxes} | {t.node_id for s in elsewhere for t in s.tokens}
    if node_id in named or any(p.node_id == node_id and (p.site != site or p.role is not Role.EDGE) for p in nodes):
        raise AlreadyExists(f"a node elsewhere in the mesh has the id {node_id}; choose another one", field="node_id")


def site_named(sites: tuple[SiteRecord, ...], name: str) -> SiteRecord:
    """Raises NotFound."""
    found = next((site for site in sites if site.site == name), None)
    if found is None:
        raise NotFound(f"there is no site {name[:64]!r}; `kvmesh site list` shows them", field="site")
    return found


def _same(record: TokenRecord, token: Token) -> bool:
    return hmac.compare_digest(record.secret_hash, hash_secret(token))


def _token_from(item: dict[str, Any]) -> TokenRecord:
    names, addresses = tuple(item.pop("dns_names")), tuple(item.pop("ip_addresses"))
    return TokenRecord(dns_names=names, ip_addresses=addresses, **item)


def _ago(seconds: float) -> str:
    """A span of time for people."""
    if seconds < 120:
        return f"{max(0, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 7200 else f"{round(seconds / 3600)} h"
