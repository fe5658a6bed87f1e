"""YAML from a stranger, read safely and with positions: text -> plain data plus the line and column of each part.

Refused: more than MAX_BYTES or MAX_PARTS, anchors and aliases (so nothing can expand), nesting beyond MAX_DEPTH,
more than one document, tags other than string, integer, number, boolean and null, keys that are no strings, keys given
twice. `no`, `NO`, `on` and the like are strings, as in YAML 1.2: NO is also a country. Integers are decimal: what YAML
1.1 reads in another base (1:30 is 90 to it, 010 is 8) is refused, and so are its numbers with `:` or `_`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

MAX_BYTES = 256 * 1024
MAX_DEPTH = 8
MAX_PARTS = 20_000
"""Keys, values, lists and mappings of one document."""

Path = tuple[str | int, ...]
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + name for name in ("str", "int", "float", "bool", "null")}
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*)", re.ASCII)
_BOOLEANS = {"true", "True", "TRUE", "false", "False", "FALSE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a document. Line and column from 1, 0 if not known; `path` like "rules.public.sites"."""

    line: int
    column: int
    path: str
    message: str

    def __str__(self) -> str:
        where = f"line {self.line}, column {self.column}: " if self.line else ""
        return f"{where}{self.path + ': ' if self.path else ''}{self.message}"


class YamlProblem(Exception):
    """The text cannot be read; never leaves placement.policy."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Plain data (dict, list, str, int, float, bool, None) and where each part of it begins."""

    data: Any
    marks: dict[Path, tuple[int, int]]

    def find(self, location: Sequence[str | int]) -> tuple[str, int, int]:
        """Path, line and column of a location in the data; the nearest part around it if it is not there.

        Steps that name no part (of a validator's own making) are left out, but for the last one."""
        here, rest = self.data, ""
        found: Path = ()
        for i, step in enumerate(location):
            inside = step in here if isinstance(here, dict) else isinstance(here, list) and step in range(len(here))
            if inside:
                here, found = here[step], (*found, step)
            elif i == len(location) - 1 and isinstance(step, str) and isinstance(here, dict):
                rest = step
        line, column = self.marks.get(found, (0, 0))
        return path_text((*found, rest) if rest else found), line, column


def path_text(path: Path) -> str:
    """`("rules", "internal", 1, "sites")` as "rules.internal[1].sites"."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def read_yaml(text: str) -> Document:
    """Parse one document. Raises YamlProblem."""
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_BYTES:
        raise YamlProblem(Problem(line=0, column=0, path="", message=f"{size} bytes, at most {MAX_BYTES}"))
    try:
        _refuse_dangers(text)
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as exc:
        raise _problem(exc.problem_mark or exc.context_mark, (), exc.problem or "not YAML") from exc
    except yaml.YAMLError as exc:  # characters that YAML does not allow
        raise _problem(None, (), " ".join(str(exc).split())) from exc
    if root is None:
        raise _problem(None, (), "the document is empty")
    marks: dict[Path, tuple[int, int]] = {}
    return Document(data=_plain(root, (), marks), marks=marks)


def _refuse_dangers(text: str) -> None:
    depth = parts = 0
    for event in yaml.parse(text, Loader=_LOADER):
        parts += isinstance(event, yaml.NodeEvent)
        if parts > MAX_PARTS:
            raise _problem(event.start_mark, (), f"more than {MAX_PARTS} keys and values")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _problem(event.start_mark, (), "anchors and aliases are not allowed")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _problem(event.start_mark, (), f"nested more than {MAX_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _plain(node: yaml.Node, path: Path, marks: dict[Path, tuple[int, int]]) -> Any:
    marks.setdefault(path, _position(node.start_mark))
    match node:
        case yaml.MappingNode():
            return _mapping(node, path, marks)
        case yaml.SequenceNode() if node.tag == _TAG + "seq":
            return [_plain(child, (*path, i), marks) for i, child in enumerate(node.value)]
        case yaml.ScalarNode() if node.tag in _SCALARS:
            return _scalar(node, path)
    raise _problem(node.start_mark, path, f"the type {node.tag.removeprefix(_TAG)} is not allowed here")


def _mapping(node: yaml.MappingNode, path: Path, marks: dict[Path, tuple[int, int]]) -> dict[str, Any]:
    if node.tag != _TAG + "map":
        raise _problem(node.start_mark, path, f"the type {node.tag.removeprefix(_TAG)} is not allowed here")
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = _scalar(key_node, path) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            raise _problem(key_node.start_mark, path, "a key must be a string (quote it)")
        if key in found:
            raise _problem(key_node.start_mark, (*path, key), "the key is given twice")
        marks[(*path, key)] = _position(key_node.start_mark)
        found[key] = _plain(value_node, (*path, key), marks)
    return found


def _scalar(node: yaml.ScalarNode, path: Path) -> Any:
    if node.tag == _TAG + "str" or (node.tag == _TAG + "bool" and node.value not in _BOOLEANS):
        return node.value
    if node.tag not in _SCALARS:
        raise _problem(node.start_mark, path, f"the type {node.tag.removeprefix(_TAG)} is not allowed here")
    if node.tag == _TAG + "int" and _DECIMAL.fullmatch(node.value) is None:
        message = f"{node.value[:40]!r} is no int in plain decimal digits (quote it if it is text)"
        raise _problem(node.start_mark, path, message)
    if node.tag == _TAG + "float" and not {":", "_"}.isdisjoint(node.value):
        message = f"{node.value[:40]!r} is no float in plain decimal digits (quote it if it is text)"
        raise _problem(node.start_mark, path, message)
    try:
        return yaml.constructor.SafeConstructor().construct_object(node)
    except (ValueError, yaml.YAMLError) as exc:
        kind = node.tag.removeprefix(_TAG)
        raise _problem(node.start_mark, path, f"{node.value[:40]!r} is no {kind} (quote it if it is text)") from exc


def _position(mark: Any) -> tuple[int, int]:
    return (mark.line + 1, mark.column + 1) if mark is not None else (0, 0)


def _problem(mark: Any, path: Path, message: str) -> YamlProblem:
    line, column = _position(mark)
    return YamlProblem(Problem(line=line, column=column, path=path_text(path), message=message))
