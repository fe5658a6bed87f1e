"""`kvmesh bench edge`: does an edge agent serve what llama.cpp's own server does, on the same box?

Both servers run, and one at a time is given work: llama.cpp's is stopped in place (SIGSTOP) while the agent computes,
and the agent idles while the other does. A round gives every case to each of them in turn, in an order that changes
from round to round; the same prompts of token ids, which no cache has seen, greedy, end of sequence ignored, over HTTP
on loopback. Ratios are taken within a round and their median is told. The CPU time of all the processes of a side is
told too: it is steadier than wall time on a machine that others use.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from edge_node.bench.cpu_time import cpu_s_of
from edge_node.bench.rivals import Rival, Sizes, running_agent, running_llama_server
from mesh.bench.http_load import Burst
from mesh.bench.plot import check_plot, save_bars
from mesh.bench.types import BenchContext, BenchResult, Cell, Direction, Goal
from mesh.errors import InvalidRequest
from mesh.machine import usable_threads
from mesh.model.catalogue import DEMO_MODEL, find_model
from mesh.model.description import describe

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 64
SHARED_TOKENS, OWN_TOKENS, SHARERS = 512, 32, 16
_SHARED = f"{SHARERS} sharing {SHARED_TOKENS}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests that are sent at once."""

    name: str
    prompts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One case on one server in one round."""

    output_tokens_per_s: float
    ttft_s: float  # median
    ttft_worst_s: float
    cpu_ms_per_token: float  # of all its processes, prompts included

    @classmethod
    def of(cls, burst: Burst, cpu_s: float) -> Measured:
        """From what the client saw."""
        n = sum(burst.n_tokens)
        return cls(
            output_tokens_per_s=n / burst.wall_s,
            ttft_s=statistics.median(burst.first_s),
            ttft_worst_s=max(burst.first_s),
            cpu_ms_per_token=1000 * cpu_s / n,
        )


Rounds = Mapping[tuple[str, str], Sequence[Measured]]
"""(case, server) -> one of each round."""


class EdgeBench:
    """See the module's docstring."""

    name = "edge"
    question = "Does an edge agent, the mesh's security on, serve what llama.cpp's own server does?"
    defaults: Mapping[str, Cell] = {
        "model": DEMO_MODEL,
        "threads": 0,
        "concurrency": "1,4,8",
        "shared_prefix": True,
        "rounds": 3,
        "slots": 16,
        "slot_tokens": 640,
        "batch_tokens": 256,
        "peers": "unified",
        "peers_folder": "~/kvmesh-peers",
        "budget_s": 480.0,
        "seed": 1,
        "plot": "",
    }

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; no case begins after `budget_s`."""
        plot = check_plot(context.text("plot"))
        sizes = _sizes(context)
        layouts = _layouts(context.text("peers"))
        program = _program(context.text("peers_folder"))
        found: dict[tuple[str, str], list[Measured]] = {}
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-bench-")))
            peers = [
                await stack.enter_async_context(
                    running_llama_server(sizes, program, unified=unified, log=folder / f"llama-{unified}.log")
                )
                for unified in layouts
            ]
            for peer in peers:
                _signal(peer, signal.SIGSTOP)
            rivals = [await stack.enter_async_context(running_agent(sizes, folder / "mesh")), *peers]
            await _rounds(context, rivals, describe(sizes.model_path).vocab_size, found)
            notes = tuple(rival.said for rival in rivals)
        result = report(found, [peer.name for peer in peers], notes)
        if plot is not None:
            save_bars(plot, [str(r["case"]) for r in result.rows if r["server"] == "agent"], _bars(result), _Y)
        return result


_Y = "output tokens/s"


def _bars(result: BenchResult) -> dict[str, list[float]]:
    bars: dict[str, list[float]] = {}
    for row in result.rows:
        bars.setdefault(str(row["server"]), []).append(float(row["output_tokens_per_s"] or 0.0))
    return bars


async def _rounds(
    context: BenchContext, rivals: Sequence[Rival], vocab_size: int, found: dict[tuple[str, str], list[Measured]]
) -> None:
    """Until all rounds are done or the time is up; a case that was begun is done on every server."""
    concurrency = [int(n) for n in context.text("concurrency").split(",") if n.strip()]
    shared, rounds, seed = bool(context.settings["shared_prefix"]), context.count("rounds"), context.count("seed")
    total, done = rounds * len(rivals) * (len(concurrency) + shared), 0
    ends_s = time.monotonic() + context.number("budget_s")
    for rival in rivals:  # threads, allocators and caches of the machine
        context.progress(done, total, f"{rival.name}, warm-up")
        await _measure(rival, next(_cases(random.Random(f"{seed}/warm"), [1], vocab_size, shared=False)))
    for number in range(rounds):
        rng = random.Random(f"{seed}/{number}")
        for case in _cases(rng, concurrency, vocab_size, shared=shared):
            if time.monotonic() > ends_s:
                return
            for rival in rivals if number % 2 else reversed(rivals):
                context.progress(done, total, f"{rival.name}, {case.name}")
                done += 1
                found.setdefault((case.name, rival.name), []).append(await _measure(rival, case))
    context.progress(total, total, "done")


async def _measure(rival: Rival, case: Case) -> Measured:
    n = len(case.prompts)
    with _awake(rival):
        before_s = sum(map(cpu_s_of, rival.pids))
        burst = await rival.server.work(case.prompts, [OUTPUT_TOKENS] * n, [0.0] * n)
        return Measured.of(burst, sum(map(cpu_s_of, rival.pids)) - before_s)


def _cases(rng: random.Random, concurrency: Sequence[int], vocab_size: int, *, shared: bool) -> Iterator[Case]:
    def ids(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size // 2, vocab_size) for _ in range(n))

    for n in concurrency:
        yield Case(name=f"{n} at once", prompts=tuple(ids(PROMPT_TOKENS) for _ in range(n)))
    if shared:
        prefix = ids(SHARED_TOKENS)
        yield Case(name=_SHARED, prompts=tuple(prefix + ids(OWN_TOKENS) for _ in range(SHARERS)))


def report(found: Rounds, peers: Sequence[str], notes: tuple[str, ...]) -> BenchResult:
    """Medians, and ratios to the best peer within each round."""
    rows: list[Mapping[str, Cell]] = []
    goals: list[Goal] = []
    for case in dict.fromkeys(case for case, _ in found):
        ours = found[case, "agent"]
        of_speed = [
            m.output_tokens_per_s / max(found[case, p][i].output_tokens_per_s for p in peers)
            for i, m in enumerate(ours)
        ]
        of_ttft = [m.ttft_s / min(found[case, p][i].ttft_s for p in peers) for i, m in enumerate(ours)]
        for server in ("agent", *peers):
            each = found[case, server]
            rows.append(
                {
                    "case": case,
                    "server": server,
                    "output_tokens_per_s": statistics.median(m.output_tokens_per_s for m in each),
                    "ttft_p50_s": statistics.median(m.ttft_s for m in each),
                    "ttft_worst_s": statistics.median(m.ttft_worst_s for m in each),
                    "cpu_ms_per_token": statistics.median(m.cpu_ms_per_token for m in each),
                    "rounds": len(each),
                    "ratio": statistics.median(of_speed) if server == "agent" else None,
                    "ratios": " ".join(f"{r:.2f}" for r in of_speed) if server == "agent" else "",
                }
            )
        goals += _goals(case, statistics.median(of_speed), statistics.median(of_ttft))
    return BenchResult(rows=tuple(rows), goals=tuple(goals), notes=notes)


def _goals(case: str, speed_ratio: float, ttft_ratio: float) -> list[Goal]:
    least = 0.97 if case == "1 at once" else 1.0
    return [
        Goal(name=f"{case}: output_ratio", value=speed_ratio, goal=least, direction=Direction.AT_LEAST),
        Goal(name=f"{case}: ttft_ratio", value=ttft_ratio, goal=1.0),
    ]


@contextmanager
def _awake(rival: Rival) -> Iterator[None]:
    """llama.cpp's server runs only while it is measured."""
    if rival.name == "agent":
        yield
        return
    _signal(rival, signal.SIGCONT)
    try:
        yield
    finally:
        _signal(rival, signal.SIGSTOP)


def _signal(rival: Rival, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(rival.pids[0], number)


def _program(peers_folder: str) -> Path:
    return Path(peers_folder).expanduser() / "llama-server" / "bin" / "llama-server"


def _layouts(text: str) -> list[bool]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or set(names) - {"unified", "split"}:
        raise InvalidRequest(f"peers are unified, split or both with a comma, got {text!r}", field="peers")
    return [name == "unified" for name in names]


def _sizes(context: BenchContext) -> Sizes:
    model = context.text("model")
    return Sizes(
        model=model,
        model_path=find_model(model),
        threads=context.count("threads") or usable_threads(),
        slots=context.count("slots"),
        slot_tokens=context.count("slot_tokens"),
        batch_tokens=context.count("batch_tokens"),
    )


BENCH = EdgeBench()
