"""Policy documents: YAML text to a compiled Policy, or every problem in it with line, column and path.

Three steps, each with its own file: read_yaml (safe text to plain data with positions), PolicyDocument (types and
unknown keys), and the cross-checks here (lattice, labels, rules that say nothing).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from types import MappingProxyType

from pydantic import ValidationError

from mesh.errors import InvalidRequest
from mesh.identity.place import Place, Tier
from placement.policy.conditions import compile_conditions
from placement.policy.contradictions import contradictions
from placement.policy.detection import Wrong, compile_detection
from placement.policy.document import PlaceRule, PolicyDocument
from placement.policy.labels import DEFAULT_ORDER, Lattice, LatticeProblem
from placement.policy.rules import DataKind, LatencyTargets, Policy, Prices, RateLimits, Rule
from placement.policy.yaml_text import Document, Problem, YamlProblem, read_yaml

__all__ = ["DataKind", "Policy", "Prices", "Problem", "Rule", "check_policy", "parse_policy"]

OWN_SITE = "own"
MAX_PROBLEMS = 100
"""More of one document are not told of."""


def parse_policy(text: str, *, version: int) -> Policy:
    """Compile a document. Raises InvalidRequest that tells the first problem (`line`, `column`, `path`)."""
    outcome = _read(text, version)
    if isinstance(outcome, Policy):
        return outcome
    first, more = outcome[0], len(outcome) - 1
    message = f"policy: {first}" + (f" (and {more} more)" if more else "")
    raise InvalidRequest(message, field="policy", line=str(first.line), column=str(first.column), path=first.path)


def check_policy(text: str) -> tuple[Problem, ...]:
    """All problems of a document; empty if it is valid."""
    outcome = _read(text, version=1)
    return () if isinstance(outcome, Policy) else outcome


def check_meaning(text: str, places: Sequence[Place]) -> tuple[Problem, ...]:
    """What a valid document says that is hardly meant, on a mesh whose engines are at `places`; empty for one that is
    not valid."""
    policy = _read(text, version=1)
    if not isinstance(policy, Policy):
        return ()
    document = read_yaml(text)
    return tuple(_problem(document, at, message) for at, message in contradictions(policy, places))[:MAX_PROBLEMS]


def _read(text: str, version: int) -> Policy | tuple[Problem, ...]:
    try:
        document = read_yaml(text)
    except YamlProblem as exc:
        return (exc.problem,)
    try:
        written = PolicyDocument.model_validate(document.data)
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_input=False)[:MAX_PROBLEMS]
        return tuple(_problem(document, error["loc"], _words(error["type"], error["msg"])) for error in errors)
    return _compile(written, document, version)


def _words(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "unknown key"
    if kind in ("missing", "string_type"):
        return {"missing": "required", "string_type": "must be a string (quote it)"}[kind]
    if kind == "model_type":
        return "must be a mapping of keys to values"
    return message.replace("Input should", "should").removeprefix("Value error, ")


def _problem(document: Document, location: tuple[str | int, ...], message: str) -> Problem:
    path, line, column = document.find(location)
    return Problem(line=line, column=column, path=path, message=message)


def _compile(written: PolicyDocument, document: Document, version: int) -> Policy | tuple[Problem, ...]:
    problems: list[Problem] = []

    def wrong(location: tuple[str | int, ...], message: str) -> None:
        problems.append(_problem(document, location, message))

    try:
        labels = _lattice(written)
    except LatticeProblem as exc:
        return (_problem(document, ("labels", "raises" if written.labels.raises else "order"), str(exc)),)
    default_label = written.labels.default or ("internal" if "internal" in labels.above else "")
    if not default_label:
        wrong(("labels", "default"), f"required with these labels: one of {', '.join(labels.names)}")
    elif default_label not in labels.above:
        wrong(("labels", "default"), f"unknown label {default_label!r}: one of {', '.join(labels.names)}")
    for section, rules in (("rules", written.rules), ("kv_rules", written.kv_rules)):
        for label, given in rules.items():
            if label not in labels.above:
                wrong((section, label), f"unknown label: one of {', '.join(labels.names)}")
            for i, rule in enumerate(given if isinstance(given, list) else [given]):
                _check_rule(rule, lambda message, at=(section, label, i): wrong(at, message))  # type: ignore[misc]
    allowed, default_model = written.models.allowed, written.models.default or ""
    if allowed is not None and default_model and default_model not in allowed:
        wrong(("models", "default"), f"{default_model!r} is not in models.allowed")
    _check_downgrade(written, wrong)
    expires_unix_s = _expiry(written.expires, wrong)
    conditions = compile_conditions(written.conditions, labels, wrong)
    detection = compile_detection(written.detectors, labels, lambda at, message: wrong(("detectors", *at), message))
    if problems:
        return tuple(problems[:MAX_PROBLEMS])
    prompt_rules = {name: _rules("rules", name, written) or (_own_site(name),) for name in labels.names}
    return Policy(
        version=version,
        labels=labels,
        default_label=default_label,
        prompt_rules=prompt_rules,
        kv_rules={name: _rules("kv_rules", name, written) or prompt_rules[name] for name in labels.names},
        allowed_models=None if allowed is None else frozenset(allowed),
        default_model=default_model,
        priority=written.priority,
        fallback=written.fallback == "allowed",
        relay=written.relay == "allowed",
        prices=Prices(**written.price.model_dump()),
        kv_max_loss_ratio=written.kv_max_loss_ratio,
        offline_max_s=written.offline_max_s,
        detection=detection,
        limits=RateLimits(**written.limits.model_dump()),
        share=written.share,
        targets=LatencyTargets(**written.targets.model_dump()),
        downgrade=MappingProxyType({model: tuple(others) for model, others in written.models.downgrade.items()}),
        conditions=conditions,
        expires_unix_s=expires_unix_s,
    )


def _check_downgrade(written: PolicyDocument, wrong: Wrong) -> None:
    allowed = written.models.allowed
    for model, others in written.models.downgrade.items():
        for i, other in enumerate(others):
            at = ("models", "downgrade", model, i)
            if other == model or other in others[:i]:
                wrong(at, f"{other!r} is named already")
            elif allowed is not None and other not in allowed:
                wrong(at, f"{other!r} is not in models.allowed")


def _expiry(text: str | None, wrong: Wrong) -> float | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        wrong(("expires",), 'must be a day or a time such as "2027-01-31" or "2027-01-31T12:00:00+01:00"')
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _lattice(written: PolicyDocument) -> Lattice:
    labels = written.labels
    if labels.raises is not None:
        if labels.order is not None:
            raise LatticeProblem("give `order` or `raises`, not both")
        return Lattice.raises(labels.raises)
    return Lattice.chain(labels.order or DEFAULT_ORDER)


def _check_rule(rule: PlaceRule, wrong: Callable[[str], None]) -> None:
    limits = rule.model_fields_set - {"anywhere"}
    if rule.anywhere and limits:
        wrong("`anywhere` stands alone: leave it out, or leave out the limits")
    elif not rule.anywhere and not limits:
        wrong("allows nothing that can be told: say `anywhere: true`, or give tiers, regions, sites ...")


def _rules(section: str, label: str, written: PolicyDocument) -> tuple[Rule, ...]:
    given = getattr(written, section).get(label)
    if given is None:
        return ()
    if isinstance(given, PlaceRule):
        return (_rule(f"{section}.{label}", given),)
    return tuple(_rule(f"{section}.{label}[{i}]", rule) for i, rule in enumerate(given))


def _rule(name: str, given: PlaceRule) -> Rule:
    def names(values: list[str] | None) -> frozenset[str] | None:
        return None if values is None else frozenset(values)

    sites = names(given.sites)
    return Rule(
        name=name,
        tiers=None if given.tiers is None else frozenset(Tier(tier) for tier in given.tiers),
        regions=names(given.regions),
        jurisdictions=names(given.jurisdictions),
        sites=None if sites is None else sites - {OWN_SITE},
        own_site=sites is not None and OWN_SITE in sites,
        nodes=names(given.nodes),
    )


def _own_site(label: str) -> Rule:
    """What a label without a rule gets."""
    return Rule(name=f"own-site({label})", sites=frozenset(), own_site=True)
