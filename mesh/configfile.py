"""Reading a tree of settings: YAML file, dotted flags over it, one clear message for everything that is wrong.

Generic over the tree (mesh.settings has ours). Nothing is read from the environment.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from mesh.errors import InvalidRequest

MAX_CONFIG_BYTES = 1024 * 1024


class Group(BaseModel):
    """Base of all groups: frozen, no unknown keys, defaults checked like input, attribute docstrings are help."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)


GroupT = TypeVar("GroupT", bound=Group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One settable value of a tree, for flags and help."""

    key: str  # dotted
    help: str
    default: str  # as it would be written; "" if required or absent


def load_settings(cls: type[GroupT], config_file: Path | None, overrides: Mapping[str, str]) -> GroupT:
    """Read the file, lay the flags over it and check everything at once.

    `overrides`: dotted key -> text as on the command line ("none" switches an optional value off; a list is
    written as YAML). Relative paths in the file are relative to the file's folder. Raises InvalidRequest that
    lists every problem, each with its dotted key."""
    tree: dict[str, Any] = {}
    if config_file is not None:
        tree = _absolute_paths(cls, _read_file(config_file), config_file.resolve().parent)
    for key, text in overrides.items():
        _set(tree, key, _flag_value(cls, key, text))
    try:
        return cls.model_validate(tree)
    except ValidationError as exc:
        problems = "; ".join(_describe(cls, error) for error in exc.errors(include_url=False))
        source = f"{config_file}: " if config_file is not None else ""
        raise InvalidRequest(f"{source}{problems}", field="config") from exc


def leaves(cls: type[Group]) -> Iterator[Leaf]:
    """Every leaf of the tree in order of definition, nested groups flattened to dotted keys."""
    for name, field in cls.model_fields.items():
        group = _group_in(field.annotation)
        if group is not None:
            for leaf in leaves(group):
                yield Leaf(key=f"{name}.{leaf.key}", help=leaf.help, default=leaf.default)
            continue
        value = None if field.is_required() else field.default
        text = "" if value is None or value == () else str(value.value if isinstance(value, Enum) else value)
        yield Leaf(key=name, help=" ".join((field.description or "").split()), default=text)


def to_yaml(settings: Group) -> str:
    """The tree as a file that load_settings reads back."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InvalidRequest(f"{path} is larger than {MAX_CONFIG_BYTES} bytes: not a configuration file")
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise InvalidRequest(f"cannot read {path}: {exc.strerror}", field="config") from exc
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidRequest(f"{path} is not valid YAML: {_one_line(exc)}", field="config") from exc
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise InvalidRequest(f"{path} must hold a mapping of settings, not a {type(tree).__name__}", field="config")
    return tree


def _absolute_paths(cls: type[Group], tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same tree with relative file names made absolute, so that a file means the same from anywhere."""
    resolved = dict(tree)
    for name, field in cls.model_fields.items():
        value = tree.get(name)
        group, item = _group_in(field.annotation), _item_group(field.annotation)
        if group is not None and isinstance(value, dict):
            resolved[name] = _absolute_paths(group, value, folder)
        elif item is not None and isinstance(value, list):
            resolved[name] = [_absolute_paths(item, v, folder) if isinstance(v, dict) else v for v in value]
        elif field.annotation is Path and isinstance(value, str):
            resolved[name] = folder / value
    return resolved


def _flag_value(cls: type[Group], key: str, text: str) -> object:
    """A flag's text as a value for the tree: pydantic reads scalars from text, so only lists are YAML."""
    annotation = _annotation_at(cls, key.split("."))
    arguments = typing.get_args(annotation)
    if type(None) in arguments and text == "none":
        return None
    if typing.get_origin(annotation) is not tuple:
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise InvalidRequest(f"--{key}: not a YAML list: {_one_line(exc)}", field=key) from exc


def _set(tree: dict[str, Any], key: str, value: object) -> None:
    *groups, leaf = key.split(".")
    node = tree
    for group in groups:
        inner = node.get(group)
        node[group] = dict(inner) if isinstance(inner, dict) else {}
        node = node[group]
    node[leaf] = value


def _describe(cls: type[Group], error: Any) -> str:
    """One pydantic error as `dotted.key: what is wrong`."""
    path = [str(part) for part in error["loc"]]
    key = ".".join(path) or "settings"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        group = _annotation_at(cls, path[:-1])
        known = list(group.model_fields) if isinstance(group, type) and issubclass(group, Group) else []
        near = difflib.get_close_matches(path[-1], known, n=1)
        return f"unknown key {key}" + (f" (did you mean {'.'.join([*path[:-1], near[0]])}?)" if near else "")
    if error["type"] == "missing":
        return f"{key} is required"
    return f"{key}: {message[:1].lower()}{message[1:]}"


def _annotation_at(cls: type[Group], path: list[str]) -> Any:
    """What the tree holds at a path: a group class, a plain annotation, or None if there is no such key."""
    found: Any = cls
    for part in path:
        if part.isdigit():  # an index into a list of groups
            continue
        group = found if isinstance(found, type) and issubclass(found, Group) else None
        field = group.model_fields.get(part) if group is not None else None
        if field is None:
            return None
        found = _group_in(field.annotation) or _item_group(field.annotation) or field.annotation
        if _item_group(field.annotation) is not None and part == path[-1]:
            return field.annotation
    return found


def _group_in(annotation: object) -> type[Group] | None:
    """The group class of `Group` or `Group | None`; None for anything else."""
    candidates = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Group)), None)


def _item_group(annotation: object) -> type[Group] | None:
    """The group class of `tuple[Group, ...]`; None for anything else."""
    if typing.get_origin(annotation) is not tuple:
        return None
    return next((a for a in typing.get_args(annotation) if isinstance(a, type) and issubclass(a, Group)), None)


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split())
