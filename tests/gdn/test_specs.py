# SPDX-License-Identifier: Apache-2.0
"""Specs: which layers are ours, for local modules and for Transformer Engine's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as CoreGatedDeltaNet
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron.gdn import GatedDeltaNet, get_gated_delta_net_module_spec, get_gdn_block_spec, specs
from megatron.gdn.variant import gdn_layer_numbers
from tests.gdn.layer_support import make_config


def attention_modules(block: TransformerBlockSubmodules) -> list[type]:
    return [spec.submodules.self_attention.module for spec in block.layer_specs]


@pytest.mark.parametrize(
    ("frequency", "numbers"),
    [(4, (1, 2, 3)), (2, (1, 3)), ([0, 1, 1, 0], (2, 3)), ([1, 1, 1, 1], (1, 2, 3, 4))],
    ids=["every_4th", "every_2nd", "list", "all"],
)
def test_local_block(frequency: Any, numbers: tuple[int, ...]) -> None:
    config = make_config(linear_attention_freq=frequency)
    assert gdn_layer_numbers(config) == numbers
    block = get_gdn_block_spec(config, pp_rank=0)
    expected = [GatedDeltaNet if n in numbers else SelfAttention for n in range(1, 5)]
    assert attention_modules(block) == expected
    for spec in block.layer_specs:
        assert spec.submodules.input_layernorm is WrappedTorchNorm
    assert config.experimental_attention_variant == "gated_delta_net"


def test_norms_are_saved_under_the_names_of_transformer_engine() -> None:
    """There the norm before a projection is part of it; a checkpoint loads into either."""
    block = get_gdn_block_spec(make_config(), pp_rank=0)
    names = [spec.submodules.sharded_state_dict_keys_map for spec in block.layer_specs]
    for name, projection in zip(names, ["in_proj"] * 3 + ["linear_qkv"], strict=True):
        assert name["input_layernorm."] == f"self_attention.{projection}.layer_norm_"
        assert name["pre_mlp_layernorm."] == "mlp.linear_fc1.layer_norm_"


@pytest.mark.parametrize(
    ("rank", "modules"), [(0, [GatedDeltaNet] * 2), (1, [GatedDeltaNet, SelfAttention])]
)
def test_pipeline_stage_builds_its_layers(rank: int, modules: list[type]) -> None:
    config = make_config(pipeline_model_parallel_size=2, pipeline_dtype=make_config().params_dtype)
    assert attention_modules(get_gdn_block_spec(config, pp_rank=rank)) == modules


def test_local_module() -> None:
    spec = get_gated_delta_net_module_spec(make_config())
    assert spec.module is GatedDeltaNet
    assert spec.submodules.in_proj is ColumnParallelLinear
    assert spec.submodules.out_norm is WrappedTorchNorm
    assert spec.submodules.out_proj is RowParallelLinear
    assert spec.metainfo == {"fuse_input_layernorm": False}


def test_a_backend_with_a_fused_norm_linear() -> None:
    @dataclass
    class FusedNormLinear:
        pass

    class Backend(LocalSpecProvider):
        def column_parallel_layer_norm_linear(self) -> type:
            return FusedNormLinear

    spec = get_gated_delta_net_module_spec(make_config(), Backend())
    assert spec.submodules.in_proj is FusedNormLinear
    assert spec.metainfo == {"fuse_input_layernorm": True}


def test_transformer_engine_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core builds it; our layer replaces its GDN layer and nothing else moves."""
    attention = ModuleSpec(
        module=CoreGatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=object, out_norm=object, out_proj=object),
        metainfo={"fuse_input_layernorm": True},
    )
    theirs = [
        ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=IdentityOp, self_attention=self_attention
            ),
        )
        for self_attention in (attention, ModuleSpec(module=SelfAttention))
    ]
    monkeypatch.setattr(
        specs,
        "get_transformer_block_with_experimental_attention_variant_spec",
        lambda config, vp_stage, pp_rank: TransformerBlockSubmodules(
            layer_specs=theirs, layer_norm=object
        ),
    )
    block = get_gdn_block_spec(make_config(transformer_impl="transformer_engine"))
    assert attention_modules(block) == [GatedDeltaNet, SelfAttention]
    ours = block.layer_specs[0].submodules.self_attention
    assert ours.submodules is attention.submodules
    assert ours.metainfo == attention.metainfo
    assert block.layer_specs[1] is theirs[1]
    assert block.layer_norm is object
    assert theirs[0].submodules.self_attention.module is CoreGatedDeltaNet


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experimental_attention_variant": None, "linear_attention_freq": None}, "requires exp"),
        ({"transformer_impl": "inference_optimized"}, "got 'inference_optimized'"),
    ],
    ids=["no_variant", "implementation"],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    config = make_config()
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        get_gdn_block_spec(config)
