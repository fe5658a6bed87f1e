"""Certificates renew by themselves: when, with what, and without dropping what runs."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import InvalidRequest, NodeUnreachable
from mesh.identity.ca import CertificateAuthority, NodeCredentials
from mesh.identity.certificates import load_certificate
from mesh.identity.keyring import Keyring
from mesh.identity.place import Place, Role, Tier
from mesh.identity.requests import certified_key
from mesh.rpc.channel import node_channel
from mesh.rpc.renewal import CertificateRenewal, renewal_wait_s, retry_wait_s
from mesh.rpc.server import add_health, node_server

PLACE = Place(
    mesh="m", role=Role.CORE, tier=Tier.CORE, site="dc", region="eu-west", jurisdiction="DE", node_id="core-1"
)


@given(begin=st.floats(0, 1e9), life=st.floats(1, 1e8), now=st.floats(0, 2e9), jitter=st.floats(0, 1))
def test_it_is_asked_for_long_before_the_end(begin: float, life: float, now: float, jitter: float) -> None:
    wait_s = renewal_wait_s(begin, begin + life, now, jitter)
    assert wait_s >= 0
    assert now + wait_s <= max(now, begin + 0.67 * life)
    assert 0.1 <= retry_wait_s(begin, begin + life, jitter) <= 3600


def test_a_keyring_takes_only_its_own_keys_certificates(tmp_path: Path) -> None:
    authority = CertificateAuthority.create_or_load(tmp_path / "ca", "m")
    credentials = authority.issue(PLACE)
    credentials.save(tmp_path / "node")
    ring = Keyring.load(tmp_path / "node")
    heard: list[NodeCredentials] = []
    ring.listen(heard.append)
    with pytest.raises(InvalidRequest, match="not of this node's key"):
        ring.keep(authority.issue(PLACE).cert_pem)
    key = certified_key(load_certificate(credentials.cert_pem, "c"))
    other = Place(mesh="m", role=Role.CORE, tier=Tier.CORE, site="x", region="r", jurisdiction="DE", node_id="core-1")
    with pytest.raises(InvalidRequest, match="not of"):
        ring.keep(authority.certify(key, other))
    assert ring.now == NodeCredentials.load(tmp_path / "node")
    ring.use(ring.keep(authority.certify(key, PLACE)))
    assert heard == [ring.now]
    assert NodeCredentials.load(tmp_path / "node") == ring.now


async def test_a_stream_runs_on_while_certificates_of_a_second_come_and_go(tmp_path: Path) -> None:
    """Both sides renew every second or so; one call runs over the whole of it, new connections work after the first
    certificates have expired, and one with the expired certificate is refused."""
    authority = CertificateAuthority.create_or_load(tmp_path / "ca", "m")
    life = timedelta(seconds=2)
    first = authority.issue(PLACE, lifetime=life)
    rings = [Keyring(first), Keyring(authority.issue(PLACE, lifetime=life))]

    def signer(ring: Keyring) -> CertificateRenewal:
        async def sign() -> bytes:
            return authority.certify(certified_key(load_certificate(ring.now.cert_pem, "c")), PLACE, lifetime=life)

        return CertificateRenewal(ring, sign)

    renewals = [signer(ring) for ring in rings]
    listener = node_server("127.0.0.1:0", rings[0])
    health = add_health(listener.server)
    await listener.server.start()
    old = node_channel(listener.address, rings[1].now, PLACE)
    watch = health_pb2_grpc.HealthStub(old).Watch(health_pb2.HealthCheckRequest())
    try:
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        for renewal in renewals:
            renewal.start()
        async with asyncio.timeout(60):
            end = first.not_after + timedelta(seconds=1)
            while datetime.now(UTC) < end or min(r.renewed for r in renewals) < 2:  # noqa: ASYNC110  # no event tells
                await asyncio.sleep(0.05)  # both certificates that the stream began with have expired
        await health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        fresh = node_channel(listener.address, rings[1].now, PLACE)
        await health_pb2_grpc.HealthStub(fresh).Check(health_pb2.HealthCheckRequest(), timeout=10)
        await fresh.close()
        stale = node_channel(listener.address, first, PLACE)
        with pytest.raises(grpc.aio.AioRpcError):
            await health_pb2_grpc.HealthStub(stale).Check(health_pb2.HealthCheckRequest(), timeout=10)
        await stale.close()
    finally:
        watch.cancel()
        await asyncio.gather(*(renewal.close() for renewal in renewals))
        await old.close()
        await listener.server.stop(None)


async def test_a_failed_renewal_is_tried_again(tmp_path: Path) -> None:
    authority = CertificateAuthority.create_or_load(tmp_path / "ca", "m")
    ring = Keyring(authority.issue(PLACE, lifetime=timedelta(seconds=1)))
    attempts = 0
    done = asyncio.Event()

    async def sign() -> bytes:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise NodeUnreachable("placement is not there")
        done.set()
        return authority.certify(certified_key(load_certificate(ring.now.cert_pem, "c")), PLACE)

    renewal = CertificateRenewal(ring, sign)
    renewal.start()
    await asyncio.wait_for(done.wait(), 60)
    await renewal.close()
    assert attempts == 3
