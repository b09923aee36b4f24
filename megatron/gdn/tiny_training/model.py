# SPDX-License-Identifier: Apache-2.0
"""The language model of the tiny training: megatron-core's GPT model on one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import (
    initialize_rng_tracker,
    model_parallel_cuda_manual_seed,
)

from megatron.gdn.config import TransformerConfig
from megatron.gdn.specs import get_gdn_block_spec
from megatron.gdn.tiny_training.sizes import TrainingSize

VOCABULARY = 256
"""One token per byte."""


@contextlib.contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """torch.distributed and megatron-core's parallel state with this process as the only rank.

    What runs already is used and left alone.
    """
    starts_processes = not torch.distributed.is_initialized()
    if starts_processes:
        torch.distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=torch.distributed.HashStore(),
            rank=0,
            world_size=1,
        )
    starts_state = not parallel_state.model_parallel_is_initialized()
    try:
        if starts_state:
            parallel_state.initialize_model_parallel()
        yield
    finally:
        if starts_state:
            parallel_state.destroy_model_parallel()
        if starts_processes:
            torch.distributed.destroy_process_group()


def make_config(
    size: TrainingSize, device: torch.device, fusion_fields: dict[str, Any]
) -> TransformerConfig:
    """Configuration of the model.

    BF16 on a GPU. On a CPU FP16, since Triton's interpreter truncates where a GPU rounds to BF16.

    Args:
        fusion_fields: the fusion fields of `TransformerConfig`.

    Raises:
        ValueError: a bad selection of fusions, or sizes that do not fit each other.
    """
    on_gpu = device.type == "cuda"
    return TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden_size,
        ffn_hidden_size=2 * size.hidden_size,
        num_attention_heads=size.value_heads,
        experimental_attention_variant="gdn",
        linear_attention_freq=size.attention_every,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=size.head_dim,
        linear_value_head_dim=size.head_dim,
        linear_num_key_heads=size.key_heads,
        linear_num_value_heads=size.value_heads,
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16 if on_gpu else torch.float16,
        bf16=on_gpu,
        fp16=not on_gpu,
        use_cpu_initialization=not on_gpu,
        # What would need Transformer Engine or Apex, and what megatron-core compiles.
        transformer_impl="local",
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        **fusion_fields,
    )


def make_model(
    config: TransformerConfig, sequence: int, seed: int, device: torch.device
) -> GPTModel:
    """The model with weights from a seed, on its device and in its dtype.

    There are no position embeddings: the recurrence and its convolution know the order.
    """
    torch.manual_seed(seed)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(seed)
    else:
        # Softmax attention forks the CUDA random state even without dropout; this tracker does not.
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gdn_block_spec(config),
        vocab_size=VOCABULARY,
        max_sequence_length=sequence,
        position_embedding_type="none",
        share_embeddings_and_output_weights=True,
    )
    return model.to(device=device, dtype=config.params_dtype)
