# SPDX-License-Identifier: Apache-2.0
"""What `--explain` says of a command line is what a run of it does, refused or not.

Both sides start at the flags. The run builds the configuration and the layers on the CPU, under
Triton's interpreter, and calls each layer once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from megatron.training.argument_utils import ArgumentGroupFactory
from torch import Tensor

from fusion_registry import FusionConfigError, FusionUnsupportedError
from fusion_registry.binding import ALL_PHASES
from fusion_registry.machine import INTERPRETER
from megatron.gdn.planning import binding as planning_binding
from megatron.gdn.planning.plan import PlannedLayer, PlannedStage, RunPlan
from tests.gdn.explained_runs import Run, StageCall, planned, run, words

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="plans for the interpreter")

PRE, NORM = "--gdn-pre-gated-delta-rule-fusion", "--gdn-gated-output-norm-fusion"
BOTH: dict[str, str | None] = {PRE: "", NORM: ""}
BF16: dict[str, str | None] = {"--fp16": None, "--bf16": ""}
FP32: dict[str, str | None] = {"--fp16": None}
GELU: dict[str, str | None] = {"--swiglu": None}
LAYER_NORM: dict[str, str | None] = {"--normalization": "LayerNorm"}
DETERMINISTIC: dict[str, str | None] = {"--deterministic-mode": ""}
PACKED: dict[str, str | None] = {"--dataloader-inter-document-masking": ""}
RECOMPUTED: dict[str, str | None] = {
    "--recompute-granularity": "selective",
    "--recompute-modules": "gdn_norm_out",
}

MINE = """
fusions:
  - name: plain_convolution
    stage: causal_conv1d
    implementation: megatron.gdn.reference:causal_conv1d
    determinism: unknown
    preconditions:
      - {kind: dim_relation, dim: conv_weight.conv_width, relation: at_most, of: 4}
  - name: channels_last_convolution
    stage: causal_conv1d
    implementation: megatron.gdn.reference:causal_conv1d
    determinism: unknown
    preconditions: [{kind: contiguous, tensor: qkv}]
  - name: plain_recurrence
    stage: gated_delta_rule
    implementation: megatron.gdn.reference:gated_delta_rule
    determinism: unknown
    preconditions:
      - {kind: contiguous, tensor: q}
      - {kind: dtype_in, tensor: g, dtypes: [float32]}
      - {kind: device_capability, tensor: q, at_least: "9.0"}
  - name: recurrence_of_float32_beta
    stage: gated_delta_rule
    implementation: megatron.gdn.reference:gated_delta_rule
    determinism: unknown
    preconditions: [{kind: dtype_in, tensor: beta, dtypes: [float32]}]
  - name: norm_of_contiguous_gates
    stage: gated_output_norm
    implementation: megatron.gdn.reference:gated_output_norm
    determinism: unknown
    preconditions: [{kind: contiguous, tensor: gate}]
  - name: plain_norm
    stage: gated_output_norm
    implementation: megatron.gdn.reference:gated_output_norm
    determinism: unknown
    preconditions:
      - {kind: value_equals, subject: layer.out_norm.eps, value: 1.0e-05}
      - {kind: contiguous, tensor: x}
  - name: norm_of_the_future
    stage: gated_output_norm
    implementation: megatron.gdn.reference:gated_output_norm
    determinism: unknown
    packages: {torch: ">=99"}
    preconditions: []
  - name: norm_for_layer_2
    stage: gated_output_norm
    implementation: megatron.gdn.reference:gated_output_norm
    determinism: unknown
    preconditions: [{kind: value_equals, subject: layer.layer_number, value: 2}]
  - name: broken_norm
    stage: gated_output_norm
    implementation: nowhere.at_all:norm
    determinism: unknown
    preconditions: []
