# SPDX-License-Identifier: Apache-2.0
"""Malformed files and selections: each ends in FusionConfigError or in a valid registry.

Nothing that a document names is imported before it has passed validation, and nothing at all by
reading it. `--hypothesis-profile=many` runs 2,500 examples of each property.
"""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_registry import FusionConfigError, Registry, Request, load_registry, select
from fusion_registry.registry import parse_declarations, precondition_kinds
from fusion_registry.schema import LayerSet
from fusion_registry.selection import Claim
from tests.fusion_registry.toy_stages import CATALOGUE

PROFILE = settings.get_profile("many" if settings.get_current_profile_name() == "many" else "few")

RULES: dict[str, dict[str, Any]] = {
    "value_equals": {"subject": "config.deterministic_mode", "value": False, "called": "mode"},
    "value_in": {"subject": "layer.activation", "values": ["silu", 1, None]},
    "module_type": {"subject": "layer.norm", "names": ["RMSNorm"]},
    "tensor_present": {"tensor": "w"},
    "device_type": {"tensors": ["x", "y"], "types": ["cuda"], "interpreter": True},
    "same_device": {"tensors": ["x", "y"]},
    "dtype_in": {"tensor": "x", "dtypes": ["bfloat16"]},
    "dtype_like": {"tensor": "x", "like": "y", "or_in": ["float32"]},
    "rank": {"tensor": "x", "dims": ["rows", "columns"]},
    "same_shape": {"tensors": ["x", "y"]},
    "dim_relation": {"dim": "x.columns", "relation": "multiple_of", "of": "n"},
    "nonempty": {"tensor": "x"},
    "contiguous": {"tensor": "x"},
    "last_dim_contiguous": {"tensor": "x"},
    "device_capability": {"tensor": "x", "at_least": "9.0"},
    "package_version": {"package": "triton", "versions": ">=3.4"},
    "predicate": {"callable": "evil.module:run", "reads": ["x", "config.a"], "says": "so"},
}
VALID: dict[str, Any] = {
    "fusions": [
        {
            "name": "mine",
            "stage": "lone",
            "implementation": "evil.module:run",
            "determinism": "deterministic",
            "preconditions": [{"kind": kind, **fields} for kind, fields in RULES.items()],
            "description": "all of it",
            "option": "use_other",
            "packages": {"torch": ">=2.6", "evil": ">=1"},
            "source": "here",
        },
        {
            "name": "second",
            "stage": "second",
            "implementation": "evil.other:run",
            "determinism": "unknown",
            "preconditions": [],
        },
    ],
    "select": [
        {"stage": "lone", "fusions": ["mine", "built_in_lone"], "layers": "1-4,7"},
        {"stage": "second", "fusions": "off"},
        {"stage": "lone", "fusions": ["built_in_lone"], "layers": [9, "11-12"]},
    ],
}


@contextmanager
def importing_nothing() -> Iterator[None]:
    """Fails when anything is imported by name."""

    def refuse(name: str, *args: Any) -> Any:
        raise AssertionError(f"imported {name}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib, "import_module", refuse)
        yield


def refused(action: Callable[[], Any]) -> FusionConfigError | None:
    """The error of `action`, if it is the one error that is allowed; it imports nothing."""
    try:
        with importing_nothing():
            action()
    except FusionConfigError as error:
        return error
    return None


def check(text: str) -> None:
    """Parses `text`: a valid document, or an error with the place of every fault."""
    error = refused(lambda: parse_declarations(text, "mine.yaml", CATALOGUE, "config file"))
    if error is not None:
        assert error.problems
        for problem in error.problems:
            assert problem.origin == "mine.yaml"
            assert str(problem).startswith("mine.yaml")
            assert problem.text
        str(error).encode()


# --- the strategies

HOSTILE_KEYS = [
    "<<",
    "=",
    '"\\ud800"',
    "1",
    "~",
    "true",
    "? a",
    "? [a]",
    "2001-01-01",
    ".nan",
    "name",
    "kind",
]
SIGNS = [
    "{", "}", "[", "]", ": ", "- ", "? ", "|", ">", "%YAML 9.9\n", "---\n", "...\n", "&a ", "*a ",
     "!t ", "!!binary ", "<<: ", "= ", "#", "'", '"', "\\", "\t", "\n", "\r", "\0", "\ufeff",
     "\u2028", '"\\ud83d"', '"\\U00110000"', "0x" + "f" * 5000, "9" * 5000, "1e999", ".inf",
     ".nan", "1:99:99", "2001-99-99", "2001-01-01T99:99:99Z", "0b_", "0o9", "[" * 100,
     "{a: " * 100, "~", "yes", "{a: 1}", "[{a: 1}, {b: 2}]"]  # fmt: skip

CHARACTERS = st.characters(exclude_categories=())
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**30, -(10**60), 10**200, 10**4000, 2**63, 0]),
    st.floats(),
    st.dates(),
    st.datetimes(),
    st.binary(max_size=8),
    st.text(CHARACTERS, max_size=12),
    st.sampled_from(
        ["", " ", "off", "x", "x.rows", "config.a", "layer", "config", "mine", "lone", "rank", "<<",
         "=", "1-4", "0-1", "1-999999999", "9" * 5000, "\ud800", "\0", "\x85", "٣", "🙂" * 40,
         "a:b", "os:system", "__import__('os').system('true')", "${HOME}", "!!python/name:a.b",
         ">=1", ">=" + "9" * 5000, "power_of_two", "multiple_of", "evil.module:run"]
    ),
)  # fmt: skip
KEYS = st.one_of(
    st.sampled_from(
        sorted(
            {"fusions", "select", "kind", "name", "stage", "layers", "option", "packages"}
            | {name for fields in RULES.values() for name in fields}
        )
    ),
    st.sampled_from(["<<", "=", "\ud800", "a\udfff", "", "\0", 1, None, True, 10**4000, 0.5]),
    SCALARS,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield from places(item, (*path, key))


PLACES = list(places(VALID))[1:]


@st.composite
def mutated_documents(draw: st.DrawFn) -> Any:
    """The valid document with one to three parts replaced, removed, renamed, doubled or wrapped."""
    document = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(PLACES))
        holder = document
        try:
            for part in parents:
                holder = holder[part]
            holder[last]
        except (KeyError, IndexError, TypeError):
            continue
        if isinstance(holder, str):
            continue
        action = draw(st.sampled_from(["replace", "remove", "add", "rename", "wrap", "double"]))
        if action == "replace":
            holder[last] = draw(VALUES)
        elif action == "remove":
            del holder[last]
        elif action == "wrap":
            for _ in range(draw(st.sampled_from([1, 2, 30]))):
                holder[last] = [holder[last]]
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[last]) if action == "double" else draw(VALUES))
        elif action == "rename":
            holder[draw(KEYS)] = holder.pop(last)
        else:
            holder[draw(KEYS)] = draw(VALUES)
    return document


