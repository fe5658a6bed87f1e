"""What a compiled policy and a border guard allow; both fail closed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import InvalidRequest, PolicyDenied, StalePlan
from mesh.identity.place import Place, Role, Tier
from mesh.node.port import WorkContext
from placement.policy.book import BUILTIN, BUILTIN_YAML, BookGuard, PolicyBook
from placement.policy.labels import Lattice
from placement.policy.model import DataKind, Policy, parse_policy
from placement.policy.places import PlaceColumns


def place(node_id: str, tier: str = "edge", site: str = "paris", region: str = "eu", jurisdiction: str = "FR") -> Place:
    return Place(
        mesh="m", role=Role(tier), tier=Tier(tier), site=site, region=region, jurisdiction=jurisdiction, node_id=node_id
    )


CORE = place("core-1", "core", "dc1", "eu", "DE")
US_CORE = place("core-2", "core", "dc2", "us", "US")
PARIS = place("edge-paris")
OSAKA = place("edge-osaka", site="osaka", region="ap", jurisdiction="JP")
ALL = (CORE, OSAKA, PARIS, US_CORE)


def allowed(policy: Policy, label: str, entry_site: str, kind: DataKind = DataKind.PROMPT) -> set[str]:
    one_by_one = {p.node_id for p in ALL if policy.allows(label, p, entry_site=entry_site, kind=kind) is not None}
    mask = policy.mask(label, PlaceColumns(ALL), entry_site=entry_site, kind=kind)
    assert {p.node_id for p, ok in zip(ALL, mask, strict=True) if ok} == one_by_one
    return one_by_one


def test_the_built_in_policy_keeps_private_data_at_home() -> None:
    assert allowed(BUILTIN, "public", "paris") == {p.node_id for p in ALL}
    assert allowed(BUILTIN, "internal", "paris") == {"core-1", "core-2", "edge-paris"}
    assert allowed(BUILTIN, "restricted", "paris") == {"edge-paris"}
    assert allowed(BUILTIN, "restricted", "") == set()
    assert parse_policy(BUILTIN_YAML, version=0) == BUILTIN


def test_keys_of_a_rule_all_count_and_alternatives_add_up() -> None:
    policy = parse_policy(
        "version: 1\nrules: {internal: [{tiers: [core], regions: [eu]}, {jurisdictions: [JP]}, {nodes: [core-2]}]}",
        version=1,
    )
    assert allowed(policy, "internal", "paris") == {"core-1", "edge-osaka", "core-2"}
    assert policy.allows("internal", OSAKA, entry_site="paris", kind=DataKind.PROMPT) == "rules.internal[1]"
    assert "tier core, region eu" in policy.explain_rules("internal", DataKind.PROMPT)


def test_a_label_without_a_rule_stays_at_the_entrys_own_site() -> None:
    policy = parse_policy("version: 1\nrules: {public: {anywhere: true}}", version=1)
    assert allowed(policy, "internal", "osaka") == {"edge-osaka"}
    assert policy.allows("internal", OSAKA, entry_site="osaka", kind=DataKind.PROMPT) == "own-site(internal)"


def test_kv_has_rules_of_its_own_or_those_of_its_prompt() -> None:
    policy = parse_policy(
        "version: 1\nrules: {internal: {tiers: [core, edge]}, public: {sites: [dc1]}}\n"
        "kv_rules: {internal: {sites: [own]}}",
        version=1,
    )
    assert allowed(policy, "internal", "paris") == {p.node_id for p in ALL}
    assert allowed(policy, "internal", "paris", DataKind.KV) == {"edge-paris"}
    assert allowed(policy, "public", "paris", DataKind.KV) == {"core-1"}


def test_unknown_labels_and_forbidden_models_are_refused() -> None:
    policy = parse_policy("version: 1\nmodels: {allowed: [a]}", version=1)
    with pytest.raises(InvalidRequest, match="unknown label"):
        policy.allows("secret", CORE, entry_site="", kind=DataKind.KV)
    with pytest.raises(InvalidRequest, match="unknown label"):
        policy.join("internal", "secret")
    assert policy.model_allowed("a")
    with pytest.raises(PolicyDenied) as caught:
        policy.check_model("b")
    assert caught.value.details["rule"] == "models.allowed"


def context(label: str, *, entry_site: str = "paris", tenant: str = "acme", version: int = 0) -> WorkContext:
    return WorkContext(
        request_id="r", tenant=tenant, label=label, model="m", salt=b"", policy_version=version, entry_site=entry_site
    )


def test_the_guard_asks_the_book_of_the_moment() -> None:
    books = [PolicyBook()]
    guard = BookGuard(lambda: books[-1])
    guard.check_prompt(context("internal"), CORE)
    books.append(books[-1].with_policy("acme", "version: 1\nrules: {internal: {sites: [dc2]}}", 3))
    with pytest.raises(PolicyDenied) as caught:
        guard.check_prompt(context("internal", version=3), CORE)
    assert caught.value.details["rule"] == "rules.internal"
    guard.check_kv(context("internal", version=3), US_CORE)
    guard.check_prompt(context("internal", tenant="other"), CORE)
    books.append(books[-1].without("acme"))
    guard.check_prompt(context("internal"), CORE)


@pytest.mark.parametrize(
    ("work", "rule"),
    [
        (context("secret"), "unknown-label"),
        (context("restricted"), "rules.restricted"),
        (context("restricted", entry_site=""), "rules.restricted"),
    ],
)
def test_the_guard_fails_closed(work: WorkContext, rule: str) -> None:
    guard = BookGuard(PolicyBook)
    for check in (guard.check_prompt, guard.check_kv):
        with pytest.raises(PolicyDenied) as caught:
            check(work, CORE)
        assert caught.value.details["rule"] == rule


def test_a_refusal_by_another_version_than_the_plan_s_is_a_stale_plan() -> None:
    books = [PolicyBook()]
    guard = BookGuard(lambda: books[-1])
    for check in (guard.check_prompt, guard.check_kv):
        with pytest.raises(StalePlan) as unknown:
            check(context("internal", version=4), CORE)
        assert unknown.value.details["rule"] == "unknown-policy"
    books.append(PolicyBook.of([("acme", "version: 1\nrules: {internal: {sites: [dc2]}}", 3)]))
    for version in (0, 2, 4):
        with pytest.raises(StalePlan) as stale:
            guard.check_prompt(context("internal", version=version), CORE)
        assert stale.value.details["rule"] == "rules.internal"
        guard.check_prompt(context("internal", version=version), US_CORE)


def test_a_book_of_documents_knows_their_versions() -> None:
    book = PolicyBook.of([("a", "version: 1", 2), ("b", "version: 1\npriority: 5", 9)])
    assert [book.lookup(t).version for t in "abc"] == [2, 9, 0]
    assert book.lookup("b").policy.version == 9
    with pytest.raises(InvalidRequest, match="unknown key"):
        PolicyBook.of([("a", "version: 1\nx: 1", 1)])


@st.composite
def lattices(draw: st.DrawFn) -> Lattice:
    """Products of two chains are lattices with labels of which neither is above the other."""
    width, height = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    names = {(i, j): f"l{i}{j}" for i in range(width) for j in range(height)}
    order = draw(st.permutations(sorted(names)))
    above = {
        names[i, j]: [names[at] for at in ((i + 1, j), (i, j + 1)) if at in names] for i, j in order
    }  # fmt: skip
    return Lattice.raises(above)


@given(lattices(), st.data())
def test_join_is_the_least_upper_bound(lattice: Lattice, data: st.DataObject) -> None:
    a, b, c = (data.draw(st.sampled_from(lattice.names)) for _ in range(3))
    join = lattice.join(a, b)
    assert join == lattice.join(b, a)
    assert lattice.join(a, a) == a
    assert lattice.join(join, c) == lattice.join(a, lattice.join(b, c))
    assert lattice.at_most(a, join)
    assert lattice.at_most(b, join)
    if lattice.at_most(a, c) and lattice.at_most(b, c):
        assert lattice.at_most(join, c)
    assert lattice.at_most(a, b) == (join == b)


NAMES = ("a", "b", "own")


@given(
    st.lists(
        st.fixed_dictionaries(
            {}, optional={
                "tiers": st.lists(st.sampled_from(["core", "edge"]), min_size=1),
                "sites": st.lists(st.sampled_from(NAMES), min_size=1),
                "regions": st.lists(st.sampled_from(NAMES), min_size=1),
                "nodes": st.lists(st.sampled_from(["n0", "n1"]), min_size=1),
            },
        ).filter(bool), min_size=1, max_size=3,
    ),
    st.lists(st.tuples(st.sampled_from(["core", "edge"]), *[st.sampled_from(["a", "b"])] * 2), max_size=6),
    st.sampled_from(["", "a", "b"]),
)  # fmt: skip
def test_mask_equals_allows(rules: list[dict[str, list[str]]], nodes: list[tuple[str, str, str]], site: str) -> None:
    policy = parse_policy(json.dumps({"version": 1, "rules": {"internal": rules}}), version=1)
    places = tuple(place(f"n{i}", tier, s, region) for i, (tier, s, region) in enumerate(nodes))
    mask = policy.mask("internal", PlaceColumns(places), entry_site=site, kind=DataKind.KV)
    expected = [policy.allows("internal", p, entry_site=site, kind=DataKind.KV) is not None for p in places]
    np.testing.assert_array_equal(mask, np.array(expected, dtype=bool))
