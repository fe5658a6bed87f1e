"""The plan runner, event by event: shapes, moves in either order, failures, and exactly one outcome."""

from __future__ import annotations

import pytest

from mesh import errors
from mesh.errors import MeshError
from mesh.node.engine import FinishReason
from placement.decide.moves import MoveWay, Tactic
from placement.entry.runner import _TABLE, PlanRunner
from placement.entry.runner_legs import Phase
from placement.entry.runner_types import (
    Begin,
    Cancelled,
    CancelMove,
    CloseRun,
    DeadlineExpired,
    Emit,
    EmitMigration,
    Event,
    Fail,
    Finish,
    KvFailed,
    KvMoved,
    KvSourceKind,
    LegDone,
    MoveCause,
    MoveFailed,
    MoveKv,
    MoveRequested,
    Release,
    RunFailed,
    RunFinished,
    RunHeld,
    RunPrefilled,
    RunTokens,
    StartRun,
    Usage,
)
from tests.placement.entry.plans import LEG, PROMPT, Player, report, run, spec

DOWN = errors.NodeUnreachable("gone", node="x")


def start(node_id: str, number: int, *generated: int, kv_from: int | None = None) -> StartRun:
    hold = None if kv_from is None else run(kv_from)
    return StartRun(node_id=node_id, run_id=run(number), token_ids=PROMPT + generated, kv_from=hold)


def tokens(number: int, *ids: int) -> RunTokens:
    return RunTokens(run_id=run(number), ids=ids)


def finished(number: int) -> RunFinished:
    return RunFinished(run_id=run(number), reason=FinishReason.STOP, stop_string="END", leg=LEG)


def held(number: int, kv_tokens: int) -> RunHeld:
    return RunHeld(run_id=run(number), kv_tokens=kv_tokens, leg=LEG)


def failed(number: int, error: MeshError = DOWN) -> RunFailed:
    return RunFailed(run_id=run(number), error=error)


def moved(number: int, kv_tokens: int) -> KvMoved:
    return KvMoved(transfer_id=f"q/kv{number}", report=report(kv_tokens, f"q/kv{number}"))


def broken(number: int, error: MeshError = DOWN) -> KvFailed:
    return KvFailed(transfer_id=f"q/kv{number}", error=error)


def ask(node_id: str, cause: MoveCause = MoveCause.OPERATOR) -> MoveRequested:
    return MoveRequested(target_node_id=node_id, cause=cause)


def replay(node_id: str) -> MoveRequested:
    """Run 1 is the target's prefill, run 2 goes on there."""
    return MoveRequested(target_node_id=node_id, cause=MoveCause.OPERATOR, way=MoveWay(tactic=Tactic.REPLAY))


def release(node_id: str, number: int) -> Release:
    return Release(node_id=node_id, run_id=run(number))


def leg(node_id: str, number: int) -> LegDone:
    return LegDone(node_id=node_id, run_id=run(number), record=LEG)


def text(player: Player) -> list[int]:
    emitted: list[int] = []
    for emit in player.of(Emit):
        assert emit.offset_tokens == len(emitted)
        emitted.extend(emit.ids)
    return emitted


@pytest.mark.parametrize("node_id", ["edge", "core"])
def test_one_node_does_all(node_id: str) -> None:
    player = Player(spec(node_id))
    assert player.begin() == (start(node_id, 0),)
    assert player(RunPrefilled(run_id=run(0), tokens=4, cached_tokens=2)) == ()
    assert player(tokens(0, 4, 5)) == (Emit(offset_tokens=0, ids=(4, 5), logprobs=(), node_id=node_id),)
    player(tokens(0, 6))
    usage = Usage(prompt_tokens=4, completion_tokens=3, cached_tokens=2)
    assert player(finished(0)) == (
        leg(node_id, 0),
        Finish(reason=FinishReason.STOP, stop_string="END", usage=usage, ttft_s=2.0, total_s=4.0),
    )
    assert (player.runner.phase, player.runner.node_id, player.runner.generated) == (Phase.ENDED, node_id, (4, 5, 6))


