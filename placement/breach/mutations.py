"""Ways to break what decides, to see whether the checker would notice: each is a fault that somebody could make.

Each is a context manager that patches one place of placement.policy, placement.decide or placement.detect and puts
it back. For tests and `kvmesh bench breach` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from placement.breach import worlds
from placement.decide import decide as decide_module
from placement.decide import filters
from placement.decide.types import Reason
from placement.detect import label as label_module
from placement.policy import model as model_module
from placement.policy.labels import Lattice
from placement.policy.places import PlaceColumns
from placement.policy.rules import DataKind, Policy, Rule

Mutation = Callable[[], AbstractContextManager[None]]

_mask, _filter = Policy.mask, filters.filter_nodes
_rule_mask, _rules, _parse = Rule.mask, model_module._rules, model_module.parse_policy


@contextmanager
def _patched(target: Any, name: str, new: Any) -> Iterator[None]:
    with patch.object(target, name, new):
        yield


def _mask_ones(*kinds: DataKind) -> Mutation:
    def mask(self: Policy, label: str, places: PlaceColumns, *, entry_site: str, kind: DataKind) -> Any:
        if kind in kinds:
            return np.ones(len(places), dtype=np.bool_)
        return _mask(self, label, places, entry_site=entry_site, kind=kind)

    return lambda: _patched(Policy, "mask", mask)


def _mask_with(change: Callable[[str, str, DataKind, Policy], tuple[str, str, DataKind]]) -> Mutation:
    def mask(self: Policy, label: str, places: PlaceColumns, *, entry_site: str, kind: DataKind) -> Any:
        label, entry_site, kind = change(label, entry_site, kind, self)
        return _mask(self, label, places, entry_site=entry_site, kind=kind)

    return lambda: _patched(Policy, "mask", mask)


def _without(part: str) -> Mutation:
    """Rules forget one of their limits."""

    forgotten: dict[str, Any] = {part: None} | ({"own_site": False} if part == "sites" else {})

    def mask(self: Rule, places: PlaceColumns, entry_site: str) -> Any:
        bare = replace(self, **forgotten)
        return _rule_mask(bare, places, entry_site)

    return lambda: _patched(Rule, "mask", mask)


def _always_own() -> AbstractContextManager[None]:
    def mask(self: Rule, places: PlaceColumns, entry_site: str) -> Any:
        return _rule_mask(self, places, entry_site) | (places.site == entry_site)

    return _patched(Rule, "mask", mask)


def _tiers_swapped() -> AbstractContextManager[None]:
    def tier(self: PlaceColumns) -> Any:
        swap = {"core": "edge", "edge": "core"}
        return np.array([swap[place.tier.value] for place in self.places], dtype=np.str_)

    return _patched(PlaceColumns, "tier", property(tier))


def _filtered(change: Callable[[filters.Filtered, Any], filters.Filtered]) -> Mutation:
    def filter_nodes(snapshot: Any, request: Any, policy: Any, **rest: Any) -> filters.Filtered:
        return change(_filter(snapshot, request, policy, **rest), snapshot)

    return lambda: _patched(decide_module, "filter_nodes", filter_nodes)


def _free_of_label(found: filters.Filtered, rows: Any) -> filters.Filtered:
    run = found.run.copy()
    run[rows] &= ~Reason.LABEL.value
    return replace(found, run=run)


def _parsed(**other: Any) -> Mutation:
    """Policies are compiled with other values than they were written with."""

    def parse(text: str, *, version: int) -> Policy:
        return replace(_parse(text, version=version), **other)

    return lambda: _patched(worlds, "parse_policy", parse)


def _missing_rule_means_anywhere() -> AbstractContextManager[None]:
    return _patched(model_module, "_own_site", lambda label: Rule(name=f"anywhere({label})"))


def _kv_rules_ignored() -> AbstractContextManager[None]:
    def rules(section: str, label: str, written: Any) -> Any:
        return () if section == "kv_rules" else _rules(section, label, written)

    return _patched(model_module, "_rules", rules)


def _rule_for_label(choose: Callable[[Lattice, str], str]) -> Mutation:
    return _mask_with(lambda label, site, kind, policy: (choose(policy.labels, label), site, kind))


def _join_keeps_the_first() -> AbstractContextManager[None]:
    return _patched(Policy, "join", lambda self, a, b: a)


def _findings_win() -> AbstractContextManager[None]:
    """The finding's label is taken, even if it is lower than what the caller said."""
    return _patched(Policy, "join", lambda self, a, b: b)


def _models_unchecked() -> AbstractContextManager[None]:
    return _patched(Policy, "model_allowed", lambda self, model: True)


def _default_is_lowest() -> AbstractContextManager[None]:
    def parse(text: str, *, version: int) -> Policy:
        policy = _parse(text, version=version)
        return replace(policy, default_label=policy.labels.names[0])

    return _patched(worlds, "parse_policy", parse)


def _patterns_forgotten() -> AbstractContextManager[None]:
    """The tenant's own patterns are found and change nothing."""
    real = label_module.raise_label

    async def raise_label(guard: Any, policy: Policy, label: str, text: str) -> Any:
        raised = await real(guard, policy, label, text)
        own = [f for f in raised.findings if f.kind.startswith("pattern.")]
        return replace(raised, label=label) if own else raised

    return _patched(worlds, "raise_label", raise_label)


def _any_site_is_own() -> AbstractContextManager[None]:
    def mask(self: Rule, places: PlaceColumns, entry_site: str) -> Any:
        return _rule_mask(replace(self, sites=None, own_site=False) if self.own_site else self, places, entry_site)

    return _patched(Rule, "mask", mask)


MUTATIONS: Mapping[str, Mutation] = {
    "prompts may be anywhere": _mask_ones(DataKind.PROMPT),
    "KV may be anywhere": _mask_ones(DataKind.KV),
    "KV is asked for as a prompt": _mask_with(lambda label, site, kind, _: (label, site, DataKind.PROMPT)),
    "prompts are asked for as KV": _mask_with(lambda label, site, kind, _: (label, site, DataKind.KV)),
    "own site is another one": _mask_with(lambda label, site, kind, _: (label, "site-1", kind)),
    "rules forget tiers": _without("tiers"),
    "rules forget regions": _without("regions"),
    "rules forget jurisdictions": _without("jurisdictions"),
    "rules forget sites": _without("sites"),
    "rules forget nodes": _without("nodes"),
    "own site always allowed": _always_own,
    "every site counts as own": _any_site_is_own,
    "tiers swapped": _tiers_swapped,
    "the lowest label's rules": _rule_for_label(lambda labels, _: labels.names[0]),
    "a missing rule means anywhere": _missing_rule_means_anywhere,
    "KV rules ignored": _kv_rules_ignored,
    "label filter off for the core": _filtered(lambda found, s: _free_of_label(found, ~s.tier_edge)),
    "label filter off for edges": _filtered(lambda found, s: _free_of_label(found, s.tier_edge)),
    "fallbacks where none are allowed": _parsed(fallback=True),
    "models unchecked": _models_unchecked,
    "findings do not raise the label": _join_keeps_the_first,
    "findings lower the label": _findings_win,
    "the default label is the lowest": _default_is_lowest,
    "a tenant's patterns forgotten": _patterns_forgotten,
}
