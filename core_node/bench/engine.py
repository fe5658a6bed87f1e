"""`kvmesh bench engine`: the core engine beside other engines on the same machine, on the same work.

Each engine runs in a process of its own and only one computes at a time; the others are stopped in place. In-process
engines are compared with one another, servers over HTTP with one another. A round is every case on every engine in
turn. README.md in this folder explains the settings and how peers are installed.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from core_node.bench.engines.fleet import EngineProcess
from core_node.bench.engines.installed import Bench, chosen, vllm_dtype
from core_node.bench.engines.probe import limits
from core_node.bench.engines.record import Record
from core_node.bench.engines.report import Limits, plot, report_goals, report_rows
from core_node.bench.engines.rounds import RATE, Rounds
from core_node.bench.step_profile import profile_decode
from mesh.bench.types import BenchContext, BenchResult, Cell
from mesh.cli.machine_checks import cpu_flags
from mesh.model.catalogue import DEMO_MODEL, find_model
from mesh.model.description import describe

_OF_THE_WORK = (
    "threads", "concurrency", "shared_prefix", "open_loop_requests", "ttft_goal_s", "tpot_goal_s", "seed", "vllm_dtype",
    "vllm_eager",
)  # fmt: skip


class EngineBench:
    """See the module's docstring."""

    name = "engine"
    question = "Output tokens/s, prefill, TTFT of the core engine against other engines here, as ratios?"
    defaults: Mapping[str, Cell] = {
        "peers": "auto",
        "ours": "kvmesh,kvmesh-int8,kvmesh-http",
        "peers_folder": "~/kvmesh-peers",
        "vllm_dtype": "auto",
        "vllm_eager": False,
        "model": DEMO_MODEL,
        "threads": 2,
        "concurrency": "1,8,32",
        "shared_prefix": True,
        "open_loop_requests": 32,
        "open_loop_rate_per_s": 0.0,
        "open_loop_ratio": 0.5,
        "ttft_goal_s": 2.0,
        "tpot_goal_s": 0.2,
        "rounds": 3,
        "probe_tolerance_ratio": 0.15,
        "work_timeout_s": 300.0,
        "budget_s": 0.0,
        "record": "",
        "profile": True,
        "plot": "",
        "seed": 1,
    }

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; many minutes. Raises InvalidRequest for a setting that cannot be."""
        model = find_model(context.text("model"))
        description = describe(model, model_id="bench")
        bench = Bench(
            model=model,
            peers_folder=_path(context.text("peers_folder")) or Path(),
            threads=context.count("threads"),
            vllm_dtype=vllm_dtype(context.text("vllm_dtype"), cpu_flags()),
            vllm_eager=bool(context.settings["vllm_eager"]),
        )
        engines = chosen(bench, context.text("ours"), context.text("peers"))
        record = Record.open(
            _path(context.text("record")),
            _work(context, model),
            tolerance_ratio=context.number("probe_tolerance_ratio"),
        )
        async with ended_by_sigterm(), _folder() as folder:
            timeout_s = context.number("work_timeout_s")
            processes = [EngineProcess(e, folder, work_timeout_s=timeout_s) for e in engines if not e.missing]
            rounds = Rounds(context, processes, record, description.vocab_size)
            rounds.problems |= {
                e.name: f"not installed: there is no {', no '.join(map(str, e.missing))}" for e in engines if e.missing
            }
            await rounds.run()
        speed = await asyncio.to_thread(limits, bench.threads)
        if path := _path(context.text("plot")):
            await asyncio.to_thread(plot, record, engines, path)
        notes = rounds.notes()
        if context.settings["profile"]:
            notes += await asyncio.to_thread(profile_decode, model, bench.threads, speed.read_bytes_per_s)
        notes.append(f"limits: {speed.read_bytes_per_s / 1e9:.1f} GB/s of reads, {speed.flop_per_s / 1e12:.2f} TFLOP/s")
        return BenchResult(
            rows=tuple(report_rows(record, engines, Limits.of(description, speed))),
            goals=tuple(report_goals(record, engines)),
            notes=tuple(notes),
        )


def _work(context: BenchContext, model: Path) -> dict[str, Cell]:
    """What a record must agree with to be gone on with."""
    facts: dict[str, Cell] = {"model": model.name, **{name: context.settings[name] for name in _OF_THE_WORK}}
    if rate := context.number(RATE):
        facts[RATE] = rate
    return facts


def _path(text: str) -> Path | None:
    return Path(text).expanduser() if text else None


@asynccontextmanager
async def ended_by_sigterm() -> AsyncIterator[None]:
    """SIGTERM ends the body, and what comes after it, the report, goes on: engines that are stopped in place would
    outlive us otherwise, and what was measured would be lost. Further ones change nothing (timeout(1) sends two);
    SIGINT still ends the report too."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    came = asyncio.Event()

    def end() -> None:
        came.set()
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    try:
        yield
    except asyncio.CancelledError:
        if not came.is_set() or task.uncancel() > 0:
            raise
    finally:
        if came.is_set():
            loop.add_signal_handler(signal.SIGTERM, lambda: None)
        else:
            loop.remove_signal_handler(signal.SIGTERM)


@asynccontextmanager
async def _folder() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        yield Path(folder)


BENCH = EngineBench()
