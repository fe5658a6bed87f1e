"""Policy documents: what is accepted, and that each mistake is told with its line, column and path."""

from __future__ import annotations

import pytest

from mesh.errors import InvalidRequest
from placement.policy.document import json_schema
from placement.policy.model import MAX_PROBLEMS, check_policy, parse_policy
from placement.policy.yaml_text import MAX_BYTES, MAX_PARTS

FULL = """\
version: 1
labels:
  raises: {public: [legal, medical], legal: [top], medical: [top], top: []}
  default: legal
rules:
  public: {anywhere: true}
  legal:
    - {tiers: [core], regions: [eu-west], jurisdictions: [FR, NO]}
    - {sites: [own]}
kv_rules:
  legal: {nodes: [core-1]}
models: {allowed: [smol, big], default: smol}
priority: -3
fallback: none
price: {core_decode_per_s: 1.5}
"""


def test_a_full_document_compiles() -> None:
    policy = parse_policy(FULL, version=7)
    assert check_policy(FULL) == ()
    assert (policy.version, policy.default_label, policy.priority, policy.fallback) == (7, "legal", -3, False)
    assert policy.join("legal", "medical") == "top"
    assert policy.prices.core_decode_per_s == 1.5
    assert policy.allowed_models == {"smol", "big"}


def test_the_smallest_document_has_the_default_chain() -> None:
    policy = parse_policy("version: 1", version=1)
    assert policy.labels.names == ("public", "internal", "confidential", "restricted")
    assert policy.default_label == "internal"
    assert policy.fallback


@pytest.mark.parametrize(
    ("text", "line", "column", "path", "words"),
    [
        ("", 0, 0, "", "empty"),
        ("- 1", 1, 1, "", "mapping"),
        ("a: [", 2, 1, "", "expected"),
        ("labels: {}", 1, 1, "version", "required"),
        ("version: 2", 1, 1, "version", "should be 1"),
        ("version: true", 1, 1, "version", "integer"),
        ("version: 1\nprize: {}", 2, 1, "prize", "unknown key"),
        ("version: 1\nversion: 1", 2, 1, "version", "twice"),
        ("version: 1\n7: x", 2, 1, "", "string"),
        ("version: 1\nrules:\n  internal: {sitez: [a]}", 3, 14, "rules.internal.sitez", "unknown key"),
        ("version: 1\nrules:\n  internal:\n    - {sites: [12]}", 4, 16, "rules.internal[0].sites[0]", "quote"),
        ("version: 1\nrules: {internal: {tiers: [cor]}}", 2, 28, "rules.internal.tiers[0]", "'core' or 'edge'"),
        ("version: 1\nrules: {internal: {sites: []}}", 2, 20, "rules.internal.sites", "at least 1"),
        ("version: 1\nrules: {internal: {}}", 2, 9, "rules.internal", "anywhere: true"),
        ("version: 1\nrules: {internal: []}", 2, 9, "rules.internal", "at least 1"),
        ("version: 1\nrules: {internal: {anywhere: true, sites: [a]}}", 2, 9, "rules.internal", "stands alone"),
        ("version: 1\nrules: {internal: {anywhere: false}}", 2, 20, "rules.internal.anywhere", "True"),
        ("version: 1\nrules: {secret: {sites: [own]}}", 2, 9, "rules.secret", "unknown label"),
        ("version: 1\nkv_rules: {secret: {sites: [own]}}", 2, 12, "kv_rules.secret", "unknown label"),
        ("version: 1\nrules: {internal: {sites: ['../x']}}", 2, 28, "rules.internal.sites[0]", "pattern"),
        ("version: 1\nlabels: {default: secret}", 2, 10, "labels.default", "unknown label"),
        ("version: 1\nlabels: {order: [a, b]}", 2, 1, "labels.default", "required"),
        ("version: 1\nlabels: {order: [a, a], default: a}", 2, 10, "labels.order", "twice"),
        ("version: 1\nlabels: {order: [a], raises: {a: []}}", 2, 22, "labels.raises", "not both"),
        ("version: 1\nlabels: {raises: {a: [b], b: [a]}}", 2, 10, "labels.raises", "above the other"),
        ("version: 1\nlabels: {raises: {a: [a]}}", 2, 10, "labels.raises", "above the other"),
        ("version: 1\nlabels: {raises: {a: [b]}}", 2, 10, "labels.raises", "not listed"),
        ("version: 1\nlabels: {raises: {a: [], b: []}}", 2, 10, "labels.raises", "no label is above both a and b"),
        (
            "version: 1\nlabels: {raises: {a: [c, d], b: [c, d], c: [e], d: [e], e: []}}",
            2, 10, "labels.raises", "a and b have no single least label above both: c and d",
        ),
        ("version: 1\nmodels: {allowed: [a], default: b}", 2, 24, "models.default", "not in models.allowed"),
        ("version: 1\nmodels: {allowed: []}", 2, 10, "models.allowed", "at least 1"),
        ("version: 1\npriority: 101", 2, 1, "priority", "100"),
        ("version: 1\npriority: '1'", 2, 1, "priority", "integer"),
        ("version: 1\nfallback: maybe", 2, 1, "fallback", "'allowed' or 'none'"),
        ("version: 1\nprice: {core_decode_per_s: -1}", 2, 9, "price.core_decode_per_s", "greater"),
        ("version: 1\nprice: {core_decode_per_s: .inf}", 2, 9, "price.core_decode_per_s", "finite"),
        ("a: &x [1]\nb: *x", 1, 4, "", "anchors"),
        ("a: 1\n---\nb: 2", 2, 1, "", "document"),
        ("a: !!python/object/apply:os.getcwd []", 1, 4, "a", "not allowed"),
        ("a: !!binary aGk=", 1, 4, "a", "not allowed"),
        ("a: 2024-01-01", 1, 4, "a", "timestamp"),
        ("a: !!int x", 1, 4, "a", "no int"),
        ("version: 1\npriority: 1:30", 2, 11, "priority", "decimal"),  # 90 in YAML 1.1
        ("version: 1\npriority: -1:30", 2, 11, "priority", "decimal"),
        ("version: 1\npriority: 010", 2, 11, "priority", "decimal"),
        ("version: 1\npriority: 0x10", 2, 11, "priority", "decimal"),
        ("version: 1\npriority: 0b1", 2, 11, "priority", "decimal"),
        ("version: 1\npriority: 1_0", 2, 11, "priority", "decimal"),
        ("version: 1\nprice: {core_decode_per_s: 1:30.5}", 2, 28, "price.core_decode_per_s", "decimal"),
        ("version: 1\nprice: {core_decode_per_s: 1_0.5}", 2, 28, "price.core_decode_per_s", "decimal"),
        ("[" * 50, 1, 9, "", "deep"),
        ("a: \x01", 0, 0, "", "control characters"),
    ],
)  # fmt: skip
def test_each_mistake_is_told_with_its_place(text: str, line: int, column: int, path: str, words: str) -> None:
    problem = check_policy(text)[0]
    assert (problem.line, problem.column, problem.path) == (line, column, path)
    assert words in problem.message
    with pytest.raises(InvalidRequest) as caught:
        parse_policy(text, version=1)
    assert caught.value.details["path"] == path


