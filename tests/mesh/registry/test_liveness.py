"""Heartbeats against time-to-live, by a table and by properties; the clock is a number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import NotFound
from mesh.registry.liveness import Liveness
from mesh.registry.types import Health, Registration

ONE = {"core-1": Registration(node_id="core-1", address="", ttl_s=5.0)}


def health(liveness: Liveness, now_s: float) -> Health:
    (node,) = liveness.nodes(ONE, now_s)
    return node.health


def test_a_node_passes_for_its_ttl_after_a_ready_heartbeat() -> None:
    liveness = Liveness()
    assert health(liveness, 0.0) is Health.CRITICAL
    assert liveness.next_expiry_s(ONE, 0.0) is None
    liveness.heartbeat(ONE, "core-1", ready=True, now_s=10.0)
    assert liveness.next_expiry_s(ONE, 10.0) == 15.0
    assert [health(liveness, now_s) for now_s in (10.0, 14.9, 15.0)] == [
        Health.PASSING,
        Health.PASSING,
        Health.CRITICAL,
    ]
    assert liveness.next_expiry_s(ONE, 15.0) is None
    liveness.heartbeat(ONE, "core-1", ready=False, now_s=16.0)
    assert health(liveness, 16.0) is Health.CRITICAL
    liveness.heartbeat(ONE, "core-1", ready=True, now_s=17.0)
    liveness.forget("core-1")
    assert health(liveness, 17.0) is Health.CRITICAL


def test_unknown_nodes_have_no_heartbeat() -> None:
    with pytest.raises(NotFound, match="register again"):
        Liveness().heartbeat(ONE, "core-2", ready=True, now_s=0.0)


@given(
    st.dictionaries(st.sampled_from("abcde"), st.tuples(st.floats(0.1, 10.0), st.floats(0.0, 10.0))),
    st.floats(0.0, 20.0),
)
def test_the_next_expiry_is_the_first_change(nodes: dict[str, tuple[float, float]], now_s: float) -> None:
    registrations = {name: Registration(node_id=name, address="", ttl_s=ttl_s) for name, (ttl_s, _) in nodes.items()}
    liveness = Liveness()
    for name, (_, heard_s) in nodes.items():
        liveness.heartbeat(registrations, name, ready=True, now_s=heard_s)
    before = liveness.nodes(registrations, now_s)
    expiry_s = liveness.next_expiry_s(registrations, now_s)
    passing = [node for node in before if node.health is Health.PASSING]
    assert (expiry_s is None) == (not passing)
    if expiry_s is not None:
        assert liveness.nodes(registrations, (now_s + expiry_s) / 2) == before or expiry_s <= now_s
        assert liveness.nodes(registrations, expiry_s + 1e-6) != before
