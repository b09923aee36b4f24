# SPDX-License-Identifier: Apache-2.0
"""The format of declaration files: what is required, what is refused, where messages point."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from fusion_registry import FusionConfigError
from fusion_registry.preconditions import Rank
from fusion_registry.registry import parse_declarations, precondition_kinds
from fusion_registry.schema import FusionDeclaration, FusionFile, LayerSet, StageSelection
from fusion_registry.yaml_source import LONGEST_INTEGER, MAX_DEPTH
from tests.fusion_registry.toy_stages import CATALOGUE

VALID: dict[str, Any] = {
    "fusions": [
        {
            "name": "mine",
            "stage": "lone",
            "implementation": "package.module:function",
            "determinism": "unknown",
            "preconditions": [{"kind": "rank", "tensor": "x", "dims": ["rows", "columns"]}],
        }
    ],
    "select": [{"stage": "lone", "fusions": ["mine"]}],
}


def parse(document: Any):
    text = document if isinstance(document, str) else yaml.safe_dump(document, sort_keys=False)
    return parse_declarations(text, "mine.yaml", CATALOGUE, "config file")


def refusal(document: Any) -> str:
    with pytest.raises(FusionConfigError) as caught:
        parse(document)
    return str(caught.value)


def with_fusion(**changes: Any) -> dict[str, Any]:
    document = copy.deepcopy(VALID)
    document["fusions"][0].update(changes)
    return document


def with_rule(**rule: Any) -> dict[str, Any]:
    return with_fusion(preconditions=[rule])


def with_select(**changes: Any) -> dict[str, Any]:
    document = copy.deepcopy(VALID)
    document["select"][0].update(changes)
    return document


def test_the_document_that_the_others_break_is_valid() -> None:
    (fusion,), (selection,) = parse(VALID)
    assert (fusion.name, str(fusion.origin), fusion.origin.kind) == (
        "mine",
        "mine.yaml:2",
        "config file",
    )
    assert (selection.selection.stage, str(selection.origin)) == ("lone", "mine.yaml:13")


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}", "fusions: []"])
def test_a_file_may_be_empty(text: str) -> None:
    assert parse(text) == ((), ())


# --- required fields


@pytest.mark.parametrize(
    "field", ["name", "stage", "implementation", "determinism", "preconditions"]
)
def test_a_required_field_of_a_fusion_has_no_default(field: str) -> None:
    document = copy.deepcopy(VALID)
    del document["fusions"][0][field]
    assert f"mine.yaml:2: fusions[0]: the key '{field}' is required; add it" in refusal(document)


@pytest.mark.parametrize("field", ["stage", "fusions"])
def test_a_required_field_of_a_selection_has_no_default(field: str) -> None:
    document = copy.deepcopy(VALID)
    del document["select"][0][field]
    assert f"select[0]: the key '{field}' is required; add it" in refusal(document)


def test_every_field_that_declares_no_default_is_tested_above() -> None:
    required = {name for name, item in FusionDeclaration.model_fields.items() if item.is_required()}
    assert required == {"name", "stage", "implementation", "determinism", "preconditions"}


def test_no_preconditions_must_be_written_out() -> None:
    (fusion,), _ = parse(with_fusion(preconditions=[]))
    assert fusion.declaration.preconditions == ()
    assert "fusions[0].preconditions: " in refusal(with_fusion(preconditions=None))


def test_the_kind_of_a_rule_is_required() -> None:
    text = refusal(with_rule(tensor="x"))
    assert "fusions[0].preconditions[0]: the key 'kind' is required; one of value_equals" in text


def test_all_faults_of_a_file_are_reported_at_once() -> None:
    text = refusal(with_fusion(name=3, determinism="maybe", extra=1))
    assert len(text.splitlines()) == 3
    for place in ("fusions[0].name", "fusions[0].determinism", "fusions[0].extra"):
        assert place in text


# --- unknown keys, at every level


@pytest.mark.parametrize(
    ("document", "place", "valid"),
    [
        (VALID | {"fusion": []}, "fusion: unknown key 'fusion'", FusionFile),
        (with_fusion(nam=1), "fusions[0].nam: unknown key 'nam'", FusionDeclaration),
        (with_select(layer=1), "select[0].layer: unknown key 'layer'", StageSelection),
        (
            with_rule(kind="rank", tensor="x", dims=["rows", "columns"], tensors=["x"]),
            "fusions[0].preconditions[0].tensors: unknown key 'tensors'",
            Rank,
        ),
    ],
    ids=["file", "fusion", "selection", "precondition"],
)
def test_an_unknown_key_lists_the_valid_ones(document: Any, place: str, valid: Any) -> None:
    text = refusal(document)
    assert f"{place}; did you mean " in text
    assert f"? valid: {', '.join(valid.model_fields)}" in text


@pytest.mark.parametrize("kind", precondition_kinds())
def test_no_kind_of_precondition_takes_unknown_keys(kind: str) -> None:
    text = refusal(with_rule(kind=kind, surplus=1))
    valid = ", ".join(precondition_kinds()[kind].model_fields)
    assert f"fusions[0].preconditions[0].surplus: unknown key 'surplus'; valid: {valid}" in text


def test_an_unknown_kind_hints_and_lists_all_kinds() -> None:
    text = refusal(with_rule(kind="dtype_inn", tensor="x"))
    assert "mine.yaml:7: fusions[0].preconditions[0]: unknown kind 'dtype_inn'" in text
    assert "did you mean 'dtype_in'?" in text
    assert all(kind in text for kind in precondition_kinds())


@pytest.mark.parametrize("key", ["1", "null", "2001-01-01", "true", "1.5"])
def test_a_key_that_is_no_text_is_refused(key: str) -> None:
    assert "a key must be a text, got " in refusal(f"{key}: 2")
    text = refusal(f"fusions:\n- name: a\n  {key}: 2")
    assert "a key must be a text, got " in text
    assert "; quote it or remove it" in text


# --- YAML that is refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "fusions: []\nselect: []\nfusions: []",
            "mine.yaml:3: fusions: the key stands twice, first on line 1",
        ),
        (
            "fusions:\n- name: a\n  stage: lone\n  name: b",
            "mine.yaml:4: fusions[0].name: the key stands twice, first on line 2",
        ),
        ("fusions:\n- {kind: a, 'kind': b}", "fusions[0].kind: the key stands twice"),
        ("fusions: &all []\nselect: *all", "mine.yaml:1: anchors and aliases are not accepted"),
        ("select: *nothing", "anchors and aliases are not accepted"),
        ("fusions:\n- <<: {name: a}", "mine.yaml:2: fusions[0]: the merge key << is not accepted"),
        ("fusions:\n- <<: [{name: a}, {name: b}]", "the merge key << is not accepted"),
        ("fusions: !!python/object:os.system []", "tag:yaml.org,2002:python/object:os.system"),
        ("fusions: !include other.yaml", "mine.yaml:1: the tag !include is not accepted"),
        ("fusions: !!str []", "the tag tag:yaml.org,2002:str is not accepted"),
        ("fusions: ! []", "the tag ! is not accepted"),
        ("? [a, b]\n: 1", "a key must be a plain word"),
        ("? {a: b}\n: 1", "a key must be a plain word"),
        ("fusions: [", "mine.yaml:1: not valid YAML"),
        ("a: 1\n---\nb: 2", "mine.yaml:2: not valid YAML"),
        ("fusions:\n\t- a", "mine.yaml:2: not valid YAML"),
        ("fusions: \x00", "not valid YAML"),
        (
            "fusions:\n- name: a\n  source: 2001-99-99",
            "mine.yaml:3: fusions[0].source: '2001-99-99' is not readable as YAML: month must be",
        ),
        ("select:\n- layers: 1_0", "mine.yaml:2: select[0].layers: an integer must be written in"),
        ('fusions: "\\ud800"', "mine.yaml:1: fusions: '\\ud800' holds half of a character"),
        ('"\\udfff": 1', "'\\udfff' holds half of a character"),
        *(
            (f"fusions: {number}", f"in decimal digits, got {number}, which YAML reads as {value};")
            for number, value in (("010", 8), ("1:4", 64), ("0x1F", 31), ("1_0", 10), ("0b11", 3))
        ),
        ("fusions: " + "9" * 5000, f"an integer of 5000 characters; at most {LONGEST_INTEGER}"),
        ("0x" + "f" * 5000, f"an integer of 5002 characters; at most {LONGEST_INTEGER}"),
        ("- a", "a mapping with the keys fusions and select, got ['a']"),
        ("just words", "a mapping with the keys fusions and select, got 'just words'"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_yaml_that_is_refused(text: str, message: str) -> None:
    assert message in refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        f"fusions: {'x' * 50_000}",
        f"select: [{{stage: lone, fusions: {'x' * 50_000}}}]",
        f"? {'x' * 50_000}\n: 1",
        f"fusions:\n- ? {'x' * 50_000}\n  : 1",
        f"fusions: [{{preconditions: [{{kind: {'x' * 50_000}}}]}}]",
        'fusions: "\\e[2J"',
        'select: [{stage: lone, fusions: "a\\nb"}]',
        '"\\e[2J": 1',
    ],
    ids=["list", "names", "key", "key_of_fusion", "kind", "escape", "line", "key_escape"],
)
def test_a_message_stays_short_and_printable(text: str) -> None:
    for line in refusal(text).splitlines():
        assert line.isprintable()
        assert len(line) < 600


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ("{a: ", "}")], ids=["list", "map"])
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 1000, 100_000])
def test_deep_nesting_is_refused_at_once(
    opening: str, closing: str, closed: bool, depth: int
) -> None:
    text = opening * depth + ("x" + closing * depth if closed else "")
    assert f"mine.yaml:1: nested deeper than {MAX_DEPTH} levels; flatten it" in refusal(text)


def test_nesting_up_to_the_limit_is_judged_by_the_schema() -> None:
    text = refusal("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert "a mapping with the keys fusions and select" in text


# --- fields


@pytest.mark.parametrize(
    "path",
    ["module", "module.function", "module:", ":function", "a b:c", "a:b c", "a:b:c", "a..b:c",
     ".a:b", "a:b\n", "1a:b", "a/b:c", "ä:b", "os:system('x')", "a" * 300 + ":b", "", 3],
    ids=lambda value: ascii(value)[:24],
)  # fmt: skip
def test_a_bad_import_path_is_refused(path: Any) -> None:
    assert "mine.yaml:4: fusions[0].implementation: " in refusal(with_fusion(implementation=path))


@pytest.mark.parametrize(
    "versions", ["3.4", ">3.4 <4", ">=", "~=1", "latest", 3.4, [">=1"]], ids=str
)
def test_a_bad_version_range_is_refused(versions: Any) -> None:
    text = refusal(with_fusion(packages={"triton": versions}))
    assert "fusions[0].packages.triton: " in text
    if isinstance(versions, str):
        assert f"not a version range: {versions!r}; write it like '>=3.4,<4'" in text
    text = refusal(with_rule(kind="package_version", package="triton", versions=versions))
    assert "fusions[0].preconditions[0].versions: " in text


@pytest.mark.parametrize("package", ["", " ", "-x", "a/b", "a b", "x" * 200], ids=ascii)
def test_a_bad_package_name_is_refused(package: str) -> None:
    assert "fusions[0].packages" in refusal(with_fusion(packages={package: ">=1"}))
    rule = {"kind": "package_version", "package": package, "versions": ">=1"}
    assert "fusions[0].preconditions[0].package: " in refusal(with_rule(**rule))


@pytest.mark.parametrize(
    ("layers", "ranges", "written"),
    [
        (3, ((3, 3),), "3"),
        ("3", ((3, 3),), "3"),
        ("1-4,7", ((1, 4), (7, 7)), "1-4,7"),
        (["1-4", 7], ((1, 4), (7, 7)), "1-4,7"),
        (" 2 - 2 , 9", ((2, 2), (9, 9)), "2,9"),
    ],
    ids=str,
)
def test_layer_numbers(layers: Any, ranges: Any, written: str) -> None:
    _, (selection,) = parse(with_select(layers=layers))
    assert selection.selection.layers.ranges == ranges
    assert str(selection.selection.layers) == written


@pytest.mark.parametrize(
    "layers",
    [0, -1, "4-1", "0-3", "1-", "-3", "1-2-3", "one", "", ",", True, 1.5, [], [[1]], {"a": 1},
     "1-100001", 10**40, "9" * 5000, ["1", None], "٣", "１", "+3", "1_0", "3\t", "01"],
    ids=lambda value: ascii(value)[:16],
)  # fmt: skip
def test_bad_layer_numbers_are_refused(layers: Any) -> None:
    assert "mine.yaml:" in (text := refusal(with_select(layers=layers)))
    assert "select[0].layers" in text or "an integer of" in text


def test_a_layer_set_holds_both_ends_of_its_ranges() -> None:
    layers = LayerSet.parse("2-4,7")
    assert [n for n in range(10) if n in layers] == [2, 3, 4, 7]


@pytest.mark.parametrize("off", ["off", "'off'", "OFF", "no", "false"])
def test_off_may_stand_bare(off: str) -> None:
    _, (selection,) = parse(f"select:\n- {{stage: lone, fusions: {off}}}")
    assert selection.selection.fusions == "off"
    assert selection.selection.candidates == ()


@pytest.mark.parametrize("name", ["off", "OFF", "No", "null", "true"])
def test_a_word_that_yaml_reads_otherwise_is_no_name(name: str) -> None:
    text = refusal(with_fusion(name=name))
    assert f"fusions[0].name: a fusion cannot be called '{name}', which YAML reads" in text


SELECTED = "select[0].fusions: must be a list of fusion names, or off, got "
WORDS: list[tuple[Any, str]] = [
    (with_select(fusions="mine"), f"{SELECTED}'mine'; write [mine]"),
    (with_select(fusions=True), f"{SELECTED}true"),
    (with_select(fusions={"a": 1}), SELECTED + "{'a': 1}"),
    (
        with_select(fusions=["mine", False]),
        "select[0].fusions: off may not stand in a list; write `fusions: off` or names alone",
    ),
    (
        with_select(fusions=["mine", True]),
        "select[0].fusions[1]: must be a text, got true; YAML reads a bare yes, no, on and off so: "
        "quote a text",
    ),
    (
        with_fusion(implementation="package.function"),
        "fusions[0].implementation: must be package.module:callable, got 'package.function'; "
        "did you mean 'package:function'?",
    ),
    (
        with_fusion(implementation="a b:c"),
        "fusions[0].implementation: must be package.module:callable, got 'a b:c'",
    ),
    (with_fusion(stage=None), "must be a text, got null; write it out or remove the key"),
    (
        with_fusion(name="x y"),
        "fusions[0].name: must be a name (letters, digits, _, . and -, a letter or _ first), got "
        "'x y'",
    ),
    (with_fusion(name="x" * 101), "fusions[0].name: must be a text of at most 100 characters, got"),
    (with_fusion(preconditions={"a": 1}), "preconditions: must be a list, got {'a': 1}"),
    (with_fusion(preconditions=[5]), "preconditions[0]: must be a mapping of keys to values, got"),
    (
        with_fusion(packages={"a b": ">=1"}),
        "the key must be the name of a distribution (such as triton), got 'a b'",
    ),
    (with_fusion(packages={"a": 3.4}), "fusions[0].packages.a: must be a text, got 3.4; quote it"),
    (
        with_fusion(determinism="deterministc"),
        "got 'deterministc'; did you mean 'deterministic'?",
    ),
    (
        with_rule(kind="rank", tensor="x", dims="rows"),
        "preconditions[0].dims: must be a list, got 'rows'; write [rows]",
    ),
    (
        with_rule(kind="rank", tensor="x", dims=[]),
        "preconditions[0].dims: must be a list with at least 1 in it, got []",
    ),
    (
        with_rule(kind="dim_relation", dim="x.rows", relation="equal_to", of=1.5),
        "preconditions[0].of: must be an integer or a text, got 1.5",
    ),
    (
        with_rule(kind="dim_relation", dim="x.rows", relation="equal_to", of="3"),
        "preconditions[0].of: must be an integer, a dimension of an input (such as x.head_dim) or "
        "a name (letters, digits and _, no digit first), got '3'",
    ),
    (
        with_rule(kind="dim_relation", dim="x.rows", relation="multiple_of", of=0),
        "`of` must be at least 1 for multiple_of, got 0; correct it",
    ),
    (
        with_rule(kind="value_equals", subject="layer.a", value=[1]),
        "preconditions[0].value: must be true or false, an integer, a number or a text, got [1]",
    ),
    (
        with_rule(kind="value_in", subject="layer.a", values=[{}]),
        "preconditions[0].values[0]: must be true or false, an integer, a number or a text, got {}",
    ),
    (
        with_rule(kind="value_equals", subject="norm", value=1),
        "preconditions[0].subject: must be a path from config or layer (such as config.bf16 or "
        "layer.out_norm), got 'norm'",
    ),
    (
        with_rule(kind="device_type", tensors=["x"], types=["gpu"]),
        "preconditions[0].types[0]: must be 'cuda', 'cpu' or 'meta', got 'gpu'",
    ),
    (
        with_rule(kind="device_type", tensors=["x"], types=["cuda"], interpreter="yes"),
        "preconditions[0].interpreter: must be true or false, got 'yes'",
    ),
    (
        with_rule(kind="device_capability", tensor="x", at_least=9.0),
        "preconditions[0].at_least: must be a text, got 9.0; quote it",
    ),
]


@pytest.mark.parametrize(("document", "message"), WORDS, ids=[text for _, text in WORDS])
def test_one_fault_is_told_once_and_in_words_of_yaml(document: Any, message: str) -> None:
    text = refusal(document)
    assert message in text
    assert len(text.splitlines()) == 1
    for word in ("tuple", "pattern", "dictionary", "constrained"):
        assert word not in text


def test_a_misspelt_key_is_not_missing_too() -> None:
    document = with_fusion(nam="mine")
    del document["fusions"][0]["name"]
    assert refusal(document).startswith(
        "mine.yaml:11: fusions[0].nam: unknown key 'nam'; did you mean 'name'? valid: name, stage"
    )
    assert len(refusal(document).splitlines()) == 1


@pytest.mark.parametrize("fusions", ["mine", "on", True, None, 0, {}, [3], [["mine"]]], ids=str)
def test_a_selection_names_a_list_or_off(fusions: Any) -> None:
    assert "select[0].fusions" in refusal(with_select(fusions=fusions))


def test_a_selection_of_nothing_says_how_to_write_off() -> None:
    assert "an empty list selects nothing; write `off`" in refusal(with_select(fusions=[]))


def test_a_selection_lists_a_fusion_once() -> None:
    assert "a fusion is listed twice" in refusal(with_select(fusions=["mine", "mine"]))


@pytest.mark.parametrize(
    "name", ["", "a b", "1a", "-a", "a\n", "a/b", "x" * 101, 3, None], ids=ascii
)
def test_a_bad_fusion_name_is_refused(name: Any) -> None:
    assert "mine.yaml:2: fusions[0].name: " in refusal(with_fusion(name=name))


@pytest.mark.parametrize("field", ["description", "source"])
def test_a_line_of_text_is_folded_and_printable(field: str) -> None:
    fusions, _ = parse(with_fusion(**{field: "  one\n  line,\tGödel's \u200d\n"}))
    assert getattr(fusions[0].declaration, field) == "one line, Gödel's \u200d"
    text = refusal(with_fusion(**{field: "a \x1b[31mred\x1b[0m"}))
    assert f"fusions[0].{field}: must be printable text, got '\\x1b' in it" in text


def test_determinism_is_one_of_three_words() -> None:
    text = refusal(with_fusion(determinism="yes"))
    assert "mine.yaml:5: fusions[0].determinism: " in text
    assert "'deterministic', 'nondeterministic' or 'unknown'" in text


# --- names that the catalogue does not have


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            with_fusion(stage="loan"),
            "mine.yaml:3: fusions[0].stage: unknown stage 'loan'; did you mean 'lone'? "
            "valid: first, lone, second, whole",
        ),
        (
            with_select(stage="loan"),
            "mine.yaml:13: select[0].stage: unknown stage 'loan'; did you mean 'lone'? ",
        ),
        (
            with_fusion(option="use_loan"),
            "fusions[0].option: unknown option 'use_loan'; did you mean 'use_lone'? "
            "valid: use_lone, use_other",
        ),
        (
            with_rule(kind="contiguous", tensor="z"),
            "mine.yaml:7: fusions[0].preconditions[0]: stage lone has no input 'z'; "
            "it has x, y, w, n, eps, flag",
        ),
        (
            with_rule(kind="contiguous", tensor="n"),
            "fusions[0].preconditions[0]: input 'n' of stage lone is no tensor",
        ),
        (
            with_rule(kind="same_shape", tensors=["x", "z"]),
            "fusions[0].preconditions[0]: stage lone has no input 'z'",
        ),
        (
            with_rule(kind="dim_relation", dim="x.depth", relation="power_of_two"),
            "fusions[0].preconditions[0]: input 'x' of stage lone has no dimension 'depth'; "
            "it has rows, columns",
        ),
        (
            with_rule(kind="dim_relation", dim="x.rows", relation="equal_to", of="y.depth"),
            "input 'y' of stage lone has no dimension 'depth'",
        ),
        (
            with_rule(kind="dim_relation", dim="n.rows", relation="power_of_two"),
            "input 'n' of stage lone has no dimension 'rows'; it has none",
        ),
        (
            with_rule(kind="dim_relation", dim="x", relation="power_of_two"),
            "input 'x' of stage lone is no integer; or mean x.rows?",
        ),
        (
            with_rule(kind="dim_relation", dim="x.rows", relation="equal_to", of="eps"),
            "input 'eps' of stage lone is no integer",
        ),
        (
            with_rule(kind="dim_relation", dim="flag", relation="power_of_two"),
            "input 'flag' of stage lone is no integer",
        ),
        (
            with_rule(kind="dim_relation", dim="config.heads", relation="power_of_two"),
            "stage lone has no input 'config'",
        ),
        (
            with_rule(kind="tensor_present", tensor="layer"),
            "stage lone has no input 'layer'",
        ),
        (
            with_rule(kind="rank", tensor="x", dims=["columns", "rows"]),
            "stage lone gives x the dimensions [rows, columns], not [columns, rows]",
        ),
        (
            with_rule(kind="predicate", callable="a:b", reads=["z"], says="so"),
            "stage lone has no input 'z'",
        ),
        (
            with_rule(kind="predicate", callable="a:b", reads=["layer"], says="so"),
            "stage lone has no input 'layer'",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.split(": ")[-1][:48],
)
def test_a_name_unknown_to_the_catalogue_is_refused(document: Any, message: str) -> None:
    assert message in refusal(document)


@pytest.mark.parametrize(
    ("relation", "of"), [("power_of_two", 4), ("multiple_of", None), ("equal_to", None)]
)
def test_a_relation_has_an_operand_unless_it_is_power_of_two(relation: str, of: Any) -> None:
    rule = {"kind": "dim_relation", "dim": "x.rows", "relation": relation, "of": of}
    assert "`of` is needed for every relation but power_of_two" in refusal(with_rule(**rule))


@pytest.mark.parametrize(
    "rule",
    [
        {"kind": "value_equals", "subject": "deterministic_mode", "value": 1},
        {"kind": "value_equals", "subject": "config", "value": 1},
        {"kind": "value_equals", "subject": "config.a b", "value": 1},
        {"kind": "value_equals", "subject": "config.a", "value": [1]},
        {"kind": "value_in", "subject": "config.a", "values": []},
        {"kind": "module_type", "subject": "x", "names": ["RMSNorm"]},
        {"kind": "dtype_in", "tensor": "x", "dtypes": ["bf16"]},
        {"kind": "dtype_in", "tensor": "x", "dtypes": []},
        {"kind": "same_device", "tensors": ["x"]},
        {"kind": "device_capability", "tensor": "x", "at_least": 9.0},
        {"kind": "device_capability", "tensor": "x", "at_least": "9"},
        {"kind": "dim_relation", "dim": "x.rows", "relation": "less_than", "of": 3},
        {"kind": "predicate", "callable": "nothing", "reads": ["x"], "says": "so"},
        {"kind": "predicate", "callable": "a:b", "reads": [], "says": "so"},
        {"kind": "predicate", "callable": "a:b", "reads": ["x"], "says": ""},
    ],
    ids=lambda rule: ",".join(str(value) for value in rule.values()),
)
def test_a_bad_parameter_of_a_rule_is_refused(rule: dict[str, Any]) -> None:
    assert "fusions[0].preconditions[0]" in refusal(with_rule(**rule))


def test_a_name_declared_twice_in_one_file_shows_both_lines() -> None:
    document = copy.deepcopy(VALID)
    document["fusions"].append(document["fusions"][0] | {"determinism": "unknown"})
    text = yaml.dump(document, Dumper=_WithoutAliases, sort_keys=False)
    message = refusal(text)
    assert (
        "fusions[1].name: fusion 'mine' is declared already, in mine.yaml:2: fusions[0];" in message
    )


class _WithoutAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


# --- frozen


def test_models_are_frozen() -> None:
    (fusion,), (selection,) = parse(VALID)
    for model, field in [
        (fusion.declaration, "name"),
        (fusion.declaration.preconditions[0], "tensor"),
        (selection.selection, "fusions"),
        (LayerSet.parse(1), "ranges"),
        (FusionFile(), "fusions"),
    ]:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(model, field, "other")
    for record in (fusion, fusion.origin, selection):
        with pytest.raises(AttributeError):
            record.origin = None


def test_every_kind_of_precondition_is_frozen_and_closed() -> None:
    for model in precondition_kinds().values():
        assert model.model_config["frozen"] is True
        assert model.model_config["extra"] == "forbid"
