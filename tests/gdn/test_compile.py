# SPDX-License-Identifier: Apache-2.0
"""`torch.compile` around fused stages: they run as they do without it, between the graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from fusion_registry import FusionUnsupportedError
from megatron.gdn import fusion_report
from megatron.gdn.fusions.gated_output_norm import fused_gated_output_norm
from megatron.gdn.fusions.pre_gated_delta_rule import fused_pre_gated_delta_rule
from tests.gdn.layer_support import DEVICE, make_config, make_input, make_layer


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    torch.compiler.reset()
    counters.clear()


BOTH = {"gdn_pre_gated_delta_rule_fusion": True, "gdn_gated_output_norm_fusion": True}


def test_a_compiled_layer_runs_its_fusions() -> None:
    config = make_config(**BOTH)
    plain, layer = make_layer(config), make_layer(config)
    # The compiler's front end, where it would fail; what a back end makes of the rest is torch's.
    compiled = torch.compile(layer, backend="eager")
    outs = []
    for call in (plain, compiled):
        x = make_input(config, length=4, batch=1)
        out, _ = call(x, None)
        out.float().square().sum().backward()
        outs.append((out, x.grad))
    for ours, theirs in zip(*outs, strict=True):
        assert torch.equal(ours, theirs)
    assert counters["stats"]["unique_graphs"] > 0
    for stage in ("pre_gated_delta_rule", "gated_output_norm"):
        (count,) = fusion_report(layer).stage(stage)
        assert (count.fused, count.unfused) == ({stage: 1}, 0)
    config.deterministic_mode = True
    with pytest.raises(FusionUnsupportedError, match="deterministic_mode=False, got True"):
        compiled(make_input(config, length=4, batch=1), None)


def output_norm(x: Tensor) -> Tensor:
    weight = torch.ones(16, dtype=x.dtype, device=x.device)
    return fused_gated_output_norm(x * 2, x, weight, 1e-6, zero_centered_gamma=False) * 3


def before_recurrence(x: Tensor) -> Tensor:
    """Two value heads for a key head, of 16 elements: 100 channels."""
    weight = torch.ones(64, 1, 4, dtype=x.dtype, device=x.device)
    decay = torch.zeros(2, device=x.device)
    outputs = fused_pre_gated_delta_rule(
        (x * 2).view(4, 1, 100),
        weight,
        None,
        decay,
        decay,
        num_key_heads=1,
        num_value_heads=2,
        key_head_dim=16,
        value_head_dim=16,
    )
    return torch.stack([output.float().sum() for output in outputs]) * 3


@pytest.mark.parametrize(
    ("function", "shape"), [(output_norm, (1, 4, 2, 16)), (before_recurrence, (4, 100))]
)
def test_a_function_that_calls_one_directly(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    compiled = torch.compile(function, backend="eager")
    found = []
    for call in (function, compiled):
        torch.manual_seed(0)
        x = torch.randn(shape).to(DEVICE, torch.bfloat16).requires_grad_()
        out = call(x)
        out.float().square().sum().backward()
        found.append((out, x.grad))
    # Before the call and after it.
    assert counters["stats"]["unique_graphs"] == 2
    for eager, traced in zip(*found, strict=True):
        assert torch.equal(eager, traced)
    with pytest.raises(FusionUnsupportedError, match="float64"):
        compiled(torch.zeros(shape, dtype=torch.float64, device=DEVICE))


def test_a_plain_call_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says for the whole process that it compiles."""
    x = torch.randn(1, 4, 2, 16).to(DEVICE, torch.bfloat16)
    expected = output_norm(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(output_norm(x), expected)
