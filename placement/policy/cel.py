"""CEL by cel-python, with a budget: the only module that knows the library. Pure but for the clock it is given.

A step is a visit to a node of the syntax tree, in the bodies of macros too. Only what conditions need is let through:
known names, and functions whose cost is linear in bounded values (`matches` is RE2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import celpy
import lark
from celpy.adapter import json_to_cel
from celpy.celparser import CELParseError
from celpy.celtypes import BoolType
from celpy.evaluation import Activation, CELEvalError, Evaluator

MAX_NODES = 600
MAX_DEPTH = 100
"""Of the syntax tree, in which each pair of parentheses is about nine deep."""
_FUNCTIONS = frozenset({"size", "has", "int", "double", "string"})
_MACROS = frozenset({"all", "exists", "exists_one", "filter", "map"})
_METHODS = frozenset({"contains", "startsWith", "endsWith", "matches", "size"})
_TYPES = frozenset({"true", "false", "null"})
_CLOCK_EVERY = 256  # steps; reading CPU time is a system call


class CelProblem(Exception):
    """An expression that is wrong, costs too much or has no value; never leaves placement.policy."""


class _Spent(BaseException):
    """The budget is gone. No Exception: the library makes values of those, and goes on."""


class Budget:
    """What evaluations may cost, together. `clock` is CPU time in seconds."""

    def __init__(self, *, steps: int, cpu_s: float, max_value: int, clock: Callable[[], float]) -> None:
        self._steps = steps
        self._left = steps
        self._cpu_s = cpu_s
        self._until_s = clock() + cpu_s
        self._clock = clock
        self._max_value = max_value

    def spend(self, steps: int) -> None:
        """Raises _Spent."""
        before = self._left // _CLOCK_EVERY
        self._left -= steps
        if self._left < 0:
            raise _Spent(f"it takes more than {self._steps} steps")
        if before != self._left // _CLOCK_EVERY and self._clock() > self._until_s:
            raise _Spent(f"it takes more than {self._cpu_s * 1000:g} ms")

    def check_value(self, value: object) -> None:
        """Raises _Spent for one that is too long."""
        if isinstance(value, (str, bytes, list)) and len(value) > self._max_value:
            raise _Spent(f"it makes a value longer than {self._max_value}")


class _Bounded(Evaluator):
    """cel-python's evaluator, which pays for each step."""

    def __init__(self, ast: lark.Tree[Any], activation: Activation, budget: Budget) -> None:
        super().__init__(ast, activation)
        self._budget = budget

    def sub_evaluator(self, ast: lark.Tree[Any]) -> Evaluator:
        return _Bounded(ast, self.activation, self._budget)

    def visit(self, tree: lark.Tree[Any]) -> Any:
        self._budget.spend(1)
        return super().visit(tree)

    def visit_children(self, tree: lark.Tree[Any]) -> Any:
        self._budget.spend(len(tree.children))
        return super().visit_children(tree)

    def addition(self, tree: lark.Tree[Any]) -> Any:
        value = super().addition(tree)
        self._budget.check_value(value)
        return value


def to_cel(features: Mapping[str, Any]) -> dict[str, Any]:
    """Features as values of the library."""
    return {name: json_to_cel(value) for name, value in features.items()}


def holds(program: celpy.Runner, values: Mapping[str, Any], budget: Budget) -> bool:
    """The value of a compiled expression, given what `to_cel` made. Raises CelProblem."""
    evaluator = _Bounded(program.ast, program.new_activation(), budget)
    try:
        value = evaluator.evaluate(dict(values))
    except _Spent as exc:
        raise CelProblem(str(exc)) from None
    except CELEvalError as exc:
        raise CelProblem(_said(exc)) from exc
    except Exception as exc:  # its message could hold a request's values
        raise CelProblem(f"evaluation failed ({type(exc).__name__})") from exc
    if not isinstance(value, (bool, BoolType)):
        raise CelProblem("its value is neither true nor false")
    return bool(value)


def compile_cel(text: str, sample: Mapping[str, Any]) -> celpy.Runner:
    """Check against the features of `sample`. Raises CelProblem, with line and column of the expression if known."""
    try:
        environment = celpy.Environment()
        tree = environment.compile(text)
    except CELParseError as exc:
        raise CelProblem(f"not CEL at {exc.line}:{exc.column} of the expression") from exc
    _check(tree, frozenset(sample))
    return environment.program(tree)


def _check(tree: lark.Tree[Any], known: frozenset[str]) -> None:
    variables = set[str]()
    nodes = list(_walk(tree))
    if len(nodes) > MAX_NODES:
        raise CelProblem(f"too long: {len(nodes)} parts, at most {MAX_NODES}")
    for node in nodes:
        arguments = node.children[-1]
        if node.data == "member_dot_arg" and str(node.children[1]) in _MACROS and isinstance(arguments, lark.Tree):
            variables |= {str(n.children[0]) for n in _walk(arguments.children[0]) if n.data == "ident"}
    for node in nodes:
        match node.data:
            case "ident" if str(node.children[0]) not in known | variables | _TYPES:
                raise CelProblem(f"no feature {_name(node, 0)}: one of {', '.join(sorted(known))}")
            case "ident_arg" if str(node.children[0]) not in _FUNCTIONS:
                raise CelProblem(f"no function {_name(node, 0)}: one of {', '.join(sorted(_FUNCTIONS))}")
            case "member_dot_arg" if str(node.children[1]) not in _METHODS | _MACROS:
                raise CelProblem(f"no method {_name(node, 1)}: one of {', '.join(sorted(_METHODS | _MACROS))}")
            case "member_object" | "dot_ident" | "dot_ident_arg":
                raise CelProblem("messages and names that begin with a dot are not allowed here")


def _walk(tree: lark.Tree[Any]) -> Iterator[lark.Tree[Any]]:
    """All nodes; not by recursion, for the expression may be nested deeply. Raises CelProblem if it is."""
    todo = [(tree, 1)]
    while todo:
        node, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise CelProblem("nested too deeply")
        yield node
        todo += [(child, depth + 1) for child in node.children if isinstance(child, lark.Tree)]


def _name(node: lark.Tree[Any], child: int) -> str:
    token = node.children[child]
    return f"{str(token)[:40]!r} at {getattr(token, 'line', '?')}:{getattr(token, 'column', '?')} of the expression"


def _said(error: CELEvalError) -> str:
    """Why there is no value, without the values: the library's messages may quote them."""
    cause = error.args[1] if len(error.args) > 1 else None
    kind = cause.__name__ if isinstance(cause, type) else ""
    if kind == "KeyError":
        return "it reads a key that is not there; ask with `has()` or `in` first"
    return "its operands are of the wrong types" if kind == "TypeError" else "it has no value"
