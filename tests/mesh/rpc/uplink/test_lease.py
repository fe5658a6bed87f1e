from __future__ import annotations

import pytest

from mesh.errors import InvalidRequest
from mesh.rpc.uplink.lease import MAX_OUTSTANDING, HeartbeatBook, HeartbeatOrder, Lease


def test_a_lease_ends_lease_s_after_its_last_renewal() -> None:
    lease = Lease(lease_s=6.0, now_s=100.0)
    assert lease.remaining_s(100.0) == 6.0
    assert lease.remaining_s(106.0) == 0.0
    lease.renew(104.0)
    assert lease.remaining_s(106.0) == 4.0
    assert lease.remaining_s(111.0) == -1.0


def test_an_older_renewal_does_not_shorten_a_lease() -> None:
    lease = Lease(lease_s=6.0, now_s=100.0)
    lease.renew(99.0)
    assert lease.remaining_s(100.0) == 6.0


def test_heartbeats_count_upwards() -> None:
    order = HeartbeatOrder()
    for sequence in (1, 2, 5):
        order.accept(sequence)
    for sequence in (5, 4, 0):
        with pytest.raises(InvalidRequest, match="heartbeat"):
            order.accept(sequence)


def test_a_renewal_tells_when_its_heartbeat_was_sent() -> None:
    book = HeartbeatBook()
    assert [book.send(now) for now in (1.0, 2.0, 3.0)] == [1, 2, 3]
    assert book.renewed(2) == 2.0
    assert book.renewed(1) is None  # stood for by the later one
    assert book.renewed(3) == 3.0
    assert book.renewed(3) is None


@pytest.mark.parametrize("sequence", [0, 3])
def test_a_renewal_of_nothing_is_refused(sequence: int) -> None:
    book = HeartbeatBook()
    book.send(1.0)
    book.send(2.0)
    with pytest.raises(InvalidRequest, match="not sent"):
        book.renewed(sequence)


def test_the_book_is_bounded() -> None:
    book = HeartbeatBook()
    for now in range(MAX_OUTSTANDING + 1):
        book.send(float(now))
    assert book.renewed(1) is None
    assert book.renewed(2) == 1.0
