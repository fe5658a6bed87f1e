"""The published JSON Schema says of a document's form what the parser says of it."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from mesh.errors import InvalidRequest
from placement.policy import commands
from placement.policy.document import PolicyDocument, json_schema

FULL = """\
version: 1
labels: {order: [public, internal, top], default: internal}
rules:
  public: {anywhere: true}
  internal: [{tiers: [core], regions: [eu-west], jurisdictions: [FR]}, {sites: [own], nodes: [core-1]}]
kv_rules: {internal: {nodes: [core-1]}}
models: {allowed: [smol, big], default: smol, downgrade: {big: [smol]}}
detectors:
  raise_to: {identifiers: top}
  patterns: {project: {regex: 'ZX-[0-9]+', raise_to: top}}
  on_failure: top
conditions: [{when: 'prompt_tokens > 10', deny: too long}, {when: 'true', raise_to: top}]
priority: -3
share: 2.5
limits: {requests_per_minute: 60, tokens_per_minute: 1000.5, offline_share_ratio: 0.5}
targets: {ttft_s: 2, tpot_s: 0.05, deadline_s: 60}
expires: '2030-01-01'
fallback: none
offline_max_s: 3600
relay: forbidden
price: {core_decode_per_s: 1.5, edge_prefill_per_s: 2}
kv_max_loss_ratio: 0.02
"""
ODD: tuple[Any, ...] = ("x", "", "a b", "x" * 300, 0, 5, -1, 2.5, -0.5, 10**13, True, False, None, [], {}, ["a"],
                        ["core"], {"a": "b"}, {"when": "true"})  # fmt: skip


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, inner in items for p in places_in(inner, (*path, key)))]


def mutated(document: Any, rng: random.Random) -> Any:
    """The document with one part replaced, removed, or one key more."""
    document = copy.deepcopy(document)
    path = rng.choice([p for p in places_in(document) if p])
    around = document
    for step in path[:-1]:
        around = around[step]
    kind = rng.random()
    if kind < 0.2:
        del around[path[-1]]
    elif kind < 0.35 and isinstance(around, dict):
        around["another"] = rng.choice(ODD)
    else:
        around[path[-1]] = rng.choice(ODD)
    return document


def parser_takes(document: Any) -> bool:
    try:
        PolicyDocument.model_validate(document)
    except ValidationError:
        return False
    return True


def test_the_schema_and_the_parser_agree_on_3_000_documents() -> None:
    full, rng = yaml.safe_load(FULL), random.Random(1)
    schema = jsonschema.Draft202012Validator(json_schema())
    verdicts = [0, 0]
    for _ in range(3_000):
        document = mutated(full, rng)
        for _ in range(rng.randrange(2)):
            document = mutated(document, rng)
        taken = parser_takes(document)
        verdicts[taken] += 1
        assert schema.is_valid(document) is taken, document
    assert min(verdicts) > 300


def test_the_schema_is_one_and_the_full_document_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert parser_takes(yaml.safe_load(FULL))
    assert set(yaml.safe_load(FULL)) == set(json_schema()["properties"])
    described = [part for part in json_schema()["$defs"].values() if "description" not in part]
    assert described == []


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    commands.schema()
    assert json.loads(capsys.readouterr().out) == json_schema()


def test_a_policy_is_read_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(FULL)
    commands.explain(file)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "A request that claims no label is internal; a label can only be raised."
    assert "public (below internal, top): a prompt may be at rules.public (anywhere); its KV as well." in told
    assert "A prompt with pattern.project" not in told
    for words in (
        "conditions[0]: where prompt_tokens > 10, a request is refused: too long.",
        "Where no node can run big now, smol answers.",
        "Each entry takes 60 requests a minute and 1000.5 tokens a minute, 50% of it at a site that is cut off.",
        "A request that states no other wish has TTFT 2 s, TPOT 0.05 s, deadline 60 s.",
        "From 2030-01-01 00:00+00:00 on every request is refused.",
    ):
        assert words in told
    assert not any("None" in sentence or "frozenset" in sentence for sentence in told)


def test_a_wrong_or_missing_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        commands.explain(tmp_path / "none.yaml")
    (tmp_path / "wrong.yaml").write_text("version: 2")
    with pytest.raises(InvalidRequest, match="line 1, column 1"):
        commands.explain(tmp_path / "wrong.yaml")
