"""A tenant's placement policy, compiled: which label may be where, as prompt and as KV. Pure.

It fails closed: a label without a rule is allowed at the entry's own site only, and no site is `own` where the
entry's site is not known. placement.policy.model makes one from a YAML document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh.errors import PolicyDenied
from mesh.identity.place import Place, Tier
from placement.policy.labels import Lattice
from placement.policy.places import PlaceColumns


class DataKind(Enum):
    """What is to be at a place."""

    PROMPT = "prompt"
    KV = "kv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One compiled rule. `None` limits nothing; `own_site` adds the entry's site to `sites`."""

    name: str
    tiers: frozenset[Tier] | None = None
    regions: frozenset[str] | None = None
    jurisdictions: frozenset[str] | None = None
    sites: frozenset[str] | None = None
    own_site: bool = False
    nodes: frozenset[str] | None = None

    def _sites(self, entry_site: str) -> frozenset[str] | None:
        if self.own_site and self.sites is not None and entry_site:
            return self.sites | {entry_site}
        return self.sites

    def matches(self, place: Place, entry_site: str) -> bool:
        """Whether data may be at `place`."""
        sites = self._sites(entry_site)
        return (
            (self.tiers is None or place.tier in self.tiers)
            and (self.regions is None or place.region in self.regions)
            and (self.jurisdictions is None or place.jurisdiction in self.jurisdictions)
            and (sites is None or place.site in sites)
            and (self.nodes is None or place.node_id in self.nodes)
        )

    def mask(self, places: PlaceColumns, entry_site: str) -> NDArray[np.bool_]:
        """`matches` of all places at once, shape [n_places]."""
        allowed = np.ones(len(places), dtype=np.bool_)
        if self.tiers is not None:
            allowed &= np.isin(places.tier, [tier.value for tier in self.tiers])
        limits = (
            (self.regions, "region"),
            (self.jurisdictions, "jurisdiction"),
            (self._sites(entry_site), "site"),
            (self.nodes, "node_id"),
        )
        for names, column in limits:
            if names is not None:
                allowed &= np.isin(getattr(places, column), list(names))
        return allowed

    def __str__(self) -> str:
        """The rule as one would say it."""
        sites = None if self.sites is None else self.sites | ({"the entry's own"} if self.own_site else set())
        tiers = None if self.tiers is None else {tier.value for tier in self.tiers}
        parts = (
            (tiers, "tier"), (self.regions, "region"), (self.jurisdictions, "jurisdiction"),
            (sites, "site"), (self.nodes, "node"),
        )  # fmt: skip
        said = [f"{what} {' or '.join(sorted(names))}" for names, what in parts if names is not None]
        return ", ".join(said) or "anywhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Seconds of cost for each second of use."""

    core_prefill_per_s: float = 0.0
    core_decode_per_s: float = 0.0
    edge_prefill_per_s: float = 0.0
    edge_decode_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """What findings in a prompt raise its label to. `raise_to`: kind -> label. `patterns`: the tenant's own kinds,
    name -> (RE2, label). `on_failure`: label of a prompt that could not be looked at; empty: nothing is looked for."""

    raise_to: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    patterns: Mapping[str, tuple[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    on_failure: str = ""

    @property
    def wanted(self) -> bool:
        """Whether prompts have to be looked at."""
        return bool(self.raise_to or self.patterns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Condition:
    """Raises the label, or refuses, where its expression holds: `raise_to` or `deny` is not empty. `program` is what
    placement.policy.conditions evaluates; `name` what refusals and receipts call it."""

    name: str
    when: str
    raise_to: str
    deny: str
    program: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """What a tenant may ask for at each entry; None: no limit. A site that is cut off gives out `offline_share_ratio`
    of both."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    offline_share_ratio: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTargets:
    """For requests that state none, in seconds; a request's own deadline may only be sooner."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None
    ttft_deadline_s: float | None = None  # of all requests: they cannot state one


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """See the module's docstring. `version` is that of the stored document; 0 is the built-in policy."""

    version: int
    labels: Lattice
    default_label: str
    prompt_rules: Mapping[str, tuple[Rule, ...]]  # for every label
    kv_rules: Mapping[str, tuple[Rule, ...]]  # for every label
    allowed_models: frozenset[str] | None
    default_model: str  # empty: none
    priority: int
    fallback: bool
    prices: Prices
    relay: bool = True  # whether sealed data may pass a third node
    kv_max_loss_ratio: float = 0.01  # rise of perplexity that a codec of moving KV may cost
    offline_max_s: float | None = None  # how old the last word of the mesh may be at a site; None: of any age
    detection: Detection = field(default_factory=Detection)
    limits: RateLimits = field(default_factory=RateLimits)
    share: float = 1.0  # weight between tenants of one priority
    targets: LatencyTargets = field(default_factory=LatencyTargets)
    downgrade: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    conditions: tuple[Condition, ...] = ()
    expires_unix_s: float | None = None

    def check_age(self, now_unix_s: float) -> None:
        """Raises PolicyDenied once it has expired."""
        if self.expires_unix_s is not None and now_unix_s >= self.expires_unix_s:
            message = f"policy version {self.version} has expired: an admin has to apply a newer one"
            raise PolicyDenied(message, rule="expires", version=str(self.version))

    def check_label(self, label: str) -> str:
        """The label. Raises InvalidRequest if the policy does not know it."""
        return self.labels.check(label)

    def join(self, a: str, b: str) -> str:
        """The lowest label above both. Raises InvalidRequest."""
        return self.labels.join(a, b)

    def model_allowed(self, model: str) -> bool:
        """Whether the tenant may use it."""
        return self.allowed_models is None or model in self.allowed_models

    def check_model(self, model: str) -> None:
        """Raises PolicyDenied unless the tenant may use it."""
        if not self.model_allowed(model):
            raise PolicyDenied(f"the policy does not allow the model {model[:100]!r}", rule="models.allowed")

    def rules_of(self, label: str, kind: DataKind) -> tuple[Rule, ...]:
        """The label's alternatives, at least one. Raises InvalidRequest."""
        rules = self.prompt_rules if kind is DataKind.PROMPT else self.kv_rules
        return rules[self.labels.check(label)]

    def allows(self, label: str, place: Place, *, entry_site: str, kind: DataKind) -> str | None:
        """Name of the rule that lets data of this label be at `place`; None if none does. Raises InvalidRequest."""
        return next((r.name for r in self.rules_of(label, kind) if r.matches(place, entry_site)), None)

    def check_prompt(self, label: str, place: Place, *, entry_site: str) -> None:
        """Raises PolicyDenied (with `rule`) unless a prompt of this label may be at `place`."""
        self._check(label, place, entry_site, DataKind.PROMPT)

    def check_kv(self, label: str, place: Place, *, entry_site: str) -> None:
        """Raises PolicyDenied (with `rule`) unless KV of this label may be at `place`."""
        self._check(label, place, entry_site, DataKind.KV)

    def check_relay(self) -> None:
        """Raises PolicyDenied unless sealed data may pass a relay."""
        if not self.relay:
            raise PolicyDenied("the policy forbids relays, sealed or not", rule="relay", version=str(self.version))

    def _check(self, label: str, place: Place, entry_site: str, kind: DataKind) -> None:
        if label not in self.labels.above:
            message = f"policy version {self.version} knows no label {label[:64]!r}"
            raise PolicyDenied(message, rule="unknown-label", node=place.node_id, version=str(self.version))
        if self.allows(label, place, entry_site=entry_site, kind=kind) is None:
            message = (
                f"{'KV' if kind is DataKind.KV else 'a prompt'} with label {label} may not be at {place.node_id} "
                f"(site {place.site}); policy version {self.version} allows {self.explain_rules(label, kind)}"
            )
            rule = self.rules_of(label, kind)[0].name
            raise PolicyDenied(message, rule=rule, node=place.node_id, version=str(self.version))

    def mask(self, label: str, places: PlaceColumns, *, entry_site: str, kind: DataKind) -> NDArray[np.bool_]:
        """`allows` of all places at once, shape [n_places], not to be written to. Raises InvalidRequest."""
        rules = self.rules_of(label, kind)

        def make() -> NDArray[np.bool_]:
            allowed = np.zeros(len(places), dtype=np.bool_)
            for rule in rules:
                allowed |= rule.mask(places, entry_site)
            return allowed

        return places.kept(self, (label, entry_site, kind), make)

    def explain_rules(self, label: str, kind: DataKind) -> str:
        """The label's rules in words, with their names."""
        return "; or ".join(f"{r.name} ({r})" for r in self.rules_of(label, kind))
