# SPDX-License-Identifier: Apache-2.0
"""Reads a YAML document to plain data and remembers the line of every key path.

Only the safe loader's types come out. Duplicate keys, anchors, aliases, merge keys and tags are
refused: a declaration that says a thing twice, or that needs a second document to be understood, is
a mistake more often than a wish. So are scalars that Python can hold and not print: integers of
thousands of digits, and escapes that are half of a character.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from fusion_registry.errors import ConfigProblem, FusionConfigError

KeyPath = tuple[str | int, ...]
MAX_DEPTH = 24
"""Nesting that no declaration needs; deeper documents are refused before Python's stack is."""
LONGEST_INTEGER = 100
"""Characters; Python refuses to print an integer of a few thousand digits."""
_DECIMAL = re.compile("[-+]?(0|[1-9][0-9]*)")
"""YAML also has integers of base 2, 8 (`010` is 8), 16 and 60 (`1:4` is 64), and with underscores:
in a list of layer numbers each of them is a slip."""


@dataclass(frozen=True)
class YamlSource:
    """A parsed document: its data, and where each part of it stands."""

    origin: str
    data: Any
    lines: Mapping[KeyPath, int]

    def line(self, path: KeyPath) -> int | None:
        """Line of `path`, or of its nearest ancestor that stands in the document."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)

    def problem(self, path: KeyPath, text: str) -> ConfigProblem:
        """A fault at `path`, with the file and line filled in."""
        return ConfigProblem(text, self.origin, self.line(path), format_path(path))


def format_path(path: KeyPath) -> str:
    """`("fusions", 0, "stage")` as `fusions[0].stage`."""
    text = ""
    for part in path:
        key = part if isinstance(part, int) else cut(part)
        text += f"[{key}]" if isinstance(part, int) else f".{key}" if text else str(key)
    return text


def short(value: Any) -> str:
    """A value for a message, as YAML writes it where that differs from Python, and cut short."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return cut(repr(value))


def cut(text: str) -> str:
    """The beginning of a text that is too long for a message, and nothing that moves a cursor."""
    plain = text if text.isprintable() else repr(text)[1:-1]
    return plain if len(plain) <= 80 else plain[:77] + "..."


def read_yaml(text: str, origin: str) -> YamlSource:
    """Parse `text`.

    Raises:
        FusionConfigError: not YAML, or YAML that is refused (see the module docstring).
    """
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise _refused(origin, event, f"nested deeper than {MAX_DEPTH} levels; flatten it")
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise _refused(origin, event, "anchors and aliases are not accepted; write it out")
            tag = getattr(event, "tag", None)
            if tag:
                raise _refused(origin, event, f"the tag {tag} is not accepted; remove it")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[KeyPath, int] = {}
        if root is not None:
            for path, node in _walk(root, (), origin):
                lines[path] = node.start_mark.line + 1
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error)
        raise FusionConfigError(
            ConfigProblem(f"not valid YAML: {what}", origin, mark.line + 1 if mark else None)
        ) from error
    except FusionConfigError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        # PyYAML lets these through for scalars such as 2001-99-99 or an int of 5,000 digits.
        raise FusionConfigError(
            ConfigProblem(f"not readable as YAML: {type(error).__name__}: {error}", origin)
        ) from error
    return YamlSource(origin, data, lines)


def _refused(origin: str, at: Any, text: str, path: KeyPath = ()) -> FusionConfigError:
    return FusionConfigError(ConfigProblem(text, origin, at.start_mark.line + 1, format_path(path)))


def _walk(node: yaml.Node, path: KeyPath, origin: str) -> Iterator[tuple[KeyPath, yaml.Node]]:
    yield path, node
    if isinstance(node, yaml.ScalarNode):
        _refuse_unreadable(node, path, origin)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _walk(item, (*path, index), origin)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refused(origin, key, "a key must be a plain word", path)
            if key.tag == "tag:yaml.org,2002:merge":
                raise _refused(origin, key, "the merge key << is not accepted; write it out", path)
            _refuse_unreadable(key, path, origin)
            name = str(key.value)
            if name in seen:
                raise _refused(
                    origin,
                    key,
                    f"the key stands twice, first on line {seen[name]}; keep one",
                    (*path, name),
                )
            seen[name] = key.start_mark.line + 1
            yield from _walk(value, (*path, name), origin)
            yield (*path, name), key


def _integer(text: str) -> str:
    try:
        return str(yaml.safe_load(text))
    except ValueError:  # such as 0b_
        return "no integer"


def _refuse_unreadable(node: yaml.ScalarNode, path: KeyPath, origin: str) -> None:
    """Refuse what PyYAML cannot turn into a value, or Python not print.

    Args:
        node: a value or a key; path: of the value, or of the mapping that has the key.
        origin: for messages.
    """
    text = str(node.value)
    if node.tag == "tag:yaml.org,2002:int":
        if len(text) > LONGEST_INTEGER:
            raise _refused(
                origin,
                node,
                f"an integer of {len(text)} characters; at most {LONGEST_INTEGER}",
                path,
            )
        if not _DECIMAL.fullmatch(text):
            raise _refused(
                origin,
                node,
                f"an integer must be written in decimal digits, got {text}, which YAML reads as "
                f"{_integer(text)}; write the digits, or quote it if it is a text",
                path,
            )
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _refused(
            origin, node, f"{ascii(text)[:80]} holds half of a character; write it whole", path
        )
    try:
        yaml.constructor.SafeConstructor().construct_object(node)
    except (ValueError, OverflowError) as error:  # such as 2001-99-99
        raise _refused(
            origin,
            node,
            f"{short(text)} is not readable as YAML: {error}; quote it if it is a text",
            path,
        ) from error
