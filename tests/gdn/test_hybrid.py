# SPDX-License-Identifier: Apache-2.0
"""Hybrid models as a library: pattern, spec, training, names in checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron.gdn import GatedDeltaNet, fusion_report
from megatron.gdn.hybrid import check_pattern, gdn_layers_of_pattern, get_hybrid_stack_spec
from megatron.gdn.tiny_training.training import small_tensors_on
from tests.gdn.layer_support import DEVICE, make_config, start_one_rank

PATTERN, TOKENS, VOCABULARY = "G-*G-", 8, 32


def hybrid_config(**changes: Any) -> Any:
    return make_config(
        num_layers=len(PATTERN),
        experimental_attention_variant=None,
        linear_attention_freq=None,
        is_hybrid_model=True,
        params_dtype=torch.float32,
        **changes,
    )


def hybrid_model(config: Any) -> HybridModel:
    start_one_rank()
    if DEVICE.type == "cpu":
        # Softmax attention forks the CUDA random state even without dropout; this one does not.
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    torch.manual_seed(0)
    return HybridModel(
        config,
        get_hybrid_stack_spec(config),
        VOCABULARY,
        TOKENS,
        hybrid_layer_pattern=PATTERN,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    ).to(DEVICE)


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [("GG", (1, 2)), ("*-", ()), ("G-|*G", (1, 4)), ("G*G/GG", (1, 3)), ("MGEG", (2, 4))],
)
def test_layers_of_a_pattern(pattern: str, numbers: tuple[int, ...]) -> None:
    assert gdn_layers_of_pattern(pattern) == numbers


def losses(model: HybridModel, steps: int = 5) -> list[float]:
    """Of Adam on one batch."""
    tokens = torch.arange(TOKENS, device=DEVICE)[None] * 5 % VOCABULARY
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device=DEVICE).triu(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    found = []
    with small_tensors_on(DEVICE):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(tokens, tokens, mask, labels=tokens.roll(-1, 1)).mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


def test_training_fused_and_unfused() -> None:
    fused = hybrid_model(hybrid_config(gdn_pre_gated_delta_rule_fusion=True))
    found = losses(fused)
    assert found[-1] < found[0] - 0.2
    # Float32; Adam's first steps have full size, which enlarges differences of rounding.
    assert found == pytest.approx(losses(hybrid_model(hybrid_config())), rel=1e-3)
    counts = fusion_report(fused).stage("pre_gated_delta_rule")
    assert [count.fused for count in counts] == [{"pre_gated_delta_rule": 5}] * 2


def test_names_in_checkpoints_are_those_of_transformer_engine() -> None:
    """Its norm is part of the projection; ours stands beside it, and is saved under its name."""
    model = hybrid_model(hybrid_config())
    assert "decoder.final_norm.weight" in dict(model.named_parameters())
    keys = {tensor.key for tensor in model.sharded_state_dict().values() if hasattr(tensor, "key")}
    assert {
        "decoder.final_norm.weight",
        "decoder.layers.0.self_attention.in_proj.layer_norm_weight",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
    } <= keys


def test_stack_specs() -> None:
    ours = get_hybrid_stack_spec(hybrid_config(transformer_impl="transformer_engine"))
    assert ours.submodules.gdn_layer.submodules.self_attention.module is GatedDeltaNet
    local = get_hybrid_stack_spec(hybrid_config(qk_layernorm=True)).submodules
    assert local.gdn_layer.submodules.self_attention.module is GatedDeltaNet
    assert local.attention_layer.submodules.self_attention.submodules.q_layernorm is (
        WrappedTorchNorm
    )


def test_a_pattern_for_another_implementation() -> None:
    with pytest.raises(ValueError, match="'local' and 'transformer_engine', got 'inference"):
        check_pattern("G", "inference_optimized")
