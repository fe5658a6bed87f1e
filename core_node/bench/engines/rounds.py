"""The rounds: every case on every engine in turn, in an order drawn anew each time, with the machine's speed probed
before and after each turn. A part (one case on all engines) is measured again until each of our engines compares often
enough with each peer. An engine that fails is reported, and the others go on without it."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from core_node.bench.engines.fleet import EngineProcess
from core_node.bench.engines.probe import Speed, probe
from core_node.bench.engines.record import Part, Record
from core_node.bench.engines.work import (
    PROMPT_TOKENS,
    Answer,
    Burst,
    Case,
    OpenLoop,
    Rows,
    SharedPrefix,
    Work,
    at_once,
    mixed,
    prompts,
)
from mesh.bench.types import BenchContext
from mesh.errors import MeshError

RATE = "open_loop_rate_per_s"
_DROPPED_RATIO = 3  # for each round that is asked for, at most so many parts are dropped and measured again
_CALIBRATION_REQUESTS = 16
_CHECK = at_once([(504, 3575, 282, 4649, 314)], 12)  # SmolLM2's "The capital of France is"


class Rounds:
    """One run over `processes`, into `record`. `problems`: by engine, why it is out or where it failed."""

    def __init__(
        self, context: BenchContext, processes: Sequence[EngineProcess], record: Record, vocab_size: int
    ) -> None:
        self.problems: dict[str, str] = {}
        self._context = context
        self._processes = list(processes)
        self._record = record
        self._vocab_size = vocab_size
        self._rounds = context.count("rounds")
        self._started_s = time.monotonic()
        self._failed_at: set[tuple[str, str]] = set()  # (engine, case)
        self._out: set[str] = set()  # engines that did not start
        self._checked: dict[str, tuple[int, ...]] = {}  # what each continued the check's prompt with

    async def run(self) -> None:
        """Until each case has its rounds, or time is up. Leaves no process behind."""
        try:
            if any(map(self._left, self._cases(rate_per_s=1.0))):
                await self._start_all()
                await self._settle_rate()
                await self._go_round(self._cases(rate_per_s=float(self._record.work.get(RATE, 1.0))))
        finally:
            await asyncio.gather(*(process.stop() for process in self._processes))

    def notes(self) -> list[str]:
        """What a reader must know beside the figures."""
        said = {p.engine.name: p.said for p in self._processes if p.said} | self._record.said
        notes = [f"{name}: {what}" for name, what in said.items()]
        notes += [f"{name}: {problem}" for name, problem in self.problems.items()]
        ours = self._checked.get("kvmesh")
        for name, ids in self._checked.items():
            if ours is not None and name != "kvmesh":
                same = sum(a == b for a, b in zip(ids, ours, strict=True))
                notes.append(f"{name}: {same} of {len(ours)} greedy tokens of a known prompt are those of kvmesh")
        if rate := self._record.work.get(RATE):
            notes.append(f"open loop: {rate:.3g} requests/s")
        notes += self._comparisons()
        return notes

    def _comparisons(self) -> list[str]:
        """How many parts the ratios are of, and what they would be of all parts, on a machine that moved or not."""
        record, notes = self._record, []
        anyhow = replace(record, tolerance_ratio=math.inf)
        for row in record.rows():
            for ours, peer in self._pairs():
                ratios = anyhow.ratios(ours, peer, row, "output_tokens_per_s")
                if ratios:
                    counted = len(record.ratios(ours, peer, row, "output_tokens_per_s"))
                    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                    parts = f"over all {len(ratios)} parts, of which {counted} count"
                    notes.append(f"{row}: {ours} to {peer} {spread} in output tokens/s {parts}")
        notes.append(
            f"a part counts for two engines if the machine's speed moved by at most {record.tolerance_ratio:.0%} "
            "around their turns"
        )
        return notes

    def _pairs(self) -> list[tuple[str, str]]:
        """Each of our engines with each peer of its kind."""
        engines = [p.engine for p in self._processes]
        return [(a.name, b.name) for a in engines if a.ours for b in engines if not b.ours and a.kind is b.kind]

    def _cases(self, rate_per_s: float) -> list[Case]:
        context = self._context
        cases: list[Case] = [Burst(int(n)) for n in context.text("concurrency").split(",") if n]
        if context.settings["shared_prefix"]:
            cases.append(SharedPrefix())
        if requests := context.count("open_loop_requests"):
            cases.append(
                OpenLoop(
                    requests=requests,
                    rate_per_s=rate_per_s,
                    ttft_goal_s=context.number("ttft_goal_s"),
                    tpot_goal_s=context.number("tpot_goal_s"),
                )
            )
        return cases

    async def _start_all(self) -> None:
        for i, process in enumerate(self._processes):
            self._context.progress(i, len(self._processes), f"starting {process.engine.name}")
            await self._start(process)

    async def _start(self, process: EngineProcess) -> None:
        """Start one, have it work off what is lazy in it, and stop it in place."""
        try:
            await process.start()
            check = await process.work(_CHECK)
            await process.work(at_once(prompts(self._rng("warm up"), self._vocab_size, 2, PROMPT_TOKENS), 4))
        except MeshError as exc:
            self.problems[process.engine.name] = str(exc)
            self._out.add(process.engine.name)
            await process.stop()
            return
        if check.ids is not None:
            self._checked[process.engine.name] = check.ids[0]
        process.pause()

    async def _settle_rate(self) -> None:
        """Fix the open loop's rate as a share of what the fastest engine does when it gets such requests at once."""
        if RATE in self._record.work or not self._context.count("open_loop_requests"):
            return
        work = mixed(self._rng("calibration"), self._vocab_size, [0.0] * _CALIBRATION_REQUESTS)
        rates = []
        for process in self._processes:
            if process.running:
                self._context.progress(0, 0, f"open loop's rate: {process.engine.name}")
                answers = await self._turn(process, "calibration", [work])
                rates += [_CALIBRATION_REQUESTS / answer.wall_s for answer in answers]
        if rates:
            self._record.settle(RATE, round(max(rates) * self._context.number("open_loop_ratio"), 3))

    async def _go_round(self, cases: Sequence[Case]) -> None:
        for _ in range(self._rounds * (1 + _DROPPED_RATIO)):
            for case in filter(self._left, cases):
                budget_s = self._context.number("budget_s")
                if 0 < budget_s < time.monotonic() - self._started_s or not any(p.running for p in self._processes):
                    return
                done = sum(min(self._rounds, self._counted(c)) for c in cases)
                self._record.add(await self._part(case, done, self._rounds * len(cases)))

    def _left(self, case: Case) -> bool:
        """Whether a case is to be measured again."""
        return self._counted(case) < self._rounds and self._record.attempts(case.name) < self._rounds * (
            1 + _DROPPED_RATIO
        )

    def _counted(self, case: Case) -> int:
        """How often a case was measured so that it counts for every engine and comparison that can be had."""
        record, name = self._record, case.name
        out = self._out | {engine for engine, at in self._failed_at if at == name}
        turns = [record.turns(p.engine.name, name) for p in self._processes if p.engine.name not in out]
        pairs = [record.comparisons(a, b, name) for a, b in self._pairs() if a not in out and b not in out]
        return min([*turns, *pairs], default=0)

    async def _part(self, case: Case, done: int, total: int) -> Part:
        attempt = self._record.attempts(case.name)
        rng = self._rng(case.name, attempt)
        works = case.works(rng, self._vocab_size)
        threads = self._context.count("threads")
        before = await asyncio.to_thread(probe, threads)
        values: dict[str, Rows] = {}
        speeds: dict[str, list[list[float]]] = {}
        for process in rng.sample(self._processes, len(self._processes)):
            name = process.engine.name
            if (name, case.name) in self._failed_at or not process.running:
                continue
            self._context.progress(done, total, f"{case.name}, try {attempt + 1}: {name}")
            answers = await self._turn(process, case.name, works)
            after = await asyncio.to_thread(probe, threads)
            if answers:
                values[name] = case.rows(works, answers)
                speeds[name] = [_plain(before), _plain(after)]
            before = after
        said = {p.engine.name: p.said for p in self._processes if p.engine.name in values}
        return Part(case=case.name, attempt=attempt, values=values, speeds=speeds, said=said)

    async def _turn(self, process: EngineProcess, case: str, works: Sequence[Work]) -> list[Answer]:
        """The exchanges of one engine; none if it failed. Then it is started afresh, and this case is not given to it
        again."""
        process.resume()
        try:
            await process.work(at_once(prompts(self._rng("wake"), self._vocab_size, 1, 16), 2))
            answers = [await process.work(work) for work in works]
        except MeshError as exc:
            name = process.engine.name
            self.problems[name] = f"failed at {case}: {exc}"
            self._failed_at.add((name, case))
            await self._start(process)
            return []
        process.pause()
        return answers

    def _rng(self, *what: object) -> random.Random:
        return random.Random("/".join(map(str, (self._context.count("seed"), *what))))


def _plain(speed: Speed) -> list[float]:
    return [speed.flop_per_s, speed.read_bytes_per_s]
