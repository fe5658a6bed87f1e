"""What was weighed between shipping KV and computing it, as values and in one sentence that a person reads. Pure."""

from __future__ import annotations

import math

import numpy as np

from placement.decide.plugins import ScoreView
from placement.decide.scores import NodeTimes
from placement.decide.ship_one import ship_one
from placement.decide.types import Candidate, IntArray, PlacementRequest, PlanShape, Shipment, ShipOption

_NAMED = 4  # alternatives in the sentence


def weigh(
    view: ScoreView, ranked: tuple[Candidate, ...], split: tuple[IntArray, IntArray], *, max_loss_ratio: float
) -> tuple[ShipOption, ...]:
    """All ways to get the prompt's KV to where the choice decodes, from the best node that could prefill for it;
    those that may not be taken with the reason. `split`: rows that may play the two parts. Empty if nobody could, or
    the choice is no place to ship to."""
    choice, snapshot, times, request = ranked[0], view.snapshot, view.times, view.request
    target = snapshot.row_of(choice.decode.node_id)
    first, then = split
    if not len(first) or target not in then or choice.shape not in (PlanShape.SPLIT, PlanShape.LOCAL):
        return ()
    pair = next((c for c in ranked if c.shape is PlanShape.SPLIT and c.decode == choice.decode), None)
    if pair is not None:
        source = snapshot.row_of(pair.prefill.node_id)
    else:  # it was not worth a closer look: then the one that would have KV first
        ready_s = times.wait_s[first] + times.prefill_s[first]
        soonest = first[ready_s == ready_s.min()].tolist()
        source = min(soonest, key=lambda row: snapshot.places[row].node_id)
    node_ids = snapshot.places[source].node_id, choice.decode.node_id
    found = ship_one(snapshot, times, request, source, target, view.settings)
    after_s = float(times.rtt_s[target] + times.token_s[target])
    local_s = float(times.rtt_s[target] + times.wait_s[target] + times.prefill_s[target] + times.first_s[target])
    options = [ShipOption(codec="", own_tokens=request.prompt_tokens, ttft_s=local_s)]
    for i, (codec, shipped) in enumerate(zip(times.codecs.names, found, strict=True)):
        refused = _refused(times, request, i, (source, target), node_ids)
        loss_ratio = times.codecs.loss_ratio[i]
        if not refused and not loss_ratio <= max_loss_ratio:
            refused = f"loses {loss_ratio:.2%}, policy accepts {max_loss_ratio:.2%}"
        ways = ((Shipment.SHIP, shipped.ship_s, 0), (Shipment.BOTH, shipped.both_s, shipped.own_tokens))
        for shipment, there_s, own in ways:
            ttft_s = there_s + after_s
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
