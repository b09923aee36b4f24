# SPDX-License-Identifier: Apache-2.0
"""A selection resolved for a layer: what runs, what is refused in which words, what is counted."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

import fusion_registry.binding as binding_module
from fusion_registry import (
    Binding,
    FusionConfigError,
    FusionReport,
    FusionUnsupportedError,
    ProfilerRange,
    Reason,
    Request,
    Selection,
    check_config,
    load_registry,
    report_bindings,
    select,
    unavailable,
)
from fusion_registry import registry as registry_module
from fusion_registry.machine import Machine
from tests.fusion_registry import toy_stages
from tests.fusion_registry.toy_stages import CATALOGUE, HERE, ToyLayer, lone_inputs

Bind = Callable[..., Binding]


def declared(name: str, rules: str = "[]", function: str = "other_lone", **more: str) -> str:
    where = function if ":" in function else f"{HERE}:{function}"
    fields = {"stage": "lone", "implementation": where, "determinism": "unknown"} | more
    lines = [f"- name: {name}", *(f"  {key}: {value}" for key, value in fields.items())]
    return "\n".join([*lines, f"  preconditions: {rules}"])


@pytest.fixture
def choose(write: Callable[..., Path]) -> Callable[..., Selection]:
    def make(*declarations: str, **candidates: tuple[str, ...]) -> Selection:
        """`choose(declared(...), lone=("a", "b"))`: candidates by stage."""
        path = write("fusions:\n" + "\n".join(declarations) if declarations else "", "file.yaml")
        registry = load_registry([path], catalogue=CATALOGUE, plugins=False)
        return select(
            registry,
            [Request(stage, names, None, f"{stage}'s test") for stage, names in candidates.items()],
        )

    return make


@pytest.fixture
def bind(choose: Callable[..., Selection]) -> Bind:
    def make(*declarations: str, layer: int | None = 3, **candidates: tuple[str, ...]) -> Binding:
        selection = choose(*declarations, **candidates)
        return Binding(selection.registry, selection.for_layer(layer), layer)

    return make


def run(binding: Binding, layer: ToyLayer | None = None, **changes: Any) -> Any:
    return binding.run("lone", layer or ToyLayer(binding), lone_inputs(**changes))


def refused(action: Callable[[], object]) -> FusionUnsupportedError:
    with pytest.raises(FusionUnsupportedError) as caught:
        action()
    return caught.value


def fault(action: Callable[[], object]) -> str:
    with pytest.raises(FusionConfigError) as caught:
        action()
    return str(caught.value)


def counts(binding: Binding, stage: str = "lone") -> tuple[dict[str, int], int, int]:
    (count,) = report_bindings([binding]).stage(stage)
    return count.fused, count.unfused, count.refused


# --- what runs


def test_nothing_bound_runs_unfused(bind: Bind) -> None:
    binding = bind()
    assert [run(binding), run(binding)] == ["unfused lone"] * 2
    assert counts(binding) == ({}, 2, 0)


def test_a_bound_fusion_runs(bind: Bind) -> None:
    binding = bind(lone=("built_in_lone",))
    assert run(binding) == "fused lone"
    assert counts(binding) == ({"built_in_lone": 1}, 0, 0)


NEEDS_8 = "[{kind: dim_relation, dim: x.columns, relation: equal_to, of: 8}]"


def test_the_first_candidate_whose_preconditions_hold_runs(bind: Bind) -> None:
    binding = bind(declared("eight", NEEDS_8), lone=("eight", "built_in_lone"))
    assert [run(binding, columns=n) for n in (8, 4, 8)] == [
        "other lone",
        "fused lone",
        "other lone",
    ]
    assert counts(binding) == ({"eight": 2, "built_in_lone": 1}, 0, 0)
    reverse = bind(declared("eight", NEEDS_8), lone=("built_in_lone", "eight"))
    assert run(reverse, columns=8) == "fused lone"


def test_when_none_holds_the_call_raises_and_nothing_runs(
    bind: Bind, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("ran")

    for name in ("unfused_lone", "fused_lone", "other_lone"):
        monkeypatch.setattr(toy_stages, name, never)
    binding = bind(declared("eight", NEEDS_8), lone=("eight", "built_in_lone"))
    refused(lambda: run(binding, columns=3))
    assert counts(binding) == ({"eight": 0, "built_in_lone": 0}, 0, 1)


def test_rules_are_judged_anew_on_every_call(bind: Bind) -> None:
    binding = bind(lone=("built_in_lone",))
    layer = ToyLayer(binding)
    assert run(binding, layer) == "fused lone"
    layer.activation = "gelu"
    assert "activation=silu, got 'gelu'" in str(refused(lambda: run(binding, layer)))
    layer.activation = "silu"
    layer.config.deterministic_mode = True
    assert "got True" in str(refused(lambda: run(binding, layer)))
    layer.config.deterministic_mode = False
    assert run(binding, layer) == "fused lone"
    assert counts(binding) == ({"built_in_lone": 2}, 0, 2)


def test_an_unfused_composite_asks_its_children(bind: Bind) -> None:
    plain = bind()
    assert plain.run("whole", ToyLayer(plain), {"value": 1}) == 20
    child = bind(first=("built_in_first",))
    assert child.run("whole", ToyLayer(child), {"value": 1}) == 10010
    assert counts(child, "whole") == ({}, 1, 0)
    assert counts(child, "first") == ({"built_in_first": 1}, 0, 0)
    assert counts(child, "second") == ({}, 1, 0)


def test_a_fused_composite_asks_no_child(bind: Bind) -> None:
    binding = bind(whole=("built_in_whole",))
    assert binding.run("whole", ToyLayer(binding), {"value": 1}) == "fused whole"
    assert counts(binding, "whole") == ({"built_in_whole": 1}, 0, 0)
    assert counts(binding, "first") == counts(binding, "second") == ({}, 0, 0)


def test_a_refusal_in_a_child_passes_through_its_parent(bind: Bind) -> None:
    rule = "[{kind: dim_relation, dim: value, relation: at_least, of: 5}]"
    binding = bind(declared("big", rule, "fused_second", stage="second"), second=("big",))
    error = refused(lambda: binding.run("whole", ToyLayer(binding), {"value": 1}))
    assert (error.stage, error.fusion) == ("second", "big")
    assert counts(binding, "whole") == ({}, 1, 0)


def test_the_first_engagement_is_logged_once(bind: Bind, caplog: pytest.LogCaptureFixture) -> None:
    binding = bind(lone=("built_in_lone",))
    with caplog.at_level(logging.INFO, logger="fusion_registry"):
        run(binding)
        run(binding)
    assert [record.getMessage() for record in caplog.records] == [
        "layer 3: stage lone runs fusion built_in_lone"
    ]


def test_a_layer_announces_only_what_it_is_told_to(
    choose, caplog: pytest.LogCaptureFixture
) -> None:
    selection = choose(
        declared("eight", NEEDS_8), lone=("eight", "built_in_lone"), first=("built_in_first",)
    )
    binding = Binding(selection.registry, selection.for_layer(2), 2, announces={"built_in_lone"})
    with caplog.at_level(logging.DEBUG, logger="fusion_registry"):
        for columns in (4, 8, 4):
            run(binding, columns=columns)
        binding.run("first", ToyLayer(binding), {"value": 1})
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "layer 2: stage lone runs fusion built_in_lone"),
        ("DEBUG", "layer 2: stage lone runs fusion eight"),
        ("DEBUG", "layer 2: stage first runs fusion built_in_first"),
    ]


# --- profiler ranges

SECONDS = declared("seconds", function="fused_second", stage="second")


def profiled(selection: Selection) -> tuple[Binding, list[str]]:
    seen: list[str] = []
    profiler = ProfilerRange(
        lambda name: seen.append(f"+{name}"), lambda name: seen.append(f"-{name}")
    )
    return Binding(selection.registry, selection.for_layer(1), 1, profiler=profiler), seen


def test_a_range_is_named_after_the_stage_and_the_fusion_that_runs(choose) -> None:
    selection = choose(declared("eight", NEEDS_8), lone=("eight", "built_in_lone"))
    binding, seen = profiled(selection)
    run(binding, columns=8)
    run(binding, columns=4)
    assert seen == ["+lone:eight", "-lone:eight", "+lone:built_in_lone", "-lone:built_in_lone"]


def test_an_unfused_range_is_named_after_the_stage_and_ranges_nest(choose) -> None:
    binding, seen = profiled(choose(SECONDS, second=("seconds",)))
    assert binding.run("whole", ToyLayer(binding), {"value": 1}) == -2
    assert seen == ["+whole", "+first", "-first", "+second:seconds", "-second:seconds", "-whole"]


def test_a_range_is_closed_when_the_stage_raises(choose) -> None:
    binding, seen = profiled(choose(SECONDS, second=("seconds",)))
    with pytest.raises(TypeError):
        binding.run("second", ToyLayer(binding), {"value": None})
    with pytest.raises(TypeError):
        binding.run("first", ToyLayer(binding), {"value": None})
    assert seen == ["+second:seconds", "-second:seconds", "+first", "-first"]


def test_a_refused_call_opens_no_range(choose) -> None:
    binding, seen = profiled(choose(lone=("built_in_lone",)))
    refused(lambda: run(binding, columns=3))
    assert seen == []


# --- independence


def test_two_bindings_live_in_one_process(bind: Bind) -> None:
    fused, plain, other = bind(lone=("built_in_lone",)), bind(), bind(declared("o"), lone=("o",))
    for _ in range(2):
        assert [run(b) for b in (fused, plain, other)] == [
            "fused lone",
            "unfused lone",
            "other lone",
        ]
    assert counts(fused) == ({"built_in_lone": 2}, 0, 0)
    assert counts(plain) == ({}, 2, 0)
    assert counts(other) == ({"o": 2}, 0, 0)


def test_a_binding_keeps_what_it_imported(bind: Bind, monkeypatch: pytest.MonkeyPatch) -> None:
    binding, plain = bind(lone=("built_in_lone",)), bind()
    monkeypatch.setattr(toy_stages, "fused_lone", None)
    monkeypatch.setattr(toy_stages, "unfused_lone", None)
    assert (run(binding), run(plain)) == ("fused lone", "unfused lone")


def test_a_later_registration_changes_no_binding(bind: Bind) -> None:
    binding = bind(lone=("built_in_lone",))
    bind(declared("later"), lone=("later",))
    assert run(binding) == "fused lone"


def test_a_copied_binding_counts_for_itself(bind: Bind) -> None:
    binding = bind(lone=("built_in_lone",))
    run(binding)
    copied = copy.deepcopy(binding)
    run(copied)
    assert counts(binding) == ({"built_in_lone": 1}, 0, 0)
    assert counts(copied) == ({"built_in_lone": 2}, 0, 0)


# --- the words of a refusal


def test_one_option_one_reason(bind: Bind) -> None:
    binding = bind(lone=("built_in_lone",))
    binding.stages["lone"].origin = "use_lone=True"
    error = refused(lambda: run(binding, columns=3))
    assert str(error) == (
        "use_lone requires a power-of-two columns of x, got 3\n"
        "  (stage lone, fusion built_in_lone, layer 3); disable the option to run unfused"
    )


def test_all_reasons_at_once(bind: Bind) -> None:
    binding = bind(lone=("built_in_lone",))
    layer = ToyLayer(deterministic_mode=True)
    layer.activation = "gelu"
    error = refused(lambda: run(binding, layer, columns=3))
    assert error.reasons == (
        Reason(
            "value_equals:config.deterministic_mode",
            "config.deterministic_mode=False, got True",
        ),
        Reason("value_equals:layer.activation", "activation=silu, got 'gelu'"),
        Reason("dim_relation:x.columns", "a power-of-two columns of x, got 3"),
    )
    assert (error.stage, error.fusion, error.layer) == ("lone", "built_in_lone", 3)
    for reason in error.reasons:
        assert f"use_lone requires {reason.text}\n" in str(error)


def test_all_reasons_of_all_candidates(bind: Bind) -> None:
    binding = bind(declared("eight", NEEDS_8), lone=("eight", "built_in_lone"))
    error = refused(lambda: run(binding, columns=3))
    assert str(error) == (
        "fusion eight requires columns of x to be equal to 8, got 3 beside 8\n"
        "  (stage lone, fusion eight, layer 3)\n"
        "use_lone requires a power-of-two columns of x, got 3\n"
        "  (stage lone, fusion built_in_lone, layer 3); "
        "deselect it (lone's test) to run unfused"
    )
    assert [reason.code for reason in error.reasons] == [
        "dim_relation:x.columns",
        "dim_relation:x.columns",
    ]
    assert [item.fusion for item in error.refusal.candidates] == ["eight", "built_in_lone"]


def test_a_fusion_selected_by_name_says_who_selected_it(bind: Bind) -> None:
    error = refused(lambda: run(bind(lone=("built_in_lone",), layer=None), columns=3))
    assert str(error).endswith(
        "(stage lone, fusion built_in_lone); deselect it (lone's test) to run unfused"
    )


def test_the_errors_are_value_errors() -> None:
    assert issubclass(FusionUnsupportedError, ValueError)
    assert issubclass(FusionConfigError, ValueError)


class _Refusing(torch.nn.Module):
    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        action()


class _Outer(torch.nn.Module):
    def __init__(self, spec: ModuleSpec, action: Callable[[], object]) -> None:
        super().__init__()
        build_module(spec, action=action)


def test_reasons_survive_megatron_cores_build_module(bind: Bind) -> None:
    binding = bind(lone=("built_in_lone",))
    spec = ModuleSpec(module=_Refusing)

    def action() -> object:
        return run(binding, columns=3)

    error = refused(lambda: build_module(spec, action=action))
    assert str(error).endswith(" when instantiating _Refusing")
    assert [reason.text for reason in error.reasons] == ["a power-of-two columns of x, got 3"]
    twice = refused(lambda: build_module(ModuleSpec(module=_Outer), spec=spec, action=action))
    assert str(twice).endswith("_Refusing when instantiating _Outer")
    assert (twice.reasons, twice.layer, twice.stage) == (error.reasons, 3, "lone")


def test_an_error_made_from_a_text_alone_has_no_reasons() -> None:
    error = FusionUnsupportedError("a text")
    assert (error.reasons, error.stage, error.fusion, error.layer) == ((), None, None, None)
    assert str(error) == "a text"


def test_errors_cross_process_boundaries(bind: Bind) -> None:
    error = refused(lambda: run(bind(lone=("built_in_lone",)), columns=3))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reasons, again.layer) == (str(error), error.reasons, 3)
    wrong = FusionConfigError("one", "two")
    again = pickle.loads(pickle.dumps(wrong))
    assert (str(again), again.problems) == (str(wrong), wrong.problems)


# --- early judgements


def test_what_the_layer_decides_is_refused_when_it_is_built(bind: Bind) -> None:
    binding = bind(lone=("built_in_lone",))
    layer = ToyLayer(binding)
    binding.check_layer(layer)
    assert counts(binding) == ({"built_in_lone": 0}, 0, 0)
    layer.activation = "gelu"
    layer.config.deterministic_mode = True
    error = refused(lambda: binding.check_layer(layer))
    assert [reason.code for reason in error.reasons] == [
        "value_equals:config.deterministic_mode",
        "value_equals:layer.activation",
    ]
    assert counts(binding) == ({"built_in_lone": 0}, 0, 0)


def test_a_layer_that_one_candidate_can_serve_is_not_refused(bind: Bind) -> None:
    binding = bind(declared("any"), lone=("built_in_lone", "any"))
    layer = ToyLayer(binding)
    layer.activation = "gelu"
    binding.check_layer(layer)
    assert run(binding, layer) == "other lone"


def test_what_the_config_decides_is_refused_before_a_layer_exists(choose) -> None:
    selection = choose(lone=("built_in_lone",))
    config = SimpleNamespace(deterministic_mode=False)
    check_config(selection, config, [1, 2])
    config.deterministic_mode = True
    error = refused(lambda: check_config(selection, config, [1, 2]))
    assert [reason.code for reason in error.reasons] == ["value_equals:config.deterministic_mode"]
    assert (error.layer, error.stage) == (None, "lone")
    check_config(choose(), config, [1])
    check_config(choose(declared("any"), lone=("built_in_lone", "any")), config, [1])


# --- implementations


@pytest.mark.parametrize("function", ["without_flag", "with_required_extra", "positional_only"])
def test_a_signature_that_does_not_fit_the_stage(bind: Bind, function: str) -> None:
    text = fault(lambda: bind(declared("bad", function=function), lone=("bad",)))
    assert (
        f"fusions[0].implementation: fusion 'bad' names {HERE}:{function}, which does not accept "
        "the inputs of stage lone (x, y, w, n, eps, flag): " in text
    )


@pytest.mark.parametrize("function", ["with_optional_extra", "fused_lone", "accepts"])
def test_a_signature_that_takes_the_inputs_by_keyword_fits(bind: Bind, function: str) -> None:
    run(bind(declared("good", function=function), lone=("good",)))


def test_something_that_is_not_callable(bind: Bind) -> None:
    text = fault(lambda: bind(declared("bad", function="NOT_CALLABLE"), lone=("bad",)))
    assert f"fusion 'bad' names {HERE}:NOT_CALLABLE, which is not callable" in text


BROKEN_PACKAGE = "raise OSError('libcudart.so: cannot open shared object file')"


@pytest.mark.parametrize(
    ("packages", "function", "key", "message"),
    [
        (
            "{no-such-distribution: '>=2'}",
            "never_imported:f",
            "packages",
            "needs no-such-distribution >=2, got nothing: it is not installed",
        ),
        ("{packaging: '<1'}", "never_imported:f", "packages", "needs packaging <1, got "),
        (
            "{packaging: '>=1'}",
            "broken_package:f",
            "implementation",
            "cannot import broken_package:f, which is broken here: "
            "OSError: libcudart.so: cannot open shared object file",
        ),
        (
            "{packaging: '>=1'}",
            "ending_package:f",
            "implementation",
            "ImportError: the module ending_package wants to end the process: SystemExit: 3",
        ),
        (
            "{}",
            "no_such_module:f",
            "implementation",
            "ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("{}", f"{HERE}:absent", "implementation", "AttributeError: module"),
    ],
    ids=["absent", "version", "broken", "ending", "no-module", "no-attribute"],
)
def test_absent_wrong_version_and_broken_are_different_messages(
    bind: Bind,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    packages: str,
    function: str,
    key: str,
    message: str,
) -> None:
    (tmp_path / "broken_package.py").write_text(BROKEN_PACKAGE)
    (tmp_path / "ending_package.py").write_text("raise SystemExit(3)")
    (tmp_path / "never_imported.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = fault(lambda: bind(declared("bad", function=function, packages=packages), lone=("bad",)))
    assert "file.yaml:" in text
    assert f": fusions[0].{key}: fusion 'bad' " in text
    assert message in text
    assert "never_imported" not in sys.modules


def test_an_implementation_is_imported_only_when_it_is_selected(choose) -> None:
    selection = choose(declared("bad", function="no_such_module:f"), lone=("built_in_lone",))
    Binding(selection.registry, selection.for_layer(1), 1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{HERE}:absent", "AttributeError: "),
        (f"{HERE}:NOT_CALLABLE", f"TypeError: {HERE}:NOT_CALLABLE is not callable, got str"),
    ],
    ids=["no-module", "no-attribute", "no-callable"],
)
def test_a_predicate_that_cannot_be_imported(
    choose, bind: Bind, function: str, message: str
) -> None:
    rule = f"[{{kind: predicate, callable: '{function}', reads: [config.a], says: so}}]"
    place = (
        "fusions[0].preconditions[0]: fusion 'bad' has a precondition that is broken here, "
        f"predicate:{function}"
    )
    text = fault(lambda: bind(declared("bad", rule), lone=("bad",)))
    assert f"{place}: {message}" in text
    selection = choose(declared("bad", rule), lone=("bad",))
    assert place in fault(lambda: check_config(selection, SimpleNamespace(), [1]))


def test_unavailable_says_what_a_machine_lacks(choose) -> None:
    rules = (
        "[{kind: device_type, tensors: [x], types: [cuda]}, "
        "{kind: device_capability, tensor: x, at_least: '9.0'}, "
        "{kind: package_version, package: triton, versions: '>=3.4'}]"
    )
    selection = choose(declared("f", rules, packages="{torch: '>=2.6'}"), lone=("f",))
    fusion = selection.registry.fusion("f")
    contract = selection.registry.stages[fusion.declaration.stage]
    good = Machine("a Hopper", "cuda", (9, 0), packages={"torch": "2.13", "triton": "3.7"})
    assert list(unavailable(fusion, contract, good)) == []
    bad = Machine("an Ampere", "cuda", (8, 0), packages={"torch": "2.5"})
    assert list(unavailable(fusion, contract, bad)) == [
        "needs torch >=2.6, got 2.5",
        "needs compute capability 9.0 or later, an Ampere has 8.0",
        "needs triton >=3.4, got nothing: it is not installed",
    ]
    laptop = Machine("a laptop", "cpu", packages={"torch": "3"})
    assert next(unavailable(fusion, contract, laptop)) == "needs CUDA"


def test_here_a_broken_implementation_is_unavailable(choose) -> None:
    selection = choose(declared("f", implementation="nowhere.at_all:f"), lone=("f",))
    fusion = selection.registry.fusion("f")
    contract = selection.registry.stages[fusion.declaration.stage]
    (reason,) = unavailable(fusion, contract, Machine("here", "cpu"))
    assert "cannot import nowhere.at_all:f, which is broken here: ModuleNotFoundError" in reason
    elsewhere = Machine("elsewhere", "cpu", packages={})
    assert list(unavailable(fusion, contract, elsewhere)) == []


# --- implementations that judge their own declaration


@pytest.fixture
def toy_is_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """`checked_by_declaration` reads the built-in declarations of the default catalogue."""
    monkeypatch.setattr(registry_module, "DEFAULT_CATALOGUE", f"{HERE}:CATALOGUE")


@pytest.mark.usefixtures("toy_is_default")
def test_a_direct_call_is_judged_by_the_rules_about_its_arguments() -> None:
    inputs = lone_inputs()
    assert toy_stages.checked_lone(**inputs) == "checked lone"
    assert toy_stages.checked_lone(inputs["x"], inputs["y"]) == "checked lone"
    error = refused(lambda: toy_stages.checked_lone(**lone_inputs(columns=3)))
    assert [reason.code for reason in error.reasons] == ["dim_relation:x.columns"]
    assert str(error).startswith("use_lone requires a power-of-two columns of x, got 3\n")
    assert toy_stages.checked_lone.unchecked(**lone_inputs(columns=3)) == "checked lone"


@pytest.mark.usefixtures("toy_is_default")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": None}, "x must be a tensor, got NoneType"),
        ({"y": [1.0]}, "y must be a tensor, got list"),
        ({"w": 3}, "w must be a tensor, got int"),
    ],
    ids=["none", "list", "number"],
)
def test_a_direct_call_without_tensors_is_a_type_error(changes: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        toy_stages.checked_lone(**lone_inputs(**changes))
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        toy_stages.checked_lone()


SAME_RULES = (
    "[{kind: value_equals, subject: config.deterministic_mode, value: false}, "
    "{kind: value_equals, subject: layer.activation, value: silu, called: activation}, "
    "{kind: dim_relation, dim: x.columns, relation: power_of_two}]"
)


@pytest.mark.usefixtures("toy_is_default")
def test_a_binding_spares_a_checked_implementation_the_second_judgement(
    bind: Bind, monkeypatch: pytest.MonkeyPatch
) -> None:
    declaration = declared("same", SAME_RULES, "checked_lone")
    binding = bind(declaration, lone=("same",))
    judged = []
    reasons = binding_module.CompiledRules.reasons
    monkeypatch.setattr(
        binding_module.CompiledRules,
        "reasons",
        lambda *args: judged.append(args) or reasons(*args),
    )
    assert run(binding) == "checked lone"
    assert judged == []
    toy_stages.checked_lone(**lone_inputs())
    assert len(judged) == 1


@pytest.mark.usefixtures("toy_is_default")
def test_a_checked_implementation_declared_with_other_rules_keeps_its_own(bind: Bind) -> None:
    binding = bind(declared("lax", "[]", "checked_lone"), lone=("lax",))
    assert run(binding) == "checked lone"
    error = refused(lambda: run(binding, columns=3))
    assert error.fusion == "built_in_lone"


# --- the report


def test_the_report_as_data_and_as_a_table(bind: Bind) -> None:
    first = bind(declared("eight", NEEDS_8), lone=("eight", "built_in_lone"), layer=1)
    second = bind(lone=("built_in_lone",), layer=2)
    third = bind(layer=3)
    run(first, columns=8)
    run(first, columns=4)
    run(second)
    refused(lambda: run(second, columns=3))
    run(third)
    report = report_bindings([first, second, third])
    data = json.loads(json.dumps(report.as_dict()))
    assert [item for item in data["counts"] if item["stage"] == "lone"] == [
        {"layer": 1, "stage": "lone", "fused": {"eight": 1, "built_in_lone": 1}}
        | {"unfused": 0, "refused": 0},
        {"layer": 2, "stage": "lone", "fused": {"built_in_lone": 1}, "unfused": 0, "refused": 1},
        {"layer": 3, "stage": "lone", "fused": {}, "unfused": 1, "refused": 0},
    ]
    assert report.fused_layers("lone") == 1
    assert data["totals"][-1] == {
        "stage": "lone",
        "layers": 3,
        "fused_layers": 1,
        "fused": {"eight": 1, "built_in_lone": 2},
        "unfused": 1,
        "refused": 1,
        "summary": "1/3 layers",
    }
    assert [total.stage for total in report.totals] == ["whole", "first", "second", "lone"]
    assert str(report).splitlines() == [
        "fusion report",
        "  stage   fused layers  fusions (calls)               unfused  refused",
        "  whole   0/3           -                             0        0",
        "  first   0/3           -                             0        0",
        "  second  0/3           -                             0        0",
        "  lone    1/3           eight (1), built_in_lone (2)  1        1",
    ]


def test_a_fusion_that_never_ran_stands_in_the_report(bind: Bind) -> None:
    report = report_bindings([bind(lone=("built_in_lone",))])
    assert "built_in_lone (0)" in str(report)
    assert report.fused_layers("lone") == 0


def test_an_empty_report_says_so() -> None:
    assert str(FusionReport(())) == "fusion report: no layer with stages in this model"
    assert report_bindings([]).as_dict() == {"totals": [], "counts": []}
