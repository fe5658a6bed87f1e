"""The transfer's state machines against each other, and against everything that can be wrong with a frame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import Draining, Internal, InvalidRequest, MeshError, PayloadCorrupt
from mesh.kv.chunks import CHUNK_TOKENS, PIECE_BYTES, chunk_ranges, digest_of
from mesh.kv.geometry import KvDtype
from mesh.kv.manifest import KvManifest, make_manifest
from mesh.kv.transfer import Limits, Receiver, Sender, State
from mesh.kv.transfer_frames import (
    Abort,
    Chunk,
    ChunkVerified,
    Commit,
    Committed,
    Done,
    Frame,
    Offer,
    Piece,
    Want,
)
from tests.fakes.fake_engine import FakeEngine

PER_TOKEN = 3000  # bytes: a chunk of 256 tokens has two pieces


def name_of(n_tokens: int) -> bytes:
    return digest_of(b"tokens up to %d" % n_tokens)


def manifest(count_tokens: int) -> KvManifest:
    return make_manifest(
        FakeEngine().info, codec="f16", count_tokens=count_tokens, block_hashes=(), tenant="a", label="b",
        expires_unix_s=1.0,
    )  # fmt: skip


def wanted(from_position: int = 0) -> Want:
    return Want(
        from_position=from_position, layout_hash="l", weights_lineage="w", dtype=KvDtype.F16, window_bytes=1 << 20
    )


def receiver(*, max_tokens: int = 1000, exact: bool = True, known: int = 0) -> Receiver:
    return Receiver(
        Limits(
            max_tokens=max_tokens,
            exact=exact,
            encoded_bytes=lambda n: n * PER_TOKEN,
            prefix_hash=lambda n: name_of(n) if n <= known else None,
        )
    )


def payload(start: int, stop: int) -> bytes:
    return b"".join(i.to_bytes(4, "big") * (PER_TOKEN // 4) for i in range(start, stop))


def frames_of(count: int, *, want: int = 0, stops: tuple[int, ...] = ()) -> list[Frame]:
    """What a good sender sends after `want`, in chunks that end at `stops` (default: as large as may be)."""
    sender = Sender(max_tokens=2000)
    sender.receive(wanted(want))
    assert sender.wanted == wanted(want)
    out: list[Frame] = [sender.offer(manifest(count))]
    for stop in stops or [b for _, b in chunk_ranges(want, count)]:
        data = payload(sender.position, stop)
        out += sender.chunk(stop, data, digest=digest_of(data), prefix_hash=name_of(stop))
    out.append(sender.commit())
    sender.receive(Done(sender.position))
    assert sender.state is State.DONE
    return out


def feed(
    machine: Receiver, frames: list[Frame], *, want: int = 0, into: list[ChunkVerified] | None = None
) -> list[ChunkVerified]:
    """All frames into a receiver that answers as it should; what came out."""
    out = [] if into is None else into
    machine.want(wanted(want))
    for frame in frames:
        match machine.receive(frame):
            case ChunkVerified() as chunk:
                out.append(chunk)
            case Committed():
                machine.done()
    return out


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_cutting_arrives_whole(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 700))
    want = data.draw(st.integers(0, count))
    stops, position = [], want
    while position < count:
        position = data.draw(st.integers(position + 1, min(count, position + CHUNK_TOKENS)))
        stops.append(position)
    machine = receiver(known=data.draw(st.integers(0, count)))
    chunks = feed(machine, frames_of(count, want=want, stops=tuple(stops)), want=want)
    assert b"".join(c.data for c in chunks) == payload(want, count)
    assert [c.stop for c in chunks] == stops
    assert all(c.prefix_hash == name_of(c.stop) for c in chunks)
    assert (machine.state, machine.position, machine.first_wanted) == (State.DONE, count, want)
    assert machine.wire_bytes == (count - want) * PER_TOKEN


def test_pieces_are_small_and_digested() -> None:
    pieces = [f for f in frames_of(256) if isinstance(f, Piece)]
    assert [len(p.data) for p in pieces] == [PIECE_BYTES, 256 * PER_TOKEN - PIECE_BYTES]
    assert all(p.digest == digest_of(p.data) for p in pieces)


def test_a_running_source_may_send_more_than_it_offered() -> None:
    frames = frames_of(300)
    frames[0] = Offer(manifest(100))
    assert len(feed(receiver(exact=False), frames)) == 2
    with pytest.raises(PayloadCorrupt):
        feed(receiver(exact=True), frames)
    with pytest.raises(PayloadCorrupt):
        feed(receiver(exact=False, max_tokens=299), frames)


def test_a_receiver_that_has_it_all() -> None:
    assert feed(receiver(), frames_of(100, want=100), want=100) == []
    sender = Sender(max_tokens=2000)
    sender.receive(wanted(112))  # it has even more
    sender.offer(manifest(100))
    assert sender.commit().stop == 112
    frames = [Offer(manifest(100)), Commit(chunks=0, stop=112, digest=digest_of(b""))]
    assert feed(receiver(), frames, want=112) == []


Change = Callable[[list[Frame]], list[Frame]]


def at(where: int, /, **changes: object) -> Change:
    """Change fields of one frame. Frames: 0 offer, 1 chunk, 2 and 3 its pieces, 4 chunk, 5 its piece, 6 commit."""
    return lambda frames: [replace(f, **changes) if i == where else f for i, f in enumerate(frames)]  # type: ignore[type-var]


def flip(index: int) -> Change:
    def change(frames: list[Frame]) -> list[Frame]:
        piece = frames[index]
        assert isinstance(piece, Piece)
        data = bytearray(piece.data)
        data[1234] ^= 1
        return [*frames[:index], replace(piece, data=bytes(data)), *frames[index + 1 :]]

    return change


def flip_with_digest(index: int) -> Change:
    """A piece whose own digest is right again: the chunk's must tell."""

    def change(frames: list[Frame]) -> list[Frame]:
        frames = flip(index)(frames)
        piece = frames[index]
        assert isinstance(piece, Piece)
        return [*frames[:index], replace(piece, digest=digest_of(piece.data)), *frames[index + 1 :]]

    return change


