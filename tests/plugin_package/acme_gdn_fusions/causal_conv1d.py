# SPDX-License-Identifier: Apache-2.0
"""Causal depthwise convolution and SiLU as one convolution call, float32 inside."""

import torch.nn.functional as F


def convolve(qkv, conv_weight, conv_bias, cu_seqlens):
    """Stage `causal_conv1d` on sequences that are not packed.

    Args:
        qkv: `[b, s, Cc]`; conv_weight: `[Cc, 1, W]`; conv_bias: `[Cc]` or None.

    Returns:
        `[b, s, Cc]`, contiguous, in the dtype of `qkv`.
    """
    del cu_seqlens
    width = conv_weight.shape[-1]
    x = F.pad(qkv.float().transpose(1, 2), (width - 1, 0))
    bias = None if conv_bias is None else conv_bias.float()
    y = F.conv1d(x, conv_weight.float(), bias, groups=conv_weight.shape[0])
    return F.silu(y).transpose(1, 2).contiguous().to(qkv.dtype)
