# SPDX-License-Identifier: Apache-2.0
"""What is chosen for whom: golden outcomes on fixture machines, on any laptop.

Each file of `golden/` holds one scenario on every machine. After a wanted change, write them anew
with `python -m tests.gdn.test_golden_selections` and read the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from fusion_registry.machine import AMPERE, CPU, HOPPER, INTERPRETER, Machine
from fusion_registry.schema import LayerSet
from megatron.gdn.planning.layers import PlannedCall
from megatron.gdn.planning.outputs import CONTRACT_OUTPUTS
from megatron.gdn.planning.plan import PlannedStage, RunPlan
from megatron.gdn.planning.run import plan_run
from megatron.gdn.stages import STAGES
from tests.gdn.layer_support import make_config

GOLDEN = Path(__file__).parent / "golden"
NEW = {"torch": "2.13.0", "triton": "3.7.1"}
OLD = {"torch": "2.8.0", "triton": "3.4.0"}

MACHINES: Mapping[str, Machine] = {
    "hopper": replace(HOPPER, packages=NEW),
    "ampere with older packages": replace(AMPERE, packages=OLD),
    "cpu": replace(CPU, packages=NEW),
    "interpreter": replace(INTERPRETER, packages=NEW),
    "hopper without triton": replace(HOPPER, packages={"torch": "2.13.0"}),
}

OPTIONS = {"gdn_pre_gated_delta_rule_fusion": True, "gdn_gated_output_norm_fusion": True}
BF16 = {"params_dtype": torch.bfloat16, "bf16": True}


@dataclass(frozen=True)
class Scenario:
    """Fields of the configuration, and entries of a config file's `select` list."""

    fields: dict[str, Any] = field(default_factory=dict)
    select: tuple[str, ...] = ()


SCENARIOS: Mapping[str, Scenario] = {
    "nothing": Scenario(),
    "built_in": Scenario({**OPTIONS, **BF16}),
    "built_in_float32_head_dim_96": Scenario(
        {**OPTIONS, "params_dtype": torch.float32, "linear_value_head_dim": 96}
    ),
    "built_in_deterministic": Scenario({**OPTIONS, "deterministic_mode": True}),
    "candidates": Scenario(
        BF16,
        (
            "{stage: gated_delta_rule, fusions: "
            "[hopper_recurrence, ampere_recurrence, triton_recurrence]}",
        ),
    ),
    "candidates_large_heads": Scenario(
        {**BF16, "linear_key_head_dim": 256},
        ("{stage: gated_delta_rule, fusions: [hopper_recurrence, ampere_recurrence]}",),
    ),
    "packages": Scenario(
        BF16,
        ("{stage: causal_conv1d, fusions: [new_triton_convolution, plain_convolution]}",),
    ),
    "absent_package_comes_second": Scenario(
        BF16, ("{stage: causal_conv1d, fusions: [plain_convolution, cutlass_convolution]}",)
    ),
    "package_as_a_rule": Scenario(
        BF16,
        ("{stage: causal_conv1d, fusions: [convolution_of_some_torch, plain_convolution]}",),
    ),
    "per_layer": Scenario(
        {**BF16, "gdn_gated_output_norm_fusion": True},
        (
            "{stage: gated_output_norm, fusions: off, layers: 2-3}",
            "{stage: pre_gated_delta_rule, fusions: [pre_gated_delta_rule], layers: [1, 3]}",
            "{stage: causal_conv1d, fusions: [plain_convolution], layers: 2}",
            "{stage: decay_and_beta, fusions: [decay_of_float32_logits], layers: 2}",
        ),
    ),
}


def plan_of(scenario: Scenario, machine: Machine, folder: Path) -> RunPlan:
    """The plan of a model of three Gated DeltaNet layers and one of softmax attention."""
    fields = dict(scenario.fields)
    fusions = {name: fields.pop(name) for name in list(fields) if name.startswith("gdn_")}
    config = make_config(**fields)
    for name, value in fusions.items():
        setattr(config, name, value)
    if scenario.select:
        file = folder / "fusions.yaml"
        entries = "".join(f"  - {entry}\n" for entry in scenario.select)
        file.write_text((GOLDEN / "fusions.yaml").read_text() + "select:\n" + entries)
        config.gdn_fusion_config = str(file)
    return plan_run(config, PlannedCall(batch=2, length=32), machine)


def stage_lines(stage: PlannedStage) -> list[str]:
    words = {"fused": f"fusion {stage.fusion}", "refused": f"refused at {stage.refused_at}"}
    outcome = words.get(stage.outcome, stage.outcome)
    lines = [f"    {'  ' * bool(stage.parent) + stage.stage:<22}{outcome}"]
    for candidate in stage.candidates:
        lines += [f"        {candidate.fusion}: {reason.code}" for reason in candidate.reasons]
    return lines


def plan_text(plan: RunPlan) -> str:
    """The outcome of every stage, layers with the same outcomes taken together."""
    groups: dict[tuple[PlannedStage, ...], list[int]] = {}
    for layer in plan.layers:
        groups.setdefault(layer.stages, []).append(layer.layer)
    lines = []
    for stages, numbers in groups.items():
        lines.append(f"  layers {LayerSet.of(numbers)}")
        lines += [line for stage in stages for line in stage_lines(stage)]
    return "\n".join(lines)


def golden_text(scenario: Scenario, folder: Path) -> str:
    """The outcomes on every machine, machines with the same outcomes taken together."""
    groups: dict[str, list[str]] = {}
    for name, machine in MACHINES.items():
        groups.setdefault(plan_text(plan_of(scenario, machine, folder)), []).append(name)
    blocks = [f"{'; '.join(names)}:\n{text}\n" for text, names in groups.items()]
    return "\n".join(blocks)


@pytest.mark.parametrize("name", SCENARIOS)
def test_golden_outcomes(name: str, tmp_path: Path) -> None:
    found = golden_text(SCENARIOS[name], tmp_path)
    assert found == (GOLDEN / f"{name}.txt").read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {file.stem for file in GOLDEN.glob("*.txt")} == set(SCENARIOS)


def test_every_stage_can_be_planned() -> None:
    assert set(CONTRACT_OUTPUTS) == {stage.name for stage in STAGES}


def test_reasons_are_told_in_words(tmp_path: Path) -> None:
    """Rule and finding, of every candidate, with the machine's own facts."""
    scenario = SCENARIOS["candidates_large_heads"]
    plan = plan_of(scenario, MACHINES["ampere with older packages"], tmp_path)
    (stage,) = [item for item in plan.layers[0].stages if item.stage == "gated_delta_rule"]
    assert [[reason.text for reason in item.reasons] for item in stage.candidates] == [
        ["a device of compute capability 9.0 or later for q, got 8.0 on cuda:0"],
        ["key_head_dim of q to be at most 128, got 256 beside 128"],
    ]
    plan = plan_of(SCENARIOS["built_in"], MACHINES["hopper without triton"], tmp_path)
    reasons = plan.layers[0].stages[0].candidates[0].reasons
    assert [reason.text for reason in reasons] == ["triton >=3.4, got nothing: it is not installed"]


if __name__ == "__main__":
    for scenario_name, each in SCENARIOS.items():
        with TemporaryDirectory() as made:
            (GOLDEN / f"{scenario_name}.txt").write_text(golden_text(each, Path(made)))
