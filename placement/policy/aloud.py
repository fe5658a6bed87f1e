"""A policy in words, as `kvmesh policy explain` tells it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from placement.policy.rules import DataKind, Policy


def read_aloud(policy: Policy) -> Iterator[str]:
    """One sentence a line, the labels first."""
    yield f"A request that claims no label is {policy.default_label}; a label can only be raised."
    for label in policy.labels.names:
        yield from _label(policy, label)
    yield from _findings(policy)
    for condition in policy.conditions:
        what = f"is raised to {condition.raise_to}" if condition.raise_to else f"is refused: {condition.deny}"
        yield f"{condition.name}: where {condition.when}, a request {what}."
    yield from _models(policy)
    yield from _load(policy)
    if not policy.fallback:
        yield "If the first choice of nodes fails, the request fails."
    if not policy.relay:
        yield "Data between two sites may not pass a third node, sealed or not."
    yield f"A codec of moving KV may cost {policy.kv_max_loss_ratio:.2%} of perplexity."
    if policy.expires_unix_s is not None:
        when = datetime.fromtimestamp(policy.expires_unix_s, UTC).isoformat(sep=" ", timespec="minutes")
        yield f"From {when} on every request is refused."


def _label(policy: Policy, label: str) -> Iterator[str]:
    prompt = policy.explain_rules(label, DataKind.PROMPT)
    kv = policy.explain_rules(label, DataKind.KV)
    also = "as well" if kv == prompt else f"at {kv}"
    above = sorted(policy.labels.above[label] - {label}, key=policy.labels.names.index)
    yield f"{label} (below {', '.join(above) or 'none'}): a prompt may be at {prompt}; its KV {also}."


def _findings(policy: Policy) -> Iterator[str]:
    rules = policy.detection
    if not rules.wanted:
        yield "Prompts are not looked at."
        return
    by_label: dict[str, list[str]] = {}
    for kind, label in rules.raise_to.items():
        by_label.setdefault(label, []).append(kind)
    for name, (_, label) in rules.patterns.items():
        by_label.setdefault(label, []).append(f"pattern.{name}")
    for label, kinds in by_label.items():
        yield f"A prompt with {', '.join(sorted(kinds))} in it is raised to {label}."
    yield f"A prompt that cannot be looked at is raised to {rules.on_failure}."


def _models(policy: Policy) -> Iterator[str]:
    if policy.allowed_models is not None:
        yield f"Models: {', '.join(sorted(policy.allowed_models))}, and no others."
    if policy.default_model:
        yield f"A request that names no model gets {policy.default_model}."
    for model, others in policy.downgrade.items():
        yield f"Where no node can run {model} now, {' or else '.join(others)} answers."


def _load(policy: Policy) -> Iterator[str]:
    limits, targets = policy.limits, policy.targets
    told = [
        f"{value:g} {what} a minute"
        for value, what in ((limits.requests_per_minute, "requests"), (limits.tokens_per_minute, "tokens"))
        if value is not None
    ]
    if told:
        offline = f"{limits.offline_share_ratio:.0%} of it at a site that is cut off"
        yield f"Each entry takes {' and '.join(told)}, {offline}."
    yield f"Where requests wait, priority is {policy.priority} (smaller goes first), and the weight {policy.share:g}."
    wanted = [f"{name} {value:g} s" for name, value in (("TTFT", targets.ttft_s), ("TPOT", targets.tpot_s),
              ("deadline", targets.deadline_s)) if value is not None]  # fmt: skip
    if wanted:
        yield f"A request that states no other wish has {', '.join(wanted)}."
    if targets.ttft_deadline_s is not None:
        yield f"A request whose first token would take more than {targets.ttft_deadline_s:g} s everywhere is refused."
