# SPDX-License-Identifier: Apache-2.0
"""Our layer in specs that others wrote: GPT layers and blocks, hybrid stacks, a user's own."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as CoreGatedDeltaNet
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron.gdn import GatedDeltaNet, fusion_report, get_gdn_block_spec
from megatron.gdn.specs import use_our_layer
from tests.gdn.layer_support import DEVICE, make_config, start_one_rank


class TheirSubclass(CoreGatedDeltaNet):
    """A user's own layer, which the swap must not undo."""


@dataclass
class TheirSubmodules:
    mixer: Any
    others: Any = None


def theirs(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """The block as megatron-core builds it: with its own layer."""

    def with_core_layer(spec: ModuleSpec) -> ModuleSpec:
        attention = spec.submodules.self_attention
        if attention.module is not GatedDeltaNet:
            return spec
        attention = replace(attention, module=CoreGatedDeltaNet)
        return replace(spec, submodules=replace(spec.submodules, self_attention=attention))

    return replace(block, layer_specs=[with_core_layer(spec) for spec in block.layer_specs])


def test_block() -> None:
    ours = get_gdn_block_spec(make_config(), pp_rank=0)
    before = theirs(ours)
    after = use_our_layer(before)
    assert after == ours
    assert before == theirs(ours)
    assert before.layer_specs[0].submodules.self_attention.module is CoreGatedDeltaNet
    # The softmax layer is shared, not copied.
    assert after.layer_specs[3] is before.layer_specs[3]
    assert use_our_layer(after) is after


def test_hybrid_stack() -> None:
    after = use_our_layer(hybrid_stack_spec)
    attention = after.submodules.gdn_layer.submodules.self_attention
    their_attention = hybrid_stack_spec.submodules.gdn_layer.submodules.self_attention
    assert attention.module is GatedDeltaNet
    assert their_attention.module is CoreGatedDeltaNet
    assert attention.submodules is their_attention.submodules
    assert after.submodules.mamba_layer is hybrid_stack_spec.submodules.mamba_layer


@pytest.mark.parametrize(
    "mixer",
    [
        CoreGatedDeltaNet,
        ModuleSpec(module=CoreGatedDeltaNet, params={"conv_bias": True}),
        ModuleSpec(module=("megatron.core.ssm.gated_delta_net", "GatedDeltaNet")),
        functools.partial(CoreGatedDeltaNet, conv_bias=True),
        [CoreGatedDeltaNet],
        (TheirSubclass, {"deep": CoreGatedDeltaNet}),
    ],
    ids=["bare", "params", "location", "partial", "list", "nested"],
)
def test_a_users_own_spec(mixer: Any) -> None:
    spec = ModuleSpec(module=object, submodules=TheirSubmodules(mixer, others=("a", 1, None)))
    after = use_our_layer(spec)
    found = after.submodules.mixer
    expected = {
        "list": [GatedDeltaNet],
        "tuple": (TheirSubclass, {"deep": GatedDeltaNet}),
    }.get(type(mixer).__name__, GatedDeltaNet)
    if isinstance(mixer, ModuleSpec):
        assert found == replace(mixer, module=GatedDeltaNet)
    elif isinstance(mixer, functools.partial):
        assert (found.func, found.keywords) == (GatedDeltaNet, mixer.keywords)
    else:
        assert found == expected
    assert after.submodules.others is spec.submodules.others
    assert spec.submodules.mixer is mixer


@pytest.mark.parametrize("part", [TheirSubclass, None, "GatedDeltaNet", ("a", "GatedDeltaNet"), {}])
def test_nothing_to_replace(part: Any) -> None:
    spec = ModuleSpec(module=object, submodules=TheirSubmodules(part))
    assert use_our_layer(spec) is spec


def test_a_hybrid_model_runs_the_fusions() -> None:
    """Its layers stand in a pattern; no attention variant is set, and both options are accepted."""
    start_one_rank()
    config = make_config(
        num_layers=2,
        experimental_attention_variant=None,
        linear_attention_freq=None,
        is_hybrid_model=True,
        gdn_pre_gated_delta_rule_fusion=True,
        gdn_gated_output_norm_fusion=True,
    )
    gpt = theirs(get_gdn_block_spec(make_config(), pp_rank=0))
    stack = build_module(
        use_our_layer(
            ModuleSpec(
                module=HybridStack, submodules=HybridStackSubmodules(gdn_layer=gpt.layer_specs[0])
            )
        ),
        config=config,
        layer_type_list=["G", "G"],
        # Its norm is Transformer Engine's, which a CPU lacks.
        post_layer_norm=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    ).to(device=DEVICE, dtype=config.params_dtype)
    hidden = torch.randn(8, 2, config.hidden_size, dtype=config.params_dtype, device=DEVICE)
    out = stack(hidden.requires_grad_(), None)
    out.float().sum().backward()
    assert torch.isfinite(hidden.grad).all()
    for stage in ("pre_gated_delta_rule", "gated_output_norm"):
        counts = fusion_report(stack).stage(stage)
        assert [(count.fused, count.unfused) for count in counts] == [({stage: 1}, 0)] * 2
