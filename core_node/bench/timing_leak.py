"""`kvmesh bench timing-leak`: can a tenant tell, by the time to first token, which prompts another tenant has sent?

The victim's prompts are in the prefix cache. The attacker probes: half of its probes are prompts that the victim has
sent, half are new, in random order. AUC is the chance that a probe of the first kind was faster than one of the second
(Mann-Whitney): 0.5 is guessing. Salts are those of mesh.identity.salts, as entries derive them. The same probes inside
one tenant must be told apart, else the measure itself is blind; `no salt` shows what would leak without.

A probe of one prompt is never sent twice, since an attacker's own probe fills its own cache. Times are CPU time of the
engine's thread unless `clock` is `wall`: other work on the machine is noise that only hides a leak. `computed` is the
same question for what the engine computed, exactly: AUC over the prompt tokens that were not in the cache.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from core_node.engine.core import EngineCore
from core_node.engine.loading import load_engine
from core_node.engine.settings import CoreEngineSettings
from mesh.bench.types import BenchContext, BenchResult, Cell, Direction, Goal
from mesh.errors import InvalidRequest, MeshError
from mesh.identity.salts import SALT_BYTES, namespace_salt
from mesh.model.catalogue import DEMO_MODEL, find_model
from mesh.node.engine import Prefilled, RunEvent, RunId, RunSpec, Tokens
from mesh.node.sampling import SamplingParams

_MODEL = "timing-leak"
_TENANTS = ("victim", "attacker")
_GOALS: Mapping[str, tuple[float, Direction]] = {
    "another tenant": (0.55, Direction.AT_MOST),
    "same tenant, another label": (0.55, Direction.AT_MOST),
    "same tenant": (0.9, Direction.AT_LEAST),
    "no salt": (0.9, Direction.AT_LEAST),
}
"""Who probes -> AUC."""
_CLOCKS: Mapping[str, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}


class TimingLeakBench:
    """See the module's docstring."""

    name = "timing-leak"
    question = "Can a tenant tell by timing which prompts another tenant has sent?"
    defaults: Mapping[str, Cell] = {
        "probes": 1000,
        "attackers": ";".join(_GOALS),
        "prompt_tokens": 128,
        "clock": "cpu",
        "n_threads": 1,
        "model": "",
        "seed": 1,
    }

    async def run(self, context: BenchContext) -> BenchResult:
        """Measure; some minutes with the defaults. Raises InvalidRequest."""
        if context.count("probes") < 20 or context.count("probes") % 2 or context.count("prompt_tokens") < 32:
            raise InvalidRequest("probes is an even number of at least 20, prompt_tokens at least 32", field="set")
        if context.text("clock") not in _CLOCKS:
            raise InvalidRequest("clock is cpu or wall", field="clock")
        if not set(context.text("attackers").split(";")) <= set(_GOALS):
            raise InvalidRequest(f"attackers are some of {'; '.join(_GOALS)}, with ; between them", field="attackers")
        return await asyncio.to_thread(_measure, context)


@dataclass(slots=True)
class _Probe:
    """A run's sink: when its first token came, and how much of the prompt was cached."""

    clock: Callable[[], float]
    first_s: float = 0.0
    cached_tokens: int = 0

    def put(self, item: RunEvent | MeshError) -> None:
        if isinstance(item, MeshError):
            raise item
        if isinstance(item, Prefilled):
            self.cached_tokens = item.cached
        if isinstance(item, Tokens) and not self.first_s:
            self.first_s = self.clock()


@dataclass(slots=True)
class _Seen:
    """Of one kind of probe, in order."""

    ttft_s: list[float] = field(default_factory=list)
    computed_tokens: list[int] = field(default_factory=list)


def auc(sent: Sequence[float], new: Sequence[float]) -> float:
    """Chance that a value of `sent` is below one of `new`, ties counted half. Both not empty."""
    ordered = np.sort(np.asarray(new, dtype=np.float64))
    values = np.asarray(sent, dtype=np.float64)
    above = len(ordered) - np.searchsorted(ordered, values, side="right")
    equal = len(ordered) - np.searchsorted(ordered, values, side="left") - above
    return float((above + equal / 2.0).sum() / (len(ordered) * len(values)))