def cut(index: int) -> Change:
    def change(frames: list[Frame]) -> list[Frame]:
        piece = frames[index]
        assert isinstance(piece, Piece)
        short = replace(piece, data=piece.data[:-1], digest=digest_of(piece.data[:-1]))
        return [*frames[:index], short, *frames[index + 1 :]]

    return change


def without(index: int) -> Change:
    return lambda f: [*f[:index], *f[index + 1 :]]


def twice(index: int) -> Change:
    return lambda f: [*f[: index + 1], f[index], *f[index + 1 :]]


def swapped(a: int, b: int) -> Change:
    def change(frames: list[Frame]) -> list[Frame]:
        frames = list(frames)
        frames[a], frames[b] = frames[b], frames[a]
        return frames

    return change


BAD: dict[str, Change] = {
    "piece bit flipped": flip(2),
    "last piece bit flipped": flip(5),
    "bit flipped, piece digest right": flip_with_digest(3),
    "piece truncated": cut(3),
    "first piece truncated": cut(2),
    "piece empty": at(2, data=b"", digest=digest_of(b"")),
    "piece too large": at(2, data=bytes(PIECE_BYTES + 1), digest=digest_of(bytes(PIECE_BYTES + 1))),
    "more bytes than announced": at(3, data=bytes(PIECE_BYTES), digest=digest_of(bytes(PIECE_BYTES))),
    "piece of another chunk": at(3, chunk_index=1),
    "piece offset wrong": at(3, offset_bytes=0),
    "piece digest empty": at(2, digest=b""),
    "pieces reordered": swapped(2, 3),
    "chunks reordered": swapped(1, 4),
    "piece missing": without(2),
    "last piece missing": without(3),
    "chunk missing": lambda f: [f[0], *f[4:]],
    "last chunk missing": lambda f: [*f[:4], f[6]],
    "last chunk missing, commit agrees": lambda f: [
        *f[:4],
        Commit(chunks=1, stop=256, digest=digest_of(f[1].digest)),  # type: ignore[union-attr]
    ],
    "offer twice": twice(0),
    "chunk announced twice": twice(1),
    "piece twice": twice(2),
    "last piece twice": twice(5),
    "chunk sent twice": lambda f: [*f[:4], *f[1:4], *f[4:]],
    "commit twice": twice(6),
    "commit missing before more": lambda f: [*f, f[1]],
    "no offer": without(0),
    "commit before pieces": swapped(2, 6),
    "chunk index wrong": at(4, index=7),
    "gap": at(4, start=257, stop=301),
    "overlap": at(4, start=255, stop=299),
    "start wrong": at(1, start=1, stop=257),
    "chunk without tokens": at(1, stop=0),
    "chunk backwards": at(4, stop=200),
    "chunk too long": at(1, stop=257, size_bytes=257 * PER_TOKEN),
    "size lies": at(1, size_bytes=256 * PER_TOKEN + 1),
    "size huge": at(1, size_bytes=2**62),
    "count lies": at(4, stop=299),
    "more than announced": at(4, stop=301, size_bytes=45 * PER_TOKEN),
    "chunk digest wrong": at(1, digest=bytes(32)),
    "chunk digest short": at(1, digest=b"x"),
    "prefix hash short": at(1, prefix_hash=b"x"),
    "prefix hash of other tokens": at(1, prefix_hash=bytes(32)),
    "commit chunks wrong": at(6, chunks=1),
    "commit stop wrong": at(6, stop=299),
    "commit digest wrong": at(6, digest=bytes(32)),
    "a want": lambda f: [f[0], wanted(), *f[1:]],
    "a done": lambda f: [*f[:6], Done(300)],
}


