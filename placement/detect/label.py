"""From a prompt's text to the label that its findings raise it to, under one policy."""

from __future__ import annotations

from dataclasses import dataclass

from placement.detect.catalogue import built_in, installed
from placement.detect.guard import Guard
from placement.detect.patterns import Patterns
from placement.detect.types import Detector, Finding
from placement.policy.rules import Policy


@dataclass(frozen=True, slots=True)
class Raised:
    """The effective label and what made it so: findings that the policy has a label for, or why none could be made,
    the conversation that it continues, and conditions.

    Positions are of the text that was looked at; of a chat, the contents of its messages joined by newlines."""

    label: str
    findings: tuple[Finding, ...] = ()
    failure: str = ""
    continued: str = ""  # label of the conversation that the request goes on with; empty: of none
    conditions: tuple[str, ...] = ()  # those of the policy that raised it


async def raise_label(guard: Guard, policy: Policy, label: str, text: str) -> Raised:
    """`label` joined with what the findings raise it to, or with `on_failure` if the text could not be looked at."""
    rules = policy.detection
    if not rules.wanted:
        return Raised(label)
    by_kind = {d_kind: d for d in installed().values() for d_kind in d.kinds}
    if missing := sorted(kind for kind in rules.raise_to if kind not in by_kind):
        return Raised(policy.join(label, rules.on_failure), failure=f"no detector for {missing[0]} is installed here")
    detectors: list[Detector] = list({by_kind[kind].name: by_kind[kind] for kind in rules.raise_to}.values())
    if rules.patterns:
        detectors.append(Patterns({name: regex for name, (regex, _) in rules.patterns.items()}))
    trusted = all(d.name in built_in() or isinstance(d, Patterns) for d in detectors)
    detected = await guard.detect(text, detectors, trusted=trusted)
    if detected.failure:
        return Raised(policy.join(label, rules.on_failure), failure=detected.failure)
    raise_to = dict(rules.raise_to) | {f"pattern.{name}": to for name, (_, to) in rules.patterns.items()}
    findings = tuple(f for f in detected.findings if f.kind in raise_to)
    for kind in {f.kind for f in findings}:
        label = policy.join(label, raise_to[kind])
    return Raised(label, findings)
