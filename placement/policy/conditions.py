"""Conditions of a policy in CEL (Common Expression Language, cel.dev): checked, compiled, evaluated within bounds.

CEL has no loops but its macros (`exists`, `map` ...), which nest. So an evaluation may take MAX_STEPS steps and
MAX_CPU_S of this thread's time, and no value that it makes may be longer than MAX_VALUE: it cannot stall an event loop
or eat memory, whatever an admin wrote. What goes beyond, or cannot be worked out, refuses the request.

cel-python evaluates: pure Python (3.4 MB with what it needs), and the one kept library whose steps can be counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mesh.errors import PolicyDenied
from placement.policy.labels import Lattice
from placement.policy.rules import Condition

if TYPE_CHECKING:
    from placement.policy.document import ConditionRule

MAX_STEPS = 4_000
MAX_CPU_S = 0.05
MAX_VALUE = 4_096
"""Characters, or members of a list."""

Wrong = Callable[[tuple[str | int, ...], str], None]
Features = Mapping[str, Any]
"""Name -> str, int, list of str, or mapping of str to str: all bounded where they come in."""

SAMPLE: Features = {
    "tenant": "acme",
    "key_id": "key",
    "model": "model",
    "label": "internal",
    "claimed_label": "",
    "prompt_tokens": 100,
    "max_tokens": 100,
    "kind": "text",
    "findings": ["email"],
    "attributes": {"name": "value"},
    "entry": {"node": "core-1", "site": "dc1", "region": "eu", "jurisdiction": "FR", "tier": "core"},
}
"""Every feature that a condition may name, with a value of its type."""


def compile_conditions(written: Sequence[ConditionRule], labels: Lattice, wrong: Wrong) -> tuple[Condition, ...]:
    """Problems go to `wrong(location, message)`."""
    if not written:
        return ()
    from placement.policy.cel import CelProblem, compile_cel  # half a second to import, for policies that need it

    found = []
    for i, rule in enumerate(written):
        if (rule.raise_to is None) == (rule.deny is None):
            wrong(("conditions", i), "give one of `raise_to` and `deny`")
        if rule.raise_to is not None and rule.raise_to not in labels.above:
            known = ", ".join(labels.names)
            wrong(("conditions", i, "raise_to"), f"unknown label {rule.raise_to!r}: one of {known}")
        try:
            program = compile_cel(rule.when, SAMPLE)
        except CelProblem as exc:
            wrong(("conditions", i, "when"), str(exc))
            continue
        name = f"conditions[{i}]"
        raise_to, deny = rule.raise_to or "", rule.deny or ""
        found.append(Condition(name=name, when=rule.when, raise_to=raise_to, deny=deny, program=program))
    return tuple(found)


def raised_by(conditions: Sequence[Condition], features: Features) -> tuple[tuple[str, str], ...]:
    """(condition's name, label) for each that holds and raises. All of them share one budget of steps and time.

    Raises PolicyDenied (with `rule`) if one that denies holds, or one cannot be worked out."""
    if not conditions:
        return ()
    from placement.policy.cel import Budget, CelProblem, holds, to_cel

    budget = Budget(steps=MAX_STEPS, cpu_s=MAX_CPU_S, max_value=MAX_VALUE, clock=time.thread_time)
    values, raised = to_cel(features), []
    for condition in conditions:
        try:
            held = holds(condition.program, values, budget)
        except CelProblem as exc:
            message = f"the policy's {condition.name} cannot be worked out for this request ({exc}), so it is refused"
            raise PolicyDenied(message, rule=condition.name) from exc
        if held and condition.deny:
            raise PolicyDenied(f"the policy refuses it: {condition.deny}", rule=condition.name)
        if held:
            raised.append((condition.name, condition.raise_to))
    return tuple(raised)
