"""Backups: whole or refused, locked, and a restored mesh that goes on with its policies, tenants and audit chain."""

from __future__ import annotations

import asyncio
import io
from functools import partial
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mesh.audit.chain import EntryKind
from mesh.audit.log import AUDIT_FOLDER, AuditLog, segments
from mesh.audit.verify import verify_log
from mesh.errors import AlreadyExists, InvalidRequest, MeshError, PayloadCorrupt, PolicyDenied
from mesh.identity.ca import CertificateAuthority, NodeCredentials
from mesh.identity.enrolment import SiteRecord
from mesh.identity.place import Place, Role, Tier
from mesh.identity.principal import AccessRole
from mesh.identity.signing import NodeIdentity
from mesh.identity.tenants import issue_key, new_tenant
from mesh.registry.embedded import EmbeddedRegistry
from mesh.settings import Identity, PlacementSettings, RegistryKind, RegistrySettings, to_yaml
from placement.backup import run, sealed
from placement.backup.commands import register
from placement.backup.contents import put_in_place, stage, write_backup
from placement.backup.run import REGISTRY_FILE, backup, check, restore
from placement.backup.sealed import PIECE_BYTES, SealedWriter, Secret, opened
from placement.service.sites import RevokedSites, SiteStore
from placement.service.stores import PolicyStore, TenantStore

KEY = Secret(kind="key", raw=bytes(range(32)))
PLACE = Place(
    mesh="toy", role=Role.PLACEMENT, tier=Tier.CORE, site="dc1", region="eu", jurisdiction="DE", node_id="placement-1"
)


