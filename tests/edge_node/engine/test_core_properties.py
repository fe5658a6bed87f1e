"""Random commands and steps: every run gives what the model says, whatever was shared, moved, preempted or paused.

The naive model of a run is `continue_`; memory accounting is checked after every step (CoreDriver.step)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mesh.errors import NotFound, Overloaded
from mesh.node.engine import Finished, Held, RunId
from tests.edge_node.engine.cores import OTHER_SALT, SALT, CoreDriver, import_of
from tests.edge_node.engine.list_backend import continue_

HEADS = [[1, 2, 3] * 8, [1, 2, 3] * 3 + [4] * 12, [5, 6] * 10]  # prompts share heads, so that prefixes are found


@dataclass
class Open:
    """A run that has not ended, or a hold: the tokens so far of one generation that may go over several runs."""

    key: int | None
    run_id: str
    prompt: list[int]
    given: list[int]
    salt: bytes
    max_tokens: int


class Commands(RuleBasedStateMachine):
    @initialize(n_cells=st.sampled_from([70, 120, 400]), step=st.sampled_from([8, 16, 63]))
    def start(self, n_cells: int, step: int) -> None:
        self.driver = CoreDriver(n_cells=n_cells, n_sequences=6, max_step_tokens=step, max_context_tokens=64)
        self.open: list[Open] = []
        self.names = 0

    @rule(
        head=st.sampled_from(HEADS),
        tail=st.lists(st.integers(0, 90), min_size=1, max_size=8),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 1),
        salt=st.sampled_from([SALT, OTHER_SALT]),
        prefill_only=st.booleans(),
    )
    def submit(
        self, head: list[int], tail: list[int], max_tokens: int, priority: int, salt: bytes, prefill_only: bool
    ) -> None:
        self.names += 1
        one = Open(None, f"n{self.names}", head + tail, [], salt, max_tokens)
        self._submit(one, priority=priority, prefill_only=prefill_only)

    def _submit(self, one: Open, *, kv_from: str | None = None, priority: int = 0, prefill_only: bool = False) -> None:
        try:
            one.key = self.driver.submit(
                one.prompt + one.given,
                one.run_id,
                prompt_tokens=len(one.prompt),
                max_tokens=one.max_tokens,
                salt=one.salt,
                kv_from=kv_from,
                priority=priority,
                prefill_only=prefill_only,
            )
        except Overloaded:
            return
        if one not in self.open:
            self.open.append(one)

    @rule(n=st.integers(1, 5))
    def step(self, n: int) -> None:
        for _ in range(n):
            self.driver.step()
        self._collect()

    def _collect(self) -> None:
        for one in list(self.open):
            if one.key is None or not self.driver.ended(one.key):
                continue
            one.given += self.driver.ids(one.key)
            assert one.given == continue_(one.prompt, len(one.given))
            last = self.driver.last(one.key)
            if isinstance(last, Finished):
                assert len(one.given) == min(one.max_tokens, 64 - len(one.prompt))
                self.open.remove(one)
            else:
                assert isinstance(last, Held), last
                one.key = None

    def _pick(self, index: int, *, holds: bool) -> Open | None:
        some = [one for one in self.open if (one.key is None) == holds]
        return some[index % len(some)] if some else None

    @rule(index=st.integers(0, 9))
    def pause(self, index: int) -> None:
        if (one := self._pick(index, holds=False)) is not None:
            self.driver.core.book.pause(RunId(one.run_id))
            self.driver.take()
            self._collect()

    @rule(index=st.integers(0, 9))
    def resume(self, index: int) -> None:
        if (one := self._pick(index, holds=True)) is not None:
            self._submit(one, kv_from=one.run_id)

    @rule(index=st.integers(0, 9), holds=st.booleans())
    def release(self, index: int, holds: bool) -> None:
        if (one := self._pick(index, holds=holds)) is not None:
            self.driver.core.book.release(RunId(one.run_id))
            self.driver.take()
            self.open.remove(one)

    @rule(index=st.integers(0, 9))
    def cancel(self, index: int) -> None:
        if (one := self._pick(index, holds=False)) is not None and one.key is not None:
            self.driver.core.book.cancel(one.key)
            self.open.remove(one)

    @rule(index=st.integers(0, 9), cut=st.integers(1, 40))
    def move_to_itself(self, index: int, cut: int) -> None:
        """Export a hold and import it under another name and salt, in two pieces; the hold goes."""
        one = self._pick(index, holds=True)
        kv = self.driver.core.kv
        if one is None or (have := kv.kv_tokens(RunId(one.run_id))) < 2:
            return
        self.names += 1
        name, salt = f"n{self.names}", OTHER_SALT if one.salt == SALT else SALT
        ids = one.prompt + one.given
        try:
            at = kv.open_import(import_of(name, ids, min(64, len(ids) + 5), salt))
        except Overloaded:
            return
        for stop in sorted({min(max(at, cut), have), have}):
            if stop > at:
                kv.write(RunId(name), at, *kv.export(RunId(one.run_id), at, stop))
                at = stop
        self.driver.core.book.release(RunId(one.run_id))
        one.run_id, one.salt = name, salt

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.core.check()
        load = self.driver.core.load()
        assert 0 <= load.kv_used_tokens <= load.kv_capacity_tokens
        assert self.driver.backend.used <= load.kv_capacity_tokens
        for one in self.open:
            self.driver.core.kv.kv_tokens(RunId(one.run_id))

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        while self.open:  # without holds in the way, every run comes to its end
            n_open = len(self.open)
            for one in [o for o in self.open if o.key is None]:
                self.driver.core.book.release(RunId(one.run_id))
                self.open.remove(one)
            self.driver.drain()
            self._collect()
            assert len(self.open) < n_open or any(o.key is None for o in self.open)
        assert self.driver.core.load().kv_used_tokens == 0
        for name in range(self.names + 1):
            with pytest.raises(NotFound):
                self.driver.core.kv.kv_tokens(RunId(f"n{name}"))


TestCommands = Commands.TestCase
TestCommands.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
