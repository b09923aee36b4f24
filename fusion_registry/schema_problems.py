# SPDX-License-Identifier: Apache-2.0
"""Turns what pydantic says of a declaration file into faults that a YAML user can act on.

Each fault says the rule, the value and the remedy, at its line and key path. pydantic speaks of
tuples, patterns and members of unions; the file has lists, names and one value in one place, so
what several members of a union say of one value becomes one fault, and what follows from a fault
further down is left out.
"""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from fusion_registry.errors import ConfigProblem
from fusion_registry.import_path import ImportPath
from fusion_registry.preconditions import (
    AnyPrecondition,
    AttributePath,
    CapabilityText,
    DimPath,
    Name,
)
from fusion_registry.schema import FusionDeclaration, FusionFile, FusionName, StageSelection
from fusion_registry.version_range import PackageName
from fusion_registry.yaml_source import KeyPath, YamlSource, cut, short

LONGEST_NAME = 100
"""Characters that a misspelt name is compared by."""

_TEXTS: Mapping[str, str] = {
    get_args(kind)[1].pattern: words
    for kind, words in (
        (Name, "a name (letters, digits and _, no digit first)"),
        (FusionName, "a name (letters, digits, _, . and -, a letter or _ first)"),
        (PackageName, "the name of a distribution (such as triton)"),
        (ImportPath, "package.module:callable"),
        (AttributePath, "a path from config or layer (such as config.bf16 or layer.out_norm)"),
        (DimPath, "a dimension of an input (such as x.head_dim)"),
        (CapabilityText, "a compute capability (such as '9.0')"),
    )
}
"""What a text of each pattern is, in words."""

_KINDS: Mapping[str, str] = {
    "string_type": "a text",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
}
"""What was wanted, by pydantic's name of the error."""

_ONLY_OF_THE_WHOLE = {*_KINDS, "literal_error", "too_short"}
"""Errors that say nothing new where a part of the same value has an error of its own: another
member of a union was not meant, or a list is short by the item that is wrong."""

PRECONDITION_MODELS: dict[str, type[BaseModel]] = {
    get_args(model.model_fields["kind"].annotation)[0]: model
    for model in get_args(get_args(AnyPrecondition)[0])
}
"""Every kind of precondition and its model, in order."""


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """`unknown fusion 'x'; did you mean 'y'? valid: ...`."""
    names = sorted(known)
    return f"unknown {what} {short(name)}; {_hint(name, names)}valid: {', '.join(names) or 'none'}"


def schema_problems(error: ValidationError, source: YamlSource) -> list[ConfigProblem]:
    """Every fault of a file that breaks the schema, in pydantic's order."""
    faults: dict[KeyPath, list[Any]] = {}
    for item in error.errors(include_url=False):
        faults.setdefault(_path_in_file(item["loc"], source), []).append(item)
    problems: list[ConfigProblem] = []
    for path, items in faults.items():
        deeper = any(len(other) > len(path) and other[: len(path)] == path for other in faults)
        mine = [item for item in items if not (deeper and item["type"] in _ONLY_OF_THE_WHOLE)]
        for text in _texts(path, mine, source, faults):
            problems.append(source.problem(path, text))
    return problems


def _path_in_file(location: tuple[str | int, ...], source: YamlSource) -> KeyPath:
    """pydantic puts the members of unions into the path; the file does not have them."""
    path: KeyPath = ()
    for part in location:
        # A key that is no text stands under its text.
        for key in (part, str(part)):
            if (*path, key) in source.lines:
                path = (*path, key)
                break
    return path


