# SPDX-License-Identifier: Apache-2.0
"""Every registered fusion against its declaration, and proof that the checks catch wrong ones.

A new built-in fusion gets its conformance tests here by being declared; there is nothing to add.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from fusion_registry import Registry, load_registry
from fusion_registry.registry import precondition_kinds
from megatron.gdn.commands.check_fusions import main
from megatron.gdn.conformance import Check, Result, Verdict, breaking, checks_of
from megatron.gdn.conformance.breaking import BREAKERS
from megatron.gdn.conformance.fitting import Fitter
from megatron.gdn.conformance.output_layout import phrases
from megatron.gdn.conformance.stage_inputs import BUILDERS
from megatron.gdn.stages import STAGES

TOYS = "tests.fusions.toy_fusions"
HARMLESS = (Verdict.PASSED, Verdict.OUTSIDE, Verdict.REPORTED)
STAGE_NAMES = [stage.name for stage in STAGES]


def registered_checks() -> list[Any]:
    registry = load_registry(plugins=False)
    return [
        pytest.param(check, id=f"{name}-{check.name}")
        for name, fusion in registry.fusions.items()
        for check in checks_of(fusion, registry)
    ]


@pytest.mark.parametrize("check", registered_checks())
def test_registered_fusion(check: Check) -> None:
    result = check.run()
    if result.verdict is Verdict.UNCHECKED:
        pytest.skip(result.detail)
    assert result.verdict in HARMLESS, result.detail


@pytest.fixture
def declare(tmp_path: Path):
    """Declares a toy fusion in a file of its own; gives the file."""

    def write(
        implementation: str, stage: str, rules: list[dict] | None = None, **keys: Any
    ) -> Path:
        path = implementation if ":" in implementation else f"{TOYS}:{implementation}"
        fusion = {"name": "toy", "stage": stage, "implementation": path}
        fusion |= {"determinism": "deterministic", "preconditions": rules or []} | keys
        file = tmp_path / "toy.yaml"
        file.write_text(yaml.safe_dump({"fusions": [fusion]}), encoding="utf-8")
        return file

    return write


@functools.cache
def _checks(registry_file: str, text: str) -> tuple[Registry, list[Check]]:
    registry = load_registry([registry_file], plugins=False)
    return registry, checks_of(registry.fusion("toy"), registry)


def results(file: Path, *starts: str) -> dict[str, Result]:
    """Results of the toy's checks by name; only those that start so, all when none is given."""
    _, checks = _checks(str(file), file.read_text(encoding="utf-8"))
    return {
        check.name: check.run()
        for check in checks
        if not starts or check.name.startswith(tuple(starts))
    }


def failed(found: dict[str, Result]) -> set[str]:
    return {name for name, result in found.items() if result.verdict is Verdict.FAILED}


# Nothing is alarmed without cause.


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_the_reference_of_every_stage_passes_as_a_fusion(stage, declare) -> None:
    found = results(declare(stage.reference, stage.name))
    wrong = {
        name: result.detail for name, result in found.items() if result.verdict not in HARMLESS
    }
    assert not wrong
    assert sum(result.verdict is Verdict.PASSED for result in found.values()) > 15


# Wrong fusions, each caught by the check that is there for it.


