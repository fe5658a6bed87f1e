"""Consul over TLS with an ACL token: what is refused before it is asked, and a real agent that denies the rest."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mesh.address import HostPort
from mesh.errors import InvalidRequest, MeshError, NodeUnreachable, PolicyDenied
from mesh.registry.consul import ConsulRegistry
from mesh.registry.consul_access import ConsulTls, read_token
from mesh.registry.open import EmbeddedSettings
from mesh.settings import ConsulTlsFiles, RegistryKind, RegistrySettings
from placement.service.registry_choice import choose_registry
from tests.conformance.registry_suite import node
from tests.consul_fixture import ConsulAgent, Secured, find_consul

TOKEN = str(uuid.UUID(int=0x5EC2E7))


def token_file(folder: Path, text: str = TOKEN + "\n", mode: int = 0o600) -> Path:
    file = folder / "token"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_a_token_file_is_read_without_its_white_space(tmp_path: Path) -> None:
    assert read_token(token_file(tmp_path)) == TOKEN


@pytest.mark.parametrize("text", ["", " \n", "two tokens", "a" * 5000, "t\u00f6ken", "a\r\nX-Other: b"])
def test_what_is_no_token_is_refused_without_being_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidRequest, match="does not hold one token") as caught:
        read_token(token_file(tmp_path, text))
    assert not text.strip() or text.strip() not in str(caught.value)


def test_a_token_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="chmod 600"):
        read_token(token_file(tmp_path, mode=0o644))
    with pytest.raises(InvalidRequest, match="cannot read"):
        read_token(tmp_path / "absent")


def test_a_token_does_not_cross_a_network_in_the_clear(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in the clear"):
        RegistrySettings(consul=HostPort("consul.example", 8500), token_file=token_file(tmp_path))


def test_half_a_pair_and_missing_files_are_refused(tmp_path: Path) -> None:
    there = token_file(tmp_path)
    with pytest.raises(InvalidRequest, match="both"):
        ConsulTls(ca_file=there, cert_file=there)
    with pytest.raises(InvalidRequest, match="cannot read"):
        ConsulTls(ca_file=tmp_path / "absent")


@pytest.fixture
def secured(tmp_path: Path) -> Secured:
    """A certificate that signs itself, for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server.dc1.consul")])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("server.dc1.consul")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = tmp_path / "consul_cert.pem", tmp_path / "consul_key.pem"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pem, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, pem, plain))
    return Secured(ca_file=cert_file, cert_file=cert_file, key_file=key_file, token=TOKEN)


@pytest.fixture
def agent(tmp_path: Path, secured: Secured) -> Iterator[ConsulAgent]:
    binary = find_consul()
    if binary is None:
        pytest.skip("no Consul binary: run deploy/consul/get_consul.sh .kvmesh/consul, or put one on PATH")
    agent = ConsulAgent(binary, tmp_path, secured)
    agent.start()
    yield agent
    agent.kill()


def settings(agent: ConsulAgent, secured: Secured, token: Path | None, *, own: bool = True) -> RegistrySettings:
    return RegistrySettings(
        kind=RegistryKind.CONSUL,
        consul=HostPort.parse(agent.address),
        token_file=token,
        tls=ConsulTlsFiles(
            ca_file=secured.ca_file,
            cert_file=secured.cert_file if own else None,
            key_file=secured.key_file if own else None,
        ),
    )


@pytest.mark.consul
async def test_with_token_and_certificate_it_serves_and_without_it_says_what_is_missing(
    agent: ConsulAgent, secured: Secured, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    embedded = EmbeddedSettings(path=tmp_path / "unused.json")
    registry = choose_registry(settings(agent, secured, token_file(tmp_path)), embedded)
    await registry.start()
    await registry.register(node())
    await registry.heartbeat("core-1", ready=True)
    assert await registry.put("policies/a", b"x", expected_version=0) > 0
    assert (await registry.list_values("policies/"))[0].value == b"x"
    await registry.close()

    wrong = token_file(tmp_path, str(uuid.UUID(int=7)))
    for refused in (settings(agent, secured, None), settings(agent, secured, wrong)):
        registry = choose_registry(refused, embedded)
        await registry.start()
        with pytest.raises(MeshError) as caught:
            await registry.put("policies/a", b"y")
        assert isinstance(caught.value, PolicyDenied)
        await registry.close()

    registry = choose_registry(settings(agent, secured, token_file(tmp_path), own=False), embedded)
    await registry.start()
    with pytest.raises(NodeUnreachable):  # no certificate of ours: the handshake fails
        await registry.get("policies/a")
    await registry.close()

    plain = ConsulRegistry(agent.address, token=TOKEN)
    await plain.start()
    with pytest.raises(MeshError) as caught:
        await plain.get("policies/a")
    await plain.close()
    assert TOKEN not in str(caught.value) + "".join(capfd.readouterr())