@pytest.mark.parametrize("name", BAD)
def test_every_deviation_is_refused_and_nothing_bad_comes_out(name: str) -> None:
    good = frames_of(300)
    machine = receiver(known=300)
    out: list[ChunkVerified] = []
    with pytest.raises((PayloadCorrupt, InvalidRequest)):
        feed(machine, BAD[name](good), into=out)
    assert all(c.data == payload(c.start, c.stop) for c in out)  # what came out before is right
    assert machine.state is State.FAILED
    for frame in good:  # and dead is dead
        with pytest.raises(InvalidRequest):
            machine.receive(frame)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_order_of_good_frames_brings_out_wrong_bytes(data: st.DataObject) -> None:
    good = frames_of(300)
    order = data.draw(st.lists(st.integers(0, len(good) - 1), max_size=12))
    machine = receiver(known=300)
    out: list[ChunkVerified] = []
    try:
        feed(machine, [good[i] for i in order], into=out)
    except (PayloadCorrupt, InvalidRequest):
        assert machine.state is State.FAILED
    assert b"".join(c.data for c in out) == payload(0, out[-1].stop if out else 0)
    if machine.state is State.DONE:
        assert order == list(range(len(good)))


def test_a_receiver_announces_only_what_it_may() -> None:
    machine = receiver()
    for early in (machine.done, lambda: machine.want(wanted())):  # dead after the first
        with pytest.raises(InvalidRequest):
            early()


@pytest.mark.parametrize("frame", [Done(0), Offer(manifest(1)), Commit(chunks=0, stop=0, digest=b"")])
def test_a_sender_takes_frames_in_their_order_only(frame: Frame) -> None:
    for first in ((), (wanted(),)):
        sender = Sender(max_tokens=100)
        for earlier in first:
            sender.receive(earlier)
        with pytest.raises(InvalidRequest):
            sender.receive(frame)
        assert sender.state is State.FAILED


def test_a_sender_offers_after_it_heard_what_is_wanted() -> None:
    with pytest.raises(InvalidRequest):
        Sender(max_tokens=100).offer(manifest(1))


def test_a_sender_checks_what_the_receiver_says() -> None:
    sender = Sender(max_tokens=100)
    with pytest.raises(PayloadCorrupt):
        sender.receive(wanted(101))
    sender = Sender(max_tokens=100)
    sender.receive(wanted(10))
    sender.offer(manifest(10))
    with pytest.raises(InvalidRequest):
        sender.receive(Done(10))  # before the commit
    sender = Sender(max_tokens=100)
    sender.receive(wanted(10))
    sender.offer(manifest(10))
    sender.commit()
    with pytest.raises(PayloadCorrupt):
        sender.receive(Done(9))


def test_an_abort_is_the_peers_error() -> None:
    for reason, error in (("DRAINING", Draining), ("A_NEWER_WORD", Internal)):
        abort = Abort(reason=reason, message="m" * 5000)
        for machine in (Sender(max_tokens=10), receiver()):
            with pytest.raises(error) as caught:
                machine.receive(abort)
            assert len(caught.value.message) < 600
            assert machine.state is State.FAILED


def test_an_abort_carries_the_reason_word() -> None:
    abort = Abort.of(MeshError("x" * 2000))
    assert (abort.reason, len(abort.message)) == ("INTERNAL", 500)


@pytest.mark.parametrize(("size", "taken"), [(0, False), (1, True), (PER_TOKEN, True), (PER_TOKEN + 1, False)])
def test_chunks_of_a_codec_without_a_fixed_size_are_bounded(size: int, taken: bool) -> None:
    limits = Limits(
        max_tokens=10, exact=True, encoded_bytes=lambda n: n * PER_TOKEN, prefix_hash=lambda n: None, fixed_size=False
    )
    r = Receiver(limits)
    r.want(wanted())
    r.receive(Offer(manifest(1)))
    frame = Chunk(index=0, start=0, stop=1, size_bytes=size, digest=digest_of(b""), prefix_hash=digest_of(b""))
    if taken:
        assert r.receive(frame) is None
    else:
        with pytest.raises(PayloadCorrupt):
            r.receive(frame)
