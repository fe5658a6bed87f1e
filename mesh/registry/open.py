"""Which registry a process uses, from its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mesh.identity.ca import NodeCredentials
from mesh.identity.keyring import Keyring
from mesh.identity.place import Role
from mesh.registry.consul import ConsulRegistry
from mesh.registry.consul_access import ConsulTls
from mesh.registry.embedded import EmbeddedRegistry
from mesh.registry.remote import RemoteRegistry
from mesh.registry.types import Registry
from mesh.rpc.channel import node_channel


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSettings:
    """In this process. `path`: the state file, in a private folder."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """The embedded one of a placement service. `placement`: its node id, if known; its role is checked anyhow."""

    address: str
    credentials: NodeCredentials | Keyring
    placement: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsulSettings:
    """See mesh.registry.consul.ConsulRegistry."""

    address: str = "127.0.0.1:8500"
    prefix: str = "kvmesh"
    token: str | None = field(default=None, repr=False)
    tls: ConsulTls | None = None
    deregister_after_s: float | None = None


RegistrySettings = EmbeddedSettings | RemoteSettings | ConsulSettings


def open_registry(settings: RegistrySettings) -> Registry:
    """A registry, not started."""
    match settings:
        case EmbeddedSettings(path=path):
            return EmbeddedRegistry(path)
        case RemoteSettings():
            expect = settings.placement or Role.PLACEMENT
            keyring = settings.credentials
            if not isinstance(keyring, Keyring):
                keyring = Keyring(keyring)
            return RemoteRegistry(lambda: node_channel(settings.address, keyring.now, expect))
        case ConsulSettings():
            return ConsulRegistry(
                settings.address,
                prefix=settings.prefix,
                token=settings.token,
                tls=settings.tls,
                deregister_after_s=settings.deregister_after_s,
            )
