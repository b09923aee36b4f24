# SPDX-License-Identifier: Apache-2.0
"""What the stages hand on when their inputs are planned tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fusion_registry.preconditions import Inputs
from megatron.gdn import reference, unfused

_SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")


def _qkv_outputs(qkv: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*qkv.shape[:2], inputs["num_value_heads"])
    key, value = (*shape, inputs["key_head_dim"]), (*shape, inputs["value_head_dim"])
    return qkv.new_empty(key), qkv.new_empty(key), qkv.new_empty(value)


def _pre_outputs(inputs: Inputs) -> tuple[Tensor, ...]:
    qkv, gate, beta, _ = reference.split_projection(
        inputs["qkvzba"],
        *(inputs[name] for name in _SIZES),
    )
    q, k, v = _qkv_outputs(qkv, inputs)
    return q, k, v, gate, *_beta_and_decay(beta)


def _beta_and_decay(beta_logits: Tensor) -> tuple[Tensor, Tensor]:
    shape = beta_logits.shape
    return (
        beta_logits.new_empty(shape, dtype=torch.float32),
        beta_logits.new_empty(shape, dtype=torch.float32),
    )


CONTRACT_OUTPUTS: Mapping[str, Callable[[Inputs], Any]] = {
    "pre_gated_delta_rule": _pre_outputs,
    "causal_conv1d": lambda inputs: inputs["qkv"].new_empty(inputs["qkv"].shape),
    "prepare_qkv": lambda inputs: _qkv_outputs(inputs["qkv"], inputs),
    "decay_and_beta": lambda inputs: _beta_and_decay(inputs["beta_logits"]),
    "gated_delta_rule": lambda inputs: inputs["v"].new_empty(inputs["v"].shape),
    "gated_output_norm": lambda inputs: inputs["x"].new_empty(inputs["x"].shape),
}
"""Outputs as the stage contract describes them: contiguous, the gate a view of the projection."""


def _unfused_convolution(layer: Any, **inputs: Any) -> Tensor:
    with mock.patch.object(unfused, "fla_causal_conv1d", _fla_convolution):
        out: Tensor = unfused.causal_conv1d(layer, **inputs)
    return out


def _fla_convolution(x: Tensor, **_: Any) -> tuple[Tensor, None]:
    return x.new_empty(x.shape), None


UNFUSED: Mapping[str, Callable[..., Any]] = {
    "pre_gated_delta_rule": unfused.pre_gated_delta_rule,
    "causal_conv1d": _unfused_convolution,
    "decay_and_beta": unfused.decay_and_beta,
}
"""Unfused code that planned tensors can run: what is no kernel and what decides more than shapes.
The rest hands on what the contract describes, as FLA's kernels do."""
