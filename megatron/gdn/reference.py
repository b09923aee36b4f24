# SPDX-License-Identifier: Apache-2.0
"""Every stage of a Gated DeltaNet layer in plain torch, for any device and any floating dtype.

Two uses. In float64 these functions are the oracle of the parity tests: every rounding point below
is then a no-op. In BF16, FP16 and FP32 they stand in for the CUDA kernels, so that the layer runs
on a CPU, and they round where the numerics contract (docs/numerics.md) says so. Arithmetic is
float32 inside, float64 for float64 inputs.

Sources: gated delta rule, Yang et al. 2024, "Gated Delta Networks", equation 10; decay
parametrisation, Gu and Dao 2023, "Mamba", section 3.5; RMSNorm, Zhang and Sennrich 2019.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

L2_NORM_EPS = 1e-6
"""Added to the sum of squares of a query or key before the square root."""


def _arithmetic_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def document_ids(cu_seqlens: Tensor, total_length: int) -> Tensor:
    """Index of the document that each token of a packed batch belongs to.

    Args:
        cu_seqlens: `[N+1]` integer, cumulative document lengths; documents may be empty.
        total_length: number of tokens.

    Returns:
        `[total_length]` int64, without a copy to the host.
    """
    positions = torch.arange(total_length, device=cu_seqlens.device)
    return torch.bucketize(positions, cu_seqlens[1:].long(), right=True)


def causal_conv1d(
    qkv: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: Callable[[Tensor], Tensor] = F.silu,
) -> Tensor:
    """Causal depthwise convolution, then the activation: `y[t] = act(sum_i w[i] x[t-W+1+i] + b)`.

    Args:
        qkv: `[b, s, Cc]`.
        conv_weight: `[Cc, 1, W]`; conv_bias: `[Cc]` or None.
        cu_seqlens: `[N+1]` or None; tokens of one document never see another's.
        activation: applied before the only rounding.

    Returns:
        `[b, s, Cc]` in the dtype of `qkv`, rounded once.
    """
    dtype = _arithmetic_dtype(qkv)
    length, width = qkv.shape[1], conv_weight.shape[-1]
    x, weight = qkv.to(dtype), conv_weight.to(dtype)
    owner = None if cu_seqlens is None else document_ids(cu_seqlens, length)
    total = torch.zeros_like(x)
    for tap in range(width):
        back = width - 1 - tap
        if back >= length:
            continue
        shifted = F.pad(x, (0, 0, back, 0))[:, :length]
        if owner is not None and back:
            same = F.pad((owner[back:] == owner[:-back]), (back, 0))
            shifted = torch.where(same[None, :, None], shifted, torch.zeros_like(shifted))
        total = total + shifted * weight[:, 0, tap]
    if conv_bias is not None:
        total = total + conv_bias.to(dtype)
    return activation(total).to(qkv.dtype)


def l2_normalize(x: Tensor) -> Tensor:
    """`x / sqrt(sum(x*x) + 1e-6)` over the last dimension; a zero row gives zeros."""
    y = x.to(_arithmetic_dtype(x))
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + L2_NORM_EPS)).to(x.dtype)


def prepare_qkv(
    qkv: Tensor,
    num_key_heads: int,
    num_value_heads: int,
    key_head_dim: int,
    value_head_dim: int,
    use_qk_l2norm: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the convolved channels, normalise q and k, expand key heads to value heads.

    Args:
        qkv: `[b, s, 2*Hk*Dk + Hv*Dv]`.

    Returns:
        q, k `[b, s, Hv, Dk]` and v `[b, s, Hv, Dv]`, contiguous. Value head j reads key head
        `j // (Hv // Hk)`.
    """
    batch, length, _ = qkv.shape
    qk_channels = num_key_heads * key_head_dim
    q, k, v = torch.split(qkv, [qk_channels, qk_channels, num_value_heads * value_head_dim], dim=-1)
    q = q.reshape(batch, length, num_key_heads, key_head_dim)
    k = k.reshape(batch, length, num_key_heads, key_head_dim)
    v = v.reshape(batch, length, num_value_heads, value_head_dim)
    if use_qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    group = num_value_heads // num_key_heads
    q, k = q.repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2)
    return q.contiguous(), k.contiguous(), v.contiguous()


