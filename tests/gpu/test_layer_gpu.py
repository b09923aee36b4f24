# SPDX-License-Identifier: Apache-2.0
"""The layer on a GPU: bitwise megatron-core's when unfused, recomputed, compiled, its device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as CoreGatedDeltaNet
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn
from torch._dynamo.utils import counters

from megatron.gdn import TransformerConfig, fusion_report, get_gated_delta_net_module_spec
from tests.gdn.layer_support import make_config, make_input, make_layer

FUSED = {"gdn_gated_output_norm_fusion": True}
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["gdn_norm_out"]}


def config(**changes: Any) -> TransformerConfig:
    """The shapes of tests/gpu/pretrain_support.py, so that FLA tunes its kernels once for both."""
    return make_config(
        hidden_size=512,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        params_dtype=torch.bfloat16,
        bf16=True,
        **changes,
    )


def run(layer: nn.Module) -> dict[str, Tensor]:
    """Output and all gradients for a fixed input and upstream gradient."""
    x = make_input(config(), length=512)
    out, _ = layer(x, None)
    torch.manual_seed(7)
    out.backward(torch.randn_like(out))
    found = {
        name.removeprefix("_orig_mod."): parameter.grad
        for name, parameter in layer.named_parameters()
    }
    return {**found, "out": out.detach(), "input": x.grad}


def test_unfused_is_bitwise_megatron_core() -> None:
    ours = make_layer(config())
    spec = replace(get_gated_delta_net_module_spec(config()), module=CoreGatedDeltaNet)
    theirs = build_module(
        spec,
        config=config(),
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"]),
    ).to("cuda", torch.bfloat16)
    theirs.load_state_dict(ours.state_dict())
    found, expected = run(ours), run(theirs)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_fused_and_recomputed() -> None:
    layers = [make_layer(config(**options)) for options in ({}, FUSED, {**FUSED, **RECOMPUTE})]
    unfused, fused, recomputed = (run(layer) for layer in layers)
    for name, value in unfused.items():
        # BF16 through the recurrence's backward: a few ulp of 2^-8 in norm. A wrong gate, weight
        # or head is off by tens of percent.
        error = (fused[name].float() - value.float()).norm() / value.float().norm()
        assert error < 4 * 2**-8, name
        assert torch.equal(fused[name], recomputed[name]), name
    counts = [fusion_report(layer).stage("gated_output_norm")[0] for layer in layers]
    assert [sum(count.fused.values()) for count in counts] == [0, 1, 2]


def test_under_torch_compile() -> None:
    """With inductor: both fusions run, between the graphs, and the rest rounds as it may."""
    layer = make_layer(config(**FUSED, gdn_pre_gated_delta_rule_fusion=True))
    eager = run(layer)
    layer.zero_grad(set_to_none=True)
    torch.compiler.reset()
    counters.clear()
    compiled = run(torch.compile(layer))
    assert counters["stats"]["unique_graphs"] > 0
    for name, value in eager.items():
        error = (compiled[name].float() - value.float()).norm()
        assert error < 4 * 2**-8 * value.float().norm(), name
    for stage in ("pre_gated_delta_rule", "gated_output_norm"):
        (count,) = fusion_report(layer).stage(stage)
        assert sum(count.fused.values()) == 2


def test_a_weight_on_another_device_is_refused() -> None:
    layer = make_layer(config(**FUSED))
    layer.out_norm.weight = nn.Parameter(layer.out_norm.weight.detach().cpu())
    with pytest.raises(ValueError, match="weight on cpu"):
        layer(make_input(config(), length=512), None)