def test_a_split_fetches_the_cores_prefill_and_decodes_at_the_edge() -> None:
    player = Player(spec("core>edge"))
    assert player.begin() == (
        MoveKv(
            transfer_id="q/kv0", source_node_id="core", target_node_id="edge", source=KvSourceKind.PREFILL,
            source_run=run(0), target_run=run(1), token_ids=PROMPT[:-1], max_tokens=12, codec="f16",
        ),
    )  # fmt: skip
    done = KvMoved(transfer_id="q/kv0", report=report(3, leg=LEG, skipped=1))
    assert player(done) == (leg("core", 0), start("edge", 2, kv_from=1))
    player(RunPrefilled(run_id=run(2), tokens=4, cached_tokens=3))
    migration, freed, emit = player(tokens(2, 4))
    assert isinstance(migration, EmitMigration)
    assert freed == release("core", 0)
    assert emit == Emit(offset_tokens=0, ids=(4,), logprobs=(), node_id="edge")
    assert (migration.from_node_id, migration.to_node_id, migration.cause) == ("core", "edge", MoveCause.PLAN)
    assert (migration.kv_tokens, migration.kv_wire_bytes, migration.offset_tokens) == (3, 300, 0)
    assert (migration.pause_s, migration.transfer_s, migration.recomputed) == (0.0, 0.5, False)
    player(finished(2))
    assert player.of(Finish)[0].usage.cached_tokens == 1


def test_a_split_of_one_token_is_run_at_the_edge() -> None:
    one = spec("core>edge")
    player = Player(type(one)(request_id="q", prompt_ids=(7,), max_tokens=2, plan=one.plan))
    assert player.begin() == (StartRun(node_id="edge", run_id=run(0), token_ids=(7,), kv_from=None),)


def test_an_offload_moves_to_the_core_after_the_first_token() -> None:
    player = Player(spec("edge>core"))
    player.begin()
    emit, move = player(tokens(0, 4))
    assert isinstance(emit, Emit)
    assert move == MoveKv(
        transfer_id="q/kv0", source_node_id="edge", target_node_id="core", source=KvSourceKind.RUNNING,
        source_run=run(0), target_run=run(1), token_ids=(*PROMPT, 4), max_tokens=12, codec="f16",
    )  # fmt: skip
    player(tokens(0, 5))
    assert player(held(0, 5)) == (leg("edge", 0),)
    assert player(moved(0, 5)) == (start("core", 2, 4, 5, kv_from=1),)
    migration, *_ = player(tokens(2, 6))
    assert isinstance(migration, EmitMigration)
    assert (migration.cause, migration.offset_tokens, migration.pause_s) == (MoveCause.PLAN, 2, 3.0)
    assert release("edge", 0) in player.effects
    assert text(player) == [4, 5, 6]


@pytest.mark.parametrize("kv_first", [True, False])
def test_a_move_works_in_either_order_of_held_and_moved(kv_first: bool) -> None:
    player = Player(spec("core"))
    player.begin()
    player(tokens(0, 4))
    player(ask("edge"))
    if kv_first:
        assert player(moved(0, 6)) == ()
        player(tokens(0, 5))
        player(tokens(0, 6))
        assert player(held(0, 6)) == (leg("core", 0), start("edge", 2, 4, 5, 6, kv_from=1))
    else:
        player(tokens(0, 5))
        player(tokens(0, 6))
        assert player(held(0, 6)) == (leg("core", 0),)
        assert player(moved(0, 6)) == (start("edge", 2, 4, 5, 6, kv_from=1),)
    assert release("core", 0) not in player.effects
    player(tokens(2, 7))
    assert release("core", 0) in player.effects
    player(finished(2))
    assert text(player) == [4, 5, 6, 7]
    assert len(player.of(EmitMigration)) == len(player.of(Finish)) == 1


