# SPDX-License-Identifier: Apache-2.0
"""What runs at each stage when no fusion is bound to it: the path of megatron-core 0.19.

Every function takes the layer first, then the inputs of its stage by name. On CUDA they call the
code that megatron-core calls (FLA's convolution, L2 norm and recurrence, its own gate and output
norm code). Without CUDA the plain-torch definitions of `reference` stand in for FLA's kernels.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import causal_conv1d as fla_causal_conv1d
from torch import Tensor

from megatron.gdn import reference
from megatron.gdn.megatron_core_0_19 import CoreGatedDeltaNet, eager_without_cuda

_gate_and_norm = eager_without_cuda(CoreGatedDeltaNet._apply_gated_norm)
_decay_and_beta = eager_without_cuda(CoreGatedDeltaNet._compute_g_and_beta)


def pre_gated_delta_rule(
    layer: Any,
    qkvzba: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    num_value_heads: int,
    key_head_dim: int,
    value_head_dim: int,
    use_qk_l2norm: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Asks the three child stages one by one."""
    qkv, gate, beta_logits, alpha = reference.split_projection(
        qkvzba, num_key_heads, num_value_heads, key_head_dim, value_head_dim
    )
    qkv = layer.run_stage(
        "causal_conv1d",
        qkv=qkv,
        conv_weight=conv_weight,
        conv_bias=conv_bias,
        cu_seqlens=cu_seqlens,
    )
    q, k, v = layer.run_stage(
        "prepare_qkv",
        qkv=qkv,
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_head_dim=key_head_dim,
        value_head_dim=value_head_dim,
        use_qk_l2norm=use_qk_l2norm,
    )
    beta, g = layer.run_stage(
        "decay_and_beta", beta_logits=beta_logits, alpha=alpha, A_log=A_log, dt_bias=dt_bias
    )
    return q, k, v, gate, beta, g


def causal_conv1d(
    layer: Any,
    qkv: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """FLA's convolution; in deterministic mode torch's own."""
    if layer.config.deterministic_mode:
        width, length = conv_weight.shape[-1], qkv.shape[1]
        padded = F.pad(qkv.transpose(1, 2), (width - 1, 0))
        out = F.conv1d(padded, conv_weight, conv_bias, groups=conv_weight.shape[0])
        return layer.act_fn(out[..., :length]).transpose(1, 2)
    if layer.activation not in ("silu", "swish"):
        raise ValueError(
            "the unfused causal convolution requires activation silu or swish, got "
            f"{layer.activation}; set activation_func to silu or enable deterministic_mode"
        )
    if not qkv.is_cuda:
        return reference.causal_conv1d(qkv, conv_weight, conv_bias, cu_seqlens)
    out, _ = fla_causal_conv1d(
        x=qkv,
        weight=conv_weight.squeeze(1),
        bias=conv_bias,
        activation=layer.activation,
        initial_state=None,
        output_final_state=False,
        cu_seqlens=cu_seqlens,
    )
    return out


def prepare_qkv(
    layer: Any,
    qkv: Tensor,
    num_key_heads: int,
    num_value_heads: int,
    key_head_dim: int,
    value_head_dim: int,
    use_qk_l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """megatron-core's split, L2 norm, head expansion and layout."""
    if not qkv.is_cuda:
        return reference.prepare_qkv(
            qkv, num_key_heads, num_value_heads, key_head_dim, value_head_dim, use_qk_l2norm
        )
    batch, length, _ = qkv.shape
    # megatron-core makes the gate contiguous here too. Its own norm code copes with a view, so an
    # empty stand-in is passed and the copy is spared.
    q, k, v, _ = layer._prepare_input_for_gated_delta_rule(qkv, qkv[..., :0], batch, length)
    return q, k, v


def decay_and_beta(
    layer: Any, beta_logits: Tensor, alpha: Tensor, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """megatron-core's decay and beta; beta keeps the activation dtype there."""
    g, beta = _decay_and_beta(layer, A_log, dt_bias, alpha.contiguous(), beta_logits.contiguous())
    return beta, g


def gated_delta_rule(
    layer: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """The layer's recurrence: FLA's chunked kernel, or torch's in deterministic mode."""
    if not q.is_cuda:
        return reference.gated_delta_rule(q, k, v, g, beta, cu_seqlens)
    x, _ = layer.gated_delta_rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=cu_seqlens,
    )
    return x


def gated_output_norm(
    layer: Any,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
) -> Tensor:
    """The layer's norm module, whatever its type, then its activation of the gate."""
    del weight, eps, zero_centered_gamma
    out: Tensor = _gate_and_norm(layer, x, gate)
    return out.view(x.shape)
