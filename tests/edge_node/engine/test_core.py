"""The engine core over a model made of lists: what runs give, what they share, and what gives way to what."""

from __future__ import annotations

import numpy as np
import pytest

from edge_node.engine.backend import DecodeStatus
from edge_node.engine.core import BackendBroken
from mesh.errors import AlreadyExists, Cancelled, Internal, InvalidRequest, NotFound, Overloaded, PayloadCorrupt
from mesh.node.engine import Finished, FinishReason, Held, Prefilled, RunId, Tokens
from tests.edge_node.engine.cores import OTHER_SALT, SALT, CoreDriver, import_of
from tests.edge_node.engine.list_backend import EOS, LAYOUT, continue_

PROMPT = list(range(1, 41))


def other_prompt(seed: int, n_tokens: int) -> list[int]:
    return [(seed * 37 + i * (seed + 3)) % 90 for i in range(n_tokens)]


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_alone() -> None:
    d = CoreDriver()
    key = d.run(PROMPT)
    assert d.events[key][0] == Prefilled(40, 0)
    assert d.ids(key) == continue_(PROMPT, 5)
    assert d.last(key) == Finished(FinishReason.LENGTH)
    assert [sum(len(i.token_ids) for i in b) for b in d.backend.batches] == [16, 16, 8, 1, 1, 1, 1]


def test_decodes_are_not_held_up_by_a_prompt() -> None:
    d = CoreDriver()
    first = d.submit(other_prompt(1, 4), max_tokens=10)
    d.step()
    second = d.submit(PROMPT)
    for n in range(2, 6):
        d.step()
        assert len(d.ids(first)) == n
        assert sum(len(i.token_ids) for i in d.backend.batches[-1]) <= 16
    d.drain()
    assert d.ids(first) == continue_(other_prompt(1, 4), 10)
    assert d.ids(second) == continue_(PROMPT, 5)


def test_only_what_is_sampled_asks_for_logits() -> None:
    d = CoreDriver()
    d.run(PROMPT, max_tokens=2)
    d.run(other_prompt(2, 20), prefill_only=True)
    assert [[i.output for i in b] for b in d.backend.batches] == [[False], [False], [True], [True], [False], [False]]


def test_more_runs_than_slots_wait_in_order() -> None:
    d = CoreDriver(max_running=2)
    keys = [d.submit(other_prompt(i, 10)) for i in range(4)]
    urgent = d.submit(other_prompt(9, 10), priority=-1)
    d.step()
    load = d.core.load()
    assert (load.running, load.waiting) == (2, 3)
    assert load.waiting_prefill_tokens > 0
    order: list[int] = []
    while d.step():
        order += [k for k in (*keys, urgent) if d.ended(k) and k not in order]
    assert order[0] == urgent
    assert order[1:] == keys
    assert [d.ids(k) for k in keys] == [continue_(other_prompt(i, 10), 5) for i in range(4)]


def test_the_queue_is_bounded() -> None:
    d = CoreDriver(max_running=1, max_waiting=2)
    for i in range(3):
        d.submit(other_prompt(i, 10))
    with pytest.raises(Overloaded):
        d.submit(other_prompt(3, 10))
    d.drain()
    d.submit(other_prompt(3, 10))


def test_what_can_never_fit_is_refused() -> None:
    d = CoreDriver(max_context_tokens=30)
    with pytest.raises(Overloaded):
        d.submit(other_prompt(0, 31))
    assert d.last(d.run(other_prompt(0, 30))) == Finished(FinishReason.LENGTH)
    assert len(d.ids(d.run(other_prompt(1, 28)))) == 2


def test_names() -> None:
    d = CoreDriver()
    d.submit(PROMPT, "r")
    with pytest.raises(AlreadyExists):
        d.submit(PROMPT, "r")
    with pytest.raises(NotFound):
        d.submit(PROMPT, "s", kv_from="ghost")
    with pytest.raises(NotFound):
        d.core.kv.kv_tokens(RunId("s"))
    with pytest.raises(NotFound):
        d.core.book.pause(RunId("ghost"))
    d.core.book.release(RunId("ghost"))
    d.drain()