def decay_and_beta(
    beta_logits: Tensor, alpha: Tensor, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """`beta = sigmoid(beta_logits)` and `g = -exp(A_log) * softplus(alpha + dt_bias)`.

    Args:
        beta_logits, alpha: `[b, s, Hv]`; A_log, dt_bias: `[Hv]`.

    Returns:
        beta, g: `[b, s, Hv]`, float32 (float64 for float64 inputs), never rounded below that.
    """
    dtype = _arithmetic_dtype(alpha)
    # softplus by log-sum-exp: exact at both tails, where log(1 + exp(x)) cancels or overflows.
    pre = alpha.to(dtype) + dt_bias.to(dtype)
    softplus = torch.logaddexp(pre, torch.zeros_like(pre))
    return beta_logits.to(dtype).sigmoid(), -A_log.to(dtype).exp() * softplus


def split_projection(
    qkvzba: Tensor, num_key_heads: int, num_value_heads: int, key_head_dim: int, value_head_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of the input projection: `[s, b, C]` to qkv, gate, beta logits and alpha.

    Returns:
        qkv `[b, s, Cc]`, gate `[b, s, Hv, Dv]`, beta logits and alpha `[b, s, Hv]`. Nothing is
        copied.
    """
    conv_channels = 2 * num_key_heads * key_head_dim + num_value_heads * value_head_dim
    gate_channels = num_value_heads * value_head_dim
    qkv, gate, beta_logits, alpha = torch.split(
        qkvzba.transpose(0, 1),
        [conv_channels, gate_channels, num_value_heads, num_value_heads],
        dim=-1,
    )
    return qkv, gate.unflatten(-1, (num_value_heads, value_head_dim)), beta_logits, alpha


def pre_gated_delta_rule(
    qkvzba: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    num_value_heads: int,
    key_head_dim: int,
    value_head_dim: int,
    use_qk_l2norm: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The composite of `causal_conv1d`, `prepare_qkv` and `decay_and_beta`.

    Args:
        qkvzba: `[s, b, C]`, channels q, k, v, z (gate), beta, alpha.

    Returns:
        q, k `[b, s, Hv, Dk]`, v `[b, s, Hv, Dv]`, gate `[b, s, Hv, Dv]` (a view of `qkvzba`),
        beta and g `[b, s, Hv]`.
    """
    sizes = (num_key_heads, num_value_heads, key_head_dim, value_head_dim)
    qkv, gate, beta_logits, alpha = split_projection(qkvzba, *sizes)
    qkv = causal_conv1d(qkv, conv_weight, conv_bias, cu_seqlens)
    q, k, v = prepare_qkv(qkv, *sizes, use_qk_l2norm)
    beta, g = decay_and_beta(beta_logits, alpha, A_log, dt_bias)
    return q, k, v, gate, beta, g


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The recurrence, token by token, with the state `S [b, Hv, Dk, Dv]` starting at zero:

        S = exp(g_t) S;  S += k_t (beta_t (v_t - k_t^T S))^T;  x_t = S^T q_t / sqrt(Dk)

    Args:
        q, k: `[b, s, Hv, Dk]`; v: `[b, s, Hv, Dv]`; g, beta: `[b, s, Hv]`.
        cu_seqlens: `[N+1]` or None; the state restarts at zero with every document.

    Returns:
        `[b, s, Hv, Dv]` in the dtype of `v`.
    """
    dtype = _arithmetic_dtype(v)
    batch, length, heads, key_dim = q.shape
    scale = key_dim**-0.5
    q_, k_, v_, g_, beta_ = (t.to(dtype) for t in (q, k, v, g, beta))
    decay = g_.exp()
    if cu_seqlens is not None:
        owner = document_ids(cu_seqlens, length)
        same = F.pad((owner[1:] == owner[:-1]), (1, 0))
        decay = torch.where(same[None, :, None], decay, torch.zeros_like(decay))
    state = q_.new_zeros(batch, heads, key_dim, v.shape[-1])
    outputs = []
    for t in range(length):
        state = state * decay[:, t, :, None, None]
        recalled = torch.einsum("bhkv,bhk->bhv", state, k_[:, t])
        update = beta_[:, t, :, None] * (v_[:, t] - recalled)
        state = state + k_[:, t, :, :, None] * update[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q_[:, t]) * scale)
    return torch.stack(outputs, dim=1).to(v.dtype)


def gated_output_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool = False
) -> Tensor:
    """RMSNorm over the last dimension, materialised in the dtype of `x`, times SiLU of the gate.

    Args:
        x, gate: `[b, s, h, d]`, any strides; weight: `[d]`; eps: added to the mean square.
        zero_centered_gamma: the weight is stored minus one.

    Returns:
        `[b, s, h, d]`, contiguous, dtype of `x`.
    """
    dtype = _arithmetic_dtype(x)
    y = x.to(dtype)
    scale = weight.to(dtype) + 1 if zero_centered_gamma else weight.to(dtype)
    normed = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * scale
    # The materialisation boundary: the norm is rounded before the gate multiplies it.
    normed = normed.to(x.dtype)
    return (normed.to(dtype) * F.silu(gate.to(dtype))).to(x.dtype).contiguous()
