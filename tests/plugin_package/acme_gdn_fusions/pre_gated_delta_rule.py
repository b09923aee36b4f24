# SPDX-License-Identifier: Apache-2.0
"""From the input projection to the inputs of the recurrence in one function, float32 inside."""

import torch
import torch.nn.functional as F

from acme_gdn_fusions.causal_conv1d import convolve


def prepare(
    qkvzba,
    conv_weight,
    conv_bias,
    A_log,
    dt_bias,
    num_key_heads,
    num_value_heads,
    key_head_dim,
    value_head_dim,
    use_qk_l2norm,
    cu_seqlens,
):
    """Stage `pre_gated_delta_rule` on sequences that are not packed.

    Args:
        qkvzba: `[s, b, C]`, channels q, k, v, gate, beta, alpha; the others as in the stage.

    Returns:
        q, k `[b, s, Hv, Dk]`, v and gate `[b, s, Hv, Dv]`, beta and g `[b, s, Hv]` in float32.
    """
    x = qkvzba.transpose(0, 1)
    keys, values = num_key_heads * key_head_dim, num_value_heads * value_head_dim
    qkv = convolve(x[..., : 2 * keys + values], conv_weight, conv_bias, cu_seqlens)
    q, k = (
        part.unflatten(-1, (num_key_heads, key_head_dim))
        for part in (qkv[..., :keys], qkv[..., keys : 2 * keys])
    )
    if use_qk_l2norm:
        q, k = (
            (part.float() / (part.float().square().sum(-1, keepdim=True) + 1e-6).sqrt()).to(x.dtype)
            for part in (q, k)
        )
    group = num_value_heads // num_key_heads
    q, k = (part.repeat_interleave(group, dim=2).contiguous() for part in (q, k))
    v = qkv[..., 2 * keys :].unflatten(-1, (num_value_heads, value_head_dim)).contiguous()
    rest = x[..., 2 * keys + values :]
    gate = rest[..., :values].unflatten(-1, (num_value_heads, value_head_dim))
    beta_logits, alpha = rest[..., values:].float().split(num_value_heads, dim=-1)
    g = -A_log.float().exp() * F.softplus(alpha + dt_bias.float())
    return q, k, v, gate, torch.sigmoid(beta_logits), g