@pytest.mark.parametrize(
    ("toy", "stage", "caught_by", "words"),
    [
        ("norm_with_sigmoid_gate", "gated_output_norm", "outputs[dense, float32]", "out is off by"),
        (
            "norm_with_wrong_weight_gradient",
            "gated_output_norm",
            "gradients[dense, float32]",
            "gradient of weight is off by 2.0e-02",
        ),
        (
            "norm_without_weight_gradient",
            "gated_output_norm",
            "gradients[dense, float32]",
            "must be differentiable by weight",
        ),
        ("norm_off_by_last_bits", "gated_output_norm", "determinism", "two runs differ in out"),
        ("norm_heads_first", "gated_output_norm", "layout[dense, float32]", "must be contiguous"),
        ("norm_in_float64", "gated_output_norm", "layout[dense, float32]", "float32, got"),
        ("norm_without_last_token", "gated_output_norm", "outputs[dense, float32]", "off by nan"),
        (
            "norm_that_overwrites_its_gate",
            "gated_output_norm",
            "layout[dense, float32]",
            "the input gate was modified",
        ),
        ("norm_without_eps", "gated_output_norm", "signature", "does not accept the inputs"),
        (
            "convolution_across_documents",
            "causal_conv1d",
            "outputs[packed documents]",
            "qkv is off by",
        ),
        (
            "recurrence_without_state_reset",
            "gated_delta_rule",
            "outputs[packed documents]",
            "x is off by",
        ),
        (
            "pre_with_copied_gate",
            "pre_gated_delta_rule",
            "layout[dense, float32]",
            "gate must be a view of qkvzba",
        ),
        (
            "pre_with_wrong_gate",
            "pre_gated_delta_rule",
            "outputs[dense, float32]",
            "gate is off by",
        ),
        (
            "pre_without_decay",
            "pre_gated_delta_rule",
            "layout[dense, float32]",
            "must return q, k, v, gate, beta, g, got 5 values",
        ),
        ("qkv_expanded_in_blocks", "prepare_qkv", "outputs[dense, float32]", "q is off by"),
        (
            "beta_rounded_to_activations",
            "decay_and_beta",
            "layout[dense, float16]",
            "beta must be torch.float32",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_wrong_fusion_is_caught(toy, stage, caught_by, words, declare) -> None:
    result = results(declare(toy, stage), caught_by)[caught_by]
    assert result.verdict is Verdict.FAILED
    assert words in result.detail


def test_noise_in_the_last_bit_fails_nothing_but_determinism(declare) -> None:
    assert failed(results(declare("norm_off_by_last_bits", "gated_output_norm"))) == {"determinism"}


def test_copied_gate_fails_nothing_but_layout(declare) -> None:
    found = failed(results(declare("pre_with_copied_gate", "pre_gated_delta_rule")))
    assert found
    assert all(name.startswith("layout[") for name in found)


def test_block_expansion_is_right_with_one_value_head_a_key_head(declare) -> None:
    file = declare("qkv_expanded_in_blocks", "prepare_qkv")
    assert not failed(results(file, "outputs[one value head"))


def test_failures_say_the_case(declare) -> None:
    (result,) = results(
        declare("norm_with_sigmoid_gate", "gated_output_norm"), "outputs[dense, float16"
    ).values()
    assert "(case: float16, batch 1, length 19" in result.detail


@pytest.mark.parametrize("declared", ["nondeterministic", "unknown"])
def test_undeclared_determinism_is_reported(declared, declare) -> None:
    file = declare("norm_off_by_last_bits", "gated_output_norm", determinism=declared)
    (result,) = results(file, "determinism").values()
    assert result.verdict is Verdict.REPORTED
    assert result.detail.startswith(f"declared {declared}; two runs differ in out, gradient of x")


def test_what_cannot_be_imported_is_not_checked_further(declare) -> None:
    found = results(declare("nowhere.at_all:function", "gated_output_norm"))
    assert failed(found) == {"import"}
    assert "No module named 'nowhere'" in found["import"].detail
    assert found["outputs[dense, float32]"].verdict is Verdict.UNCHECKED


def test_misspelt_attributes_are_caught(declare) -> None:
    rules = [
        {"kind": "value_equals", "subject": "config.determinstic_mode", "value": False},
        {"kind": "value_in", "subject": "layer.activaton", "values": ["silu"]},
        {"kind": "value_equals", "subject": "layer.config.bf17", "value": False},
        {"kind": "module_type", "subject": "layer.out_norm", "names": ["RMSNorm"]},
        {"kind": "value_equals", "subject": "config.multi_latent_attention", "value": False},
        {"kind": "value_equals", "subject": "layer.config.bf16", "value": True},
    ]
    file = declare("megatron.gdn.reference:gated_output_norm", "gated_output_norm", rules)
    (result,) = results(file, "attributes exist").values()
    assert result.verdict is Verdict.FAILED
    for place, words in (
        (0, "reads config.determinstic_mode, but the transformer configuration has no "),
        (1, "reads layer.activaton, but a GatedDeltaNet layer has no 'activaton'; did you mean ac"),
        (2, "reads layer.config.bf17, but the transformer configuration has no 'bf17'; did you m"),
    ):
        assert f"fusions[0].preconditions[{place}]: fusion 'toy' {words}" in result.detail
    assert "preconditions[3]" not in result.detail
    assert "preconditions[4]" not in result.detail
    assert "preconditions[5]" not in result.detail


def test_absent_package(declare) -> None:
    packages = {"no-such-package": ">=1"}
    file = declare("norm_right", "gated_output_norm", packages=packages)
    result = results(file, "packages")["packages"]
    assert result.detail == "needs no-such-package >=1, got nothing: it is not installed"


# Preconditions.


def test_every_kind_of_precondition_has_a_breaker() -> None:
    assert set(BREAKERS) == set(precondition_kinds())


def test_every_stage_has_inputs() -> None:
    assert sorted(BUILDERS) == sorted(STAGE_NAMES)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_promise_about_an_output_is_understood(stage) -> None:
    for item in stage.outputs:
        phrases(item.note)


def test_an_unknown_promise_is_an_error() -> None:
    with pytest.raises(ValueError, match="no check knows what 'sorted' promises"):
        phrases("contiguous, sorted")


NORM_RULES = [
    {"kind": "value_equals", "subject": "config.deterministic_mode", "value": False},
    {"kind": "value_equals", "subject": "config.layernorm_epsilon", "value": 1e-5},
    {"kind": "value_in", "subject": "layer.activation", "values": ["silu", "swish"]},
    {"kind": "value_in", "subject": "layer.cp_size", "values": [1, 2]},
    {"kind": "value_in", "subject": "layer.act_fn.__name__", "values": ["silu"]},
    {"kind": "module_type", "subject": "layer.out_norm", "names": ["RMSNorm"]},
    {"kind": "module_type", "subject": "layer.out_proj", "names": ["a.package.RowParallelLinear"]},
    {"kind": "tensor_present", "tensor": "weight"},
    {"kind": "device_type", "tensors": ["x", "gate", "weight"], "types": ["cuda", "cpu"]},
    {"kind": "same_device", "tensors": ["x", "gate", "weight"]},
    {"kind": "dtype_in", "tensor": "x", "dtypes": ["float32"]},
    {"kind": "dtype_in", "tensor": "weight", "dtypes": ["bfloat16"]},
    {"kind": "dtype_like", "tensor": "gate", "like": "x", "or_in": ["float16"]},
    {"kind": "rank", "tensor": "weight", "dims": ["head_dim"]},
    {"kind": "same_shape", "tensors": ["x", "gate"]},
    {"kind": "dim_relation", "dim": "x.head_dim", "relation": "power_of_two"},
    {"kind": "dim_relation", "dim": "x.head_dim", "relation": "multiple_of", "of": 64},
    {"kind": "dim_relation", "dim": "x.head_dim", "relation": "at_least", "of": 128},
    {"kind": "dim_relation", "dim": "x.head_dim", "relation": "at_most", "of": 256},
    {"kind": "dim_relation", "dim": "x.batch", "relation": "equal_to", "of": 3},
    {"kind": "nonempty", "tensor": "x"},
    {"kind": "contiguous", "tensor": "gate"},
    {"kind": "last_dim_contiguous", "tensor": "x"},
    {"kind": "device_capability", "tensor": "x", "at_least": "8.0"},
    {"kind": "package_version", "package": "torch", "versions": ">=2.6"},
]


def test_rules_of_every_kind_are_met_and_broken(declare) -> None:
    found = results(declare("norm_right", "gated_output_norm", NORM_RULES))
    wrong = {name: result for name, result in found.items() if result.verdict not in HARMLESS}
    assert not wrong
    refusals = [name for name in found if name.startswith("refuses[")]
    assert len(refusals) == len(NORM_RULES)
    assert {rule["kind"] for rule in NORM_RULES} == set(BREAKERS) - {"predicate"}


def test_one_gpu_is_enough_to_break_the_rule_about_devices(declare, monkeypatch) -> None:
    """torch would initialise a second one, also for a tensor that only pretends to be there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    rules = [{"kind": "same_device", "tensors": ["x", "gate"]}]
    with mock.patch.object(breaking, "pretend", wraps=breaking.pretend) as pretended:
        (result,) = results(declare("norm_right", "gated_output_norm", rules), "refuses[").values()
    assert result.verdict is Verdict.PASSED, result.detail
    assert "cuda:1" not in {call.args[1] for call in pretended.call_args_list}


def test_most_rules_are_broken_alone(declare) -> None:
    found = results(declare("norm_right", "gated_output_norm", NORM_RULES), "refuses[")
    together = {name: result.detail for name, result in found.items() if result.detail}
    # A tensor of another rank, an empty one and an oblong one break what is said of sizes too.
    assert len(together) <= 8, together


def test_a_rule_that_never_refuses_is_caught(declare) -> None:
    rule = {"kind": "dim_relation", "dim": "x.head_dim", "relation": "at_least", "of": 0}
    (result,) = results(declare("norm_right", "gated_output_norm", [rule]), "refuses[").values()
    assert result.verdict is Verdict.FAILED
    assert "never refuses" in result.detail


def test_a_predicate_that_never_refuses_is_not_passed(declare) -> None:
    rule = {"kind": "predicate", "callable": f"{TOYS}:accepts", "reads": ["x"], "says": "anything"}
    (result,) = results(declare("norm_right", "gated_output_norm", [rule]), "refuses[").values()
    assert result.verdict is Verdict.NOT_GENERATED


def test_a_predicate_about_two_inputs_is_broken(declare) -> None:
    rule = {"kind": "predicate", "callable": f"{TOYS}:one_row", "reads": ["qkv", "cu_seqlens"]}
    file = declare(f"{STAGES[1].reference}", "causal_conv1d", [rule | {"says": "one row"}])
    assert results(file, "refuses[")["refuses[one row]"].verdict is Verdict.PASSED


def test_a_predicate_that_reads_contents_is_caught(declare) -> None:
    rule = {"kind": "predicate", "callable": f"{TOYS}:reads_contents", "reads": ["cu_seqlens"]}
    file = declare(f"{STAGES[1].reference}", "causal_conv1d", [rule | {"says": "tokens"}])
    (result,) = results(file, "reads metadata only").values()
    assert result.verdict is Verdict.FAILED
    assert "cannot be judged on meta tensors" in result.detail


def test_a_predicate_that_always_crashes_is_told_soon(declare, monkeypatch) -> None:
    judged = []
    refusing = Fitter.refusing

    def counted(self: Fitter, setting: Any) -> Any:
        judged.append(setting)
        return refusing(self, setting)

    monkeypatch.setattr(Fitter, "refusing", counted)
    rule = {"kind": "predicate", "callable": f"{TOYS}:no_list", "reads": ["x"], "says": "a list"}
    found = results(declare(STAGES[-1].reference, "gated_output_norm", [rule]))
    result = found["reads metadata only"]
    assert result.verdict is Verdict.FAILED
    assert "must return a list of reasons, got 'no'" in result.detail
    # A search that tries pairs judges 3,000 calls more, and every one of thirty checks searches.
    assert len(judged) < 10_000


def test_rules_that_contradict_each_other_leave_nothing_to_check(declare) -> None:
    rules = [
        {"kind": "dim_relation", "dim": "x.head_dim", "relation": "equal_to", "of": 32},
        {"kind": "dim_relation", "dim": "weight.head_dim", "relation": "equal_to", "of": 64},
    ]
    found = results(declare("norm_right", "gated_output_norm", rules), "outputs[dense, float32")
    (result,) = found.values()
    assert result.verdict is Verdict.UNCHECKED
    assert "head_dim of weight to be equal to 64, got 32 beside 64" in result.detail


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_the_device_only_refusals_are_checked(declare) -> None:
    rules = [
        {"kind": "device_type", "tensors": ["x", "gate"], "types": ["cuda"]},
        {"kind": "device_capability", "tensor": "x", "at_least": "9.0"},
    ]
    found = results(declare("norm_right", "gated_output_norm", rules))
    verdicts = {name: found[name].verdict for name in found}
    assert verdicts["outputs[dense, float32]"] is Verdict.UNCHECKED
    assert "cannot be checked here: needs CUDA" in found["outputs[dense, float32]"].detail
    refusals = [name for name in found if name.startswith("refuses[")]
    assert [verdicts[name] for name in refusals] == [Verdict.PASSED] * 2
    assert not failed(found)


# The command.


@pytest.mark.parametrize(
    ("toy", "rules", "status", "last"),
    [
        ("norm_right", [], 0, "all checks passed"),
        ("norm_with_sigmoid_gate", [], 1, "some checks FAILED"),
        (
            "norm_right",
            [{"kind": "dim_relation", "dim": "x.head_dim", "relation": "at_least", "of": 100000}],
            3,
            "no check failed, but some could not be made on this machine",
        ),
    ],
    ids=["right", "wrong", "uncheckable"],
)
def test_exit_status(toy, rules, status, last, declare, capsys) -> None:
    file = declare(toy, "gated_output_norm", rules)
    assert main(["toy", "--config", str(file)]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == last
    assert any(line.startswith("outputs[dense, float32]") for line in lines)


def test_json(declare, capsys) -> None:
    file = declare("norm_without_last_token", "gated_output_norm")
    assert main(["toy", "--config", str(file), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    (fusion,) = data["fusions"]
    check = next(c for c in fusion["checks"] if c["name"] == "outputs[dense, float32]")
    assert check["verdict"] == "failed"
    assert check["measurements"][0]["error"] == "nan"
    assert fusion["counts"]["failed"] > 0


def test_mistakes_end_with_status_2(declare, tmp_path, capsys) -> None:
    assert main(["toi", "--config", str(declare("norm_right", "gated_output_norm"))]) == 2
    assert "did you mean 'toy'?" in capsys.readouterr().err
    assert main(["--config", str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml: cannot be read" in capsys.readouterr().err
