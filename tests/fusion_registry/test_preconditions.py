# SPDX-License-Identifier: Apache-2.0
"""Every kind of precondition: when it holds, when not, what it says, and that it reads metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusion_registry import Machine
from fusion_registry import machine as machine_module
from fusion_registry import preconditions as preconditions_module
from fusion_registry.preconditions import Precondition
from fusion_registry.registry import precondition_kinds
from tests.fusion_registry.metadata_guard import metadata_only
from tests.fusion_registry.toy_stages import HERE, LONE, ToyLayer, lone_inputs

Change = Callable[[dict[str, Any], ToyLayer], None]


class RMSNorm(torch.nn.Module):
    pass


class FasterRMSNorm(RMSNorm):
    pass


class LayerNorm(torch.nn.Module):
    pass


def rule(**fields: Any) -> Precondition:
    return precondition_kinds()[fields["kind"]].model_validate(fields)


def judge(declared: Precondition, inputs: dict[str, Any], layer: Any) -> str | None:
    compiled = declared.compile(LONE)
    with metadata_only():
        return compiled(inputs, layer)


@dataclass(frozen=True)
class Case:
    """A rule, and a change of a call under which it no longer holds.

    Args:
        name: for the test id; fields: of the rule; phase: when it can first be judged.
        breaks: change of (inputs, layer); None for a rule that no call can break.
        found: what the judge says then. requires: what `describe` says.
        devices: where the unchanged call holds.
    """

    name: str
    fields: dict[str, Any]
    requires: str
    found: str
    breaks: Change
    phase: str = "call"
    code: str = ""
    devices: tuple[str, ...] = field(default=("cpu", "meta"))

    @property
    def rule(self) -> Precondition:
        return rule(**self.fields)


def set_input(name: str, make: Callable[[torch.Tensor], Any]) -> Change:
    def change(inputs: dict[str, Any], layer: ToyLayer) -> None:
        inputs[name] = make(inputs["x"])

    return change


def set_config(**values: Any) -> Change:
    return lambda inputs, layer: layer.config.__dict__.update(values)


def set_layer(**values: Any) -> Change:
    return lambda inputs, layer: layer.__dict__.update(values)


def on_the_other_device(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, device="cpu" if x.is_meta else "meta")


def shaped(*shape: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.new_empty(shape)


CASES = [
    Case(
        "bool",
        {"kind": "value_equals", "subject": "config.deterministic_mode", "value": False},
        "config.deterministic_mode=False",
        "True",
        set_config(deterministic_mode=True),
        "config",
        "value_equals:config.deterministic_mode",
    ),
    Case(
        "number-for-bool",
        {"kind": "value_equals", "subject": "config.deterministic_mode", "value": False}
        | {"called": "mode"},
        "mode=False",
        "0",
        set_config(deterministic_mode=0),
        "config",
    ),
    Case(
        "absent",
        {"kind": "value_equals", "subject": "layer.activation", "value": "silu"},
        "layer.activation=silu",
        "nothing of that name",
        lambda inputs, layer: layer.__dict__.pop("activation"),
        "layer",
        "value_equals:layer.activation",
    ),
    Case(
        "tensor-for-number",
        {"kind": "value_equals", "subject": "layer.scale", "value": 1},
        "layer.scale=1",
        "",
        set_layer(scale=torch.empty((), device="meta")),
        "layer",
    ),
    Case(
        "text",
        {"kind": "value_in", "subject": "layer.activation", "values": ["silu", "swish"]},
        "layer.activation to be silu or swish",
        "'gelu'",
        set_layer(activation="gelu"),
        "layer",
        "value_in:layer.activation",
    ),
    Case(
        "unhashable",
        {"kind": "value_in", "subject": "layer.activation", "values": ["silu"], "called": "act"},
        "act to be silu",
        "['silu']",
        set_layer(activation=["silu"]),
        "layer",
    ),
    Case(
        "true-for-1",
        {"kind": "value_in", "subject": "layer.scale", "values": [1, 2, 3]},
        "layer.scale to be 1, 2 or 3",
        "True",
        set_layer(scale=True),
        "layer",
    ),
    Case(
        "nested-absent",
        {"kind": "value_in", "subject": "layer.norm.__class__.__name__"}
        | {"values": ["FasterRMSNorm"]},
        "layer.norm.__class__.__name__ to be FasterRMSNorm",
        "nothing of that name",
        lambda inputs, layer: layer.__dict__.pop("norm"),
        "layer",
    ),
    Case(
        "other-class",
        {"kind": "module_type", "subject": "layer.norm", "names": ["RMSNorm"], "called": "norm"},
        "norm to be RMSNorm",
        "LayerNorm",
        set_layer(norm=LayerNorm()),
        "layer",
        "module_type:layer.norm",
    ),
    Case(
        "dotted-name",
        {"kind": "module_type", "subject": "layer.norm", "names": [f"{__name__}.RMSNorm"]},
        "layer.norm to be RMSNorm",
        "NoneType",
        set_layer(norm=None),
        "layer",
    ),
    Case(
        "own-forward",
        {"kind": "module_type", "subject": "layer.norm", "names": ["RMSNorm"]},
        "layer.norm to be RMSNorm",
        "Overriding with a forward of its own",
        set_layer(norm=type("Overriding", (RMSNorm,), {"forward": lambda self, x: x})()),
        "layer",
    ),
    Case(
        "absent",
        {"kind": "module_type", "subject": "layer.norm", "names": ["Module", "object"]},
        "layer.norm to be Module or object",
        "nothing of that name",
        lambda inputs, layer: layer.__dict__.pop("norm"),
        "layer",
    ),
    Case(
        "none",
        {"kind": "tensor_present", "tensor": "w"},
        "w to be given",
        "None",
        set_input("w", lambda x: None),
        code="tensor_present:w",
    ),
    Case(
        "another",
        {"kind": "device_type", "tensors": ["x", "y", "w"], "types": ["cpu"]},
        "x, y and w on CPU",
        "y on meta",
        set_input("y", on_the_other_device),
        code="device_type:x,y,w",
        devices=("cpu",),
    ),
    Case(
        "two-types",
        {"kind": "device_type", "tensors": ["x"], "types": ["cuda", "meta"]},
        "x on CUDA or META",
        "x on cpu",
        set_input("x", on_the_other_device),
        devices=("meta",),
    ),
    Case(
        "last-of-three",
        {"kind": "same_device", "tensors": ["x", "y", "w"]},
        "x, y and w on one device",
        "",
        set_input("w", on_the_other_device),
        code="same_device:x,y,w",
    ),
    Case(
        "float64",
        {"kind": "dtype_in", "tensor": "x", "dtypes": ["float32", "bfloat16"]},
        "x in float32 or bfloat16",
        "float64",
        set_input("x", lambda x: x.new_empty(x.shape, dtype=torch.float64)),
        code="dtype_in:x",
    ),
    Case(
        "float16",
        {"kind": "dtype_like", "tensor": "y", "like": "x", "or_in": ["float64"]},
        "y in the dtype of x or float64",
        "float16 beside float32",
        set_input("y", lambda x: x.new_empty(x.shape, dtype=torch.float16)),
        code="dtype_like:y,x",
    ),
    Case(
        "no-others",
        {"kind": "dtype_like", "tensor": "y", "like": "x"},
        "y in the dtype of x",
        "bool beside float32",
        set_input("y", lambda x: x.new_empty(x.shape, dtype=torch.bool)),
    ),
    Case(
        "3-for-2",
        {"kind": "rank", "tensor": "x", "dims": ["rows", "columns"]},
        "x of shape [rows, columns]",
        "3 dimensions [3, 4, 1]",
        set_input("x", shaped(3, 4, 1)),
        code="rank:x",
    ),
    Case(
        "0-for-1",
        {"kind": "rank", "tensor": "w", "dims": ["columns"]},
        "w of shape [columns]",
        "0 dimensions []",
        set_input("w", shaped()),
    ),
    Case(
        "transposed",
        {"kind": "same_shape", "tensors": ["x", "y"]},
        "x and y of one shape",
        "x [3, 4] and y [4, 3]",
        set_input("y", shaped(4, 3)),
        code="same_shape:x,y",
    ),
    Case(
        "power-of-two-3",
        {"kind": "dim_relation", "dim": "x.columns", "relation": "power_of_two"},
        "a power-of-two columns of x",
        "3",
        set_input("x", shaped(4, 3)),
        code="dim_relation:x.columns",
    ),
    Case(
        "power-of-two-0",
        {"kind": "dim_relation", "dim": "x.columns", "relation": "power_of_two"},
        "a power-of-two columns of x",
        "0",
        set_input("x", shaped(4, 0)),
    ),
    Case(
        "without-the-dimension",
        {"kind": "dim_relation", "dim": "x.columns", "relation": "at_least", "of": 1},
        "columns of x to be at least 1",
        "x without it: [4]",
        set_input("x", shaped(4)),
    ),
    Case(
        "operand-without-the-dimension",
        {"kind": "dim_relation", "dim": "x.rows", "relation": "at_most", "of": "y.columns"},
        "rows of x to be at most columns of y",
        "y without it: [4]",
        set_input("y", shaped(4)),
    ),
    Case(
        "multiple-of-2",
        {"kind": "dim_relation", "dim": "x.columns", "relation": "multiple_of", "of": 2},
        "columns of x to be a multiple of 2",
        "3 beside 2",
        set_input("x", shaped(4, 3)),
    ),
    Case(
        "multiple-of-zero",
        {"kind": "dim_relation", "dim": "n", "relation": "multiple_of", "of": "x.columns"},
        "n to be a multiple of columns of x",
        "8 beside 0",
        set_input("x", shaped(3, 0)),
    ),
    Case(
        "equal-to-a-dimension",
        {"kind": "dim_relation", "dim": "w.columns", "relation": "equal_to", "of": "x.columns"},
        "columns of w to be equal to columns of x",
        "5 beside 4",
        set_input("w", shaped(5)),
        code="dim_relation:w.columns,x.columns",
    ),
    Case(
        "equal-to-a-number-given",
        {"kind": "dim_relation", "dim": "n", "relation": "equal_to", "of": 8},
        "n to be equal to 8",
        "9 beside 8",
        set_input("n", lambda x: 9),
    ),
    Case(
        "at-least",
        {"kind": "dim_relation", "dim": "x.rows", "relation": "at_least", "of": 3},
        "rows of x to be at least 3",
        "2 beside 3",
        set_input("x", shaped(2, 4)),
    ),
    Case(
        "at-most",
        {"kind": "dim_relation", "dim": "x.rows", "relation": "at_most", "of": "n"},
        "rows of x to be at most n",
        "9 beside 8",
        set_input("x", shaped(9, 4)),
    ),
    Case(
        "no-rows",
        {"kind": "nonempty", "tensor": "x"},
        "x to be nonempty",
        "shape [0, 4]",
        set_input("x", shaped(0, 4)),
        code="nonempty:x",
    ),
    Case(
        "transposed",
        {"kind": "contiguous", "tensor": "x"},
        "x to be contiguous",
        "shape [4, 3] with strides [1, 4]",
        set_input("x", lambda x: x.t()),
        code="contiguous:x",
    ),
    Case(
        "transposed",
        {"kind": "last_dim_contiguous", "tensor": "x"},
        "stride 1 in the last dimension of x",
        "strides [1, 4]",
        set_input("x", lambda x: x.t()),
        code="last_dim_contiguous:x",
    ),
    Case(
        "expanded",
        {"kind": "last_dim_contiguous", "tensor": "x"},
        "stride 1 in the last dimension of x",
        "strides [1, 0]",
        set_input("x", lambda x: x.new_empty(3, 1).expand(3, 4)),
    ),
    Case(
        "reasons",
        {"kind": "predicate", "says": "x to be liked", "callable": f"{HERE}:accepts"}
        | {"reads": ["x", "n", "layer.activation"]},
        "x to be liked",
        "",
        lambda inputs, layer: None,
        code=f"predicate:{HERE}:accepts",
    ),
]  # fmt: skip
UNBREAKABLE = {"predicate", "package_version", "device_capability"}
"""Kinds whose refusals have tests of their own below: no change of these calls breaks them."""


def fresh(device: str) -> tuple[dict[str, Any], ToyLayer]:
    layer = ToyLayer()
    layer.norm, layer.scale = FasterRMSNorm(), 1
    return lone_inputs(device=device), layer


def test_every_kind_has_a_case() -> None:
    tested = {case.fields["kind"] for case in CASES} | UNBREAKABLE
    assert tested == set(precondition_kinds())


def case_id(value: Any) -> str | None:
    return f"{value.fields['kind']}-{value.name}" if isinstance(value, Case) else None


PLACES = [(case, device) for case in CASES for device in case.devices]
BREAKABLE = [(case, device) for case, device in PLACES if case.fields["kind"] not in UNBREAKABLE]


@pytest.mark.parametrize(("case", "device"), PLACES, ids=case_id)
def test_a_rule_holds(case: Case, device: str) -> None:
    assert judge(case.rule, *fresh(device)) is None


@pytest.mark.parametrize(("case", "device"), BREAKABLE, ids=case_id)
def test_a_broken_rule_says_what_it_requires_and_what_it_got(case: Case, device: str) -> None:
    inputs, layer = fresh(device)
    case.breaks(inputs, layer)
    found = judge(case.rule, inputs, layer)
    assert found is not None
    assert found == case.found or (not case.found and found)
    assert case.rule.describe() == case.requires


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_phase_and_code_of_a_rule(case: Case) -> None:
    assert case.rule.phase == case.phase
    assert not case.code or case.rule.code == case.code


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_case_fits_the_stage(case: Case) -> None:
    assert case.rule.problems(LONE) == []


ABSENT_TENSORS = [
    {"kind": "device_type", "tensors": ["w"], "types": ["cuda"]},
    {"kind": "same_device", "tensors": ["w", "x"]},
    {"kind": "same_device", "tensors": ["x", "w"]},
    {"kind": "dtype_in", "tensor": "w", "dtypes": ["int8"]},
    {"kind": "dtype_like", "tensor": "w", "like": "x"},
    {"kind": "dtype_like", "tensor": "x", "like": "w"},
    {"kind": "rank", "tensor": "w", "dims": ["columns"]},
    {"kind": "same_shape", "tensors": ["w", "x"]},
    {"kind": "same_shape", "tensors": ["x", "w"]},
    {"kind": "dim_relation", "dim": "w.columns", "relation": "power_of_two"},
    {"kind": "dim_relation", "dim": "w.columns", "relation": "at_least", "of": 100},
    {"kind": "dim_relation", "dim": "x.columns", "relation": "equal_to", "of": "w.columns"},
    {"kind": "nonempty", "tensor": "w"},
    {"kind": "contiguous", "tensor": "w"},
    {"kind": "last_dim_contiguous", "tensor": "w"},
    {"kind": "device_capability", "tensor": "w", "at_least": "99.0"},
]


@pytest.mark.parametrize(
    "fields", ABSENT_TENSORS, ids=lambda f: "-".join(str(value) for value in f.values())
)
def test_an_optional_tensor_that_is_none_meets_the_rule(fields: dict[str, Any]) -> None:
    inputs, layer = fresh("cpu")
    assert judge(rule(**fields), inputs | {"w": None}, layer) is None


def test_every_kind_about_tensors_was_judged_without_one() -> None:
    about_tensors = {
        kind
        for kind, model in precondition_kinds().items()
        if {"tensor", "tensors", "dim"} & set(model.model_fields)
    }
    assert {fields["kind"] for fields in ABSENT_TENSORS} == about_tensors - {"tensor_present"}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("same_device", set_input("y", on_the_other_device)),
        ("same_shape", set_input("y", shaped(4, 3))),
    ],
)
def test_a_first_tensor_that_is_none_excuses_only_itself(kind: str, change: Change) -> None:
    inputs, layer = fresh("cpu")
    change(inputs, layer)
    declared = rule(kind=kind, tensors=["w", "x", "y"])
    assert "x " in judge(declared, inputs | {"w": None}, layer)


# --- what the guard of these tests would catch


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum() == 0,
        lambda x: x.new_empty(1),
        lambda x: x[0, 0].item(),
        lambda x: bool(x.ndim) and x.tolist(),
        lambda x: x.contiguous() is x and x.float() is x and x + 1,
    ],
    ids=["operator", "allocation", "item", "tolist", "arithmetic"],
)
def test_the_guard_fails_a_judge_that_looks_into_a_tensor(look: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match="a judge"), metadata_only():
        look(torch.ones(2, 2))


# --- kinds that a call alone cannot break


def test_a_comparison_with_a_value_never_compares_a_tensor() -> None:
    layer = ToyLayer()
    layer.scale = torch.ones(3)
    equals = rule(kind="value_equals", subject="layer.scale", value=1)
    within = rule(kind="value_in", subject="layer.scale", values=[1, 2])
    for declared in (equals, within):
        compiled = declared.compile(LONE)
        assert compiled(lone_inputs(), layer) is not None


@pytest.mark.parametrize(
    ("reads", "found"),
    [
        (["n"], "n=8"),
        (["config.deterministic_mode"], "config_deterministic_mode=False"),
        (["layer.nothing.below"], "layer_nothing_below=None"),
        (["n", "layer.activation", "eps"], "eps=1e-06; layer_activation='silu'; n=8"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else None,
)
def test_a_predicate_receives_what_it_reads_by_keyword(reads: list[str], found: str) -> None:
    declared = rule(kind="predicate", callable=f"{HERE}:echoes", reads=reads, says="so")
    assert judge(declared, *fresh("cpu")) == found


def test_all_reasons_of_a_predicate_are_given() -> None:
    declared = rule(kind="predicate", callable=f"{HERE}:refuses", reads=["x"], says="so")
    assert judge(declared, *fresh("meta")) == "first reason; second reason"


def test_a_predicate_that_answers_with_a_bool_is_not_taken_for_satisfied() -> None:
    declared = rule(kind="predicate", callable=f"{HERE}:answers_false", reads=["n"], says="so")
    with pytest.raises(TypeError, match=r"answers_false must return a list of reasons, got False"):
        judge(declared, *fresh("cpu"))


@pytest.mark.parametrize(
    ("reads", "phase"),
    [
        (["config.a"], "config"),
        (["config.a", "layer.b"], "layer"),
        (["layer.b"], "layer"),
        (["config.a", "n"], "call"),
        (["x"], "call"),
    ],
    ids=",".join,
)
def test_a_rule_is_judged_as_early_as_all_that_it_reads(reads: list[str], phase: str) -> None:
    assert rule(kind="predicate", callable="a:b", reads=reads, says="so").phase == phase


def test_package_version() -> None:
    declared = rule(kind="package_version", package="packaging", versions=">=1")
    assert (declared.phase, declared.code) == ("config", "package_version:packaging")
    assert judge(declared, {}, None) is None
    too_new = rule(kind="package_version", package="packaging", versions=">=1000")
    assert judge(too_new, {}, None) == machine_module.installed_version("packaging")
    absent = rule(kind="package_version", package="no-such-distribution", versions=">=1")
    assert judge(absent, {}, None) == "nothing: it is not installed"
    assert absent.describe() == "no-such-distribution >=1"


@pytest.mark.parametrize(
    ("version", "versions", "holds"),
    [
        ("3.4.0", ">=3.4", True),
        ("3.4.0+git1", ">=3.4", True),
        ("3.5.0a1", ">=3.4", True),
        ("3.4.0a1", ">=3.4", False),
        ("3.10", ">=3.9,<4", True),
        ("4.0", ">=3.9,<4", False),
        ("no version", ">=0", False),
    ],
)
def test_version_ranges(version: str, versions: str, holds: bool) -> None:
    declared = rule(kind="package_version", package="triton", versions=versions)
    there = Machine("there", "cuda", (9, 0), packages={"triton": version})
    expected = None if holds else f"needs triton {versions}, got {version}"
    assert declared.machine_problem(there) == expected


class CudaTensor:
    """What a rule about devices reads of a tensor on a GPU."""

    is_cuda = True

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)


def test_device_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def capability(device: torch.device) -> tuple[int, int]:
        asked.append(device.index)
        return [(8, 0), (10, 0)][device.index]

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    declared = rule(kind="device_capability", tensor="x", at_least="9.0")
    compiled = declared.compile(LONE)
    assert compiled({"x": CudaTensor(0)}, None) == "8.0 on cuda:0"
    assert compiled({"x": CudaTensor(1)}, None) is None
    assert compiled({"x": CudaTensor(1)}, None) is None
    assert asked == [0, 1]
    assert compiled({"x": torch.empty(1)}, None) is None
    assert declared.describe() == "a device of compute capability 9.0 or later for x"
    assert (declared.phase, declared.code) == ("call", "device_capability:x")


@pytest.mark.parametrize(
    ("capability", "holds"),
    [((8, 9), False), ((9, 0), True), ((10, 0), True), (None, True)],
    ids=str,
)
def test_device_capability_of_a_machine(capability: tuple[int, int] | None, holds: bool) -> None:
    declared = rule(kind="device_capability", tensor="x", at_least="9.0")
    problem = declared.machine_problem(Machine("there", "cuda", capability))
    assert problem == (None if holds else "needs compute capability 9.0 or later, there has 8.9")


# --- Triton's interpreter


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def switch(on: bool) -> None:
        monkeypatch.setattr(preconditions_module, "triton_interpreter_is_on", lambda: on)

    return switch


@pytest.mark.parametrize("allowed", [True, False], ids=["allowed", "not-allowed"])
@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_interpreter_stands_in_for_cuda_on_a_cpu_only(
    interpreter: Callable[[bool], None], allowed: bool, on: bool, device: str
) -> None:
    interpreter(on)
    declared = rule(kind="device_type", tensors=["x", "y"], types=["cuda"], interpreter=allowed)
    found = judge(declared, *fresh(device))
    assert found == (None if allowed and on and device == "cpu" else f"x on {device}")
    stand_in = " (or CPU tensors under Triton's interpreter)" if allowed else ""
    assert declared.describe() == f"x and y on CUDA{stand_in}"


def test_the_interpreter_may_be_switched_after_the_rule_was_compiled(
    interpreter: Callable[[bool], None],
) -> None:
    compiled = rule(
        kind="device_type", tensors=["x", "y"], types=["cuda"], interpreter=True
    ).compile(LONE)
    for on in (True, False, True):
        interpreter(on)
        assert (compiled(lone_inputs(), None) is None) is on


def test_the_switch_of_the_interpreter_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, on in (("1", True), ("0", False)):
        monkeypatch.setenv("TRITON_INTERPRET", text)
        assert machine_module.triton_interpreter_is_on() is on


@pytest.mark.parametrize(
    ("machine", "problem"),
    [
        (Machine("a GPU", "cuda", (9, 0)), None),
        (Machine("a CPU under the interpreter", "cpu", None, True), None),
        (Machine("a CPU", "cpu"), "needs CUDA; set TRITON_INTERPRET=1 to run on the CPU"),
    ],
    ids=lambda value: value.name if isinstance(value, Machine) else "",
)
def test_device_type_of_a_machine(machine: Machine, problem: str | None) -> None:
    declared = rule(kind="device_type", tensors=["x"], types=["cuda"], interpreter=True)
    assert declared.machine_problem(machine) == problem


# --- attributes


def test_a_class_is_matched_by_its_bases_and_never_by_a_similar_name() -> None:
    declared = rule(kind="module_type", subject="layer.norm", names=["RMSNorm"]).compile(LONE)
    like = type("NotRMSNorm", (torch.nn.Module,), {})
    for norm, found in [(RMSNorm(), None), (FasterRMSNorm(), None), (like(), "NotRMSNorm")] * 2:
        assert declared({}, SimpleNamespace(norm=norm)) == found


def test_an_attribute_replaced_after_construction_is_seen() -> None:
    compiled = rule(kind="value_equals", subject="layer.activation", value="silu").compile(LONE)
    layer = ToyLayer()
    assert compiled({}, layer) is None
    layer.activation = "gelu"
    assert compiled({}, layer) == "'gelu'"


@pytest.mark.parametrize("path", ["layer.none.__doc__", "layer.none.__class__.nothing"])
def test_an_attribute_below_one_that_is_absent_is_absent(path: str) -> None:
    compiled = rule(kind="value_equals", subject=path, value="x").compile(LONE)
    assert compiled({}, SimpleNamespace()) == "nothing of that name"
