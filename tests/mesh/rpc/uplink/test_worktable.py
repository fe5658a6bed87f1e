from __future__ import annotations

import pytest

from mesh.errors import LeaseLost, NotFound, Overloaded
from mesh.rpc.uplink.worktable import Delivery, Work, WorkTable


def table(*, max_open: int = 4, max_events: int = 8) -> WorkTable[str, str]:
    return WorkTable("edge-1", max_open=max_open, max_unread_bytes=max_events)


def drain(work: Work[str, str]) -> list[str]:
    events = []
    while (event := work.take()) is not None:
        events.append(event)
    return events


def no_wake() -> None:
    return


def test_ids_are_unique_and_events_keep_their_order() -> None:
    works = table()
    first, second = works.open(no_wake), works.open(no_wake)
    assert first.work_id != second.work_id
    for event in "ab":
        assert works.event(first.work_id, event, 1) is Delivery.ACCEPTED
    works.event(second.work_id, "x", 1)
    assert drain(first) == ["a", "b"]
    assert drain(second) == ["x"]
    assert first.unread_bytes == 0


def test_each_arrival_wakes_the_reader() -> None:
    woken: list[int] = []
    works = table()
    work = works.open(lambda: woken.append(1))
    works.event(work.work_id, "a", 1)
    works.settle(work.work_id, result="done")
    assert len(woken) == 2


def test_an_outcome_stands_behind_the_events_before_it() -> None:
    works = table()
    work = works.open(no_wake)
    works.event(work.work_id, "a", 1)
    works.settle(work.work_id, error=NotFound("gone"))
    assert drain(work) == ["a"]
    assert isinstance(work.error, NotFound)
    assert works.event(work.work_id, "late", 1) is Delivery.NOT_OPEN
    assert works.settle(work.work_id, result="late") is Delivery.NOT_OPEN
    assert isinstance(work.error, NotFound)
    assert work.result is None


def test_a_result_may_be_empty() -> None:
    works = table()
    work = works.open(no_wake)
    works.settle(work.work_id)
    assert work.settled


def test_what_comes_after_close_is_not_open() -> None:
    works = table()
    work = works.open(no_wake)
    works.close(work.work_id)
    works.close(work.work_id)
    assert works.event(work.work_id, "a", 1) is Delivery.NOT_OPEN
    assert works.settle(99) is Delivery.NOT_OPEN
    assert len(works) == 0


def test_a_reader_that_falls_behind_fails_alone() -> None:
    works = table(max_events=3)
    slow, quick = works.open(no_wake), works.open(no_wake)
    for _ in range(3):
        assert works.event(slow.work_id, "a", 1) is Delivery.ACCEPTED
    assert works.event(slow.work_id, "a", 1) is Delivery.OVERFLOW
    assert works.event(slow.work_id, "a", 1) is Delivery.NOT_OPEN
    assert works.event(quick.work_id, "b", 1) is Delivery.ACCEPTED
    assert drain(slow) == ["a", "a", "a"]
    assert isinstance(slow.error, Overloaded)
    assert quick.error is None


def test_a_reader_that_keeps_up_never_overflows() -> None:
    works = table(max_events=1)
    work = works.open(no_wake)
    for _ in range(1000):
        assert works.event(work.work_id, "a", 1) is Delivery.ACCEPTED
        assert work.take() == "a"


def test_open_orders_are_bounded() -> None:
    works = table(max_open=2)
    first = works.open(no_wake)
    works.open(no_wake)
    with pytest.raises(Overloaded, match="edge-1"):
        works.open(no_wake)
    works.close(first.work_id)
    works.open(no_wake)


def test_the_end_of_a_session_fails_all_open_orders_once() -> None:
    works = table()
    done, running = works.open(no_wake), works.open(no_wake)
    works.settle(done.work_id, result="ok")
    works.fail_all(LeaseLost("replaced"))
    works.fail_all(NotFound("later"))
    assert done.error is None
    assert isinstance(running.error, LeaseLost)
    with pytest.raises(LeaseLost):
        works.open(no_wake)