def test_end_of_sequence_and_stop_strings() -> None:
    prompt = next(p for i in range(2000) if (p := other_prompt(i, 9)) and EOS in continue_(p, 12)[1:])
    ids = continue_(prompt, 12)
    until_eos = ids[: ids.index(EOS) + 1]
    d = CoreDriver()
    key = d.run(prompt, max_tokens=12, ignore_eos=False)
    assert d.ids(key) == until_eos
    assert d.last(key) == Finished(FinishReason.STOP)
    stop = chr(ord("A") + ids[1]) + chr(ord("A") + ids[2])
    key = d.run(prompt, max_tokens=12, stop=("\x00", stop))
    assert d.ids(key) == ids[:3]
    assert d.last(key) == Finished(FinishReason.STOP, stop)
    moved = d.run(prompt + ids[:2], prompt_tokens=len(prompt), max_tokens=12, stop=(stop,))
    assert d.ids(moved) == ids[2:3]
    assert d.last(moved) == Finished(FinishReason.STOP, stop)
    late = d.run(prompt, max_tokens=6, min_tokens=5, stop=(stop,))
    assert len(d.ids(late)) == 6


def test_a_run_that_is_over_at_the_start_says_so() -> None:
    d = CoreDriver()
    key = d.run(PROMPT, prompt_tokens=35, max_tokens=5)
    assert d.events[key] == [Finished(FinishReason.LENGTH)]
    assert d.backend.batches == []


def test_logprobs_only_if_asked_for() -> None:
    d = CoreDriver()
    with_them = d.run(PROMPT, logprobs=2, max_tokens=1)
    event = next(e for e in d.events[with_them] if isinstance(e, Tokens))
    assert len(event.logprobs) == 1
    assert event.logprobs[0][1][0] == (event.ids[0], event.logprobs[0][0])


# --- prefixes ---------------------------------------------------------------------------------------------------------


def test_a_kept_prefix_is_shared_under_its_salt_only() -> None:
    d = CoreDriver()
    d.run(PROMPT)
    assert d.core.kv.cached_tokens(tuple(PROMPT), SALT) == 39
    assert d.core.kv.cached_tokens(tuple(PROMPT), OTHER_SALT) == 0
    used = d.backend.used
    again = d.run([*PROMPT, 7, 8])
    assert d.prefilled(again) == [Prefilled(42, 40)]
    assert d.ids(again) == continue_([*PROMPT, 7, 8], 5)
    assert d.backend.used == used + 2 + 4  # two more of the prompt, four of five sampled ones
    assert d.prefilled(d.run(PROMPT, salt=OTHER_SALT)) == [Prefilled(40, 0)]


def test_runs_side_by_side_share_a_prompt() -> None:
    d = CoreDriver()
    first = d.submit(PROMPT)
    for _ in range(3):
        d.step()
    second = d.submit([*PROMPT[:30], 5])
    d.drain()
    assert d.prefilled(second) == [Prefilled(31, 30)]
    assert d.ids(second) == continue_([*PROMPT[:30], 5], 5)
    assert d.ids(first) == continue_(PROMPT, 5)


def test_a_longer_run_replaces_the_prefix_it_grew_from() -> None:
    d = CoreDriver(n_sequences=5)
    conversation = PROMPT[:10]
    for _ in range(6):
        key = d.run(conversation, max_tokens=3)
        conversation = conversation + d.ids(key) + [1, 2]
    d.run(PROMPT[:5], max_tokens=1)  # nothing that is not there already
    assert d.backend.used == len(conversation) - 3  # one entry: the last sampled token and the two after it have no KV


def test_kept_prefixes_give_way_oldest_first() -> None:
    d = CoreDriver(n_cells=100)
    prompts = [other_prompt(i, 20) for i in range(1, 5)]
    for prompt in prompts:
        d.run(prompt, max_tokens=1)
    d.run(prompts[0], max_tokens=1)  # used again
    d.run(other_prompt(8, 30), max_tokens=1)
    cached = [d.core.kv.cached_tokens(tuple(p), SALT) for p in prompts]
    assert cached == [19, 0, 19, 19]


def test_sequence_ids_run_out_before_cells() -> None:
    d = CoreDriver(n_sequences=3, max_running=2)
    for i in range(12):
        key = d.run(other_prompt(i, 10), max_tokens=2)
        assert d.ids(key) == continue_(other_prompt(i, 10), 2)


