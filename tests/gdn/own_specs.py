# SPDX-License-Identifier: Apache-2.0
"""Specs as a user may name them with `--spec`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as CoreGatedDeltaNet
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron.gdn import GatedDeltaNet, get_gdn_block_spec
from megatron.gdn.hybrid import LocalHybridStack


class TheirSubclass(CoreGatedDeltaNet):
    """A user's own layer without stages."""


def layer_of(attention: Any) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    submodules = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
    )
    attention = ModuleSpec(module=attention, submodules=submodules)
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention))


OUR_LAYER = layer_of(GatedDeltaNet)
CORE_LAYER = layer_of(CoreGatedDeltaNet)
CORE_LAYER_BY_LOCATION = layer_of(("megatron.core.ssm.gated_delta_net", "GatedDeltaNet"))
THEIR_LAYER = layer_of(TheirSubclass)
SOFTMAX_LAYER = get_gpt_layer_local_spec(normalization="RMSNorm")
CORE_BLOCK = TransformerBlockSubmodules(layer_specs=[CORE_LAYER] * 2, layer_norm=WrappedTorchNorm)
HYBRID_STACK = ModuleSpec(
    module=LocalHybridStack, submodules=HybridStackSubmodules(gdn_layer=CORE_LAYER)
)


def our_block(config: Any, vp_stage: int | None) -> TransformerBlockSubmodules:
    return get_gdn_block_spec(config, vp_stage=vp_stage)


def core_layer(config: Any) -> ModuleSpec:
    """For every layer of the model; takes no pipeline stage."""
    assert config.num_layers == 2
    return CORE_LAYER
