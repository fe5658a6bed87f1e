"""Consul where settings say so, else the embedded registry as this process reaches it."""

from __future__ import annotations

from mesh.registry.consul_access import ConsulTls, read_token
from mesh.registry.open import ConsulSettings, EmbeddedSettings, RemoteSettings, open_registry
from mesh.registry.types import Registry
from mesh.settings import RegistryKind, RegistrySettings


def choose_registry(settings: RegistrySettings, embedded: EmbeddedSettings | RemoteSettings) -> Registry:
    """A registry, not started. Reads Consul's token and looks for its TLS files. Raises InvalidRequest."""
    if settings.kind is not RegistryKind.CONSUL:
        return open_registry(embedded)
    tls = settings.tls
    return open_registry(
        ConsulSettings(
            address=str(settings.consul),
            prefix=settings.prefix,
            token=None if settings.token_file is None else read_token(settings.token_file),
            tls=None if tls is None else ConsulTls(**dict(tls)),
        )
    )
