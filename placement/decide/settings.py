"""The few numbers that placement assumes where nothing was measured, and its limits. In one place, with reasons."""

from __future__ import annotations

from dataclasses import dataclass

from placement.decide.picks import POWER_OF_TWO
from placement.decide.plugins import Filter, Pick, Weighed
from placement.decide.score_terms import HARM, LATE, PRICE, SESSION, TIME


@dataclass(frozen=True, slots=True, kw_only=True)
class DecideSettings:
    """Defaults are pessimistic: what is not measured must not look better than what is."""

    busy_after_s: float = 5.0
    """Load older than this counts as busy. Nodes report at least every second; a few may be lost."""

    stale_after_s: float = 60.0
    """Load older than this refuses the node. The entry's own engine is never stale."""

    busy_wait_s: float = 2.0
    """Wait assumed at a node whose load is stale, or whose KV pool is full while its queue is short."""

    full_queue: int = 64
    """A node with this many waiting requests takes no more: backpressure instead of an endless queue."""

    short_queue: int = 8
    """With a full KV pool, only this many wait for it."""

    prefill_tokens_per_s: float = 50.0
    """Prefill speed of a node that measured none: a small model on one CPU core."""

    decode_tokens_per_s: float = 2.0
    """Decode speed of a node that measured none."""

    rtt_s: float = 0.25
    """Round trip to a node where none was measured: another continent."""

    goodput_bytes_per_s: float = 1.25e6
    """Goodput to a node where none was measured: 10 Mbit/s."""

    chunk_tokens: int = 256
    """Tokens of a KV chunk: what is still to be sent when prefill is done."""

    transfer_round_trips: float = 4.5
    """Round trips of a KV transfer beside its bytes: a connection of its own (TLS, settings), open and want, commit and
    goodbye. 4.1 to 4.4 were measured through a proxy that saves the TCP handshake."""

    goodbye_round_trips: float = 1.25
    """Of these, after the last byte: done, its acknowledgement, the end of the call."""

    both_gain_ratio: float = 0.08
    """What computing the head at the receiver must gain over shipping all: it takes the receiver's time, and its
    prediction rests on more figures."""

    least_own_tokens: int = 16
    """A receiver that would compute less than this itself, while the rest comes, computes nothing."""

    batch_cost_ratio: float = 0.1
    """How much each running sequence slows the decoding of one more."""

    session_switch_ratio: float = 0.1
    """What another node must gain, as a share of the time there, to take a session from where it was served last."""

    same_site_rtt_s: float = 0.001
    """Round trip between two nodes of one site that the entry sees from afar: a switch between them."""

    same_site_goodput_bytes_per_s: float = 1.25e8
    """Least goodput assumed between two nodes of one site: 1 Gbit/s."""

    near_best_ratio: float = 0.02
    """Candidates within this of the best are tied; one is drawn, so that a burst does not hit one node."""

    prefill_nodes: int = 8
    """At most this many core nodes are tried as the prefill side of pairs, the fastest for this prompt first."""

    decode_nodes: int = 64
    """At most this many nodes are tried as the decode side of pairs, the fastest by a first guess."""

    candidates_per_shape: int = 4
    """At most this many candidates of each shape are ranked and told of."""

    pair_cost_ratio: float = 1.0
    """A pair that costs more than so many times the best single node is not told of: it has more that can fail."""

    retry_s: tuple[float, float] = (0.5, 30.0)
    """Bounds of the time after which a request that is refused as too late should be tried again."""

    codec: str = "f16"
    """Codec of KV that an operator moves; f16 loses nothing between engines that hold f16."""

    fallbacks: int = 4
    """At most this many fallbacks."""

    filters: tuple[Filter, ...] = ()
    """Filters beside the built-in ones, which cannot be left out."""

    scores: tuple[Weighed, ...] = (
        Weighed(score=TIME, weight=1.0),
        Weighed(score=PRICE, weight=1.0),
        Weighed(score=LATE, weight=4.0),
        Weighed(score=HARM, weight=1.0),
        Weighed(score=SESSION, weight=1.0),
    )
    """Terms of the cost, see placement/decide/PLUGINS.md."""

    pick: Pick = POWER_OF_TWO
    """Which of the near-best is taken."""


DEFAULTS = DecideSettings()
