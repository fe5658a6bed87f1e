"""The rounds: every case on every engine in turn, interleaved, with the machine's speed probed before and after each
turn. A part (one case on all engines) in which it moved is measured again. An engine that fails is reported, and the
others go on without it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from core_node.bench.engines.fleet import EngineProcess
from core_node.bench.engines.probe import Speed, moved_ratio, probe
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
        parts = len(self._record.parts)
        tolerance = self._context.number("probe_tolerance_ratio")
        notes.append(
            f"{self._record.dropped} of {parts} parts dropped: the machine's speed moved by more than {tolerance:.0%}"
        )
        return notes

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
                done = sum(min(self._rounds, len(self._record.kept(c.name))) for c in cases)
                self._record.add(await self._part(case, done, self._rounds * len(cases)))

    def _left(self, case: Case) -> bool:
        """Whether a case is to be measured again."""
        if len(self._record.kept(case.name)) >= self._rounds:
            return False
        return self._record.attempts(case.name) < self._rounds * (1 + _DROPPED_RATIO)

    async def _part(self, case: Case, done: int, total: int) -> Part:
        attempt = self._record.attempts(case.name)
        works = case.works(self._rng(case.name, attempt), self._vocab_size)
        threads = self._context.count("threads")
        speeds: list[Speed] = [await asyncio.to_thread(probe, threads)]
        values: dict[str, Rows] = {}
        for process in self._processes:
            name = process.engine.name
            if (name, case.name) in self._failed_at or not process.running:
                continue
            self._context.progress(done, total, f"{case.name}, try {attempt + 1}: {name}")
            answers = await self._turn(process, case.name, works)
            if answers:
                values[name] = case.rows(works, answers)
            speeds.append(await asyncio.to_thread(probe, threads))
        moved = moved_ratio(speeds)
        kept = moved <= self._context.number("probe_tolerance_ratio")
        return Part(
            case=case.name,
            attempt=attempt,
            moved_ratio=round(moved, 3),
            kept=kept,
            values=values,
            said={p.engine.name: p.said for p in self._processes if p.engine.name in values},
        )

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