def test_the_only_kept_prefix_becomes_the_run_when_no_id_is_left() -> None:
    d = CoreDriver(n_sequences=2, max_running=2)
    d.run(PROMPT, max_tokens=1)
    d.run(other_prompt(1, 5), "h", prefill_only=True)
    key = d.run([*PROMPT[:20], 3], max_tokens=4)
    assert d.prefilled(key) == [Prefilled(21, 20)]
    assert d.ids(key) == continue_([*PROMPT[:20], 3], 4)


# --- room -------------------------------------------------------------------------------------------------------------


def test_the_last_run_gives_way_and_is_computed_again() -> None:
    d = CoreDriver(n_cells=64, max_context_tokens=60)
    keys = [d.submit(other_prompt(i, 18), max_tokens=30) for i in range(3)]
    d.drain()
    assert d.core.load().preempted_total > 0
    for i, key in enumerate(keys):
        assert d.ids(key) == continue_(other_prompt(i, 18), 30)
        assert len(d.prefilled(key)) == 1
    assert d.core.load().prompt_tokens_total == 3 * 18


def test_a_hold_is_never_preempted_and_runs_wait_for_it() -> None:
    d = CoreDriver(n_cells=64)
    d.run(other_prompt(1, 50), "h", prefill_only=True)
    key = d.submit(other_prompt(2, 30))
    d.drain()
    assert not d.ended(key)
    assert d.core.load().waiting == 1
    d.core.book.release(RunId("h"))
    d.drain()
    assert d.ids(key) == continue_(other_prompt(2, 30), 5)


def test_waiting_runs_that_brought_kv_do_not_block_each_other() -> None:
    d = CoreDriver(n_cells=64, max_running=1)
    for name, seed in (("a", 1), ("b", 2)):
        d.run(other_prompt(seed, 25), name, prefill_only=True)
    first = d.submit(other_prompt(1, 25) + [1] * 20, kv_from="a")
    second = d.submit(other_prompt(2, 25) + [1] * 20, kv_from="b")
    d.drain()
    assert d.ids(first) == continue_(other_prompt(1, 25) + [1] * 20, 5)
    assert d.ids(second) == continue_(other_prompt(2, 25) + [1] * 20, 5)


def test_cancel_and_release_free_at_once() -> None:
    d = CoreDriver()
    running, waiting = d.submit(PROMPT, "r"), d.submit(other_prompt(1, 30), "w")
    d.step()
    d.core.book.cancel(running)
    d.core.book.release(RunId("w"))
    d.take()
    assert isinstance(d.last(waiting), Cancelled)
    assert d.core.load().kv_used_tokens == 0
    assert not d.step()
    assert running not in d.events or not d.ended(running)
    d.core.book.cancel(running)  # late, and for nothing


# --- holds ------------------------------------------------------------------------------------------------------------


def test_pause_in_every_phase() -> None:
    whole = continue_(PROMPT, 8)
    for steps in range(9):
        d = CoreDriver()
        key = d.submit(PROMPT, "r", max_tokens=8)
        for _ in range(steps):
            d.step()
        d.core.book.pause(RunId("r"))
        d.take()
        held = d.last(key)
        assert isinstance(held, Held)
        assert held.kv_tokens == d.core.kv.kv_tokens(RunId("r")) == min(16 * steps, 40) + max(0, steps - 3)
        assert len(d.ids(key)) == max(0, steps - 2)
        with pytest.raises(NotFound):
            d.core.book.pause(RunId("r"))
        rest = d.run(PROMPT + d.ids(key), "r", prompt_tokens=40, max_tokens=8, kv_from="r")
        assert d.ids(key) + d.ids(rest) == whole
        assert d.core.load().kv_used_tokens == 0


def test_a_prefill_tells_its_progress_and_becomes_a_hold() -> None:
    d = CoreDriver()
    key = d.run(PROMPT, "h", prefill_only=True)
    assert d.events[key] == [Prefilled(16, 0), Prefilled(32, 0), Prefilled(40, 0), Held(40)]
    assert d.core.load().kv_used_tokens == 40
    again = d.run(PROMPT, "h2", prefill_only=True)  # all of it is there
    assert d.events[again] == [Prefilled(40, 40), Held(40)]
    key = d.run(PROMPT, kv_from="h")  # and the last token is computed again, for its logits
    assert d.prefilled(key) == [Prefilled(40, 39)]
    assert d.ids(key) == continue_(PROMPT, 5)


