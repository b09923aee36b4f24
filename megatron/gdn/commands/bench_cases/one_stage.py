# SPDX-License-Identifier: Apache-2.0
"""A layer's way to one stage, without the rest of the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megatron.gdn.config import TransformerConfig
from megatron.gdn.layer import GatedDeltaNet
from megatron.gdn.selection import bind_layer
from megatron.gdn.variant import VARIANT


class LayerWithOneStage(torch.nn.Module):
    """What a stage, its fusion's declaration and the binding read of a layer.

    Args:
        key_heads, value_heads, head_dim: of the layer.
        options: fields of the configuration, such as the option of the fusion.
    """

    run_stage: Any = GatedDeltaNet.run_stage
    tp_size = 1

    def __init__(self, *, key_heads: int, value_heads: int, head_dim: int, **options: Any) -> None:
        super().__init__()
        self.act_fn = F.silu
        self.config = TransformerConfig(
            num_layers=1,
            hidden_size=value_heads * head_dim,
            num_attention_heads=value_heads,
            experimental_attention_variant=VARIANT,
            linear_attention_freq=[1],
            linear_conv_kernel_dim=4,
            linear_key_head_dim=head_dim,
            linear_value_head_dim=head_dim,
            linear_num_key_heads=key_heads,
            linear_num_value_heads=value_heads,
            activation_func=F.silu,
            **options,
        )
        self.fusion_binding = bind_layer(self.config, 1)

    def consult(self, stage: str, **inputs: Any) -> Callable[[], object]:
        """The call that asks the binding about `inputs` and counts, and then does nothing."""
        (fusion,) = self.fusion_binding.stages[stage].candidates
        fusion.call = lambda **_: None
        return lambda: self.run_stage(stage, **inputs)
