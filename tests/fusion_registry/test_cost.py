# SPDX-License-Identifier: Apache-2.0
"""What the registry costs on every call: lookup, all preconditions of a fusion, counters.

The bound is generous, because test machines are shared; `-s` prints the figures. They are minima
over short runs, since a longer run measures the neighbours too.
"""

from __future__ import annotations

import functools
import timeit
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusion_registry import Binding, Registry, load_registry
from fusion_registry.selection import Claim
from tests.fusion_registry.metadata_guard import metadata_only

STAGES = ("gated_output_norm", "pre_gated_delta_rule")
BOUND = 50.0
"""Microseconds. `python -m tools.bench_fusions` has the figures of a quiet machine."""


def nothing_runs(**inputs: Any) -> None:
    return None


def nothing_unfused(layer: Any, **inputs: Any) -> None:
    return None


class Layer(torch.nn.Module):
    """What the rules of the built-in fusion read."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            deterministic_mode=False,
            experimental_attention_variant="gated_delta_net",
            is_hybrid_model=False,
            linear_conv_kernel_dim=4,
        )
        self.act_fn = torch.nn.functional.silu
        self.out_norm = torch.nn.RMSNorm(64)


def registry_with(stage: str, types: tuple[str, ...]) -> Registry:
    """A built-in fusion with its kernel swapped for nothing and these device types."""
    registry = load_registry(plugins=False)
    fusion = registry.fusion(stage)
    rules = tuple(
        rule.model_copy(update={"types": types}) if rule.kind == "device_type" else rule
        for rule in fusion.declaration.preconditions
    )
    changes = {"implementation": f"{__name__}:nothing_runs", "preconditions": rules}
    declaration = fusion.declaration.model_copy(update=changes)
    contract = replace(registry.stages[stage], unfused=f"{__name__}:nothing_unfused")
    return replace(
        registry,
        stages={stage: contract},
        fusions={stage: replace(fusion, declaration=declaration)},
    )


def inputs(stage: str, device: str = "cpu") -> dict[str, Any]:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    if stage == "gated_output_norm":
        return {
            "x": empty(2, 8, 4, 64),
            "gate": empty(2, 8, 1024)[..., :256].unflatten(-1, (4, 64)),
            "weight": empty(64, dtype=torch.float32),
            "eps": 1e-6,
            "zero_centered_gamma": False,
        }
    return {
        "qkvzba": empty(8, 1, 2 * 16 + 2 * 4 * 16 + 2 * 4),
        "conv_weight": empty(2 * 16 + 4 * 16, 1, 4),
        "conv_bias": None,
        "A_log": empty(4, dtype=torch.float32),
        "dt_bias": empty(4, dtype=torch.float32),
        "num_key_heads": 1,
        "num_value_heads": 4,
        "key_head_dim": 16,
        "value_head_dim": 16,
        "use_qk_l2norm": True,
        "cu_seqlens": torch.tensor([0, 3, 8], dtype=torch.int32, device=device),
    }


def microseconds(call: Callable[[], object]) -> float:
    number = 100
    return min(timeit.repeat(call, number=number, repeat=300)) / number * 1e6


@pytest.mark.parametrize(
    ("types", "interpreter"),
    [(("cuda", "cpu"), "0"), (("cuda",), "1")],
    ids=["device-accepted", "interpreter-stands-in"],
)
@pytest.mark.parametrize("stage", STAGES)
def test_cost_of_a_call(
    stage: str, types: tuple[str, ...], interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpreter)
    registry, layer, arguments = registry_with(stage, types), Layer(), inputs(stage)
    fused = Binding(registry, {stage: Claim(stage, (stage,), "test")}, 1)
    plain = Binding(registry, {}, 1)
    rules = fused.stages[stage].candidates[0].rules
    assert len(rules.judges) == len(registry.fusion(stage).declaration.preconditions) >= 17

    cost = microseconds(lambda: fused.run(stage, layer, arguments))
    without = microseconds(lambda: plain.run(stage, layer, arguments))
    print(
        f"\n{stage}: {cost:.2f} us a call with {len(rules.judges)} preconditions, "
        f"{without:.2f} us unfused"
    )
    for rule, judge in zip(rules.rules, rules.judges, strict=True):
        each = microseconds(functools.partial(judge, arguments, layer))
        print(f"  {each:6.3f}  {rule.code}")
    assert fused.stages[stage].candidates[0].calls > 0
    assert cost < BOUND


@pytest.mark.parametrize("stage", STAGES)
def test_a_call_makes_no_tensor_and_reads_none(stage: str) -> None:
    registry = registry_with(stage, ("cuda", "meta"))
    fused = Binding(registry, {stage: Claim(stage, (stage,), "test")}, 1)
    layer, arguments = Layer(), inputs(stage, "meta")
    with metadata_only():
        fused.run(stage, layer, arguments)
    assert fused.stages[stage].candidates[0].calls == 1
