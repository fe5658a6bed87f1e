"""What a valid policy says that its author hardly means: labels that fit nowhere, rules that contradict the lattice.

None of it is an error: a node may be added tomorrow. Pure; the mesh is given as places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mesh.identity.place import Place
from placement.policy.rules import DataKind, Policy, Rule

Oddity = tuple[tuple[str, ...], str]
"""Location in the document, and what is odd there."""


def contradictions(policy: Policy, places: Sequence[Place]) -> Iterator[Oddity]:
    """`places`: of all nodes with an engine, up or down; none: nothing is said of what fits where."""
    for label in policy.labels.names:
        if places:
            yield from _fits_nowhere(policy, label, places)
        yield from _kv_goes_further(policy, label)
        yield from _looser_than_a_lower_label(policy, label)


def _fits_nowhere(policy: Policy, label: str, places: Sequence[Place]) -> Iterator[Oddity]:
    """At the best entry for it: `own` is taken as the site of each node."""
    may = [p for p in places if policy.allows(label, p, entry_site=p.site, kind=DataKind.PROMPT) is not None]
    if not may:
        allowed = policy.explain_rules(label, DataKind.PROMPT)
        yield ("rules", label), f"no node of the mesh, up or down, may have a {label} prompt: allowed is {allowed}"


def _kv_goes_further(policy: Policy, label: str) -> Iterator[Oddity]:
    further = _beyond(policy.rules_of(label, DataKind.KV), policy.rules_of(label, DataKind.PROMPT))
    if further is not None:
        yield (
            ("kv_rules", label),
            f"KV of {label} may be where its prompt may not ({further}), and prompts can be rebuilt from KV",
        )


def _looser_than_a_lower_label(policy: Policy, label: str) -> Iterator[Oddity]:
    """Told once for each label, of the nearest such label below it in the document's order."""
    for lower in reversed(policy.labels.names):
        if lower == label or not policy.labels.at_most(lower, label):
            continue
        further = _beyond(policy.rules_of(label, DataKind.PROMPT), policy.rules_of(lower, DataKind.PROMPT))
        if further is not None:
            yield (
                ("rules", label),
                f"{label} is above {lower}, but may be where {lower} may not ({further}): raising the label loosens it",
            )
            return


def _beyond(inner: tuple[Rule, ...], outer: tuple[Rule, ...]) -> Rule | None:
    """The first rule of `inner` that no single rule of `outer` covers."""
    return next((rule for rule in inner if not any(_covers(o, rule) for o in outer)), None)


def _covers(outer: Rule, inner: Rule) -> bool:
    """Whether `outer` allows every place that `inner` does, whichever the entry."""
    limits = ("tiers", "regions", "jurisdictions", "nodes")
    if not all(_within(getattr(inner, limit), getattr(outer, limit)) for limit in limits):
        return False
    return _within(inner.sites, outer.sites) and (outer.sites is None or outer.own_site or not inner.own_site)


def _within(inner: frozenset[object] | None, outer: frozenset[object] | None) -> bool:
    return outer is None or (inner is not None and inner <= outer)
