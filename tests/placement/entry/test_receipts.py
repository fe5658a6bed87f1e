"""Receipts of whole requests, verified offline as a client does; tampering is found."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from mesh.errors import MeshError, Overloaded, PayloadCorrupt, Unauthenticated
from mesh.identity.ca import CertificateAuthority
from mesh.identity.receipt import verify_receipt
from mesh.identity.signing import NodeIdentity
from mesh.v1 import admin_pb2 as admin
from mesh.v1 import common_pb2 as common
from mesh.v1 import inference_pb2 as pb
from tests.fakes.mesh import Answer, MemoryMesh, ask, asking, principal, request_of
from tests.placement.entry.conftest import MakeMesh

SignerOf = Callable[..., NodeIdentity]


@pytest.fixture
def mesh(make_mesh: MakeMesh, signer_of: SignerOf) -> MemoryMesh:
    return make_mesh("core-1", "paris", entry="paris", signer_of=signer_of, step_delay_s=0.001)


def receipt_of(answer: Answer) -> common.Receipt:
    assert answer.finish is not None
    return answer.finish.receipt


async def test_a_local_request_touched_one_node(mesh: MemoryMesh, authority: CertificateAuthority) -> None:
    answer = await ask(mesh.door, request_of("private", label="restricted"))
    verified = verify_receipt(receipt_of(answer), authority.ca_pem)
    body = verified.body
    assert verified.entry.node_id == "paris"
    assert body["saw_prompt"] == body["held_kv"] == {"paris": "paris"}
    assert body["tokens_by_node"] == {"paris": 12}
    assert body["label"] == {"claimed": "restricted", "effective": "restricted"}
    assert (body["rule"], body["policy_version"], body["tenant"]) == ("rules.restricted", 1, "acme")
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 12, "cached_tokens": 0}
    assert body["request_id"] == answer.request_id
    assert [place.node_id for _, place in verified.legs] == ["paris"]
    assert verified.legs[0][0]["generated_tokens"] == 12
    assert "private" not in json.dumps(body)


async def test_what_was_predicted_stands_beside_what_was_measured(
    mesh: MemoryMesh, authority: CertificateAuthority
) -> None:
    answer = await ask(mesh.door, request_of("how long"))
    body = verify_receipt(receipt_of(answer), authority.ca_pem).body
    assert answer.finish is not None
    assert body["measured"]["ttft_s"] == pytest.approx(answer.finish.ttft_s, abs=1e-3)
    assert set(body["predicted"]) == {"ttft_s", "tpot_s", "total_s", "error_ratio"}
    assert body["predicted"]["ttft_s"] > 0
    text = mesh.metrics.render().decode()
    for time in ("ttft", "tpot", "total"):
        assert f'kvmesh_prediction_error_ratio_count{{time="{time}"}} 1.0' in text
        assert f'kvmesh_prediction_error_median_ratio{{time="{time}"}}' in text


async def test_a_split_has_the_prefill_s_leg_too(mesh: MemoryMesh, authority: CertificateAuthority) -> None:
    answer = await ask(mesh.door, request_of("a longer prompt " * 6, shape=pb.PLAN_SHAPE_SPLIT))
    verified = verify_receipt(receipt_of(answer), authority.ca_pem)
    assert [(place.node_id, leg["kind"]) for leg, place in verified.legs] == [
        ("core-1", "prefill"),
        ("paris", "decode"),
    ]
    # The target gets the prompt's ids as well, for it computes the last of them.
    assert set(verified.body["saw_prompt"]) == set(verified.body["held_kv"]) == {"core-1", "paris"}
    assert [m["cause"] for m in verified.body["migrations"]] == ["plan"]


async def test_a_moved_request_names_both_nodes(mesh: MemoryMesh, authority: CertificateAuthority) -> None:
    request = request_of("on the move " * 6, shape=pb.PLAN_SHAPE_LOCAL, max_tokens=80)
    async with asking(mesh.door, request, tokens=5) as (answer, task):
        await mesh.door.migrate(None, admin.MigrateRequest(request_id=answer.request_id, tier="core"))
        await task
    body = verify_receipt(receipt_of(answer), authority.ca_pem).body
    assert set(body["saw_prompt"]) == set(body["held_kv"]) == {"core-1", "paris"}
    assert sum(body["tokens_by_node"].values()) == 80
    assert body["tokens_by_node"]["paris"] == answer.migrations[0].offset_tokens
    assert (body["migrations"][0]["from_node_id"], body["migrations"][0]["to_node_id"]) == ("paris", "core-1")


async def test_a_fallback_is_counted(mesh: MemoryMesh, authority: CertificateAuthority) -> None:
    async with asking(mesh.door, request_of("fall back", max_tokens=80), tokens=5) as (answer, task):
        await mesh.nodes[answer.by_node[0]].kill()
        await task
    body = verify_receipt(receipt_of(answer), authority.ca_pem).body
    assert body["fallbacks"] == 1
    assert set(body["tokens_by_node"]) == {"core-1", "paris"}


def _body(receipt: common.Receipt) -> None:
    receipt.record.body = receipt.record.body.replace(b"restricted", b"public")


def _signature(receipt: common.Receipt) -> None:
    receipt.record.signature = receipt.record.signature[:-1] + bytes([receipt.record.signature[-1] ^ 1])


def _leg_gone(receipt: common.Receipt) -> None:
    del receipt.legs[0]


def _leg_twice(receipt: common.Receipt) -> None:
    receipt.legs.append(receipt.legs[0])


def _leg_body(receipt: common.Receipt) -> None:
    receipt.legs[0].body = receipt.legs[0].body.replace(b'"generated_tokens":12', b'"generated_tokens":2')


def _no_certificate(receipt: common.Receipt) -> None:
    receipt.record.certificate = b"junk"


@pytest.mark.parametrize("tamper", [_body, _signature, _leg_gone, _leg_twice, _leg_body, _no_certificate])
async def test_tampering_is_found(
    mesh: MemoryMesh, authority: CertificateAuthority, tamper: Callable[[common.Receipt], None]
) -> None:
    receipt = receipt_of(await ask(mesh.door, request_of("x", label="restricted")))
    verify_receipt(receipt, authority.ca_pem)
    tamper(receipt)
    with pytest.raises(PayloadCorrupt):
        verify_receipt(receipt, authority.ca_pem)


async def test_a_leg_of_another_request_does_not_pass(mesh: MemoryMesh, authority: CertificateAuthority) -> None:
    one = receipt_of(await ask(mesh.door, request_of("a", label="restricted")))
    two = receipt_of(await ask(mesh.door, request_of("b", label="restricted")))
    one.legs[0].CopyFrom(two.legs[0])
    with pytest.raises(PayloadCorrupt):
        verify_receipt(one, authority.ca_pem)


async def test_another_authority_s_receipt_is_not_of_this_mesh(
    mesh: MemoryMesh, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stranger = CertificateAuthority.create_or_load(tmp_path_factory.mktemp("stranger") / "ca", "toy")
    receipt = receipt_of(await ask(mesh.door, request_of("x")))
    with pytest.raises((Unauthenticated, PayloadCorrupt)) as caught:
        verify_receipt(receipt, stranger.ca_pem)
    assert isinstance(caught.value, MeshError)


async def test_the_receipt_is_kept_before_the_client_has_it(mesh: MemoryMesh) -> None:
    answer = await ask(mesh.door, request_of("private", label="restricted"))
    assert [r.record.body for r in mesh.receipts.kept] == [receipt_of(answer).record.body]


async def test_a_request_that_failed_leaves_one_too(mesh: MemoryMesh, authority: CertificateAuthority) -> None:
    async with asking(mesh.door, request_of("private", label="restricted", max_tokens=200)) as (answer, task):
        assert mesh.door.abort(principal(), answer.request_id)
        with pytest.raises(MeshError):
            await task
    (kept,) = mesh.receipts.kept
    body = verify_receipt(kept, authority.ca_pem).body
    assert body["outcome"] == "CANCELLED"
    assert body["saw_prompt"] == {"paris": "paris"}


async def test_no_request_is_taken_while_receipts_cannot_be_kept(mesh: MemoryMesh) -> None:
    mesh.receipts.error = Overloaded("the disk is full")
    with pytest.raises(Overloaded, match="disk is full"):
        await ask(mesh.door, request_of("private"))


async def test_an_answer_without_its_receipt_is_an_error(mesh: MemoryMesh) -> None:
    async with asking(mesh.door, request_of("private")) as (answer, task):
        mesh.receipts.error = Overloaded("the disk is full")
        with pytest.raises(Overloaded, match="its receipt could not be kept"):
            await task
    assert answer.finish is None


async def test_a_bug_in_keeping_receipts_leaves_no_client_waiting(
    mesh: MemoryMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: common.Receipt) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(mesh.receipts, "append_receipt", broken)
    with pytest.raises(MeshError, match="could not conclude"):
        await ask(mesh.door, request_of("private"))