def load(*files: Path) -> Registry:
    return load_registry(files, catalogue=CATALOGUE, plugins=False)


load()  # the built-in files are read once a process, and reading them imports their package


def dump(document: Any, **style: Any) -> str:
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=False, width=10**6, **style)


@st.composite
def texts_of_documents(draw: st.DrawFn) -> str:
    """YAML of a document, then cut, doubled or sprinkled with the signs that YAML knows."""
    document = draw(st.one_of(st.just(VALID), mutated_documents(), VALUES))
    try:
        text = dump(document, default_flow_style=draw(st.sampled_from([None, True, False])))
    except (yaml.YAMLError, TypeError, ValueError):
        text = repr(document)
    for _ in range(draw(st.integers(0, 3))):
        lines = text.split("\n")
        at = draw(st.integers(0, max(len(lines) - 1, 0)))
        action = draw(
            st.sampled_from(["double", "cut", "insert", "swap", "anchor", "tag", "value", "entry"])
        )
        if action == "double":
            lines.insert(at, lines[at])
        elif action == "cut":
            del lines[at]
        elif action == "swap":
            other = draw(st.integers(0, len(lines) - 1))
            lines[at], lines[other] = lines[other], lines[at]
        elif action == "anchor":
            lines[at] = lines[at].replace(": ", draw(st.sampled_from([": &a ", ": *a "])), 1)
        elif action == "tag":
            tags = ["!x", "!!str", "!!int", "!!python/object/apply:os.system", "!!binary", "!!set"]
            lines[at] = lines[at].replace(": ", f": {draw(st.sampled_from(tags))} ", 1)
        elif action == "value":
            key, colon, _ = lines[at].partition(": ")
            lines[at] = key + colon + draw(st.sampled_from(SIGNS))
        elif action == "entry":
            margin = lines[at][: len(lines[at]) - len(lines[at].lstrip(" -"))].replace("-", " ")
            lines.insert(
                at + 1,
                f"{margin}{draw(st.sampled_from(HOSTILE_KEYS))}: {draw(st.sampled_from(SIGNS))}",
            )
        if action == "insert":
            position = draw(st.integers(0, len(text)))
            text = text[:position] + draw(st.sampled_from(SIGNS)) + text[position:]
        else:
            text = "\n".join(lines)
    return text


RAW_TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(CHARACTERS, max_size=20),
    st.lists(
        st.one_of(
            st.sampled_from(SIGNS),
            st.sampled_from(["fusions", "select", "name", " ", "\n", "\n  "]),
        ),
        max_size=25,
    ).map("".join),
    st.binary(max_size=40).map(lambda data: data.decode("latin-1")),
)


# --- the properties

SMALL = dump(
    {
        "fusions": [VALID["fusions"][0] | {"preconditions": [{"kind": "rank"} | RULES["rank"]]}],
        "select": VALID["select"][:1],
    }
)


