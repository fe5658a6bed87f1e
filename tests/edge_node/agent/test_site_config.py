"""What a site keeps: used whole or not at all, kept over a restart, never looser for a damaged or a full disk."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from edge_node.agent import site_config as site_config_module
from edge_node.agent.process import _load
from edge_node.agent.site_config import SiteConfig
from mesh.errors import InvalidRequest, MeshError, Overloaded, PayloadCorrupt, PolicyDenied, Unauthenticated
from mesh.identity.principal import AccessRole
from mesh.identity.sealing import StateKey
from mesh.identity.tenants import issue_key
from mesh.v1 import admin_pb2, uplink_pb2

KEY, RECORD = issue_key("acme", AccessRole.OPERATOR, created_unix_s=1)


def message(version: int = 1, **changes: object) -> uplink_pb2.SiteConfig:
    values: dict[str, object] = {
        "version": version,
        "policies": [admin_pb2.StoredPolicy(tenant="acme", yaml="version: 1\npriority: 7", version=3)],
        "keys": [uplink_pb2.TenantKeyHash(key_id=RECORD.key_id, tenant="acme", role="operator", hash=RECORD.hash)],
        "salts": [uplink_pb2.TenantSalt(tenant="acme", secret=bytes(32))],
    }
    return uplink_pb2.SiteConfig(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "site_config.bin"


def assert_in_force(site: SiteConfig) -> None:
    who = site.directory.authenticate(f"Bearer {KEY}")
    assert (who.tenant, who.role) == ("acme", AccessRole.OPERATOR)
    assert (site.book.lookup("acme").version, site.book.lookup("acme").policy.priority) == (3, 7)
    assert len(site.salt("acme", "internal", "m")) == 32


def assert_closed(site: SiteConfig) -> None:
    with pytest.raises(Unauthenticated):
        site.directory.authenticate(f"Bearer {KEY}")
    with pytest.raises(PolicyDenied) as caught:
        site.salt("acme", "internal", "m")
    assert caught.value.details["rule"] == "tenant-known"


def test_without_a_file_everything_is_refused(file: Path) -> None:
    site = SiteConfig(file)
    assert not site.load()
    assert_closed(site)


def test_what_was_taken_is_kept_over_a_restart(file: Path) -> None:
    site = SiteConfig(file)
    site.take(message(version=9))
    assert_in_force(site)
    assert file.stat().st_mode & 0o777 == 0o600
    again = SiteConfig(file)
    assert again.load()
    assert again.version == 9
    assert_in_force(again)


@pytest.mark.parametrize(
    "bad",
    [
        message(keys=[uplink_pb2.TenantKeyHash(key_id="k", tenant="acme", role="king")]),
        message(policies=[admin_pb2.StoredPolicy(tenant="acme", yaml="version: 1\nx: 1", version=4)]),
    ],
)
def test_a_configuration_that_is_not_valid_leaves_the_old_one(file: Path, bad: uplink_pb2.SiteConfig) -> None:
    site = SiteConfig(file)
    site.take(message())
    before = file.read_bytes()
    with pytest.raises((PayloadCorrupt, InvalidRequest)) as caught:
        site.take(bad)
    assert isinstance(caught.value, MeshError)
    assert_in_force(site)
    assert file.read_bytes() == before


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", message().SerializeToString()[:-5]])
def test_a_damaged_file_is_not_used(file: Path, raw: bytes) -> None:
    file.write_bytes(raw)
    site = SiteConfig(file)
    with pytest.raises(PayloadCorrupt, match=r"site_config\.bin cannot be read"):
        site.load()
    assert_closed(site)
    _load(site)  # the agent starts all the same, and takes what placement sends
    assert_closed(site)
    site.take(message())
    assert_in_force(site)
    assert SiteConfig(file).load()


def test_a_kept_policy_that_this_build_cannot_read_is_a_damaged_file(file: Path) -> None:
    bad = message(policies=[admin_pb2.StoredPolicy(tenant="acme", yaml="version: 99", version=4)])
    file.write_bytes(bad.SerializeToString())
    with pytest.raises(PayloadCorrupt):
        SiteConfig(file).load()


def test_a_file_that_cannot_be_opened_is_a_damaged_file(file: Path) -> None:
    file.mkdir()
    with pytest.raises(PayloadCorrupt):
        SiteConfig(file).load()


def test_on_a_full_disk_a_configuration_is_in_force_but_not_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = SiteConfig(file)
    site.take(message())

    def full(path: Path, data: bytes) -> None:
        raise Overloaded(f"the disk of {path} is full", path=str(path))

    monkeypatch.setattr(site_config_module, "write_private", full)
    with capture_logs() as logs:
        site.take(message(version=2, keys=[]))  # the key was revoked: that must not wait for room
    with pytest.raises(Unauthenticated):
        site.directory.authenticate(f"Bearer {KEY}")
    assert [(line["event"], line["reason"]) for line in logs] == [("site_config_not_kept", "OVERLOADED")]
    assert SiteConfig(file).load()


def test_a_key_without_a_role_is_a_tenant_s(file: Path) -> None:
    site = SiteConfig(file)
    site.take(message(keys=[uplink_pb2.TenantKeyHash(key_id=RECORD.key_id, tenant="acme", hash=RECORD.hash)]))
    assert site.directory.authenticate(f"Bearer {KEY}").role is AccessRole.TENANT


def policy(tenant: str, version: int, yaml: str = "version: 1") -> admin_pb2.StoredPolicy:
    return admin_pb2.StoredPolicy(tenant=tenant, yaml=yaml, version=version, deleted=not yaml)


def test_a_placement_that_lags_does_not_take_a_site_back(file: Path) -> None:
    site = SiteConfig(file)
    site.take(message(epoch="e", directory_revision=5))
    lagging = message(epoch="e", directory_revision=4, policies=[policy("acme", 2)], keys=[])
    for told in (lagging, message(epoch="e", directory_revision=5, policies=[])):
        with capture_logs() as logs:
            site.take(told)
        assert "placement_lags" in {line["event"] for line in logs}
        assert_in_force(site)
    again = SiteConfig(file)
    assert again.load()
    assert_in_force(again)


def test_what_is_newer_or_of_another_epoch_is_taken(file: Path) -> None:
    site = SiteConfig(file)
    site.take(message(epoch="e", directory_revision=5))
    site.take(message(epoch="e", directory_revision=5, policies=[policy("acme", 4, "")]))  # deleted since
    assert site.book.lookup("acme").version == 0
    site.take(message(epoch="e", directory_revision=6, policies=[policy("acme", 4, "")]))
    site.take(message(epoch="e", directory_revision=5, policies=[policy("acme", 3)]))
    assert site.book.lookup("acme").version == 0
    site.take(message(epoch="restored", directory_revision=1))
    assert_in_force(site)


def test_a_tenant_that_the_site_no_longer_serves_is_gone(file: Path) -> None:
    site = SiteConfig(file)
    site.take(message(epoch="e", directory_revision=5))
    site.take(message(epoch="e", directory_revision=6, keys=[], salts=[], policies=[]))
    assert_closed(site)
    assert site.book.lookup("acme").version == 0


def test_what_is_being_taken_does_not_outlive_a_revocation(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, begun, going_on = SiteConfig(file), threading.Event(), threading.Event()
    write = site_config_module.write_private

    def slow(path: Path, data: bytes) -> None:
        begun.set()
        going_on.wait(10)
        write(path, data)

    monkeypatch.setattr(site_config_module, "write_private", slow)
    taking, forgetting = threading.Thread(target=site.take, args=(message(),)), threading.Thread(target=site.forget)
    taking.start()
    assert begun.wait(10)
    forgetting.start()
    forgetting.join(0.05)
    going_on.set()
    taking.join()
    forgetting.join()
    assert_closed(site)
    assert not file.exists()


def test_with_a_state_key_a_file_that_is_not_sealed_is_not_believed(file: Path) -> None:
    SiteConfig(file).take(message())
    site = SiteConfig(file, StateKey(bytes(32)).sealer("site-config"))
    with pytest.raises(PayloadCorrupt, match="cannot be read"):
        site.load()
    assert_closed(site)
