"""Streams of requests: several readers at any offset, ends and errors, what is kept and for how long."""

from __future__ import annotations

import asyncio

import pytest

from mesh.errors import Cancelled, InvalidRequest, NotFound, PolicyDenied
from mesh.v1 import inference_pb2 as pb
from placement.entry.request_log import RequestLog, RequestStream, TokenPiece

DECISION = pb.GenerateResponse(decision=pb.Decision(request_id="r"))
MIGRATION = pb.GenerateResponse(migration=pb.Migration(from_node_id="a", to_node_id="b"))
FINISH = pb.GenerateResponse(finish=pb.Finish(ttft_s=1.0))


def piece(number: int, node_id: str = "a") -> TokenPiece:
    return TokenPiece(number, f"<{number}>", node_id)


def stream_of(
    *entries: TokenPiece | pb.GenerateResponse, name: str = "r", tenant: str = "t", key: str = ""
) -> RequestStream:
    stream = RequestStream(name, tenant, b"content", key)
    stream.append(*entries)
    return stream


async def read(stream: RequestStream, offset: int = 0) -> list[tuple[str, int, tuple[int, ...], str]]:
    """(kind, offset, ids, text) of each response."""
    return [
        (r.WhichOneof("event") or "", r.tokens.offset_tokens, tuple(r.tokens.ids), r.tokens.text)
        async for r in stream.read(offset)
    ]


@pytest.mark.parametrize(
    ("offset", "tokens"),
    [
        (0, [("tokens", 0, (0, 1, 2), "<0><1><2>"), ("migration", 0, (), ""), ("tokens", 3, (3, 4), "<3><4>")]),
        (1, [("tokens", 1, (1, 2), "<1><2>"), ("migration", 0, (), ""), ("tokens", 3, (3, 4), "<3><4>")]),
        (3, [("migration", 0, (), ""), ("tokens", 3, (3, 4), "<3><4>")]),
        (4, [("migration", 0, (), ""), ("tokens", 4, (4,), "<4>")]),
        (5, [("migration", 0, (), "")]),
    ],
)
async def test_offsets_inside_a_run_of_tokens(offset: int, tokens: list[tuple[str, int, tuple[int, ...], str]]) -> None:
    stream = stream_of(DECISION, piece(0), piece(1), piece(2), MIGRATION, piece(3, "b"), piece(4, "b"), FINISH)
    stream.end(1.0)
    assert await read(stream, offset) == [("decision", 0, (), ""), *tokens, ("finish", 0, (), "")]


async def test_an_offset_beyond_the_end_is_told() -> None:
    stream = stream_of(DECISION, piece(0), FINISH)
    stream.end(1.0)
    with pytest.raises(InvalidRequest, match="had 1 tokens") as caught:
        await read(stream, 2)
    assert caught.value.details["field"] == "resume_offset_tokens"


async def test_readers_follow_what_comes() -> None:
    stream = stream_of(DECISION)
    first, second = asyncio.create_task(read(stream)), asyncio.create_task(read(stream, 2))
    for number in range(4):
        await asyncio.sleep(0)
        stream.append(piece(number))
    await asyncio.sleep(0)
    stream.append(FINISH)
    stream.end(1.0)
    assert [i for r in await first for i in r[2]] == [0, 1, 2, 3]
    assert [i for r in await second for i in r[2]] == [2, 3]


async def test_each_reader_gets_the_error_after_what_there_was() -> None:
    stream = stream_of(DECISION, piece(0))
    error = PolicyDenied("no", rule="r1")
    stream.end(1.0, error)
    assert stream.failed
    for _ in range(2):
        responses = stream.read(0)
        assert [(await anext(responses)).WhichOneof("event") for _ in range(2)] == ["decision", "tokens"]
        with pytest.raises(PolicyDenied, match="no") as caught:
            await anext(responses)
        assert caught.value.details == {"rule": "r1"}
        assert caught.value is not error


async def test_a_reader_that_waits_gets_the_error_too() -> None:
    stream = stream_of(DECISION)
    reader = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    stream.end(1.0, Cancelled("gone"))
    with pytest.raises(Cancelled):
        await reader


def test_keys_are_of_one_tenant_and_content() -> None:
    log = RequestLog()
    stream = stream_of(key="k")
    log.add(stream, 0.0)
    assert log.find("t", "k", b"content") is stream
    assert log.find("other", "k", b"content") is None
    assert log.find("t", "", b"content") is None
    with pytest.raises(InvalidRequest, match="other contents"):
        log.find("t", "k", b"else")


def test_an_id_is_its_tenant_s_own() -> None:
    log = RequestLog()
    stream = stream_of()
    log.add(stream, 0.0)
    assert log.get("r", "t") is log.get("r", None) is stream
    for name, tenant in (("r", "other"), ("x", "t"), ("x", None)):
        with pytest.raises(NotFound):
            log.get(name, tenant)


def test_what_ended_is_kept_for_a_while() -> None:
    log = RequestLog(keep_s=10.0)
    ended, open_ = stream_of(name="a", key="k"), stream_of(name="b")
    log.add(ended, 0.0)
    log.add(open_, 0.0)
    ended.end(1.0)
    log.add(stream_of(name="c"), 11.0)
    assert log.get("a", "t") is ended
    log.add(stream_of(name="d"), 11.5)
    with pytest.raises(NotFound):
        log.get("a", "t")
    assert log.find("t", "k", b"content") is None
    assert log.get("b", "t") is open_


def test_at_most_so_many_ended_ones_are_kept() -> None:
    log = RequestLog(max_kept=2)
    for number in range(5):
        stream = stream_of(name=str(number), key=str(number))
        log.add(stream, 0.0)
        stream.end(0.0)
    log.add(stream_of(name="open"), 0.0)
    assert [n for n in range(5) if log.find("t", str(n), b"content")] == [3, 4]


def test_dropping_an_old_stream_leaves_its_key_s_new_one() -> None:
    log = RequestLog(keep_s=1.0)
    old, new = stream_of(name="old", key="k"), stream_of(name="new", key="k")
    log.add(old, 0.0)
    old.end(0.0)
    log.add(new, 0.5)
    log.add(stream_of(name="x"), 5.0)
    assert log.find("t", "k", b"content") is new