def locked(data: bytes, secret: Secret = KEY, log_n: int = 10) -> bytes:
    file = io.BytesIO()
    writer = SealedWriter(file, secret, log_n=log_n)
    for start in range(0, len(data), 100_000):
        writer.write(data[start : start + 100_000])
    writer.finish()
    return file.getvalue()


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES])
def test_what_was_locked_comes_out(size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    assert b"".join(opened(io.BytesIO(locked(data)), KEY)) == data
    assert not size or data[:64] not in locked(data)[:4096]


def test_every_damage_is_found() -> None:
    good = locked(bytes(2 * PIECE_BYTES + 50))
    start = good.index(b"\n", len(sealed.MAGIC)) + 1
    piece = PIECE_BYTES + 16
    for bad in (
        good[:-1],
        good[: start + piece],  # a piece less
        good[: start + piece] + good[start + 2 * piece :],  # one taken out
        good[:start]
        + good[start + piece : start + 2 * piece]
        + good[start : start + piece]
        + good[start + 2 * piece :],
        good[: start + 9] + bytes([good[start + 9] ^ 1]) + good[start + 10 :],
        good.replace(b'"scrypt_log_n": 10', b'"scrypt_log_n": 11'),
        good + b"x",
    ):
        with pytest.raises(PayloadCorrupt):
            list(opened(io.BytesIO(bad), KEY))


@pytest.mark.parametrize("bad", [b"", b"PK\x03\x04", sealed.MAGIC, sealed.MAGIC + b"{}\n", sealed.MAGIC + b"[1]\n" * 9])
def test_what_is_no_archive_is_said_so(bad: bytes) -> None:
    with pytest.raises(InvalidRequest):
        list(opened(io.BytesIO(bad), KEY))


def test_a_header_that_asks_for_too_much_memory_is_refused() -> None:
    bad = locked(b"x").replace(b'"scrypt_log_n": 10', b'"scrypt_log_n": 40')
    with pytest.raises(InvalidRequest):
        list(opened(io.BytesIO(bad), KEY))


def test_another_secret_opens_nothing() -> None:
    words = Secret(kind="passphrase", raw=b"correct horse battery")
    with pytest.raises(PayloadCorrupt, match="secret is wrong"):
        list(opened(io.BytesIO(locked(b"x")), Secret(kind="key", raw=bytes(32))))
    with pytest.raises(InvalidRequest, match="locked with a key"):
        list(opened(io.BytesIO(locked(b"x")), words))
    archive = locked(b"x", words)
    assert list(opened(io.BytesIO(archive), words)) == [b"x"]
    with pytest.raises(PayloadCorrupt):
        list(opened(io.BytesIO(archive), Secret(kind="passphrase", raw=b"correct horse batterz")))


def test_secrets_are_read_from_files_and_not_told(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"a long passphrase\n")
    assert Secret.read(file, None).raw == b"a long passphrase"
    assert "passphrase" not in repr(Secret.read(file, None)).removeprefix("Secret(passphrase)")
    file.write_bytes(b"short")
    for given in ((file, None), (None, file), (None, None), (file, file), (tmp_path / "absent", None)):
        with pytest.raises(InvalidRequest) as caught:
            Secret.read(*given)
        assert "short" not in str(caught.value)


def test_a_file_that_would_leave_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_bytes(b"x")
    for name in ("../a", "state/../../a", "/state/a"):
        file = io.BytesIO()
        write_backup(file, KEY, mesh="toy", folders={"state": tmp_path / "in"}, values=None, made_unix_s=1.0, log_n=10)
        plain = b"".join(opened(io.BytesIO(file.getvalue()), KEY))
        padded = plain.replace(b"state/a".ljust(100, b"\0"), name.encode().ljust(100, b"\0"))
        with pytest.raises(PayloadCorrupt):
            stage(io.BytesIO(locked(padded)), KEY, tmp_path / "out")
        assert list((tmp_path / "out").iterdir()) == []


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


class World:
    """A placement service's folders, with something in them."""

    def __init__(self, folder: Path) -> None:
        self.ca = folder / "ca"
        self.settings = PlacementSettings(
            identity=Identity(folder=folder / "node" / "identity"), state_folder=folder / "node" / "state"
        )

    async def fill(self) -> None:
        authority = CertificateAuthority.create_or_load(self.ca, "toy")
        authority.issue(PLACE).save(self.settings.identity.folder)
        async with self.stores() as (policies, tenants):
            _, key = issue_key("acme", AccessRole.TENANT, created_unix_s=1)
            await tenants.change(lambda d: d.with_tenant(new_tenant("acme", ["paris"])).with_key(key))
            await policies.put("acme", "version: 1\npriority: 3", None)
            await policies.put("acme", "version: 1\npriority: 4", None)
        log = self.log()
        for action in ("tenant.create", "policy.put"):
            await log.append(EntryKind.ADMIN, {"actor": {"key_id": "k"}, "action": action})
        await log.close()

    def log(self) -> AuditLog:
        credentials = NodeCredentials.load(self.settings.identity.folder)
        return AuditLog(self.settings.state_folder / AUDIT_FOLDER, NodeIdentity(PLACE, credentials))

    def stores(self) -> Stores:
        return Stores(self.settings.state_folder / REGISTRY_FILE)


class Stores:
    def __init__(self, file: Path) -> None:
        self.registry = EmbeddedRegistry(file)
        self.policies = PolicyStore(self.registry, lambda: None)
        self.tenants = TenantStore(self.registry, lambda: None)

    async def __aenter__(self) -> tuple[PolicyStore, TenantStore]:
        await self.registry.start()
        await self.policies.start()
        await self.tenants.start()
        return self.policies, self.tenants

    async def __aexit__(self, *_: object) -> None:
        await self.policies.close()
        await self.tenants.close()
        await self.registry.close()


@pytest.fixture
async def world(tmp_path: Path) -> World:
    made = World(tmp_path / "old")
    await made.fill()
    return made


async def test_a_restored_mesh_serves_and_its_audit_chain_goes_on(world: World, tmp_path: Path) -> None:
    archive = tmp_path / "mesh.backup"
    made = await backup(world.settings, archive, KEY, ca=world.ca, more={})
    assert archive.stat().st_mode & 0o077 == 0
    assert (made.mesh, made.folders) == ("toy", ("identity", "state", "ca"))
    assert check(archive, KEY).files == made.files
    new = World(tmp_path / "new")
    await restore(new.settings, archive, KEY, ca=new.ca, more={})

    ca_pem = (new.ca / "ca_cert.pem").read_bytes()
    async with world.stores() as (_, before), new.stores() as (policies, tenants):
        assert tenants.directory.tenants == before.directory.tenants
        assert tenants.directory.keys == before.directory.keys
        assert tenants.directory.epoch != before.directory.epoch, "sites must not take it for stale"
        assert policies.get("acme").version == 2
        assert [s.version for s in await policies.history("acme")] == [2, 1]
        assert await policies.put("acme", "version: 1", None) == 3
    CertificateAuthority.create_or_load(new.ca, "toy").issue(PLACE)
    log = new.log()
    await log.append(EntryKind.ADMIN, {"actor": {"key_id": "k"}, "action": "after"})
    await log.close()
    report = verify_log(new.settings.state_folder / AUDIT_FOLDER, ca_pem)
    assert report.problems == []
    raw = b"".join(path.read_bytes() for path in segments(new.settings.state_folder / AUDIT_FOLDER))
    assert raw.count(b'"kind":"restored"') == 1
    assert raw.startswith(b"".join(p.read_bytes() for p in segments(world.settings.state_folder / AUDIT_FOLDER)))


async def test_half_an_audit_entry_is_left_out(world: World, tmp_path: Path) -> None:
    (file,) = segments(world.settings.state_folder / AUDIT_FOLDER)
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"half')
    await backup(world.settings, tmp_path / "b", KEY, ca=None, more={})
    new = World(tmp_path / "new")
    await restore(new.settings, tmp_path / "b", KEY, ca=None, more={})
    assert segments(new.settings.state_folder / AUDIT_FOLDER)[0].read_bytes().startswith(whole + b'{"chain')


async def test_nothing_is_written_over(world: World, tmp_path: Path) -> None:
    archive = tmp_path / "b"
    await backup(world.settings, archive, KEY, ca=world.ca, more={})
    with pytest.raises(AlreadyExists):
        await backup(world.settings, archive, KEY, ca=world.ca, more={})
    before = everything(tmp_path)
    with pytest.raises(AlreadyExists, match="not empty"):
        await restore(world.settings, archive, KEY, ca=world.ca, more={})
    assert everything(tmp_path) == before


@pytest.mark.parametrize("how", ["cut", "flip", "secret"])
async def test_a_bad_archive_leaves_nothing(world: World, tmp_path: Path, how: str) -> None:
    archive = tmp_path / "b"
    await backup(world.settings, archive, KEY, ca=world.ca, more={})
    raw = bytearray(archive.read_bytes())
    if how == "flip":
        raw[-40] ^= 1
    archive.write_bytes(raw[:-20] if how == "cut" else raw)
    secret = Secret(kind="key", raw=bytes(32)) if how == "secret" else KEY
    new = World(tmp_path / "new")
    with pytest.raises(MeshError):
        await restore(new.settings, archive, secret, ca=new.ca, more={})
    assert [p for p in (tmp_path / "new").rglob("*") if p.is_file()] == []


async def test_folders_that_have_no_place_here_are_asked_for(world: World, tmp_path: Path) -> None:
    site = tmp_path / "site-audit"
    site.mkdir()
    (site / "audit-000001.jsonl").write_bytes(b"{}\n")
    await backup(world.settings, tmp_path / "b", KEY, ca=world.ca, more={"paris-audit": site})
    new = World(tmp_path / "new")
    with pytest.raises(InvalidRequest, match="ca, paris-audit"):
        await restore(new.settings, tmp_path / "b", KEY, ca=None, more={})
    assert not [path for path in everything(tmp_path / "new") if path.is_file()]
    put = tmp_path / "put" / "audit"
    await restore(new.settings, tmp_path / "b", KEY, ca=new.ca, more={"paris-audit": put})
    assert (put / "audit-000001.jsonl").read_bytes() == b"{}\n"


async def test_the_commands(world: World, tmp_path: Path) -> None:
    app = typer.Typer()
    register(app)
    config, secret, archive = tmp_path / "placement.yaml", tmp_path / "key", tmp_path / "b"
    config.write_text(to_yaml(world.settings))
    secret.write_bytes(bytes(32))
    common = [str(archive), "--config", str(config), "--key-file", str(secret)]
    invoke = partial(asyncio.to_thread, CliRunner().invoke, app)
    made = await invoke(["backup", *common, "--ca", str(world.ca)])
    assert made.exit_code == 0, made.output
    assert "kept: mesh toy" in made.output
    checked = await invoke(["restore", *common, "--check", "--json"])
    assert checked.exit_code == 0
    assert '"mesh": "toy"' in checked.output
    refused = await invoke(["restore", *common])
    assert isinstance(refused.exception, AlreadyExists)


def test_what_was_unpacked_does_not_stay_where_it_finds_no_room(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "node_key.pem").write_bytes(b"secret")
    file = io.BytesIO()
    write_backup(file, KEY, mesh="toy", folders={"identity": tmp_path / "in"}, values=None, made_unix_s=1.0, log_n=10)
    staged = stage(io.BytesIO(file.getvalue()), KEY, tmp_path / "out")
    with pytest.raises(AlreadyExists):  # filled since it was looked at
        put_in_place(staged, {"identity": tmp_path / "in"})
    assert everything(tmp_path / "out") == []


async def test_revoked_sites_of_a_shared_registry_stay_revoked(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "old.json", tmp_path / "new.json"

    def use(file: Path) -> None:
        monkeypatch.setattr(run, "choose_registry", lambda kind, embedded: EmbeddedRegistry(file))

    registry = EmbeddedRegistry(shared[0])
    await registry.start()
    store = SiteStore(registry)
    await store.create(SiteRecord(site="paris", region="eu", jurisdiction="FR", created_unix_s=1.0))
    await store.revoke("paris", 2.0)
    _, key = issue_key("acme", AccessRole.TENANT, created_unix_s=1)
    await TenantStore(registry, lambda: None).change(lambda d: d.with_tenant(new_tenant("acme")).with_key(key))
    await registry.close()

    consul = RegistrySettings(kind=RegistryKind.CONSUL)
    use(shared[0])
    settings = world.settings.model_copy(update={"registry": consul})
    await backup(settings, tmp_path / "b", KEY, ca=None, more={})
    use(shared[1])
    new = World(tmp_path / "new")
    await restore(new.settings.model_copy(update={"registry": consul}), tmp_path / "b", KEY, ca=None, more={})

    restored = EmbeddedRegistry(shared[1])
    await restored.start()
    sites, marks = SiteStore(restored), RevokedSites(restored)
    await sites.start()
    await marks.start()
    box = sites.named("paris").place("toy", "edge-paris")
    assert sites.refusal(box) is not None
    with pytest.raises(PolicyDenied):
        marks.check(box)
    for each in (sites, marks, restored):
        await each.close()