def test_all_problems_are_told() -> None:
    problems = check_policy(
        "version: 1\nrules: {internal: {}, secret: {sites: [own]}}\nmodels: {allowed: [a], default: b}"
    )
    assert [p.path for p in problems] == ["rules.internal", "rules.secret", "models.default"]


def test_a_document_that_is_too_large_is_refused_unread() -> None:
    assert "at most" in check_policy("#" * (MAX_BYTES + 1))[0].message


def test_norway_is_a_country() -> None:
    policy = parse_policy("version: 1\nrules: {internal: {jurisdictions: [NO]}}", version=1)
    assert policy.prompt_rules["internal"][0].jurisdictions == {"NO"}


def test_json_schema_names_every_key() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == {
        "version", "labels", "rules", "kv_rules", "models", "detectors", "priority", "fallback", "price",
            "kv_max_loss_ratio", "relay", "conditions", "limits", "targets", "share", "expires",
            "offline_max_s",
    }  # fmt: skip
    assert schema["additionalProperties"] is False


def test_a_million_lines_are_refused_before_they_are_read() -> None:
    (problem,) = check_policy("a: 1\n" * 1_000_000)
    assert f"at most {MAX_BYTES}" in problem.message


def test_a_document_of_too_many_parts_is_refused_where_they_begin_to_be() -> None:
    text = "version: 1\nrules: {public: {sites: [" + ",".join(f"s{i}" for i in range(30_000)) + "]}}"
    (problem,) = check_policy(text)
    assert (problem.line, f"more than {MAX_PARTS} keys" in problem.message) == (2, True)


def test_of_very_many_problems_the_first_are_told() -> None:
    text = "version: 1\nrules: {public: {sites: [" + ",".join(f"-s{i}" for i in range(5_000)) + "]}}"
    assert len(check_policy(text)) == MAX_PROBLEMS


@pytest.mark.parametrize("given", ["tomorrow", "2027-13-01", "31.12.2027", ""])
def test_an_expiry_that_is_no_time(given: str) -> None:
    (problem,) = check_policy(f'version: 1\nexpires: "{given}"')
    assert (problem.line, problem.column, problem.path) == (2, 1, "expires")


@pytest.mark.parametrize(
    ("models", "path", "words"),
    [
        ("{downgrade: {big: [big]}}", "models.downgrade.big[0]", "named already"),
        ("{downgrade: {big: [small, small]}}", "models.downgrade.big[1]", "named already"),
        ("{allowed: [big], downgrade: {big: [small]}}", "models.downgrade.big[0]", "not in models.allowed"),
        ("{downgrade: {big: []}}", "models.downgrade.big", "at least 1"),
    ],
)
def test_a_downgrade_that_cannot_be(models: str, path: str, words: str) -> None:
    (problem,) = check_policy(f"version: 1\nmodels: {models}")
    assert (problem.line, problem.path) == (2, path)
    assert words in problem.message
