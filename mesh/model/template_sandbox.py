"""jinja2's immutable sandbox with bounds on steps, time and size, for templates that come with a model file.

jinja2 keeps a template from the interpreter's internals but lets it loop and multiply at will. Here every loop turn
and macro call is counted (a call is put into the syntax tree), `a ~ b` and the operators go through checks of size,
and what pads or formats text is off. Each rendering has its own budget, carried in a context variable, so one
compiled template serves several threads.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from mesh.errors import InvalidRequest

MAX_TEMPLATE_CHARS: Final = 256 * 1024
MAX_RENDERED_CHARS: Final = 8 * 1024 * 1024
MAX_STEPS: Final = 200_000
MAX_RENDER_S: Final = 2.0

# What makes much text of little, or looks at the machine.
_METHODS_OFF: Final = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate"}
)
_FILTERS_OFF: Final = (
    "center",
    "filesizeformat",
    "format",
    "indent",
    "pprint",
    "random",
    "urlize",
    "wordwrap",
    "xmlattr",
)


class TemplateRefusal(Exception):
    """The template called raise_exception: it does not take these messages."""


class _Budget:
    """Steps and time that one rendering has left."""

    __slots__ = ("_deadline_s", "_left")

    def __init__(self) -> None:
        self._left = MAX_STEPS
        self._deadline_s = time.monotonic() + MAX_RENDER_S

    def step(self) -> None:
        self._left -= 1
        if self._left < 0 or (self._left % 64 == 0 and time.monotonic() > self._deadline_s):
            raise InvalidRequest("the model's chat template runs too long", field="model")


_budget: ContextVar[_Budget] = ContextVar("template_budget")


class SandboxedTemplate:
    """A compiled template. Raises InvalidRequest if the source is too long or does not compile."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise InvalidRequest(f"the chat template has more than {MAX_TEMPLATE_CHARS} characters", field="model")
        try:
            self._template = _Environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as exc:
            raise InvalidRequest(f"the model's chat template does not compile: {exc}", field="model") from exc

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises InvalidRequest when it fails or exceeds a bound, TemplateRefusal when it refuses."""
        token = _budget.set(_Budget())
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                size += len(part)
                _check_size(size)
                parts.append(part)
        except (InvalidRequest, TemplateRefusal):
            raise
        except Exception as exc:
            # A template can fail in any way Python can; whatever it is, it is the template's fault and not ours.
            # The text of the exception may quote a message, so only its kind is told.
            raise InvalidRequest(f"the model's chat template failed with {type(exc).__name__}", field="model") from exc
        finally:
            _budget.reset(token)
        return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        for name in _FILTERS_OFF:
            del self.filters[name]
        self.filters.update(join=_join, replace=_replace, tojson=_tojson)
        self.globals.clear()
        self.globals.update(range=safe_range, namespace=Namespace, dict=dict, raise_exception=_raise_exception)

    # Both are called from compiled templates, through nodes that no template text can shadow.
    step = staticmethod(lambda: _budget.get().step())
    concat_checked = staticmethod(lambda *values: _join(values))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        loops: list[Any] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro), *tree.find_all(nodes.CallBlock)]
        for node in loops:
            node.body.insert(0, nodes.ExprStmt(_call("step", [], node.lineno), lineno=node.lineno))
        _ConcatAsCall().visit(tree)
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return not (isinstance(obj, str) and attr in _METHODS_OFF) and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str) and (bounded := _BOUNDED_METHODS.get(obj.__name__)) is not None:
            obj = functools.partial(bounded, owner)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if hasattr(left, "__len__") and hasattr(right, "__len__"):
                _check_size(len(left) + len(right))
        elif not (_is_small(left) and _is_small(right)) or (operator == "**" and right > 8):
            raise InvalidRequest(f"the chat template uses {operator!r} on something but small numbers", field="model")
        return super().call_binop(context, operator, left, right)


class _ConcatAsCall(NodeTransformer):
    """`a ~ b` is not an operator that the sandbox intercepts: make it a call of `concat_checked`."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concat_checked", node.nodes, node.lineno)


def _call(name: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=lineno), args, [], None, None, lineno=lineno)


def _check_size(n_chars: int) -> None:
    if n_chars > MAX_RENDERED_CHARS:
        raise InvalidRequest(f"the rendered chat has more than {MAX_RENDERED_CHARS} characters", field="messages")


def _is_small(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= 1 << 32


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message)[:500])


def _join(value: Iterable[Any], d: Any = "", attribute: str | None = None) -> str:
    items = [str(item[attribute] if attribute is not None else item) for item in value]
    _check_size(sum(map(len, items)) + len(str(d)) * len(items))
    return str(d).join(items)


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    source, limit = str(text), -1 if count is None else count
    times = source.count(old) if limit < 0 else min(limit, source.count(old))
    _check_size(len(source) + times * len(new))
    return source.replace(old, new, limit)


def _tojson(value: Any, indent: int | None = None) -> str:
    """As chat templates expect it: not escaped for HTML."""
    if indent is not None and not 0 <= indent <= 16:
        raise InvalidRequest("the chat template gives tojson an indent that is not 0 to 16", field="model")
    return json.dumps(value, ensure_ascii=False, indent=indent)


_BOUNDED_METHODS: Final[Mapping[str, Callable[..., str]]] = {
    "join": lambda text, items: _join(items, text),
    "replace": _replace,
}
