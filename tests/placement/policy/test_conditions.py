"""Conditions in CEL: what holds, what each mistake is told as, and that nothing an admin writes can run away."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mesh.errors import PolicyDenied
from placement.policy.conditions import MAX_CPU_S, MAX_STEPS, SAMPLE, raised_by
from placement.policy.model import check_policy, parse_policy
from placement.policy.rules import Policy


def policy_with(when: str, then: str = "raise_to: restricted") -> Policy:
    return parse_policy(f"version: 1\nconditions:\n  - when: >-\n      {when}\n    {then}\n", version=1)


def holds(when: str, **features: Any) -> bool:
    return bool(raised_by(policy_with(when).conditions, {**SAMPLE, **features}))


@pytest.mark.parametrize(
    ("when", "features", "expected"),
    [
        ("true", {}, True),
        ("prompt_tokens > 1000 || max_tokens >= 500", {"prompt_tokens": 1001}, True),
        ("prompt_tokens > 1000 || max_tokens >= 500", {}, False),
        ("model in ['large', 'huge']", {"model": "huge"}, True),
        ("'iban' in findings", {"findings": ["email", "iban"]}, True),
        ("findings.exists(f, f.startsWith('pattern.'))", {"findings": ["pattern.badge"]}, True),
        ("findings.all(f, f != 'iban') && size(findings) == 1", {}, True),
        ("entry.jurisdiction != 'FR' && entry.tier == 'edge'", {"entry": {"jurisdiction": "DE", "tier": "edge"}}, True),
        ("has(attributes.team) && attributes.team == 'payroll'", {"attributes": {"team": "payroll"}}, True),
        ("has(attributes.team) && attributes.team == 'payroll'", {"attributes": {}}, False),
        ("key_id.matches('^batch-[0-9]+$')", {"key_id": "batch-12"}, True),
        ("kind == 'chat' ? true : label == 'internal'", {"kind": "text", "label": "public"}, False),
    ],
)
def test_what_holds(when: str, features: dict[str, Any], expected: bool) -> None:
    assert holds(when, **features) is expected


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("prompt_tokens >", "not CEL"),
        ("prompt_tokens > 'a", "not CEL"),
        ("secret == 'x'", "no feature 'secret' at 1:1"),
        ("findings.exists(f, g == 'x')", "no feature 'g'"),
        ("timestamp('2020-01-01T00:00:00Z') == 1", "no function 'timestamp'"),
        ("model.upper() == 'X'", "no method 'upper'"),
        (".model == 'x'", "dot"),
        ("(" * 60 + "true" + ")" * 60, "nested too deeply"),
        ("[" + "1," * 100 + "1] == []", "too long"),
    ],
)
def test_a_mistake_is_told_with_its_place(when: str, words: str) -> None:
    text = f'version: 1\nconditions:\n  - when: "{when}"\n    deny: no\n'
    problems = check_policy(text)
    assert [(p.line, p.column, p.path) for p in problems] == [(3, 5, "conditions[0].when")]
    assert words in problems[0].message


@pytest.mark.parametrize(
    ("rule", "path", "words"),
    [
        ("{when: 'true'}", "conditions[0]", "one of"),
        ("{when: 'true', deny: x, raise_to: public}", "conditions[0]", "one of"),
        ("{when: 'true', raise_to: secret}", "conditions[0].raise_to", "unknown label"),
        ("{when: '', deny: x}", "conditions[0].when", "at least 1"),
        ("{deny: x}", "conditions[0].when", "required"),
        ("{when: 'true', allow: x}", "conditions[0].allow", "unknown key"),
    ],
)
def test_a_rule_that_says_too_little_or_too_much(rule: str, path: str, words: str) -> None:
    problems = check_policy(f"version: 1\nconditions: [{rule}]\n")
    assert problems[0].path == path
    assert words in problems[0].message
    assert problems[0].line == 2


_TEN = "[0,1,2,3,4,5,6,7,8,9]"
_GROW = "".join(f".map(s{i}, s{i} + s{i} + s{i} + s{i} + s{i} + s{i})" for i in range(7)) + ".exists(s, size(s) > 0)"
RUNAWAYS = {
    "loops": f"{_TEN}.all(a, {_TEN}.all(b, {_TEN}.all(c, {_TEN}.all(d, a + b + c + d >= 0))))",
    "allocates": "['x']" + _GROW,
    "allocates lists": "[[1, 2, 3]]" + _GROW,
}


@pytest.mark.parametrize("then", ["raise_to: restricted", "deny: no"])
@pytest.mark.parametrize("kind", sorted(RUNAWAYS))
def test_one_that_loops_or_allocates_is_ended_and_refuses(kind: str, then: str) -> None:
    policy = policy_with(RUNAWAYS[kind], then)
    began_s = time.thread_time()
    with pytest.raises(PolicyDenied, match="cannot be worked out") as caught:
        raised_by(policy.conditions, SAMPLE)
    assert caught.value.details["rule"] == "conditions[0]"
    # CPU time, which other work on the machine does not stretch; the limit is looked at every few steps.
    assert time.thread_time() - began_s < 50 * MAX_CPU_S


def test_all_conditions_of_a_request_share_one_budget() -> None:
    each = f"{_TEN}.all(a, {_TEN}.all(b, a + b >= 0))"
    rules = "".join(f"  - {{when: '{each}', raise_to: restricted}}\n" for _ in range(32))
    with pytest.raises(PolicyDenied, match=f"{MAX_STEPS} steps|ms"):
        raised_by(parse_policy(f"version: 1\nconditions:\n{rules}", version=1).conditions, SAMPLE)


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("attributes.team == 'x'", "key that is not there"),
        ("prompt_tokens", "neither true nor false"),
        ("prompt_tokens > model", "."),
        ("1 / (prompt_tokens - 100) > 0", "."),
    ],
)
def test_one_that_has_no_value_refuses_and_quotes_nothing(when: str, words: str) -> None:
    with pytest.raises(PolicyDenied, match=words) as caught:
        raised_by(policy_with(when).conditions, {**SAMPLE, "model": "hush-hush", "attributes": {"x": "hush-hush"}})
    assert "hush" not in caught.value.message


def test_an_error_is_no_escape_from_the_limits() -> None:
    with pytest.raises(PolicyDenied):
        raised_by(policy_with(f"true || {RUNAWAYS['loops']} || 1 / 0 > 0").conditions, SAMPLE)