def test_a_hold_of_other_tokens_or_namespace_is_refused_and_stays() -> None:
    d = CoreDriver()
    d.run(PROMPT, "h", prefill_only=True)
    with pytest.raises(InvalidRequest):
        d.submit([9, *PROMPT[1:]], kv_from="h")
    with pytest.raises(InvalidRequest):
        d.submit(PROMPT, kv_from="h", salt=OTHER_SALT)
    assert d.core.kv.kv_tokens(RunId("h")) == 40


# --- import and export ------------------------------------------------------------------------------------------------


def test_kv_moves_between_two_cores_in_chunks() -> None:
    source, target = CoreDriver(), CoreDriver()
    source.run(PROMPT, "h", prefill_only=True)
    assert target.core.kv.open_import(import_of("i", PROMPT, 60)) == 0
    assert target.core.load().kv_used_tokens == 60  # promised
    for start, stop in ((0, 7), (7, 8), (8, 39)):
        target.core.kv.write(RunId("i"), start, *source.core.kv.export(RunId("h"), start, stop))
        target.core.check()
    key = target.run(PROMPT, kv_from="i")
    assert target.prefilled(key) == [Prefilled(40, 39)]
    assert target.ids(key) == continue_(PROMPT, 5)


def test_the_head_is_prefilled_while_the_tail_arrives() -> None:
    source, target = CoreDriver(), CoreDriver()
    source.run(PROMPT, "h", prefill_only=True)
    target.run(PROMPT[:20], "i", prefill_only=True)
    target.core.kv.write(RunId("i"), 20, *source.core.kv.export(RunId("h"), 20, 39))
    assert target.ids(target.run(PROMPT, kv_from="i")) == continue_(PROMPT, 5)


def test_an_import_starts_from_whole_blocks_of_the_cache() -> None:
    d = CoreDriver()
    d.run(PROMPT, "h", prefill_only=True)
    k, v = d.core.kv.export(RunId("h"), 32, 39)
    assert d.core.kv.open_import(import_of("i", PROMPT, 50)) == 32
    d.core.kv.write(RunId("i"), 32, k, v)
    assert d.ids(d.run(PROMPT, kv_from="i")) == continue_(PROMPT, 5)


def test_wrong_writes_change_nothing() -> None:
    d = CoreDriver()
    k, v = np.zeros(LAYOUT.shape(4), np.float16), np.zeros(LAYOUT.shape(4), np.float16)
    d.core.kv.open_import(import_of("i", PROMPT, 40))
    d.core.kv.write(RunId("i"), 0, k, v)
    for start in (0, 3, 5):
        with pytest.raises(InvalidRequest):
            d.core.kv.write(RunId("i"), start, k, v)
    big = np.zeros(LAYOUT.shape(37), np.float16)
    with pytest.raises(InvalidRequest):
        d.core.kv.write(RunId("i"), 4, big, big)
    d.submit(other_prompt(1, 10), "r")
    with pytest.raises(InvalidRequest):
        d.core.kv.write(RunId("r"), 0, k, v)
    with pytest.raises(NotFound):
        d.core.kv.write(RunId("ghost"), 0, k, v)
    assert d.core.kv.kv_tokens(RunId("i")) == 4
    d.core.check()


def test_imports_that_do_not_fit_are_refused() -> None:
    d = CoreDriver(n_cells=100, n_sequences=5)
    with pytest.raises(Overloaded):
        d.core.kv.open_import(import_of("i", PROMPT, 101))
    with pytest.raises(InvalidRequest):
        d.core.kv.open_import(import_of("i", PROMPT, 39))
    with pytest.raises(InvalidRequest):
        d.core.kv.open_import(import_of("i", [], 39))
    d.core.kv.open_import(import_of("a", PROMPT, 60))
    with pytest.raises(Overloaded):  # promised cells are not promised twice
        d.core.kv.open_import(import_of("b", PROMPT, 50))
    with pytest.raises(AlreadyExists):
        d.core.kv.open_import(import_of("a", PROMPT, 40))
    for i in range(4):
        d.core.kv.open_import(import_of(f"c{i}", [i], 1))
    with pytest.raises(Overloaded):
        d.core.kv.open_import(import_of("d", [1], 1))


