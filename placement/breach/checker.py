"""Did a request go where its policy forbids? Written apart from the code that decides, and far simpler: it shares no
rule, lattice or compiled policy with it, reads the policy's YAML as plain strings and looks at one node at a time.

It knows the policy language only (placement/policy/document.py) and what happened. A policy or place that it cannot
read is a breach, for then nothing is proven.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from mesh.audit.query import touched
from mesh.identity.place import Place
from mesh.identity.receipt import VerifiedReceipt
from placement.detect.catalogue import kinds

DEFAULT_ORDER = ["public", "internal", "confidential", "restricted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """One request. `prompt_at`: nodes that were sent the prompt; `kv_moved_to`: nodes that KV was moved to; `places`:
    where these nodes are, as certificates say. `fallbacks`: how often it was run again elsewhere."""

    entry: Place
    claimed: str
    effective: str
    model: str
    prompt_at: frozenset[str]
    kv_moved_to: frozenset[str]
    places: Mapping[str, Place]
    found_kinds: frozenset[str] = field(default_factory=frozenset)
    not_looked_at: bool = False
    fallbacks: int = 0
    refused: bool = False
    continued: str = ""
    conditions: tuple[str, ...] = ()  # those that held, as "conditions[2]"


def happened_from(receipt: VerifiedReceipt, places: Mapping[str, Place]) -> Happened:
    """What a verified receipt tells. `places` as known elsewhere (the registry); certificates in it win."""
    body = receipt.body
    seen = {place.node_id: place for _, place in receipt.legs} | {receipt.entry.node_id: receipt.entry}
    label = body["label"]
    moves = [m for m in body["migrations"] if not m.get("recomputed")]
    return Happened(
        entry=receipt.entry,
        claimed=label["claimed"],
        effective=label["effective"],
        model=body["model"],
        prompt_at=frozenset(touched(receipt)) - {receipt.entry.node_id},
        kv_moved_to=frozenset(m["to_node_id"] for m in moves),
        places={**places, **seen},
        found_kinds=frozenset(f["kind"] for f in label.get("findings", ())),
        not_looked_at="not_looked_at" in label,
        fallbacks=int(body["fallbacks"]),
        refused="refused_because" in body,
        continued=label.get("continued", ""),
        conditions=tuple(label.get("conditions", ())),
    )


def breaches(happened: Happened, policy_yaml: str) -> tuple[str, ...]:
    """What the policy forbids and happened, in words; empty if nothing."""
    try:
        policy = yaml.load(policy_yaml, Loader=yaml.BaseLoader)  # everything is a string, list or dict
        return tuple(_find(happened, policy))
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as exc:
        return (f"the policy cannot be read ({type(exc).__name__}), so nothing is proven",)


def _find(happened: Happened, policy: dict[str, Any]) -> list[str]:
    found: list[str] = []
    if happened.refused and not happened.prompt_at and not happened.kv_moved_to:
        return found  # nothing happened; its label may not have been worked out
    for lower, why in _must_be_at_least(happened, policy):
        if not _is_at_most(lower, happened.effective, policy):
            found.append(f"label {happened.effective} is below {lower}, which {why} asks for")
    allowed_models = (policy.get("models") or {}).get("allowed")
    if allowed_models is not None and happened.model not in allowed_models:
        found.append(f"model {happened.model} is not allowed")
    if policy.get("fallback") == "none" and happened.fallbacks:
        found.append(f"{happened.fallbacks} fallbacks, and the policy allows none")
    for node_id in sorted(happened.prompt_at):
        if not _may_be_at(node_id, "rules", happened, policy):
            found.append(f"a {happened.effective} prompt was at {node_id}")
    for node_id in sorted(happened.kv_moved_to):
        section = "kv_rules" if happened.effective in (policy.get("kv_rules") or {}) else "rules"
        if not _may_be_at(node_id, section, happened, policy):
            found.append(f"KV of a {happened.effective} prompt was moved to {node_id}")
    return found


def _must_be_at_least(happened: Happened, policy: dict[str, Any]) -> list[tuple[str, str]]:
    """Labels that the effective one must be at or above, each with what asks for it."""
    default = (policy.get("labels") or {}).get("default") or "internal"
    asked = [(happened.claimed, "the caller") if happened.claimed else (default, "the default")]
    if happened.continued:
        known = happened.continued if happened.continued in _above(policy) else _top(policy)
        asked.append((known, "the conversation that it continues"))
    for name in happened.conditions:
        rule = policy["conditions"][int(name.removeprefix("conditions[").removesuffix("]"))]
        asked.append((rule["raise_to"], name))
    detectors = policy.get("detectors") or {}
    raise_to, detector_of = detectors.get("raise_to") or {}, kinds()
    for kind in happened.found_kinds:
        if kind.startswith("pattern."):
            asked.append((detectors["patterns"][kind.removeprefix("pattern.")]["raise_to"], f"a finding of {kind}"))
        elif kind in raise_to or detector_of.get(kind) in raise_to:
            asked.append((raise_to.get(kind) or raise_to[detector_of[kind]], f"a finding of {kind}"))
    if happened.not_looked_at:
        on_failure = detectors.get("on_failure") or _top(policy)
        asked.append((on_failure, "a prompt that was not looked at"))
    return asked


def _above(policy: dict[str, Any]) -> dict[str, list[str]]:
    """For each label those right above it."""
    labels = policy.get("labels") or {}
    if labels.get("raises"):
        return {name: list(up or ()) for name, up in labels["raises"].items()}
    order = labels.get("order") or DEFAULT_ORDER
    return {name: order[i + 1 : i + 2] for i, name in enumerate(order)}


def _is_at_most(lower: str, upper: str, policy: dict[str, Any]) -> bool:
    above = _above(policy)
    if lower not in above or upper not in above:
        return False
    return lower == upper or any(_is_at_most(up, upper, policy) for up in above[lower])


def _top(policy: dict[str, Any]) -> str:
    return next(label for label, up in _above(policy).items() if not up)


def _may_be_at(node_id: str, section: str, happened: Happened, policy: dict[str, Any]) -> bool:
    place = happened.places.get(node_id)
    if place is None:
        return False
    rules = (policy.get(section) or {}).get(happened.effective)
    if rules is None:
        rules = {"sites": ["own"]}
    return any(_matches(rule, place, happened.entry) for rule in (rules if isinstance(rules, list) else [rules]))


def _matches(rule: dict[str, Any], place: Place, entry: Place) -> bool:
    if rule.get("anywhere") == "true":
        return True
    own = {"own": entry.site}
    checks = (
        ("tiers", place.tier.value),
        ("regions", place.region),
        ("jurisdictions", place.jurisdiction),
        ("sites", place.site),
        ("nodes", place.node_id),
    )
    given = [(rule[key], value) for key, value in checks if key in rule]
    return bool(given) and all(value in [own.get(name, name) for name in names] for names, value in given)
