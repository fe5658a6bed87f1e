"""Moves without KV, event by event: the source goes on until the target has made a token."""

from __future__ import annotations

import pytest

from mesh import errors
from placement.entry.runner_legs import Phase
from placement.entry.runner_types import (
    Cancelled,
    CloseRun,
    Emit,
    EmitMigration,
    Event,
    Fail,
    Finish,
    MoveFailed,
    StartRun,
)
from tests.placement.entry.plans import PROMPT, Player, run, spec
from tests.placement.entry.test_runner import DOWN, failed, finished, held, leg, release, replay, start, text, tokens


def under_way() -> Player:
    """Runs at core with one token; edge prefills."""
    player = Player(spec("core", "spare"))
    player.begin()
    player(tokens(0, 4))
    (ordered,) = player(replay("edge"))
    assert ordered == StartRun(node_id="edge", run_id=run(1), token_ids=PROMPT, kv_from=None, prefill_only=True)
    return player


def taken_over() -> Player:
    """Edge runs on from its prefill and has made no token; core made another one meanwhile."""
    player = under_way()
    player(tokens(0, 5))
    assert player(held(1, 4)) == (leg("edge", 1), start("edge", 2, 4, 5, kv_from=1))
    return player


def test_the_target_takes_over_with_its_first_token() -> None:
    player = taken_over()
    assert player(tokens(0, 6)) == (), "what the source goes on making is not told"
    close, migration, emit = sorted(player(tokens(2, 60)), key=lambda e: type(e).__name__ != "CloseRun")
    assert close == CloseRun(node_id="core", run_id=run(0))
    assert isinstance(migration, EmitMigration)
    assert (migration.from_node_id, migration.to_node_id, migration.recomputed) == ("core", "edge", True)
    assert (migration.kv_wire_bytes, migration.kv_tokens, migration.offset_tokens) == (0, 0, 2)
    assert isinstance(emit, Emit)
    assert player(tokens(0, 7)) == (), "it was on its way"
    player(failed(0, errors.Cancelled("closed")))
    player(finished(2))
    assert text(player) == [4, 5, 60]
    assert isinstance(player.effects[-1], Finish)


@pytest.mark.parametrize("error", [DOWN, errors.Overloaded("full"), errors.PolicyDenied("no"), errors.Internal("bug")])
@pytest.mark.parametrize("when", ["prefilling", "starting"])
def test_a_target_that_fails_changes_nothing(when: str, error: errors.MeshError) -> None:
    player = under_way() if when == "prefilling" else taken_over()
    before = list(text(player))
    player(tokens(0, 8))
    player(failed(1 if when == "prefilling" else 2, error))
    assert text(player) == [*before, 8], "nothing lost, nothing twice"
    (told,) = player.of(MoveFailed)
    assert (told.target_node_id, told.error) == ("edge", error)
    assert player.runner.phase is Phase.RUNNING
    assert not any(isinstance(e, Fail) for e in player.effects)
    player(finished(0))
    assert isinstance(player.effects[-1], Finish)


def test_a_target_that_fails_late_may_have_its_hold_still() -> None:
    player = taken_over()
    assert release("edge", 1) in player(failed(2))


def test_a_target_whose_stream_breaks_while_it_prefills_may_have_a_hold_already() -> None:
    player = under_way()
    assert release("edge", 1) in player(failed(1, errors.NodeUnreachable("stream broke")))


def test_a_source_that_finishes_first_has_the_last_word() -> None:
    player = taken_over()
    player(tokens(0, 6))
    effects = player(finished(0))
    assert CloseRun(node_id="edge", run_id=run(2)) in effects
    assert release("edge", 1) in effects
    assert text(player) == [4, 5, 6]
    assert [type(e).__name__ for e in effects if isinstance(e, MoveFailed | Finish)] == ["MoveFailed", "Finish"]


@pytest.mark.parametrize("gone", [failed(0), held(0, 4)])
def test_a_source_that_goes_while_the_target_starts_is_not_missed(gone: Event) -> None:
    player = taken_over()
    player(tokens(0, 6))
    player(gone)
    player(tokens(2, 60))
    player(finished(2))
    assert text(player) == [4, 5, 60]
    assert isinstance(player.effects[-1], Finish)


def test_both_fail_and_another_node_goes_on() -> None:
    player = taken_over()
    player(failed(0))
    effects = player(failed(2))
    assert len(player.of(MoveFailed)) == 1
    assert effects[-1] == start("spare", 3, 4, 5)


def test_a_source_that_fails_while_the_target_prefills_falls_back_with_all_tokens() -> None:
    player = under_way()
    effects = player(failed(0))
    assert CloseRun(node_id="edge", run_id=run(1)) in effects
    assert release("edge", 1) in effects
    assert effects[-1] == start("spare", 2, 4)
    assert player(held(1, 4)) == (release("edge", 1),), "what it had become by then is freed"


@pytest.mark.parametrize("when", ["prefilling", "starting"])
def test_a_client_that_leaves_closes_both(when: str) -> None:
    player = under_way() if when == "prefilling" else taken_over()
    effects = player(Cancelled())
    closed = {e.node_id for e in effects if isinstance(e, CloseRun)}
    assert closed == {"core", "edge"}
    assert release("edge", 1) in effects
    assert [type(e).__name__ for e in effects if isinstance(e, MoveFailed | Fail)] == ["MoveFailed", "Fail"]


def test_a_node_that_runs_what_it_was_to_prefill_is_given_up() -> None:
    player = under_way()
    player(tokens(1, 9))
    assert text(player) == [4]
    (told,) = player.of(MoveFailed)
    assert isinstance(told.error, errors.Internal)
