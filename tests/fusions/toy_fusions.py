# SPDX-License-Identifier: Apache-2.0
"""Fusions in plain torch, each wrong in one way, and predicates of all sorts."""

from __future__ import annotations

from typing import Any

import torch

from megatron.gdn import reference


def norm_right(x, gate, weight, eps, zero_centered_gamma):
    return reference.gated_output_norm(x, gate, weight, eps, zero_centered_gamma)


def norm_with_sigmoid_gate(x, gate, weight, eps, zero_centered_gamma):
    ones = torch.full_like(gate, 50.0)  # silu(50) is 50, so this multiplies by sigmoid(gate)
    plain = reference.gated_output_norm(x, ones, weight, eps, zero_centered_gamma)
    return (plain.float() / 50.0 * gate.float().sigmoid()).to(x.dtype)


def norm_with_wrong_weight_gradient(x, gate, weight, eps, zero_centered_gamma):
    same_value = weight + 0.02 * (weight - weight.detach())
    return reference.gated_output_norm(x, gate, same_value, eps, zero_centered_gamma)


def norm_without_weight_gradient(x, gate, weight, eps, zero_centered_gamma):
    return reference.gated_output_norm(x, gate, weight.detach(), eps, zero_centered_gamma)


def norm_off_by_last_bits(x, gate, weight, eps, zero_centered_gamma):
    out = reference.gated_output_norm(x, gate, weight, eps, zero_centered_gamma)
    noise = torch.finfo(out.dtype).eps * torch.randint(2, out.shape, device=out.device)
    return out * (1 + noise).to(out.dtype)


def norm_heads_first(x, gate, weight, eps, zero_centered_gamma):
    out = reference.gated_output_norm(x, gate, weight, eps, zero_centered_gamma)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def norm_in_float64(x, gate, weight, eps, zero_centered_gamma):
    return reference.gated_output_norm(x, gate, weight, eps, zero_centered_gamma).double()


def norm_without_last_token(x, gate, weight, eps, zero_centered_gamma):
    out = torch.empty_like(x)
    right = reference.gated_output_norm(x, gate, weight, eps, zero_centered_gamma)
    return torch.cat([right[:, :-1], out[:, -1:]], dim=1)


def norm_that_overwrites_its_gate(x, gate, weight, eps, zero_centered_gamma):
    out = reference.gated_output_norm(x, gate, weight, eps, zero_centered_gamma)
    gate.detach().neg_()
    return out


def norm_without_eps(x, gate, weight, zero_centered_gamma):
    return x


def convolution_across_documents(qkv, conv_weight, conv_bias, cu_seqlens):
    return reference.causal_conv1d(qkv, conv_weight, conv_bias, None)


def pre_with_copied_gate(**inputs):
    q, k, v, gate, beta, g = reference.pre_gated_delta_rule(**inputs)
    return q, k, v, gate.contiguous(), beta, g


def pre_with_wrong_gate(**inputs):
    q, k, v, _, beta, g = reference.pre_gated_delta_rule(**inputs)
    start = inputs["num_value_heads"] * inputs["value_head_dim"]
    wrong = inputs["qkvzba"].narrow(2, start, start).transpose(0, 1)
    return q, k, v, wrong.unflatten(-1, (inputs["num_value_heads"], -1)), beta, g


def pre_without_decay(**inputs):
    return reference.pre_gated_delta_rule(**inputs)[:-1]


def qkv_expanded_in_blocks(**inputs):
    q, k, v = reference.prepare_qkv(
        **{**inputs, "num_value_heads": inputs["num_key_heads"]}
        | {
            "value_head_dim": inputs["value_head_dim"]
            * inputs["num_value_heads"]
            // inputs["num_key_heads"]
        }
    )
    group = inputs["num_value_heads"] // inputs["num_key_heads"]
    v = v.unflatten(-1, (group, -1)).flatten(2, 3).contiguous()
    return q.repeat(1, 1, group, 1), k.repeat(1, 1, group, 1), v


def beta_rounded_to_activations(beta_logits, alpha, A_log, dt_bias):
    beta, g = reference.decay_and_beta(beta_logits, alpha, A_log, dt_bias)
    return beta.to(alpha.dtype), g


def recurrence_without_state_reset(q, k, v, g, beta, cu_seqlens):
    return reference.gated_delta_rule(q, k, v, g, beta, None)


def accepts(**values: Any) -> list[str]:
    return []


def one_row(qkv: torch.Tensor, cu_seqlens: torch.Tensor | None) -> list[str]:
    """Refuses packed documents in several rows: only two changes together break it."""
    if cu_seqlens is not None and qkv.shape[0] != 1:
        return [f"{qkv.shape[0]} rows"]
    return []


def reads_contents(cu_seqlens: torch.Tensor | None) -> list[str]:
    if cu_seqlens is not None and int(cu_seqlens[-1]) == 0:
        return ["no token"]
    return []


def no_list(x: torch.Tensor) -> Any:
    """Breaks the contract of a predicate on every call."""
    return "no"
