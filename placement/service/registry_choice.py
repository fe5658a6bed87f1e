"""Consul where settings say so, else the embedded registry as this process reaches it."""

from __future__ import annotations

from mesh.registry.open import ConsulSettings, EmbeddedSettings, RemoteSettings, open_registry
from mesh.registry.types import Registry
from mesh.settings import RegistryKind, RegistrySettings


def choose_registry(settings: RegistrySettings, embedded: EmbeddedSettings | RemoteSettings) -> Registry:
    """A registry, not started."""
    if settings.kind is RegistryKind.CONSUL:
        return open_registry(ConsulSettings(address=str(settings.consul), prefix=settings.prefix))
    return open_registry(embedded)
