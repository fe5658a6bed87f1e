"""Valid policies that contradict themselves are explained, with line and column; sensible ones pass in silence."""

from __future__ import annotations

import pytest

from mesh.identity.place import Place, Role, Tier
from placement.policy.book import BUILTIN_YAML
from placement.policy.model import check_meaning

CORE = Place(mesh="m", role=Role.CORE, tier=Tier.CORE, site="dc1", region="eu", jurisdiction="FR", node_id="core-1")
EDGE = Place(mesh="m", role=Role.EDGE, tier=Tier.EDGE, site="oslo", region="eu", jurisdiction="NO", node_id="edge-1")
HEAD = "version: 1\nlabels: {order: [low, high], default: low}\n"


def test_the_built_in_policy_is_sensible() -> None:
    assert check_meaning(BUILTIN_YAML, (CORE, EDGE)) == ()


@pytest.mark.parametrize(
    ("rules", "line", "path", "words"),
    [
        ("rules: {low: {anywhere: true}, high: {jurisdictions: [DE]}}", 3, "rules.high", "no node of the mesh"),
        ("rules: {low: {sites: [oslo], tiers: [core]}}", 3, "rules.low", "no node of the mesh"),
        ("rules: {high: {anywhere: true}}", 3, "rules.high", "raising the label loosens it"),
        ("rules: {low: {sites: [dc1, own]}, high: {sites: [oslo]}}", 3, "rules.high", "site oslo"),
        ("rules: {low: {anywhere: true}}\nkv_rules: {high: {tiers: [core]}}", 4, "kv_rules.high", "rebuilt from KV"),
    ],
)
def test_a_contradiction_is_explained(rules: str, line: int, path: str, words: str) -> None:
    found = check_meaning(HEAD + rules, (CORE, EDGE))
    assert any(p.line == line and p.path == path and words in p.message for p in found), found


@pytest.mark.parametrize(
    "rules",
    [
        "rules: {low: {tiers: [core, edge]}, high: {tiers: [core], sites: [dc1]}}",
        "rules: {low: [{tiers: [core]}, {sites: [own]}], high: {sites: [own]}}\nkv_rules: {low: {tiers: [core]}}",
        "rules: {}",
    ],
)
def test_what_is_sensible_passes(rules: str) -> None:
    assert check_meaning(HEAD + rules, (CORE, EDGE)) == ()


def test_without_a_mesh_nothing_is_said_of_nodes_and_a_wrong_document_says_nothing() -> None:
    assert check_meaning(HEAD + "rules: {low: {anywhere: true}, high: {jurisdictions: [DE]}}", ()) == ()
    assert check_meaning("version: 2", (CORE,)) == ()