select:
"""


@dataclass(frozen=True)
class Setting:
    """One run of the matrix.

    Args:
        ends: `runs`; refused as `config`, `layer` or `call`; `raises`, without a fusion's doing;
            or `file`, when the selection itself is wrong.
        changes: flags that differ from the tiny run's.
        select: entries of a config file's `select` list; an empty text means no file.
    """

    ends: Literal["runs", "config", "layer", "call", "raises", "file"]
    changes: dict[str, str | None]
    select: str = ""


SETTINGS: dict[str, Setting] = {
    "unfused": Setting("runs", {}),
    "pre": Setting("runs", {PRE: ""}),
    "norm": Setting("runs", {NORM: ""}),
    "both": Setting("runs", BOTH),
    "both-bf16": Setting("runs", BOTH | BF16),
    "both-fp32": Setting("call", BOTH | FP32),
    "pre-fp32": Setting("runs", {PRE: ""} | FP32),
    "both-dv_96": Setting("call", BOTH | {"--linear-value-head-dim": "96"}),
    "pre-dv_96": Setting("runs", {PRE: "", "--linear-value-head-dim": "96"}),
    "both-dk_24": Setting("runs", BOTH | {"--linear-key-head-dim": "24"}),
    "both-dv_1": Setting("runs", BOTH | {"--linear-value-head-dim": "1"}),
    "both-gelu": Setting("layer", BOTH | GELU),
    "unfused-gelu": Setting("raises", GELU),
    "pre-gelu": Setting("layer", {PRE: ""} | GELU),
    "norm-gelu": Setting("layer", {NORM: ""} | GELU),
    "both-layer_norm": Setting("layer", BOTH | LAYER_NORM),
    "pre-layer_norm": Setting("runs", {PRE: ""} | LAYER_NORM),
    "both-deterministic": Setting("config", BOTH | DETERMINISTIC),
    "unfused-deterministic": Setting("runs", DETERMINISTIC),
    "unfused-deterministic-gelu": Setting("runs", DETERMINISTIC | GELU),
    "both-packed": Setting("runs", BOTH | PACKED),
    "unfused-packed": Setting("runs", PACKED),
    "unfused-packed-deterministic": Setting("raises", PACKED | DETERMINISTIC),
    "norm-packed-deterministic": Setting("config", {NORM: ""} | PACKED | DETERMINISTIC),
    "both-conv_2": Setting("runs", BOTH | {"--linear-conv-kernel-dim": "2"}),
    "both-conv_8": Setting("runs", BOTH | {"--linear-conv-kernel-dim": "8"}),
    "both-conv_9": Setting("config", BOTH | {"--linear-conv-kernel-dim": "9"}),
    "both-conv_1": Setting("config", BOTH | {"--linear-conv-kernel-dim": "1"}),
    "both-recomputed": Setting("runs", BOTH | RECOMPUTED),
    "norm-recomputed-dv_96": Setting(
        "call",
        {NORM: "", "--linear-value-head-dim": "96"} | RECOMPUTED,
    ),
    "both-one_key_head": Setting(
        "runs",
        BOTH | {"--linear-num-key-heads": "1", "--linear-num-value-heads": "3"},
    ),
    "both-softmax_layers": Setting(
        "runs",
        BOTH | {"--num-layers": "4", "--linear-attention-freq": "2"},
    ),
    "both-off_in_layer_2": Setting(
        "runs",
        BOTH,
        "- {stage: gated_output_norm, fusions: off, layers: 2}\n"
        "- {stage: pre_gated_delta_rule, fusions: off, layers: 2}",
    ),
    "config-per_layer": Setting(
        "runs",
        {},
        "- {stage: gated_output_norm, fusions: [gated_output_norm], layers: 1}\n"
        "- {stage: gated_output_norm, fusions: [plain_norm], layers: 2}",
    ),
    "config-layers_match_nothing": Setting(
        "file",
        {},
        "- {stage: gated_output_norm, fusions: [plain_norm], layers: 7}",
    ),
    "config-layer_number": Setting(
        "runs",
        {},
        "- {stage: gated_output_norm, fusions: [norm_for_layer_2, plain_norm]}",
    ),
    "config-layer_number_alone": Setting(
        "layer",
        {},
        "- {stage: gated_output_norm, fusions: [norm_for_layer_2]}",
    ),
    "config-candidates_dv_96": Setting(
        "runs",
        {"--linear-value-head-dim": "96"},
        "- {stage: gated_output_norm, fusions: [gated_output_norm, plain_norm]}",
    ),
    "config-no_candidate": Setting(
        "call",
        {"--linear-value-head-dim": "96"},
        "- {stage: gated_output_norm, fusions: [gated_output_norm, norm_of_contiguous_gates]}",
    ),
    "config-gate_is_a_view": Setting(
        "call",
        {PRE: ""},
        "- {stage: gated_output_norm, fusions: [norm_of_contiguous_gates]}",
    ),
    "config-child": Setting(
        "runs", {NORM: ""}, "- {stage: causal_conv1d, fusions: [plain_convolution]}"
    ),
    "config-child-conv_5": Setting(
        "call",
        {"--linear-conv-kernel-dim": "5"},
        "- {stage: causal_conv1d, fusions: [plain_convolution]}",
    ),
    "config-child_wants_contiguous": Setting(
        "call",
        {},
        "- {stage: causal_conv1d, fusions: [channels_last_convolution]}",
    ),
    "config-child_and_composite": Setting(
        "file",
        {PRE: ""},
        "- {stage: causal_conv1d, fusions: [plain_convolution]}",
    ),
    "config-recurrence": Setting(
        "runs", BOTH, "- {stage: gated_delta_rule, fusions: [plain_recurrence]}"
    ),
    "config-beta_fused": Setting(
        "runs",
        {PRE: ""},
        "- {stage: gated_delta_rule, fusions: [recurrence_of_float32_beta]}",
    ),
    "config-beta_unfused": Setting(
        "call",
        {},
        "- {stage: gated_delta_rule, fusions: [recurrence_of_float32_beta]}",
    ),
    "config-package": Setting(
        "layer", {}, "- {stage: gated_output_norm, fusions: [norm_of_the_future]}"
    ),
    "config-package_second": Setting(
        "layer",
        {},
        "- {stage: gated_output_norm, fusions: [gated_output_norm, norm_of_the_future]}",
    ),
    "config-broken": Setting("layer", {}, "- {stage: gated_output_norm, fusions: [broken_norm]}"),
    "config-unknown": Setting("file", {}, "- {stage: gated_output_norm, fusions: [no_such_norm]}"),
    "config-contradicts_flag": Setting(
        "file",
        {NORM: ""},
        "- {stage: gated_output_norm, fusions: [plain_norm]}",
    ),
}


def line_of(name: str, tmp_path: Path) -> list[str]:
    setting = SETTINGS[name]
    changes = setting.changes
    if setting.select:
        file = tmp_path / "mine.yaml"
        file.write_text(MINE + "".join(f"  {line}\n" for line in setting.select.splitlines()))
        changes = changes | {"--gdn-fusion-config": str(file)}
    return words(changes)


def refused_stage(plan: RunPlan, layer: int | None, stage: str | None) -> PlannedStage:
    """The refused stage of the layer that the run was in; any layer before layers exist."""
    return next(
        item
        for planned_layer in plan.layers
        if layer in (None, planned_layer.layer)
        for item in planned_layer.stages
        if item.stage == stage and item.outcome == "refused"
    )


def check_refusal(plan: RunPlan, done: Run, error: FusionUnsupportedError) -> None:
    stage = refused_stage(plan, error.layer, error.stage)
    assert stage.refused_at == done.moment
    assert error.refusal is not None
    known = ALL_PHASES[: ALL_PHASES.index(stage.refused_at) + 1]
    assert [candidate.fusion for candidate in error.refusal.candidates] == [
        candidate.fusion for candidate in stage.candidates
    ]
    for ours, theirs in zip(stage.candidates, error.refusal.candidates, strict=True):
        said = [(reason.code, reason.text) for reason in ours.reasons if reason.phase in known]
        assert said == [(reason.code, reason.text) for reason in theirs.reasons]


def check_unloadable(plan: RunPlan, error: FusionConfigError) -> None:
    """What cannot be loaded is an error of the configuration to a run; the plan tells it too."""
    reasons = [
        reason
        for layer in plan.layers
        for stage in layer.stages
        if stage.outcome == "refused" and stage.refused_at == "layer"
        for candidate in stage.candidates
        if not candidate.can_be_loaded
        for reason in candidate.reasons
    ]
    assert any(reason.text in str(error) for reason in reasons), (reasons, error)


def ran_by(layer: PlannedLayer) -> dict[str, str | None]:
    return {item.stage: item.fusion for item in layer.stages if item.outcome != "inside"}


_DOCSTRINGS: dict[Any, Any] = {}


@pytest.fixture(autouse=True)
def _quick_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core reads its own source files for every parser; once will do."""
    inner = ArgumentGroupFactory._get_field_docstrings

    def remembered(self: Any, cls: Any) -> Any:
        if cls not in _DOCSTRINGS:
            _DOCSTRINGS[cls] = inner(self, cls)
        return _DOCSTRINGS[cls]

    monkeypatch.setattr(ArgumentGroupFactory, "_get_field_docstrings", remembered)


