"""Joining over real TLS: first contact by the token, what a thief or a second box is told, renewal, revocation."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc.aio
import pytest

from mesh.address import HostPort
from mesh.errors import (
    AlreadyExists,
    InvalidRequest,
    MeshError,
    NodeUnreachable,
    NotImplementedHere,
    PolicyDenied,
    Unauthenticated,
)
from mesh.identity.ca import CertificateAuthority
from mesh.identity.certificates import load_certificate
from mesh.identity.enrolment import SiteRecord, Terms, Token
from mesh.identity.keyring import Keyring
from mesh.identity.place import Place, Role, Tier
from mesh.identity.requests import certificate_digest, new_key_pem, signing_request
from mesh.identity.tls_names import name_of_node, name_of_role
from mesh.registry.embedded import EmbeddedRegistry
from mesh.rpc.channel import node_channel
from mesh.rpc.enrol import _check_clock, join, renew, skew_words
from mesh.rpc.server import node_server, public_server
from mesh.rpc.uplink.agent import UplinkAgent
from mesh.rpc.uplink.backoff import FullJitter
from mesh.rpc.uplink.hub import UplinkHub
from mesh.rpc.uplink.types import AgentFacts
from mesh.v1 import enrolment_pb2 as pb
from mesh.v1 import enrolment_pb2_grpc as pb_grpc
from mesh.v1 import uplink_pb2_grpc
from placement.service.enrolment import CertificatesServicer, EnrolmentServicer, Issuer, Reach, SitesServicer
from placement.service.sites import RevokedSites, SiteStore
from tests.mesh.rpc.uplink.harness import FakeHost, eventually
from tests.mesh.rpc.uplink.test_mutual_tls import ignore_config, ignore_snapshot, no_command

CORE = Place(
    mesh="m", role=Role.PLACEMENT, tier=Tier.CORE, site="dc", region="eu-west", jurisdiction="DE", node_id="placement-1"
)


@dataclass
class World:
    """A placement service's part in enrolment, on real listeners."""

    authority: CertificateAuthority
    registry: EmbeddedRegistry
    store: SiteStore
    hub: UplinkHub
    sites: SitesServicer
    address: HostPort
    node_address: str
    actions: list[str]

    async def site(self, name: str = "paris", **terms: object) -> Token:
        wire = pb.TokenTerms(**terms)  # type: ignore[arg-type]
        request = pb.CreateSiteRequest(site=name, region="eu-west", jurisdiction="FR", terms=wire)
        response = await self.sites.Create(request, None)  # type: ignore[arg-type]
        return Token.parse(response.token.token)

    async def token(self, name: str = "paris", node_id: str = "") -> Token:
        request = pb.IssueTokenRequest(site=name, terms=pb.TokenTerms(node_id=node_id))
        return Token.parse((await self.sites.IssueToken(request, None)).token.token)  # type: ignore[arg-type]

    async def join(self, token: Token, key_pem: bytes | None = None) -> Keyring:
        return Keyring((await join(self.address, token, "test", key_pem=key_pem)).credentials)

    def agent(self, ring: Keyring, refusals: list[MeshError]) -> UplinkAgent:
        return UplinkAgent(
            dial=lambda: node_channel(self.node_address, ring.now, "placement-1"),
            host=FakeHost(),
            facts=AgentFacts(build="test", models=()),
            on_config=ignore_config,
            on_snapshot=ignore_snapshot,
            on_command=no_command,
            on_refusal=refusals.append,
            backoff=FullJitter(random.Random(1), base_s=0.02, cap_s=0.1),
        )


@asynccontextmanager
async def world(folder: Path, *, has_authority: bool = True) -> AsyncIterator[World]:
    authority = CertificateAuthority.create_or_load(folder / "ca", "m")
    own = authority.issue(CORE)
    registry = EmbeddedRegistry(folder / "registry" / "registry.json")
    await registry.start()
    store = SiteStore(registry)
    await store.start()
    hub = UplinkHub(lambda context: store.admit(context, "m"))
    store.on_change(lambda: hub.cut_off(store.refusal))
    public, node = public_server("127.0.0.1:0", credentials=own), node_server("127.0.0.1:0", own)
    issuer = Issuer(authority=authority, lifetime=timedelta(days=30)) if has_authority else None
    actions: list[str] = []

    async def record(action: str, facts: dict[str, str]) -> str:
        actions.append(action)
        return "key"

    async def record_join(facts: dict[str, str]) -> None:
        actions.append("site.join")

    async def cut_off() -> tuple[str, ...]:
        return hub.cut_off(store.refusal)

    sites = SitesServicer(
        store,
        authority.ca_pem,
        record,
        can_issue=has_authority,
        attached=lambda: frozenset(edge.place.node_id for edge in hub.attached()),
        nodes=lambda: (CORE,),
        cut_off=cut_off,
    )
    reach = Reach(node_address=f"0.0.0.0:{HostPort.parse(node.address).port}", node_id="placement-1", model_ids=("a",))
    enrolment = EnrolmentServicer(store, issuer, authority.ca_pem, reach, record_join)
    certificates = CertificatesServicer(store, issuer, lambda context: store.admit(context, "m"))
    pb_grpc.add_EnrolmentServicer_to_server(enrolment, public.server)
    pb_grpc.add_CertificatesServicer_to_server(certificates, node.server)
    uplink_pb2_grpc.add_UplinkServicer_to_server(hub, node.server)
    for listener in (public, node):
        await listener.server.start()
    try:
        yield World(authority, registry, store, hub, sites, HostPort.parse(public.address), node.address, actions)
    finally:
        hub.close()
        for listener in (public, node):
            await listener.server.stop(None)
        await store.close()
        await registry.close()