def _texts(
    path: KeyPath, items: list[Any], source: YamlSource, faults: Mapping[KeyPath, list[Any]]
) -> Iterator[str]:
    of_value = []
    for item in items:
        kind, last = item["type"], item["loc"][-1]
        if kind == "missing":
            if not _is_misspelt(str(last), path, faults):
                yield f"the key {last!r} is required; add it"
        elif kind == "extra_forbidden":
            missing = [
                str(other["loc"][-1])
                for other in faults.get(path[:-1], ())
                if other["type"] == "missing"
            ]
            close = difflib.get_close_matches(str(last)[:LONGEST_NAME], missing, n=1)
            valid = _valid_keys(path[:-1], source)
            hint = f"did you mean {close[0]!r}? " if close else _hint(str(last), valid)
            yield f"unknown key {short(last)}; {hint}valid: {', '.join(valid)}"
        elif kind == "invalid_key":
            yield f"a key must be a text, got {short(last)}; quote it or remove it"
        elif kind == "union_tag_not_found":
            yield f"the key 'kind' is required; one of {', '.join(PRECONDITION_MODELS)}"
        elif kind == "union_tag_invalid":
            yield unknown("kind", str(item["input"]["kind"]), PRECONDITION_MODELS)
        elif kind == "value_error":
            yield item["msg"].removeprefix("Value error, ")
        else:
            of_value.append(item)
    if of_value:
        yield _text_of_value(of_value)


def _is_misspelt(key: str, path: KeyPath, faults: Mapping[KeyPath, list[Any]]) -> bool:
    """Whether an unknown key beside a missing one was probably meant to be it."""
    beside = [
        str(other[-1])
        for other, items in faults.items()
        if other[:-1] == path and any(item["type"] == "extra_forbidden" for item in items)
    ]
    return any(difflib.get_close_matches(name[:LONGEST_NAME], [key], n=1) for name in beside)


def _text_of_value(items: list[Any]) -> str:
    """One fault of one value, with all that it could have been."""
    value = items[0]["input"]
    wanted = list(dict.fromkeys(_wanted(item) for item in items))
    rule = wanted[0] if len(wanted) == 1 else f"{', '.join(wanted[:-1])} or {wanted[-1]}"
    what = "the key must be" if items[0]["loc"][-1] == "[key]" else "must be"
    return f"{what} {rule}, got {short(value)}{_remedy(items, value)}"


def _wanted(item: Any) -> str:
    kind, context = item["type"], item.get("ctx", {})
    if kind == "string_pattern_mismatch":
        return _TEXTS.get(context["pattern"], f"a text that matches {context['pattern']}")
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "string_too_long":
        return f"a text of at most {context['max_length']} characters"
    if kind == "string_too_short":
        return f"a text of at least {context['min_length']} characters"
    if kind == "too_short":
        return f"a list with at least {context['min_length']} in it"
    return _KINDS.get(kind, str(item["msg"]).removeprefix("Input should be "))


def _remedy(items: list[Any], value: Any) -> str:
    kinds = {item["type"] for item in items}
    if value is None:
        return "; write it out or remove the key"
    if kinds == {"string_type"} and isinstance(value, bool):
        return "; YAML reads a bare yes, no, on and off so: quote a text"
    if kinds == {"string_type"} and isinstance(value, int | float | datetime.date):
        return "; quote it"
    if kinds == {"tuple_type"} and isinstance(value, str | int | float):
        return f"; write [{cut(value) if isinstance(value, str) else short(value)}]"
    if kinds == {"string_pattern_mismatch"} and "." in value and ":" not in value:
        if items[0]["ctx"]["pattern"] == get_args(ImportPath)[1].pattern:
            module, _, name = value.rpartition(".")
            return f"; did you mean '{module}:{name}'?"
    if kinds == {"literal_error"} and isinstance(value, str):
        names = re.findall("'([^']*)'", items[0]["ctx"]["expected"])
        hint = _hint(value, names, 0.7).strip()  # a gpu is no cpu
        return f"; {hint}" if hint else ""
    return ""


def _hint(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    # The time grows with the square of the length.
    close = difflib.get_close_matches(name[:LONGEST_NAME], list(known), n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}? " if close else ""


def _valid_keys(path: KeyPath, source: YamlSource) -> list[str]:
    if not path:
        return [*FusionFile.model_fields]
    if len(path) == 2:
        return [*(FusionDeclaration if path[0] == "fusions" else StageSelection).model_fields]
    value: Any = source.data
    for part in path:
        value = value[part]
    model = PRECONDITION_MODELS.get(str(value.get("kind")))
    return [*model.model_fields] if model is not None else [*PRECONDITION_MODELS]