@pytest.mark.parametrize("key", HOSTILE_KEYS)
def test_a_hostile_entry_after_every_line(key: str) -> None:
    lines = SMALL.splitlines()
    values = ["{a: 1}", "[{a: 1}]", "0x" + "f" * 5000, '"\\ud800"', "2001-99-99", "~"]
    for at, value in itertools.product(range(len(lines)), values):
        margin = lines[at][: len(lines[at]) - len(lines[at].lstrip(" -"))].replace("-", " ")
        check("\n".join([*lines[: at + 1], f"{margin}{key}: {value}", *lines[at + 1 :]]))


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: ascii(sign)[:16])
def test_a_hostile_value_on_every_line(sign: str) -> None:
    lines = SMALL.splitlines()
    for at, line in enumerate(lines):
        key, colon, _ = line.partition(": ")
        check("\n".join([*lines[:at], f"{key}{colon}{sign}", *lines[at + 1 :]]))


def test_the_document_that_is_mutated_is_valid_and_complete() -> None:
    fusions, selections = parse_declarations(dump(VALID), "mine.yaml", CATALOGUE, "config file")
    assert [item.name for item in fusions] == ["mine", "second"]
    assert len(selections) == 3
    assert set(RULES) == set(precondition_kinds())


@settings(PROFILE)
@given(document=mutated_documents())
def test_mutated_documents(document: Any) -> None:
    try:
        text = dump(document)
    except (yaml.YAMLError, TypeError, ValueError):  # what no YAML can say
        return
    check(text)


@settings(PROFILE)
@given(text=texts_of_documents())
def test_mutated_texts(text: str) -> None:
    check(text)


@settings(PROFILE)
@given(text=RAW_TEXTS)
def test_raw_texts(text: str) -> None:
    check(text)


@settings(PROFILE)
@given(value=VALUES)
def test_any_value_in_any_place_of_a_small_document(value: Any) -> None:
    for document in (
        value,
        {"fusions": value},
        {"select": value},
        {"fusions": [value]},
        {"select": [{"stage": "lone", "fusions": value}]},
        {"select": [{"stage": "lone", "fusions": "off", "layers": value}]},
    ):
        try:
            text = dump(document)
        except (yaml.YAMLError, TypeError, ValueError):
            continue
        check(text)


@pytest.fixture(scope="module")
def fresh_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], Any]:
    path = tmp_path_factory.mktemp("malformed") / "mine.yaml"

    def write(data: bytes) -> Any:
        path.write_bytes(data)
        return path

    return write


@settings(PROFILE)
@given(
    data=st.one_of(
        texts_of_documents().map(lambda text: text.encode("utf-8", "surrogatepass")),
        RAW_TEXTS.map(lambda text: text.encode("utf-16", "surrogatepass")),
        st.binary(max_size=60),
    )
)
def test_files_on_disk(fresh_file: Callable[[bytes], Any], data: bytes) -> None:
    path = fresh_file(data)
    registries: list[Registry] = []
    error = refused(lambda: registries.append(load(path)))
    if error is not None:
        assert str(path) in str(error)
    else:
        assert set(registries[0].stages) == {stage.name for stage in CATALOGUE.stages}
        assert "built_in_lone" in registries[0].fusions


NAMES = st.one_of(
    st.sampled_from(["built_in_lone", "built_in_first", "built_in_whole", "mine", "second"]),
    st.text(CHARACTERS, max_size=8),
)
LAYERS = st.one_of(
    st.none(), st.sampled_from(["1", "1-4", "2,9", "100000"]).map(lambda text: LayerSet.parse(text))
)
REQUESTS = st.lists(
    st.builds(
        Request,
        stage=st.one_of(
            st.sampled_from([stage.name for stage in CATALOGUE.stages]),
            st.text(CHARACTERS, max_size=8),
        ),
        candidates=st.lists(NAMES, max_size=3).map(tuple),
        layers=LAYERS,
        origin=st.sampled_from(["option", "--gdn-fusions"]),
    ),
    max_size=4,
)


@settings(PROFILE)
@given(requests=REQUESTS, document=st.one_of(st.just(VALID), st.just(None), mutated_documents()))
def test_selections(
    fresh_file: Callable[[bytes], Any], requests: list[Request], document: Any
) -> None:
    try:
        path = fresh_file(dump(document).encode())
    except (yaml.YAMLError, TypeError, ValueError):
        return
    registry = load()
    claims: list[Mapping[str, Claim]] = []

    def select_and_check() -> None:
        nonlocal registry
        registry = load(path)
        selection = select(registry, requests)
        selection.check([1, 2, 3])
        claims.extend(selection.for_layer(layer) for layer in (1, 2, 3, None))

    error = refused(select_and_check)
    if error is not None:
        assert str(error)
        return
    for claim in (claim for layer in claims for claim in layer.values()):
        assert claim.candidates
        for name in claim.candidates:
            assert registry.fusion(name).declaration.stage == claim.stage


@settings(PROFILE)
@given(value=st.one_of(VALUES, st.text("0123456789-, _+٣", max_size=12), st.dates()))
def test_layer_sets(value: Any) -> None:
    try:
        layers = LayerSet.parse(value)
    except ValueError:
        return
    assert all(1 <= first <= last for first, last in layers.ranges)
    assert LayerSet.parse(str(layers)) == layers


def test_the_guard_against_imports_guards() -> None:
    with pytest.raises(AssertionError, match="imported evil"), importing_nothing():
        importlib.import_module("evil")