def test_a_failed_transfer_of_a_run_that_goes_on_changes_nothing() -> None:
    player = Player(spec("core"))
    player.begin()
    player(tokens(0, 4))
    player(ask("edge"))
    # Its last word may have been lost, so what it may have is freed.
    assert player(broken(0)) == (
        release("edge", 1),
        MoveFailed(target_node_id="edge", cause=MoveCause.OPERATOR, error=DOWN),
    )
    player(tokens(0, 5))
    player(finished(0))
    assert text(player) == [4, 5]
    assert player.of(StartRun) == [start("core", 0)]


@pytest.mark.parametrize("held_first", [True, False])
def test_a_failed_transfer_of_a_paused_run_resumes_from_its_hold(held_first: bool) -> None:
    player = Player(spec("core"))
    player.begin()
    player(tokens(0, 4))
    player(ask("edge"))
    for event in (held(0, 4), broken(0)) if held_first else (broken(0), held(0, 4)):
        player(event)
    assert player.of(StartRun)[-1] == start("core", 2, 4, kv_from=0)
    player(tokens(2, 5))
    player(finished(2))
    assert text(player) == [4, 5]
    assert player.of(EmitMigration) == []
    assert len(player.of(MoveFailed)) == 1


def test_a_target_that_fails_before_its_first_token_sends_the_request_back_to_its_source() -> None:
    player = Player(spec("core", "spare"))
    player.begin()
    player(tokens(0, 4))
    player(ask("edge"))
    player(held(0, 4))
    player(moved(0, 4))
    error = errors.Internal("broken")  # whatever it is: the source is still fine
    effects = player(failed(2, error))
    assert effects == (
        release("edge", 1),
        MoveFailed(target_node_id="edge", cause=MoveCause.OPERATOR, error=error),
        start("core", 3, 4, kv_from=0),
    )
    player(tokens(3, 5))
    assert player.of(EmitMigration) == []
    assert text(player) == [4, 5]


def test_a_source_hold_that_is_gone_is_recomputed_there() -> None:
    player = Player(spec("core"))
    player.begin()
    player(tokens(0, 4))
    player(ask("edge"))
    player(held(0, 4))
    player(moved(0, 4))
    player(failed(2))
    assert player(failed(3, errors.NotFound("expired")))[-1] == start("core", 4, 4)


def test_a_target_that_fails_later_replays_where_the_request_came_from() -> None:
    player = Player(spec("core", "spare"))
    player.begin()
    player(tokens(0, 4))
    player(ask("edge"))
    player(held(0, 4))
    player(moved(0, 4))
    player(tokens(2, 5))
    assert player(failed(2)) == (start("core", 3, 4, 5),)
    assert player(failed(3)) == (start("spare", 4, 4, 5),)
    migration, *_ = player(tokens(4, 6))
    assert isinstance(migration, EmitMigration)
    assert (migration.from_node_id, migration.to_node_id) == ("edge", "spare")
    assert (migration.cause, migration.recomputed, migration.kv_wire_bytes) == (MoveCause.FALLBACK, True, 0)
    assert text(player) == [4, 5, 6]


def test_tokens_are_replayed_on_fallbacks_in_order_and_failed_nodes_are_left_out() -> None:
    player = Player(spec("core", "core>edge", "edge", "spare"))
    player.begin()
    player(tokens(0, 4, 5))
    assert player(failed(0)) == (start("edge", 1, 4, 5),)
    assert player(failed(1)) == (start("spare", 2, 4, 5),)
    last = errors.Draining("bye")
    assert player(failed(2, last)) == (
        Fail(error=last, usage=Usage(prompt_tokens=4, completion_tokens=2, cached_tokens=0)),
    )


@pytest.mark.parametrize(
    ("error", "made_tokens", "elsewhere"),
    [
        (errors.NodeUnreachable("x"), True, True),
        (errors.PayloadCorrupt("x"), True, True),
        (errors.StalePlan("x"), True, True),
        (errors.LeaseLost("x"), False, True),
        (errors.Cancelled("the node closed"), True, True),
        (errors.Overloaded("x"), False, True),
        (errors.Overloaded("x"), True, False),
        (errors.InvalidRequest("x"), False, False),
        (errors.PolicyDenied("x"), False, False),
        (errors.Expired("x"), False, False),
        (errors.Internal("x"), True, False),
    ],
)
def test_the_errors_retry_rule_decides(error: MeshError, made_tokens: bool, elsewhere: bool) -> None:
    player = Player(spec("core", "edge"))
    player.begin()
    if made_tokens:
        player(tokens(0, 4))
    effects = player(failed(0, error))
    assert isinstance(effects[-1], StartRun if elsewhere else Fail)
    if not elsewhere:
        assert player.of(Fail)[0].error is error