def test_promised_cells_are_kept_from_runs() -> None:
    d = CoreDriver(n_cells=100)
    d.core.kv.open_import(import_of("i", PROMPT, 60))
    key = d.submit(other_prompt(1, 41), max_tokens=3)
    d.drain()
    assert not d.ended(key)
    d.core.book.release(RunId("i"))
    d.drain()
    assert d.ids(key) == continue_(other_prompt(1, 41), 3)


def test_an_import_that_was_dropped_leaves_no_prefix() -> None:
    d = CoreDriver()
    k = np.ones(LAYOUT.shape(40), np.float16)
    d.core.kv.open_import(import_of("i", PROMPT, 50))
    d.core.kv.write(RunId("i"), 0, k, k)
    d.core.book.release(RunId("i"))
    assert d.core.kv.cached_tokens(tuple(PROMPT), SALT) == 0
    assert d.backend.used == 0


def test_a_failed_restore_loses_that_hold_and_no_other() -> None:
    d = CoreDriver()
    d.run(PROMPT, "h", prefill_only=True)
    k, v = d.core.kv.export(RunId("h"), 0, 10)
    d.core.kv.open_import(import_of("i", PROMPT[:20], 30, OTHER_SALT))
    d.core.kv.write(RunId("i"), 0, k, v)
    d.backend.refuse_restore = True
    with pytest.raises(PayloadCorrupt, match="torn"):
        d.core.kv.write(RunId("i"), 10, k, v)
    with pytest.raises(NotFound):
        d.core.kv.kv_tokens(RunId("i"))
    d.core.check()
    assert d.ids(d.run(PROMPT, kv_from="h")) == continue_(PROMPT, 5)


# --- llama.cpp's bad days ---------------------------------------------------------------------------------------------


def test_a_failed_batch_ends_its_runs_and_no_other() -> None:
    d = CoreDriver(max_running=1)
    first, second = d.submit(PROMPT), d.submit(other_prompt(1, 10))
    d.backend.fail_next = [DecodeStatus.FAILED]
    d.drain()
    assert isinstance(d.last(first), Internal)
    assert "torn" in str(d.last(first))
    assert d.ids(second) == continue_(other_prompt(1, 10), 5)


def test_batch_after_batch_failing_asks_for_another_process() -> None:
    d = CoreDriver(max_running=1)
    for i in range(3):
        d.submit(other_prompt(i, 10))
    d.backend.fail_next = [DecodeStatus.FAILED] * 3
    with pytest.raises(BackendBroken):
        d.drain()


def test_no_slot_evicts_then_preempts_then_fails() -> None:
    d = CoreDriver()
    d.run(other_prompt(5, 20), max_tokens=1)
    d.backend.fail_next = [DecodeStatus.NO_SLOT]
    key = d.run(PROMPT)  # the kept prefix went, and it could go on
    assert d.ids(key) == continue_(PROMPT, 5)
    assert d.core.kv.cached_tokens(tuple(other_prompt(5, 20)), SALT) == 0
    d = CoreDriver()
    keys = [d.submit(other_prompt(i, 10)) for i in range(2)]
    d.backend.fail_next = [DecodeStatus.NO_SLOT]
    d.drain()
    assert d.core.load().preempted_total == 1
    assert [d.ids(k) for k in keys] == [continue_(other_prompt(i, 10), 5) for i in range(2)]
    d.backend.fail_next = [DecodeStatus.NO_SLOT] * 9
    assert isinstance(d.last(d.run(other_prompt(7, 10))), Internal)


def test_a_logit_that_is_no_number_fails_that_run() -> None:
    d = CoreDriver()
    rows = d.backend.logits
    d.backend.logits = lambda item: rows(item) * np.float32("nan")  # type: ignore[method-assign]
    assert isinstance(d.last(d.run(PROMPT)), Internal)
    assert d.core.load().kv_used_tokens == 0


def test_self_test_wants_an_idle_engine_and_leaves_nothing() -> None:
    d = CoreDriver()
    result = d.core.self_test()
    assert result.prefill_tokens_per_s > 0
    assert result.decode_tokens_per_s > 0
    assert d.backend.used == 0
    assert d.core.load().prefill_tokens_per_s == pytest.approx(result.prefill_tokens_per_s)
    d.submit(PROMPT)
    with pytest.raises(Overloaded):
        d.core.self_test()
