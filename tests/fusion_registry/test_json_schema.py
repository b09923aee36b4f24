# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema that editors are given: it says what the reader of the files says."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from fusion_registry import FusionConfigError
from fusion_registry.json_schema import declaration_file_schema
from fusion_registry.registry import default_catalogue, parse_declarations, precondition_kinds
from megatron.gdn.commands.list_fusions import main

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = declaration_file_schema(default_catalogue())
VALIDATOR = Draft202012Validator(SCHEMA)

FUSION: dict[str, Any] = {
    "name": "mine",
    "stage": "causal_conv1d",
    "implementation": "package.module:function",
    "determinism": "unknown",
    "preconditions": [{"kind": "dtype_in", "tensor": "qkv", "dtypes": ["bfloat16"]}],
}


def reader_accepts(text: str) -> bool:
    try:
        parse_declarations(text, "mine.yaml", default_catalogue(), "config file")
    except FusionConfigError:
        return False
    return True


def editor_accepts(text: str) -> bool:
    return VALIDATOR.is_valid(yaml.safe_load(text))


def fusion(**changes: Any) -> str:
    return json.dumps({"fusions": [{**copy.deepcopy(FUSION), **changes}]})


def without(key: str) -> str:
    return json.dumps({"fusions": [{name: FUSION[name] for name in FUSION if name != key}]})


def select(**changes: Any) -> str:
    return json.dumps({"select": [{"stage": "causal_conv1d", "fusions": ["mine"], **changes}]})


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == Draft202012Validator.META_SCHEMA["$schema"]


def test_the_command_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA


@pytest.mark.parametrize(
    "file", sorted((ROOT / "megatron/gdn/fusions").glob("*.yaml")), ids=lambda file: file.stem
)
def test_the_built_in_files_validate(file: Path) -> None:
    error = best_match(VALIDATOR.iter_errors(yaml.safe_load(file.read_text())))
    assert error is None, error


def test_the_example_of_the_guide_validates() -> None:
    page = (ROOT / "docs/fusions.md").read_text()
    examples = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert examples
    for text in examples:
        assert editor_accepts(text)
        assert reader_accepts(text)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "fusions: []",
        fusion(),
        fusion(preconditions=[]),
        fusion(option="gdn_gated_output_norm_fusion"),
        fusion(option=None),
        fusion(packages={"triton": ">=3.4,<4"}, description="one line", source="a paper"),
        select(),
        "select: [{stage: gated_delta_rule, fusions: off}]",
        "select: [{stage: gated_delta_rule, fusions: 'off', layers: 3}]",
        select(fusions=["first", "second"], layers="1-4,7"),
        select(layers=" 1 - 4 , 7 "),
        select(layers=["1-4", 7]),
        select(layers=[100_000]),
        select(layers=None),
    ],
)
def test_reader_and_editor_accept(text: str) -> None:
    assert reader_accepts(text)
    error = best_match(VALIDATOR.iter_errors(yaml.safe_load(text)))
    assert error is None, error


@pytest.mark.parametrize(
    "text",
    [
        "fusion: []",
        "fusions: {}",
        "[]",
        *(without(key) for key in FUSION),
        fusion(surplus=1),
        fusion(name="two words"),
        fusion(name="off"),
        fusion(name="Null"),
        fusion(stage="causal_conv"),
        fusion(implementation="a module"),
        fusion(determinism="maybe"),
        fusion(option="gdn_fusions"),
        fusion(packages={"a b": ">=1"}),
        fusion(preconditions=[{"tensor": "qkv"}]),
        *(
            fusion(preconditions=[{"kind": "dim_relation", "relation": "at_least", **keys}])
            for keys in ({"dim": "qkv.batch", "of": "3"}, {"dim": "qkv.batch", "of": True})
        ),
        fusion(
            preconditions=[
                {"kind": "device_type", "tensors": ["qkv"], "types": ["cuda"], "interpreter": "yes"}
            ]
        ),
        fusion(preconditions=[{"kind": "dtype_inn", "tensor": "qkv", "dtypes": ["bfloat16"]}]),
        fusion(preconditions=[{"kind": "dtype_in", "tensor": "qkv", "dtypes": ["bf16"]}]),
        fusion(preconditions=[{"kind": "rank", "tensor": "qkv", "dims": ["batch"], "surplus": 1}]),
        "select: [{stage: gated_delta_rule}]",
        select(stage="causal_conv"),
        select(fusions="mine"),
        select(fusions=["mine", "off"]),
        select(fusions=True),
        select(fusions=[]),
        select(fusions=["mine", "mine"]),
        select(layers=0),
        select(layers=100_001),
        select(layers=True),
        select(layers=1.5),
        select(layers=[]),
        select(layers="all"),
        select(layers="1-"),
        select(layers="1-100001"),
        select(layers="01"),
        select(layers="3\t"),
        select(layers="٣"),
        select(layers="1;3"),
        select(layers=["1-4", None]),
        select(layers={"ranges": [[1, 2]]}),
    ],
)
def test_reader_and_editor_refuse(text: str) -> None:
    assert not reader_accepts(text)
    assert not editor_accepts(text)


def test_every_kind_of_precondition_is_offered_and_described() -> None:
    definitions = SCHEMA["$defs"]
    offered = {
        model["properties"]["kind"]["const"]: model
        for model in definitions.values()
        if "kind" in model["properties"]
    }
    assert set(offered) == set(precondition_kinds())
    assert all(model["description"] for model in offered.values())


def test_every_key_of_a_file_is_described_in_one_line() -> None:
    tables = [SCHEMA, *(SCHEMA["$defs"][name] for name in ("FusionDeclaration", "StageSelection"))]
    for table in tables:
        for name, field in table["properties"].items():
            assert field["description"], name
            assert "\n" not in field["description"]


def test_stages_are_offered_with_what_they_do() -> None:
    for name in ("FusionDeclaration", "StageSelection"):
        offered = SCHEMA["$defs"][name]["properties"]["stage"]["oneOf"]
        assert [item["const"] for item in offered] == [
            stage.name for stage in default_catalogue().stages
        ]
        assert offered[1]["description"] == "causal depthwise convolution and SiLU over q, k, v"