async def test_a_box_joins_with_the_place_of_its_token(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        token = await w.site(dns_names=["paris.example"], ip_addresses=["192.0.2.7"])
        joined = await join(w.address, token, "test")
        assert joined.place == Place(
            mesh="m", role=Role.EDGE, tier=Tier.EDGE, site="paris", region="eu-west", jurisdiction="FR",
            node_id="edge-paris",
        )  # fmt: skip
        assert joined.credentials.ca_pem == w.authority.ca_pem
        assert str(joined.node_address) == w.node_address  # the wildcard gave way to the address that was dialled
        assert joined.model_ids == ("a",)
        assert abs(joined.clock_skew_s) < 30
        (box,) = w.store.named("paris").boxes
        assert (box.node_id, box.joined_from) == ("edge-paris", "ipv4:127.0.0.1")
        assert w.actions == ["site.create", "site.join"]
        ring = Keyring(joined.credentials)
        renewed = load_certificate(await renew(w.node_address, ring, "placement-1"), "renewed")
        before = load_certificate(ring.now.cert_pem, "before")
        assert renewed.serial_number != before.serial_number
        assert renewed.public_key() == before.public_key()
        assert {e.oid: e.value for e in renewed.extensions} == {e.oid: e.value for e in before.extensions}


async def test_a_token_is_good_for_one_key(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        token, key_pem = await w.site(), new_key_pem()
        first = await w.join(token, key_pem)
        again = await w.join(token, key_pem)  # the answer was lost
        assert again.now.place == first.now.place
        with pytest.raises(AlreadyExists, match="kvmesh site revoke paris"):
            await w.join(token)


async def test_two_boxes_that_race_for_a_token_get_one_identity(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        token = await w.site()
        came = await asyncio.gather(*(w.join(token) for _ in range(4)), return_exceptions=True)
        assert sorted(type(result).__name__ for result in came) == ["AlreadyExists"] * 3 + ["Keyring"]


async def test_tokens_that_are_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        token = await w.site()
        with pytest.raises(Unauthenticated, match="not known"):
            await w.join(replace(token, token_id="0" * 16))
        for _ in range(5):
            with pytest.raises(Unauthenticated, match="not known"):
                await w.join(replace(token, secret="x" * 43))
        with pytest.raises(Unauthenticated, match="not known"):
            await w.join(token)  # too many wrong ones
        site = SiteRecord(site="lyon", region="eu-west", jurisdiction="FR", created_unix_s=0.0)
        digest = certificate_digest(w.authority.ca_pem)
        made, old, _ = site.with_token(Terms(node_id="edge-lyon"), digest, time.time() - 90_000)
        await w.store.create(made)
        with pytest.raises(Unauthenticated, match=r"expired 60 min ago|expired 1 h ago"):
            await w.join(old)


async def test_another_mesh_in_between_gets_no_token(tmp_path: Path) -> None:
    async with world(tmp_path / "ours") as ours, world(tmp_path / "theirs") as theirs:
        token = await ours.site()
        with pytest.raises(Unauthenticated, match="not of the mesh that this token is of"):
            await theirs.join(token)
        assert theirs.actions == []


async def test_an_address_where_nobody_is(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        token = await w.site()
    with pytest.raises(NodeUnreachable, match="check address"):
        await w.join(token)
    with pytest.raises(NodeUnreachable, match="check address"):
        await join(HostPort("no-such-host.invalid", 7000), token, "test")


def test_a_clock_that_is_far_off_is_named_before_tls_fails_without_a_word(tmp_path: Path) -> None:
    shown = load_certificate(CertificateAuthority.create_or_load(tmp_path / "ca", "m").issue(CORE).cert_pem, "c")
    address, now = HostPort("mesh.example", 7000), datetime.now(UTC)
    _check_clock(shown, address, now)
    with pytest.raises(InvalidRequest, match=r"before the time .* Set the clock"):
        _check_clock(shown, address, now - timedelta(days=400))
    with pytest.raises(InvalidRequest, match=r"after the time .* Set the clock"):
        _check_clock(shown, address, now + timedelta(days=400))
    assert skew_words(-7300.0).startswith("2.0 hours behind the mesh's: set it")
    assert skew_words(0.4) == "0.4 s ahead of the mesh's"


async def test_a_placement_without_authority_says_so(tmp_path: Path) -> None:
    async with world(tmp_path, has_authority=False) as w:
        with pytest.raises(NotImplementedHere, match=r"authority\.folder"):
            await w.site()


async def test_a_box_that_took_anothers_place_and_the_old_one(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        old = await w.join(await w.site())
        new = await w.join(await w.token())
        with pytest.raises(PolicyDenied, match="given to another box"):
            await renew(w.node_address, old, "placement-1")
        await renew(w.node_address, new, "placement-1")
        refusals: list[MeshError] = []
        agent = w.agent(old, refusals)
        await agent.start()
        await eventually(lambda: bool(refusals))
        await agent.stop()
        assert refusals[0].details["rule"] == "identity_replaced"


async def test_a_box_that_was_replaced_does_not_come_back_by_its_own_token(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        token, key_pem = await w.site(), new_key_pem()
        await w.join(token, key_pem)
        new = await w.join(await w.token())
        with pytest.raises(PolicyDenied) as refusal:
            await w.join(token, key_pem)
        assert refusal.value.details["rule"] == "identity_replaced"
        await renew(w.node_address, new, "placement-1")


@pytest.mark.parametrize(
    "name",
    [
        name_of_role(Role.PLACEMENT),
        name_of_role(Role.PLACEMENT).upper() + ".",
        name_of_node("placement-1"),
        "*.role.kvmesh.internal",
        "kvmesh.internal",
    ],
)
async def test_no_token_lets_a_box_pass_for_another_node(tmp_path: Path, name: str) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(InvalidRequest, match="nodes know one another"):
            await w.site(dns_names=[name])
        with pytest.raises(InvalidRequest, match="nodes know one another"):
            w.authority.issue(CORE, dns_names=[name])
        assert w.store.sites == ()


async def test_a_node_id_that_is_taken_elsewhere_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(AlreadyExists, match="placement-1"):
            await w.site(node_id="placement-1")
        await w.join(await w.site())
        with pytest.raises(AlreadyExists, match="edge-paris"):
            await w.site("lyon", node_id="edge-paris")
        assert w.actions == ["site.create", "site.join"]


async def test_a_revoked_site_is_cut_off_and_stays_out(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        ring = await w.join(await w.site())
        spare = await w.token(node_id="edge-paris-2")
        revoked_at_core = RevokedSites(w.registry)
        await revoked_at_core.start()
        refusals: list[MeshError] = []
        agent = w.agent(ring, refusals)
        await agent.start()
        await agent.wait_connected()
        await eventually(lambda: len(w.hub.attached()) == 1)
        revoked_at_core.check(ring.now.place)
        answer = await w.sites.Revoke(pb.RevokeSiteRequest(site="paris"), None)  # type: ignore[arg-type]
        assert list(answer.cut_off) == ["edge-paris"]
        assert w.hub.attached() == ()
        await eventually(lambda: bool(refusals))
        await agent.stop()
        assert {error.details.get("rule") for error in refusals} == {"site_revoked"}
        with pytest.raises(PolicyDenied, match="was revoked"):
            await renew(w.node_address, ring, "placement-1")
        with pytest.raises(Unauthenticated):
            await w.join(spare)
        with pytest.raises(PolicyDenied, match="was revoked"):
            await w.token()
        await eventually(lambda: _refused(revoked_at_core, ring.now.place))
        await revoked_at_core.close()
        await w.registry.delete("sites/paris")  # a registry that lost it takes nothing back
        with pytest.raises(PolicyDenied):
            await renew(w.node_address, ring, "placement-1")


async def test_a_site_whose_record_was_never_read_is_not_let_in(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        ring = await w.join(await w.site())
        await w.registry.put("sites/paris", b'{"format":99}')
        begun_anew = SiteStore(w.registry)
        await begun_anew.start()
        w.store.admit = begun_anew.admit  # type: ignore[method-assign]
        with pytest.raises(PolicyDenied) as refusal:
            await renew(w.node_address, ring, "placement-1")
        assert refusal.value.details["rule"] == "site_unreadable"
        await begun_anew.close()


async def test_a_request_for_another_key_is_no_renewal(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        ring = await w.join(await w.site())
        channel = node_channel(w.node_address, ring.now, "placement-1")
        with pytest.raises(grpc.aio.AioRpcError, match="another key"):
            await pb_grpc.CertificatesStub(channel).Renew(pb.RenewRequest(csr=signing_request(new_key_pem())))
        await channel.close()


def _refused(revoked: RevokedSites, place: Place) -> bool:
    try:
        revoked.check(place)
    except PolicyDenied:
        return True
    return False
