"""What was weighed between shipping KV and computing it, as values and in one sentence that a person reads. Pure."""

from __future__ import annotations

import math

import numpy as np

from placement.decide.scores import NodeTimes
from placement.decide.settings import DecideSettings
from placement.decide.ship import shipping
from placement.decide.types import Candidate, PlacementRequest, PlanShape, Shipment, ShipOption, Snapshot

_NAMED = 4  # alternatives in the sentence


def weigh(
    snapshot: Snapshot,
    times: NodeTimes,
    request: PlacementRequest,
    ranked: tuple[Candidate, ...],
    *,
    max_loss_ratio: float,
    settings: DecideSettings,
) -> tuple[ShipOption, ...]:
    """All ways to get the prompt's KV to where the choice decodes, from the best node that could prefill for it;
    those that may not be taken with the reason. Empty if nobody could, or the choice is no place to ship to."""
    choice = ranked[0]
    pairs = (c for c in ranked if c.shape is PlanShape.SPLIT and c.decode == choice.decode)
    pair = next(pairs, None)
    if pair is None or choice.shape not in (PlanShape.SPLIT, PlanShape.LOCAL):
        return ()
    source, target = (snapshot.row_of(place.node_id) for place in (pair.prefill, pair.decode))
    found = shipping(snapshot, times, request, np.array([source]), np.array([target]), settings)
    after_s = float(times.rtt_s[target] + times.token_s[target])
    recompute_s = after_s + float(times.wait_s[target] + times.prefill_s[target])
    options = [ShipOption(codec="", own_tokens=request.prompt_tokens, ttft_s=recompute_s)]
    for i, codec in enumerate(times.codecs.names):
        refused = _refused(times, request, i, (source, target), (pair.prefill.node_id, pair.decode.node_id))
        loss_ratio = times.codecs.loss_ratio[i]
        if not refused and not loss_ratio <= max_loss_ratio:
            refused = f"loses {loss_ratio:.2%}, policy accepts {max_loss_ratio:.2%}"
        ways = ((Shipment.SHIP, found.ship_s, 0), (Shipment.BOTH, found.both_s, int(found.own_tokens[i, 0, 0])))
        for shipment, there_s, own in ways:
            ttft_s = float(there_s[i, 0, 0]) + after_s
            if math.isfinite(ttft_s) or (refused and shipment is Shipment.SHIP):
                wished = request.wish.shipment in (None, shipment)
                why = refused or ("" if wished else "not what the placement wish asks for")
                options.append(ShipOption(codec=codec, own_tokens=own, ttft_s=ttft_s, refused=why))
    return tuple(options)


def _refused(
    times: NodeTimes, request: PlacementRequest, codec: int, rows: tuple[int, int], node_ids: tuple[str, str]
) -> str:
    if request.wish.codec not in ("", times.codecs.names[codec]):
        return "not what the placement wish asks for"
    for row, node_id, seconds in zip(rows, node_ids, (times.codecs.encode_s, times.codecs.decode_s), strict=True):
        if not np.isfinite(seconds[row, codec]):
            return f"{node_id} does not have it"
    return ""


def in_words(choice: Candidate, options: tuple[ShipOption, ...]) -> str:
    """One sentence: what the choice takes, and what the others would have taken; empty if there were none."""
    if not options:
        return ""
    free = [o for o in options if not o.refused]
    if choice.shape is PlanShape.SPLIT:
        taken = next((o for o in free if (o.codec, o.own_tokens) == (choice.codec, choice.own_tokens)), free[0])
    else:
        taken = options[0]
    others = sorted((o for o in free if o is not taken), key=lambda o: o.ttft_s)
    best_of: dict[str, ShipOption] = {}
    for option in others:
        best_of.setdefault(option.codec, option)
    told = [_told(o, "would take") for o in list(best_of.values())[:_NAMED]]
    told += [f"{o.codec} is not allowed ({o.refused})" for o in options if o.refused][:_NAMED]
    return f"{_told(taken, 'takes')}; " + ", ".join(told) if told else _told(taken, "takes")


def _told(option: ShipOption, verb: str) -> str:
    seconds = f"{option.ttft_s:.2f} s"
    if not option.codec:
        return f"prefill here {verb} {seconds}"
    both = f" (the first {option.own_tokens} tokens computed there meanwhile)" if option.own_tokens else ""
    return f"{option.codec} over this link{both} {verb} {seconds}"