@pytest.mark.parametrize("name", SETTINGS)
def test_plan_and_run_agree(name: str, tmp_path: Path) -> None:
    line = line_of(name, tmp_path)
    ends = SETTINGS[name].ends
    done = run(line)
    if ends == "file":
        assert isinstance(done.error, FusionConfigError)
        assert done.moment == "config"
        with pytest.raises(FusionConfigError) as found:
            planned(line)
        assert str(found.value) == str(done.error)
        return
    plan = planned(line)
    assert plan.stops == (ends != "runs")
    if ends == "runs":
        assert done.error is None
        assert {layer.layer: ran_by(layer) for layer in plan.layers} == done.ran
    elif isinstance(done.error, FusionUnsupportedError):
        assert done.moment == ends
        check_refusal(plan, done, done.error)
    elif isinstance(done.error, FusionConfigError):
        assert done.moment == ends
        check_unloadable(plan, done.error)
    else:
        # No fusion refused it: the layer or the unfused code did.
        assert ends == "raises"
        assert isinstance(done.error, ValueError), done.error
        problems = [layer.problem for layer in plan.layers]
        problems += [stage.problem for layer in plan.layers for stage in layer.stages]
        assert str(done.error) in problems


def test_the_matrix_is_mixed() -> None:
    """At least thirty settings, some of every kind."""
    ends = [setting.ends for setting in SETTINGS.values()]
    assert len(ends) >= 30
    assert set(ends) == {"runs", "config", "layer", "call", "raises", "file"}
    assert ends.count("runs") >= 10


def metadata(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # The stride of a dimension of size 1 means nothing, and PyTorch chooses it freely.
    strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]
    return tuple(value.shape), strides, value.dtype


@pytest.mark.parametrize(
    "name",
    ["unfused", "both", "unfused-packed", "both-packed", "unfused-deterministic"],
)
def test_planned_tensors_are_those_of_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes, strides and dtypes of every input of every stage.

    Behind a fusion of a third party they are what the stage contract says, whatever it makes.
    """
    line, calls = line_of(name, tmp_path), []
    inner = planning_binding.PlannedBinding.run

    def recording(self: Any, stage: str, layer: Any, inputs: dict[str, Any]) -> Any:
        if layer.layer_number == 1:
            calls.append(StageCall(stage, inputs))
        return inner(self, stage, layer, inputs)

    monkeypatch.setattr(planning_binding.PlannedBinding, "run", recording)
    planned(line, INTERPRETER)
    done = run(line)
    assert done.error is None
    assert [call.stage for call in calls] == [call.stage for call in done.calls]
    for ours, theirs in zip(calls, done.calls, strict=True):
        for key, value in theirs.inputs.items():
            assert metadata(ours.inputs[key]) == metadata(value), (ours.stage, key)
