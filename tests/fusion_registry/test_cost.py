# SPDX-License-Identifier: Apache-2.0
"""What the registry costs on every call: lookup, all preconditions of a fusion, counters.

The bound is generous, because test machines are shared; `-s` prints the figures. They are minima
over short runs, since a longer run measures the neighbours too.
"""

from __future__ import annotations

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

STAGE = "gated_output_norm"
BOUND = 30.0
"""Microseconds."""


def nothing_runs(x: Any, gate: Any, weight: Any, eps: float, zero_centered_gamma: bool) -> None:
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
        )
        self.act_fn = torch.nn.functional.silu
        self.out_norm = torch.nn.RMSNorm(64)


def registry_with(types: tuple[str, ...]) -> Registry:
    """The built-in fusion with its kernel swapped for nothing and these device types."""
    registry = load_registry(plugins=False)
    fusion = registry.fusion(STAGE)
    rules = tuple(
        rule.model_copy(update={"types": types}) if rule.kind == "device_type" else rule
        for rule in fusion.declaration.preconditions
    )
    changes = {"implementation": f"{__name__}:nothing_runs", "preconditions": rules}
    declaration = fusion.declaration.model_copy(update=changes)
    contract = replace(registry.stages[STAGE], unfused=f"{__name__}:nothing_unfused")
    return replace(
        registry,
        stages={STAGE: contract},
        fusions={STAGE: replace(fusion, declaration=declaration)},
    )


def inputs(device: str = "cpu") -> dict[str, Any]:
    shape = (2, 8, 4, 64)
    return {
        "x": torch.empty(shape, dtype=torch.bfloat16, device=device),
        "gate": torch.empty((*shape[:2], 1024), dtype=torch.bfloat16, device=device)[
            ..., :256
        ].unflatten(-1, shape[2:]),
        "weight": torch.empty(64, device=device),
        "eps": 1e-6,
        "zero_centered_gamma": False,
    }


def microseconds(call: Callable[[], object]) -> float:
    number = 100
    return min(timeit.repeat(call, number=number, repeat=300)) / number * 1e6


@pytest.mark.parametrize(
    ("types", "interpreter"),
    [(("cuda", "cpu"), "0"), (("cuda",), "1")],
    ids=["device-accepted", "interpreter-stands-in"],
)
def test_cost_of_a_call(
    types: tuple[str, ...], interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpreter)
    registry, layer, arguments = registry_with(types), Layer(), inputs()
    fused = Binding(registry, {STAGE: Claim(STAGE, (STAGE,), "test")}, 1)
    plain = Binding(registry, {}, 1)
    rules = fused.stages[STAGE].candidates[0].rules
    assert len(rules.judges) == len(registry.fusion(STAGE).declaration.preconditions) >= 17

    cost = microseconds(lambda: fused.run(STAGE, layer, arguments))
    without = microseconds(lambda: plain.run(STAGE, layer, arguments))
    print(
        f"\n{STAGE}: {cost:.2f} us a call with {len(rules.judges)} preconditions, "
        f"{without:.2f} us unfused"
    )
    for rule, judge in zip(rules.rules, rules.judges, strict=True):
        each = microseconds(lambda judge=judge: judge(arguments, layer))
        print(f"  {each:6.3f}  {rule.code}")
    assert fused.stages[STAGE].candidates[0].calls > 0
    assert cost < BOUND


def test_a_call_makes_no_tensor_and_reads_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = Binding(registry_with(("cuda", "meta")), {STAGE: Claim(STAGE, (STAGE,), "test")}, 1)
    layer, arguments = Layer(), inputs("meta")
    with metadata_only():
        fused.run(STAGE, layer, arguments)
    assert fused.stages[STAGE].candidates[0].calls == 1
