"""Who is calling a public listener."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class AccessRole(IntEnum):
    """Roles of API keys; each includes the ones below it."""

    TENANT = 1
    OPERATOR = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated caller. `key_id` is public; the secret is never kept."""

    tenant: str
    role: AccessRole
    key_id: str
