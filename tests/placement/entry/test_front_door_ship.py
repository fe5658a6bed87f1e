"""A split's KV at an entry: codec and head as planned; what is bad is recomputed and counted; what was seen is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mesh.errors import NoCapableNode
from mesh.kv.transfer_frames import Chunk, Offer, Piece
from mesh.node.host_frames import HostFrame
from mesh.v1 import inference_pb2 as pb
from tests.fakes.fake_node import MemoryStream
from tests.fakes.mesh import MemoryMesh, ask, principal, request_of, settle
from tests.placement.entry.conftest import MakeMesh

PROMPT = "".join(chr(97 + i * i % 26) for i in range(400))
SPLIT, LOCAL = pb.PLAN_SHAPE_SPLIT, pb.PLAN_SHAPE_LOCAL
BOTH, SHIP = pb.KV_SHIPMENT_BOTH, pb.KV_SHIPMENT_SHIP


def far_core(make_mesh: MakeMesh) -> MemoryMesh:
    """A core whose link carries KV about as fast as the edge prefills."""
    mesh = make_mesh("core-1", "paris", entry="paris")
    mesh.goodput_bytes_per_s = 256 * 400
    return mesh


async def test_the_head_is_computed_at_the_edge_while_the_tail_comes(make_mesh: MakeMesh) -> None:
    mesh = far_core(make_mesh)
    answer = await ask(mesh.door, request_of(PROMPT, shape=SPLIT, codec="f16", shipment=BOTH))
    [moved] = answer.migrations
    assert 0 < moved.own_tokens < 399
    assert moved.own_tokens % 16 == 0
    assert (moved.codec, moved.kv_tokens, moved.recomputed) == ("f16", 399, False)
    assert answer.decision is not None
    assert [(leg.kind, leg.codec, leg.own_tokens) for leg in answer.decision.plan.legs if leg.kind == "move_kv"] == [
        ("move_kv", "f16", moved.own_tokens)
    ]
    assert "f16 over this link" in answer.decision.plan.why
    assert mesh.nodes["paris"].host.statistics().kv_own_tokens_total == moved.own_tokens
    assert answer.finish is not None
    receipt = json.loads(answer.finish.receipt.record.body)
    assert receipt["plan"]["own_tokens"] == receipt["migrations"][0]["own_tokens"] == moved.own_tokens
    assert receipt["why"] == answer.decision.plan.why
    alone = make_mesh("paris", entry="paris")
    assert answer.ids == (await ask(alone.door, request_of(PROMPT))).ids


def flip(frame: HostFrame) -> HostFrame:
    assert isinstance(frame, Piece)
    return replace(frame, data=bytes([frame.data[0] ^ 1]) + frame.data[1:])


def cut(frame: HostFrame) -> HostFrame:
    assert isinstance(frame, Piece)
    return replace(frame, data=frame.data[:-1])


def of_others(frame: HostFrame) -> HostFrame:
    assert isinstance(frame, Chunk)
    return replace(frame, prefix_hash=bytes(32))


def another(field: str, value: Any) -> Callable[[HostFrame], HostFrame]:
    def change(frame: HostFrame) -> HostFrame:
        assert isinstance(frame, Offer)
        return replace(frame, manifest=replace(frame.manifest, **{field: value}))

    return change


@pytest.mark.parametrize("shipment", [SHIP, BOTH])
@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        (Piece, flip, "DATA_LOSS"),
        (Piece, cut, "DATA_LOSS"),
        (Chunk, of_others, "DATA_LOSS"),
        (Offer, another("label", "public"), "KV_INCOMPATIBLE"),
        (Offer, another("tenant", "other"), "KV_INCOMPATIBLE"),
        (Offer, another("count_tokens", 4), "KV_INCOMPATIBLE"),
        (Offer, another("codec", "q4"), "KV_INCOMPATIBLE"),
        (Offer, another("expires_unix_s", 1.0), "KV_INCOMPATIBLE"),
    ],
)
async def test_what_is_refused_is_recomputed_and_counted(
    make_mesh: MakeMesh, kind: type, change: Callable[[HostFrame], HostFrame], reason: str, shipment: int
) -> None:
    mesh = far_core(make_mesh)

    def tamper(ours: MemoryStream, theirs: MemoryStream) -> None:
        theirs.tamper = lambda frame: [change(frame) if isinstance(frame, kind) else frame]

    mesh.network.on_pair = tamper
    answer = await ask(mesh.door, request_of(PROMPT, shape=SPLIT, shipment=shipment))
    [moved] = answer.migrations
    assert (moved.recomputed, moved.kv_tokens, moved.to_node_id) == (True, 0, "paris")
    [(counted, times)] = mesh.nodes["paris"].host.statistics().transfer_failures
    assert (counted in (reason, "PAYLOAD_CORRUPT"), times) == (True, 1)
    await settle(mesh.nodes["paris"])
    alone = make_mesh("paris", entry="paris")
    assert answer.ids == (await ask(alone.door, request_of(PROMPT))).ids


async def test_an_entry_learns_where_a_prefix_is(make_mesh: MakeMesh) -> None:
    mesh = far_core(make_mesh)
    before = await mesh.door.explain(principal(), request_of(PROMPT, site="paris"))
    await ask(mesh.door, request_of(PROMPT, shape=LOCAL))
    after = await mesh.door.explain(principal(), request_of(PROMPT, site="paris"))
    assert after.decision.plan.predicted_ttft_s < 0.5 * before.decision.plan.predicted_ttft_s
    other = await mesh.door.explain(principal(), request_of("x" + PROMPT, site="paris"))
    assert other.decision.plan.predicted_ttft_s >= 0.9 * before.decision.plan.predicted_ttft_s
    labelled = await mesh.door.explain(principal(), request_of(PROMPT, site="paris", label="restricted"))
    assert labelled.decision.plan.predicted_ttft_s > 2 * after.decision.plan.predicted_ttft_s  # its own namespace


async def test_a_codec_that_nobody_has_is_refused(make_mesh: MakeMesh) -> None:
    mesh = far_core(make_mesh)
    with pytest.raises(NoCapableNode, match="no node has the codec 'morse'"):
        await ask(mesh.door, request_of(PROMPT, shape=SPLIT, codec="morse"))


@pytest.mark.parametrize("codec", ["x" * 129, "a\nb", "é"])
async def test_a_codecs_name_is_checked(make_mesh: MakeMesh, codec: str) -> None:
    mesh = far_core(make_mesh)
    with pytest.raises(Exception, match="malformed"):
        await ask(mesh.door, request_of(PROMPT, shape=SPLIT, codec=codec))