def test_a_split_whose_kv_cannot_be_used_is_recomputed_at_its_target() -> None:
    player = Player(spec("core>edge", "spare"))
    player.begin()
    effects = player(broken(0, errors.KvIncompatible("layout")))
    assert effects[0] == release("edge", 1)
    assert effects[2:] == (release("core", 0), start("edge", 2))


def test_a_split_whose_prefill_node_is_down_falls_back() -> None:
    player = Player(spec("core>edge", "core", "edge"))
    player.begin()
    assert player(broken(0, errors.NodeUnreachable("gone", node="core")))[-1] == start("edge", 2)


def test_the_kept_prefill_serves_a_fallback_at_its_node() -> None:
    player = Player(spec("core>edge", "core"))
    player.begin()
    player(moved(0, 3))
    assert player(failed(2))[-1] == start("core", 3, kv_from=0)


def test_a_split_after_a_split_gives_up_the_first_prefill() -> None:
    player = Player(spec("core>edge", "core>spare", "core"))
    player.begin()
    player(moved(0, 3))
    effects = player(failed(2))
    assert release("core", 0) in effects
    assert isinstance(effects[-1], MoveKv)
    assert effects[-1].target_node_id == "spare"
    assert player(broken(1))[-1] == start("core", 5)


def test_kv_that_reaches_beyond_the_tokens_is_not_used() -> None:
    player = Player(spec("core"))
    player.begin()
    player(tokens(0, 4))
    player(ask("edge"))
    player(held(0, 4))
    assert player(moved(0, 5))[0] == release("edge", 1)
    assert player.of(StartRun)[-1] == start("core", 2, 4, kv_from=0)


def test_a_run_that_finishes_while_it_moves_ends_the_request_and_frees_the_target() -> None:
    player = Player(spec("core"))
    player.begin()
    player(tokens(0, 4))
    player(ask("edge"))
    effects = player(finished(0))
    assert effects[:3] == (leg("core", 0), CancelMove(transfer_id="q/kv0"), release("edge", 1))
    assert isinstance(effects[3], MoveFailed)
    assert isinstance(effects[4], Finish)
    assert player(moved(0, 4)) == (release("edge", 1), release("core", 0))


def test_a_source_that_dies_while_it_moves_falls_back_unless_all_its_tokens_came() -> None:
    early, late = Player(spec("core", "spare")), Player(spec("core", "spare"))
    for player in (early, late):
        player.begin()
        player(tokens(0, 4))
        player(ask("edge"))
    assert early(failed(0))[-1] == start("spare", 2, 4)
    late(tokens(0, 5))
    late(moved(0, 5))
    assert late(failed(0))[-1] == start("edge", 2, 4, 5, kv_from=1)


def test_a_node_that_dies_after_the_last_token_leaves_nothing_to_replay() -> None:
    for runner_spec, reason in (
        (spec("core", "edge", max_tokens=2), FinishReason.LENGTH),
        (spec("core", "edge", eos=[5]), FinishReason.STOP),
    ):
        player = Player(runner_spec)
        player.begin()
        player(tokens(0, 4, 5))
        effects = player(failed(0))
        assert [type(e) for e in effects] == [Finish]
        assert player.of(Finish)[0].reason is reason


def test_a_node_that_pauses_a_run_for_no_reason_is_left() -> None:
    player = Player(spec("core", "edge"))
    player.begin()
    assert player(held(0, 4))[-1] == start("edge", 1)
    assert release("core", 0) in player.effects
    player(tokens(1, 4))
    assert player(held(1, 4))[-1] == start("edge", 2, 4, kv_from=1)


