"""Credits and rewinding, against a plain model: nothing is lost, nothing comes twice, memory stays in the window."""

from __future__ import annotations

import random

import pytest

from mesh.errors import InvalidRequest
from mesh.kv.chunks import PIECE_BYTES, digest_of
from mesh.kv.transfer_frames import Done, Piece
from mesh.kv.transfer_window import ReceiveWindow, SendWindow, cost_bytes


def test_a_frame_costs_what_it_keeps_in_memory() -> None:
    piece = Piece(chunk_index=0, offset_bytes=0, data=bytes(1000), digest=digest_of(b""))
    assert 1000 < cost_bytes(piece) < 1500
    assert 0 < cost_bytes(Done(1)) < 1000


def test_the_window_bounds_what_is_kept() -> None:
    window: SendWindow[str] = SendWindow(100)
    assert window.has_room(1000)  # alone, anything goes: else it could never
    window.push("a", 60)
    assert window.has_room(40)
    assert not window.has_room(41)
    window.push("b", 40)
    window.ack(1)
    assert (window.kept_bytes, window.peak_bytes, window.sent, window.acked) == (40, 100, 2, 1)
    assert window.has_room(60)


def test_the_smaller_window_counts() -> None:
    window: SendWindow[str] = SendWindow(100)
    window.grant(1000)
    window.push("a", 60)
    assert not window.has_room(41)
    window.grant(70)
    assert not window.has_room(11)
    assert window.has_room(10)


@pytest.mark.parametrize("count", [-1, 0, 4, 2**63])
def test_an_ack_that_cannot_be(count: int) -> None:
    window: SendWindow[str] = SendWindow(100)
    for name in "abc":
        window.push(name, 1)
    window.ack(1)
    for wrong in (window.ack, window.rewind):
        with pytest.raises(InvalidRequest):
            wrong(count)
    assert (window.acked, window.sent) == (1, 3)


def test_a_receiver_holds_its_sender_to_the_grant() -> None:
    window = ReceiveWindow(2 * PIECE_BYTES)
    window.arrived(PIECE_BYTES)
    window.arrived(PIECE_BYTES)
    with pytest.raises(InvalidRequest):
        window.arrived(1)
    small = ReceiveWindow(1)
    small.arrived(PIECE_BYTES)  # one piece always


def test_a_receiver_tells_now_and_then() -> None:
    window = ReceiveWindow(4 * PIECE_BYTES)
    for _ in range(4):
        window.arrived(PIECE_BYTES // 2)
    assert not window.consume(PIECE_BYTES // 2)
    assert window.consume(PIECE_BYTES // 2)  # a quarter of the window is free
    assert window.told() == 2
    assert not window.consume(PIECE_BYTES // 2)


@pytest.mark.parametrize("seed", range(100))
def test_every_frame_arrives_once_whatever_breaks(seed: int) -> None:
    """Two ends and a connection that loses what is under way whenever it breaks."""
    rng = random.Random(seed)
    n_frames, size = rng.randint(1, 40), rng.randint(1, 50)
    sender: SendWindow[int] = SendWindow(rng.randint(1, 200))
    receiver = ReceiveWindow(200)
    wire: list[int] = []
    acks: list[int] = []
    waiting: list[int] = []
    used: list[int] = []
    while len(used) < n_frames:
        match rng.choice(["push", "transmit", "arrive", "use", "ack", "break"]):
            case "push" if sender.sent < n_frames and sender.has_room(size):
                assert sender.push(sender.sent, size) == sender.sent
            case "transmit" if (due := sender.next()) is not None:
                wire.append(due[0])
                sender.passed(due[1])
            case "arrive" if wire:
                waiting.append(wire.pop(0))
                receiver.arrived(size)
            case "use" if waiting:
                used.append(waiting.pop(0))
                receiver.consume(size)
                acks.append(receiver.told())
            case "ack" if acks:
                sender.ack(acks.pop(0))
            case "break" if rng.random() < 0.3:
                wire.clear()
                acks = [receiver.told()]
                sender.rewind(receiver.received)
        assert sender.kept_bytes <= max(200, size)
    assert used == list(range(n_frames))
