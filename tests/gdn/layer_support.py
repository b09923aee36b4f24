# SPDX-License-Identifier: Apache-2.0
"""Small Gated DeltaNet layers and models for tests, on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import build_module

from megatron.gdn import GatedDeltaNet, TransformerConfig, get_gated_delta_net_module_spec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def start_one_rank() -> None:
    """Start torch.distributed and megatron's parallel state with one rank, once per process."""
    if not torch.distributed.is_initialized():
        # A store in memory: a port could be taken by another process of the tests meanwhile.
        torch.distributed.init_process_group(
            "nccl" if DEVICE.type == "cuda" else "gloo",
            store=torch.distributed.HashStore(),
            rank=0,
            world_size=1,
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    if DEVICE.type == "cuda":
        model_parallel_cuda_manual_seed(1234)


def make_config(**changes: Any) -> TransformerConfig:
    """A 4-layer GDN configuration: layers 1 to 3 linear, layer 4 softmax attention."""
    settings: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "experimental_attention_variant": "gdn",
        "linear_attention_freq": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "transformer_impl": "local",
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "use_cpu_initialization": DEVICE.type == "cpu",
        "params_dtype": torch.float16,
        "fp16": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if settings["params_dtype"] != changes.get("params_dtype", torch.float16):
        del settings["fp16"]
    settings.update(changes)
    return TransformerConfig(**settings)


def make_layer(
    config: TransformerConfig, layer_number: int = 1, seed: int = 0, **params: Any
) -> GatedDeltaNet:
    """One layer with weights from a seed, the fused and the unfused one alike."""
    start_one_rank()
    torch.manual_seed(seed)
    spec = get_gated_delta_net_module_spec(config)
    layer: GatedDeltaNet = build_module(
        spec,
        config=config,
        layer_number=layer_number,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"]),
        **params,
    )
    layer.to(device=DEVICE, dtype=config.params_dtype)
    with torch.no_grad():
        # Away from the symmetric start: a norm weight of ones would hide a missing product.
        layer.out_norm.weight.uniform_(0.5, 1.5)
        layer.dt_bias.uniform_(-1.0, 1.0)
    return layer


def make_input(
    config: TransformerConfig, length: int = 12, batch: int = 2, seed: int = 1
) -> torch.Tensor:
    """Hidden states `[s, b, hidden]` that ask for a gradient."""
    torch.manual_seed(seed)
    shape = (length, batch, config.hidden_size)
    return torch.randn(shape, dtype=config.params_dtype, device=DEVICE, requires_grad=True)