def in_phase(phase: Phase) -> Player:
    steps: dict[Phase, list[Event]] = {
        Phase.FETCHING: [],
        Phase.RUNNING: [tokens(0, 4)],
        Phase.MOVING: [tokens(0, 4), ask("edge")],
        Phase.PAUSED: [tokens(0, 4), ask("edge"), held(0, 4)],
        Phase.LANDED: [tokens(0, 4), ask("edge"), moved(0, 4)],
        Phase.REPLAYING: [tokens(0, 4), replay("edge")],
        Phase.ARRIVING: [tokens(0, 4), ask("edge"), held(0, 4), moved(0, 4)],
        Phase.ENDED: [finished(0)],
    }
    player = Player(spec("core>edge" if phase is Phase.FETCHING else "core", "spare"))
    if phase is not Phase.NEW:
        player.begin()
        for event in steps[phase]:
            player(event)
    assert player.runner.phase is phase
    return player


@pytest.mark.parametrize(
    ("phase", "freed"),
    [
        (Phase.NEW, []),
        (Phase.FETCHING, [CancelMove(transfer_id="q/kv0"), release("edge", 1), release("core", 0)]),
        (Phase.RUNNING, [CloseRun(node_id="core", run_id=run(0))]),
        (
            Phase.MOVING,
            [
                CloseRun(node_id="core", run_id=run(0)), release("core", 0), CancelMove(transfer_id="q/kv0"),
                release("edge", 1),
            ],
        ),
        (Phase.PAUSED, [CancelMove(transfer_id="q/kv0"), release("edge", 1), release("core", 0)]),
        (Phase.LANDED, [CloseRun(node_id="core", run_id=run(0)), release("core", 0), release("edge", 1)]),
        (Phase.ARRIVING, [CloseRun(node_id="edge", run_id=run(2)), release("edge", 1), release("core", 0)]),
    ],
)  # fmt: skip
def test_cancel_and_deadline_free_everything_in_every_phase(phase: Phase, freed: list[object]) -> None:
    for event, error in ((Cancelled(), errors.Cancelled), (DeadlineExpired(), errors.Expired)):
        player = in_phase(phase)
        *effects, last = player(event)
        assert [e for e in effects if not isinstance(e, MoveFailed)] == freed
        assert isinstance(last, Fail)
        assert isinstance(last.error, error)
        assert player(Cancelled()) == player(DeadlineExpired()) == ()
        assert len(player.of(MoveKv)) == len(player.of(MoveFailed))


@pytest.mark.parametrize("phase", [p for p in Phase if p is not Phase.RUNNING])
def test_a_move_that_cannot_be_done_now_is_answered(phase: Phase) -> None:
    (answer,) = in_phase(phase)(ask("spare"))
    assert isinstance(answer, MoveFailed)
    assert isinstance(answer.error, errors.NotFound if phase is Phase.ENDED else errors.StalePlan)


def test_a_move_to_where_it_is_is_refused() -> None:
    (answer,) = in_phase(Phase.RUNNING)(ask("core"))
    assert isinstance(answer, MoveFailed)
    assert isinstance(answer.error, errors.InvalidRequest)


def test_late_events_only_free() -> None:
    player = in_phase(Phase.MOVING)
    player(Cancelled())
    assert player(tokens(0, 5)) == ()
    assert player(held(0, 5)) == (release("core", 0),)
    assert player(broken(0)) == (release("core", 0),)
    assert len(player.of(Fail)) == 1
    assert text(player) == [4]


@pytest.mark.parametrize("event", [Begin(), tokens(9, 1), moved(9, 1), held(0, 1)])
def test_what_cannot_come_is_a_bug_of_the_driver(event: Event) -> None:
    player = in_phase(Phase.ENDED)
    with pytest.raises(errors.Internal):
        player(event)


def test_the_table_answers_requests_from_outside_in_every_phase() -> None:
    for phase in Phase:
        assert {Cancelled, DeadlineExpired, MoveRequested} <= set(_TABLE[phase])
    assert {h.__name__ for row in _TABLE.values() for h in row.values()} <= set(dir(PlanRunner))
