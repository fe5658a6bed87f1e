"""The authority: private files, one mesh, certificates whose SAN is the place."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from mesh.errors import InvalidRequest, Overloaded, Unauthenticated
from mesh.identity import files
from mesh.identity.ca import CertificateAuthority, NodeCredentials
from mesh.identity.certificates import check_issued, load_certificate
from mesh.identity.place import Place
from mesh.identity.tls_names import name_of_place, names_of


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_folder_and_files_are_private(tmp_path: Path) -> None:
    CertificateAuthority.create_or_load(tmp_path / "ca", "demo")
    assert mode(tmp_path / "ca") == 0o700
    assert {mode(path) for path in (tmp_path / "ca").iterdir()} == {0o600}


def test_second_load_is_the_same_authority(tmp_path: Path) -> None:
    first = CertificateAuthority.create_or_load(tmp_path / "ca", "demo")
    assert CertificateAuthority.create_or_load(tmp_path / "ca", "demo").ca_pem == first.ca_pem


def test_an_empty_open_folder_is_tightened_and_a_filled_one_refused(tmp_path: Path) -> None:
    folder = tmp_path / "ca"
    folder.mkdir(mode=0o755)
    CertificateAuthority.create_or_load(folder, "demo")
    assert mode(folder) == 0o700
    folder.chmod(0o755)
    with pytest.raises(InvalidRequest, match="open to other users"):
        CertificateAuthority.create_or_load(folder, "demo")


def test_another_mesh_is_refused(tmp_path: Path) -> None:
    CertificateAuthority.create_or_load(tmp_path / "ca", "demo")
    with pytest.raises(InvalidRequest, match="'demo', not 'other'"):
        CertificateAuthority.create_or_load(tmp_path / "ca", "other")


@pytest.mark.parametrize("mesh", ["", "a/b", "x" * 64])
def test_a_bad_mesh_name_is_refused(tmp_path: Path, mesh: str) -> None:
    with pytest.raises(InvalidRequest, match="mesh"):
        CertificateAuthority.create_or_load(tmp_path / "ca", mesh)


@pytest.mark.parametrize("name", ["ca_key.pem", "ca_cert.pem"])
def test_half_an_authority_is_refused(tmp_path: Path, name: str) -> None:
    CertificateAuthority.create_or_load(tmp_path / "ca", "demo")
    (tmp_path / "ca" / name).unlink()
    with pytest.raises(InvalidRequest, match="alone"):
        CertificateAuthority.create_or_load(tmp_path / "ca", "demo")


@pytest.mark.parametrize("name", ["ca_key.pem", "ca_cert.pem"])
def test_a_garbled_file_is_refused(tmp_path: Path, name: str) -> None:
    CertificateAuthority.create_or_load(tmp_path / "ca", "demo")
    (tmp_path / "ca" / name).write_bytes(b"\x00garbage")
    with pytest.raises(InvalidRequest, match=name):
        CertificateAuthority.create_or_load(tmp_path / "ca", "demo")


def test_certificate_carries_place_names_and_addresses(authority: CertificateAuthority, place: Place) -> None:
    credentials = authority.issue(place, dns_names=["edge.example"], ip_addresses=["127.0.0.1", "::1"])
    san = load_certificate(credentials.cert_pem, "it").extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert san.value.get_values_for_type(x509.UniformResourceIdentifier) == [place.uri]
    assert san.value.get_values_for_type(x509.DNSName) == [*names_of(place), "edge.example"]
    assert [str(ip) for ip in san.value.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    assert credentials.place == place
    assert b"PRIVATE" not in repr(credentials).encode()


def test_every_part_of_a_place_changes_its_tls_name(place: Place) -> None:
    others = [replace(place, **{field: "x"}) for field in ("mesh", "site", "region", "jurisdiction", "node_id")]
    assert len({name_of_place(p) for p in [place, *others]}) == 6


def test_credentials_survive_saving(authority: CertificateAuthority, place: Place, tmp_path: Path) -> None:
    credentials = authority.issue(place)
    credentials.save(tmp_path / "node")
    assert mode(tmp_path / "node") == 0o700
    assert mode(tmp_path / "node" / "node_key.pem") == 0o600
    assert NodeCredentials.load(tmp_path / "node") == credentials


def test_mixed_up_or_missing_credentials_are_refused(
    authority: CertificateAuthority, place: Place, tmp_path: Path
) -> None:
    replace(authority.issue(place), key_pem=authority.issue(place).key_pem).save(tmp_path / "node")
    with pytest.raises(InvalidRequest, match="do not belong together"):
        NodeCredentials.load(tmp_path / "node")
    with pytest.raises(InvalidRequest, match="cannot read"):
        NodeCredentials.load(tmp_path / "nowhere")


def test_issue_refuses_another_mesh_and_a_bad_address(authority: CertificateAuthority, place: Place) -> None:
    with pytest.raises(InvalidRequest, match="signs for mesh"):
        authority.issue(replace(place, mesh="other"))
    with pytest.raises(InvalidRequest, match="IP address"):
        authority.issue(place, ip_addresses=["not-an-address"])


def test_check_issued(authority: CertificateAuthority, place: Place, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    ca = load_certificate(authority.ca_pem, "ca")
    good = load_certificate(authority.issue(place, lifetime=timedelta(hours=1)).cert_pem, "it")
    assert check_issued(good, ca, now) == place
    with pytest.raises(Unauthenticated, match="valid from"):
        check_issued(good, ca, now + timedelta(hours=2))
    with pytest.raises(Unauthenticated, match="valid from"):
        check_issued(good, ca, now - timedelta(hours=2))
    stranger = CertificateAuthority.create_or_load(tmp_path / "other", "demo")
    with pytest.raises(Unauthenticated, match="not issued"):
        check_issued(load_certificate(stranger.issue(place).cert_pem, "it"), ca, now)
    with pytest.raises(Unauthenticated, match="authority's certificate was used"):
        check_issued(ca, ca, now)


def test_a_full_disk_is_said_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    files.write_private(target, b"old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(Overloaded, match=r"disk of .* is full"):
        files.write_private(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]
