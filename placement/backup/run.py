"""Backup and restore of the placement side of a mesh: authority, identity, state (audit, embedded registry), and the
values of a shared registry."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from mesh.audit.chain import EntryKind
from mesh.audit.log import AUDIT_FOLDER, AuditLog, segments
from mesh.errors import AlreadyExists, InvalidRequest, NotFound
from mesh.identity.ca import NodeCredentials
from mesh.identity.files import write_error
from mesh.identity.signing import NodeIdentity
from mesh.identity.tenants import TenantDirectory
from mesh.registry.open import EmbeddedSettings
from mesh.registry.types import Registry
from mesh.settings import PlacementSettings, RegistryKind
from placement.backup.contents import Staged, Summary, check_empty, put_in_place, stage, write_backup
from placement.backup.sealed import Secret
from placement.service.registry_choice import choose_registry
from placement.service.sites import REVOKED_PREFIX, SITE_PREFIX
from placement.service.stores import EPOCH_BYTES, HISTORY_PREFIX, POLICY_PREFIX, TENANTS_KEY

REGISTRY_FILE = "registry.json"
_SHARED_PREFIXES = (POLICY_PREFIX, HISTORY_PREFIX, TENANTS_KEY, SITE_PREFIX, REVOKED_PREFIX)


def folders_of(settings: PlacementSettings, ca: Path | None, more: Mapping[str, Path]) -> dict[str, Path]:
    """Names in the archive, and where they are here."""
    folders = {"identity": settings.identity.folder, "state": settings.state_folder}
    if ca is not None:
        folders["ca"] = ca
    clash = folders.keys() & more.keys()
    if clash:
        raise AlreadyExists(f"the name {min(clash)} is taken in a backup: give the folder another one")
    return {**folders, **more}


async def backup(
    settings: PlacementSettings, archive: Path, secret: Secret, *, ca: Path | None, more: Mapping[str, Path]
) -> Summary:
    """Write the archive, mode 0600, whole or not at all. The placement service may run meanwhile. Raises AlreadyExists
    if there is such a file, and what reading the registry raises."""
    folders = folders_of(settings, ca, more)
    mesh = NodeCredentials.load(settings.identity.folder).place.mesh
    values = await _shared_values(settings)
    return await asyncio.to_thread(_write, archive, secret, mesh, folders, values)


def _write(
    archive: Path, secret: Secret, mesh: str, folders: Mapping[str, Path], values: Mapping[str, bytes] | None
) -> Summary:
    if archive.exists():
        raise AlreadyExists(f"{archive} exists: a backup is never written over")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{archive.name}.", dir=archive.parent)
    except OSError as error:
        raise write_error(archive, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            summary = write_backup(file, secret, mesh=mesh, folders=folders, values=values, made_unix_s=time.time())
            file.flush()
            os.fsync(file.fileno())
        os.link(name, archive)  # unlike a rename it does not replace one that came up meanwhile
    except OSError as error:
        raise write_error(archive, error) from error
    finally:
        Path(name).unlink(missing_ok=True)
    return summary


async def restore(
    settings: PlacementSettings, archive: Path, secret: Secret, *, ca: Path | None, more: Mapping[str, Path]
) -> Summary:
    """Put everything back, into empty folders and a registry without policies, tenants and sites only. The audit chain
    goes on: its next entry says that it was restored, and from when. Raises AlreadyExists, PayloadCorrupt,
    InvalidRequest; nothing was put in place then."""
    folders = folders_of(settings, ca, more)
    check_empty(folders.values())
    await _check_registry_empty(settings)
    staged = await asyncio.to_thread(_stage, archive, secret, settings.state_folder.parent)
    await asyncio.to_thread(put_in_place, staged, folders)
    await _restore_registry(settings, staged)
    await _tell_audit(settings, staged.summary)
    return staged.summary


def check(archive: Path, secret: Secret) -> Summary:
    """Read the whole archive and hold it to its digests; nothing is kept."""
    with _reading(archive) as file, tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        return stage(file, secret, Path(folder)).summary


def _stage(archive: Path, secret: Secret, parent: Path) -> Staged:
    with _reading(archive) as file:
        return stage(file, secret, parent)


def _reading(archive: Path) -> BinaryIO:
    try:
        return archive.open("rb")
    except OSError as error:
        raise InvalidRequest(f"cannot read {archive}: {error.strerror}", field="archive") from error


async def _shared_values(settings: PlacementSettings) -> dict[str, bytes] | None:
    """Values of a registry that is not in the state folder. None: it is."""
    if settings.registry.kind is RegistryKind.EMBEDDED:
        return None
    registry = await _open(settings)
    try:
        return {value.key: value.value for prefix in _SHARED_PREFIXES for value in await registry.list_values(prefix)}
    finally:
        await registry.close()


async def _check_registry_empty(settings: PlacementSettings) -> None:
    if await _shared_values(settings):
        raise AlreadyExists(
            "the registry holds policies, tenants or sites; a backup is restored into an empty one only"
        )


async def _restore_registry(settings: PlacementSettings, staged: Staged) -> None:
    """Values of a shared registry, and a new epoch, so that sites do not take what was restored for stale."""
    registry = await _open(settings)
    try:
        for key, value in (staged.values or {}).items():
            await registry.put(key, value, expected_version=0)
        stored = await registry.get(TENANTS_KEY)
        if stored is None:
            raise NotFound("the backup holds no tenants")
        directory = replace(TenantDirectory.from_json(stored.value), epoch=secrets.token_hex(EPOCH_BYTES))
        await registry.put(TENANTS_KEY, directory.to_json(), expected_version=stored.version)
    finally:
        await registry.close()


async def _open(settings: PlacementSettings) -> Registry:
    registry = choose_registry(settings.registry, EmbeddedSettings(path=settings.state_folder / REGISTRY_FILE))
    await registry.start()
    return registry


async def _tell_audit(settings: PlacementSettings, summary: Summary) -> None:
    folder = settings.state_folder / AUDIT_FOLDER
    if not segments(folder):
        return
    credentials = NodeCredentials.load(settings.identity.folder)
    log = AuditLog(folder, NodeIdentity(credentials.place, credentials))
    try:
        facts = {"made_unix_s": summary.made_unix_s, "last_seq": log.head.seq, "files": summary.files}
        await log.append(EntryKind.RESTORED, facts)
    finally:
        await log.close()