def _measure(context: BenchContext) -> BenchResult:
    rng = random.Random(context.count("seed"))
    secrets = {tenant: rng.randbytes(32) for tenant in _TENANTS}
    salts = {t: namespace_salt(s, tenant=t, label="internal", model=_MODEL) for t, s in secrets.items()}
    other_label = namespace_salt(secrets["victim"], tenant="victim", label="confidential", model=_MODEL)
    shared = bytes(SALT_BYTES)
    salts_of = {
        "another tenant": (salts["victim"], salts["attacker"]),
        "same tenant, another label": (salts["victim"], other_label),
        "same tenant": (salts["victim"], salts["victim"]),
        "no salt": (shared, shared),
    }
    cases = {name: salts_of[name] for name in _GOALS if name in context.text("attackers").split(";")}
    core = _load(context)
    rows: list[Mapping[str, Cell]] = []
    found: dict[str, float] = {}
    for number, (name, (victim, attacker)) in enumerate(cases.items()):
        sent, new = _probe_all(core, context, rng, (victim, attacker), number * context.count("probes"))
        found[name] = auc(sent.ttft_s, new.ttft_s)
        rows.append(
            {
                "attacker": name,
                "probes": context.count("probes"),
                "auc": round(found[name], 3),
                "auc_computed": round(auc(sent.computed_tokens, new.computed_tokens), 3),
                "ttft_sent_p50_ms": round(float(np.median(sent.ttft_s)) * 1e3, 2),
                "ttft_new_p50_ms": round(float(np.median(new.ttft_s)) * 1e3, 2),
            }
        )
    goals = [
        Goal(name=f"{name}: AUC", value=value, goal=_GOALS[name][0], direction=_GOALS[name][1])
        for name, value in found.items()
    ]
    note = f"{core.info.build}; {context.count('prompt_tokens')} tokens; {context.text('clock')} time"
    return BenchResult(rows=tuple(rows), goals=tuple(goals), notes=(note,))


def _probe_all(
    core: EngineCore, context: BenchContext, rng: random.Random, salts: tuple[bytes, bytes], done: int
) -> tuple[_Seen, _Seen]:
    """Probes of prompts that the victim has sent, and of new ones. The victim sends shortly before, so that its prompt
    is still cached; for each probe of a new prompt it sends another one, so that the engine is as busy."""
    victim, attacker = salts
    n = context.count("probes")
    kinds = [True, False] * (n // 2)
    rng.shuffle(kinds)
    sent, new = _Seen(), _Seen()
    for i, was_sent in enumerate(kinds):
        prompt, other = _prompt(core, context, rng), _prompt(core, context, rng)
        _ask(core, context, prompt if was_sent else other, victim)
        ttft_s, computed = _ask(core, context, prompt, attacker)
        seen = sent if was_sent else new
        seen.ttft_s.append(ttft_s)
        seen.computed_tokens.append(computed)
        if i % 20 == 0:
            context.progress(done + i, n * len(context.text("attackers").split(";")), "probes")
    core.check_integrity()
    return sent, new


def _prompt(core: EngineCore, context: BenchContext, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(core.info.vocab_size) for _ in range(context.count("prompt_tokens")))


def _ask(core: EngineCore, context: BenchContext, prompt: tuple[int, ...], salt: bytes) -> tuple[float, int]:
    """Time to first token in seconds, and the prompt's tokens that were computed."""
    clock = _CLOCKS[context.text("clock")]
    probe = _Probe(clock)
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True)
    began_s = clock()
    core.add_run(
        RunSpec(run_id=RunId("probe"), token_ids=prompt, prompt_tokens=len(prompt), sampling=sampling, salt=salt),
        probe,
    )
    while core.step():
        pass
    return probe.first_s - began_s, len(prompt) - probe.cached_tokens


def _load(context: BenchContext) -> EngineCore:
    prompt = context.count("prompt_tokens")
    return load_engine(
        CoreEngineSettings(
            model_path=Path(context.text("model")) if context.text("model") else find_model(DEMO_MODEL),
            model_id=_MODEL,
            n_threads=context.count("n_threads"),
            max_context_tokens=prompt + 16,
            kv_pool_tokens=64 * (prompt + 16),
            max_step_tokens=prompt,
            max_running=4,
        )
    )


BENCH = TimingLeakBench()
"""Entry point of `kvmesh.benches`."""
