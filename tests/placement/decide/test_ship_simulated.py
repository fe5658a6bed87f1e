"""The planner's formula against a simulation that shares nothing with it: chunks that are prefilled, encoded, sent and
decoded one after another, on two machines of one CPU each and a link with a rate and a delay.

All cells of `kvmesh bench ship`, with speeds like those of the demo model: the choice must be within max(10 %, 50 ms)
of the best way in at least 90 % of cells, and never worse than prefill at the edge by more than that.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from placement.decide.decide import decide
from placement.decide.settings import DEFAULTS
from placement.decide.types import CodecTable, Plan, ShipOption, Snapshot, Wish
from placement.policy.model import parse_policy
from tests.placement.decide.meshes import core, edge, request, snapshot

CELLS = [
    (mbit, rtt_s, tokens)
    for tokens in (256, 1024, 4096)
    for mbit in (5.0, 20.0, 100.0, 1000.0)
    for rtt_s in (0.002, 0.04, 0.15)
]
TOKEN_BYTES = 23_040
CHUNK = 256
# Name: bytes for a byte of f16, loss, tokens/s of encoding and of decoding.
CODECS = {
    "f16": (1.0, 0.0, 60_000.0, 60_000.0),
    "q8_0": (0.53, 0.001, 8_000.0, 12_000.0),
    "kvtc": (1 / 28, 0.009, 5_000.0, 3_000.0),
}
DECODE_TOKENS_PER_S = 40.0
POLICY = parse_policy("version: 1\nrules: {internal: {anywhere: true}}", version=1)
Curve = tuple[float, float]


def prefill_s(curve: Curve, start: int, stop: int) -> float:
    return sum(curve[0] + curve[1] * i for i in range(start, stop))


def simulate(option: ShipOption, mbit: float, rtt_s: float, n: int, source: Curve | None, target: Curve) -> float:
    """Seconds to the first token. `source` None: it has the KV already."""
    step_s = 1 / DECODE_TOKENS_PER_S
    if not option.codec:
        return prefill_s(target, 0, n) + step_s
    ratio, _, encode, decode = CODECS[option.codec]
    own = option.own_tokens
    bounds = [*range(own, n - 1, CHUNK), n - 1]
    handshakes_s = 2 * rtt_s + rtt_s / 2  # TLS and settings, then the open's way
    source_s = handshakes_s
    if source is not None:
        source_s += prefill_s(source, 0, own)
    link_s = 0.0
    arrivals = []
    for start, stop in pairwise(bounds):
        if source is not None:
            source_s += prefill_s(source, start, stop)
        source_s += (stop - start) / encode
        link_s = max(link_s, source_s) + (stop - start) * TOKEN_BYTES * ratio / (mbit * 1e6 / 8)
        arrivals.append((link_s + rtt_s / 2, (stop - start) / decode))
    # The target's CPU: its own prefill a step at a time, from the first moment; what has arrived is decoded in between.
    now_s, steps = 0.0, [*range(0, own, 64), own] if own else [0]
    left = list(pairwise(steps))
    waiting = list(arrivals)
    while left or waiting:
        if waiting and waiting[0][0] <= now_s:
            now_s += waiting.pop(0)[1]
        elif left:
            now_s += prefill_s(target, *left.pop(0))
        else:
            now_s = waiting[0][0]
    return now_s + 1.25 * rtt_s + step_s  # commit was there with the last chunk; goodbye


def mesh(mbit: float, rtt_s: float, n: int, source: Curve | None, target: Curve) -> Snapshot:
    nodes = [
        core(
            rtt_s=rtt_s, goodput_bytes_per_s=mbit * 1e6 / 8, cached_tokens=n if source is None else 0,
            prefill_token_s=(source or (0.0006, 0.0))[0], prefill_growth_s=(source or (0.0006, 0.0))[1],
            decode_tokens_per_s=DECODE_TOKENS_PER_S,
        ),
        edge(
            "a", prefill_token_s=target[0], prefill_growth_s=target[1], decode_tokens_per_s=DECODE_TOKENS_PER_S,
        ),
    ]  # fmt: skip
    columns = list(zip(*CODECS.values(), strict=True))
    codecs = CodecTable(
        names=tuple(CODECS),
        bytes_ratio=np.array(columns[0]),
        loss_ratio=np.array(columns[1]),
        encode_s=np.tile(1 / np.array(columns[2]), (2, 1)),
        decode_s=np.tile(1 / np.array(columns[3]), (2, 1)),
    )
    return replace(snapshot(nodes, entry="edge-a"), codecs=codecs)


def judge(source: Curve | None, target: Curve, codecs: tuple[str, ...]) -> tuple[int, int, set[str]]:
    """Cells whose choice is good, cells in which it is no worse than prefill at the edge, and who wins somewhere."""
    good = no_worse = 0
    winners = set()
    for mbit, rtt_s, n in CELLS:
        snap = mesh(mbit, rtt_s, n, source, target)
        assert snap.codecs is not None
        kept = np.array([i for i, name in enumerate(snap.codecs.names) if name in codecs])
        snap = replace(snap, codecs=snap.codecs.only(kept))
        wish = Wish(site="a")
        req = request(n, expected_tokens=1, max_tokens=1, wish=wish)
        plan = decide(snap, req, POLICY, entry_site="a", now_s=0.0, rng=random.Random(1), settings=DEFAULTS)
        assert isinstance(plan, Plan)
        took = {(o.codec, o.own_tokens): simulate(o, mbit, rtt_s, n, source, target) for o in plan.shipping}
        choice = (plan.choice.codec, plan.choice.own_tokens) if plan.choice.codec else ("", n)
        best, local, chosen = min(took.values()), took["", n], took[choice]
        good += chosen <= best + max(0.1 * best, 0.05)
        no_worse += chosen <= local + max(0.1 * local, 0.05)
        way = min(took, key=lambda k: took[k])
        winners.add("" if not way[0] else f"{way[0]} {'both' if way[1] else 'ship'}")
    return good, no_worse, winners


@pytest.mark.parametrize("codecs", [("f16",), ("f16", "q8_0"), ("f16", "q8_0", "kvtc")])
@pytest.mark.parametrize("source", [None, (0.0006, 5e-8)], ids=["kv-is-there", "to-be-computed"])
@pytest.mark.parametrize("target", [(0.003, 4e-7), (0.0009, 1e-7)], ids=["slow-edge", "fast-edge"])
def test_the_choice_is_as_good_as_the_best(source: Curve | None, target: Curve, codecs: tuple[str, ...]) -> None:
    good, no_worse, _ = judge(source, target, codecs)
    assert good >= 0.9 * len(CELLS)
    assert no_worse == len(CELLS)


def test_every_kind_of_way_wins_somewhere() -> None:
    winners = set().union(
        *(judge(None, t, c)[2] for t in ((0.003, 4e-7), (0.0009, 1e-7)) for c in (("f16",), tuple(CODECS)))
    )
    assert {"", "f16 both"} <= winners
    assert any(w.startswith("kvtc") for w in winners)
