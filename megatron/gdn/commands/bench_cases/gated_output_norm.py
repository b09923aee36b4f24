# SPDX-License-Identifier: Apache-2.0
"""The output norm at the shape of a large model: 4 x 4096 tokens, 32 heads of 128, BF16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.gdn import reference
from megatron.gdn.commands.bench_cases.case import BenchCase, Implementation, Inputs, Stage
from megatron.gdn.commands.bench_cases.one_stage import LayerWithOneStage
from megatron.gdn.fusions.gated_output_norm import fused_gated_output_norm
from megatron.gdn.layer import GatedDeltaNet

BATCH, LENGTH, HEADS, HEAD_DIM = 4, 4096, 32, 128
KEY_HEADS = 16
EPS = 1e-6
DTYPE = torch.bfloat16
CHUNK = 256
"""Tokens that the float64 reference takes at a time."""
# BF16 rounds with a relative error of 2^-8 at most and 1.6e-3 root mean square, and an output is
# rounded twice: 2.3e-3. A weight that is not shifted by one, or a gate that is not multiplied by
# its sigmoid, is off by tens of percent.
TOLERANCE = 2.0**-8


def _make_inputs() -> Inputs:
    """The gate is a slice of the input projection `[s, b, C]`, as in the layer."""
    value_channels = HEADS * HEAD_DIM
    conv_channels = 2 * KEY_HEADS * HEAD_DIM + value_channels
    channels = conv_channels + value_channels + 2 * HEADS
    projection = torch.randn(LENGTH, BATCH, channels, device="cuda", dtype=DTYPE)
    gate = projection.transpose(0, 1)[..., conv_channels : conv_channels + value_channels]
    return {
        "x": torch.randn(
            BATCH, LENGTH, HEADS, HEAD_DIM, device="cuda", dtype=DTYPE
        ).requires_grad_(),
        "gate": gate.unflatten(-1, (HEADS, HEAD_DIM)).requires_grad_(),
        "weight": torch.nn.Parameter((1 + 0.2 * torch.randn(HEAD_DIM, device="cuda")).to(DTYPE)),
    }


def _make_output_gradients() -> tuple[Tensor, ...]:
    return (torch.randn(BATCH, LENGTH, HEADS, HEAD_DIM, device="cuda", dtype=DTYPE),)


def _errors(
    inputs: Inputs,
    outputs: tuple[Tensor, ...],
    output_gradients: tuple[Tensor, ...],
    gradients: Mapping[str, Tensor],
) -> dict[str, float]:
    weight = inputs["weight"].detach().double().requires_grad_()
    squares = {name: [0.0, 0.0] for name in ("out", "dx", "dgate", "dweight")}

    def add(name: str, got: Tensor, want: Tensor) -> None:
        squares[name][0] += (got.double() - want).square().sum().item()
        squares[name][1] += want.square().sum().item()

    total = torch.zeros_like(weight)
    for begin in range(0, LENGTH, CHUNK):
        tokens = slice(begin, begin + CHUNK)
        x, gate = (inputs[n].detach()[:, tokens].double().requires_grad_() for n in ("x", "gate"))
        out = reference.gated_output_norm(x, gate, weight, EPS)
        dout = output_gradients[0][:, tokens].double()
        dx, dgate, dweight = torch.autograd.grad(out, (x, gate, weight), dout)
        add("out", outputs[0].detach()[:, tokens], out.detach())
        add("dx", gradients["x"][:, tokens], dx)
        add("dgate", gradients["gate"][:, tokens], dgate)
        total += dweight
    add("dweight", gradients["weight"], total)
    return {name: (wrong / norm) ** 0.5 for name, (wrong, norm) in squares.items()}


def _fused(inputs: Inputs) -> Stage:
    return lambda given: (fused_gated_output_norm(given["x"], given["gate"], given["weight"], EPS),)


def _parameter(inputs: Inputs) -> torch.nn.Parameter:
    """The weight itself, for a module to hold: gradients are taken with respect to this object."""
    weight = inputs["weight"]
    assert isinstance(weight, torch.nn.Parameter)
    return weight


class _Layer(LayerWithOneStage):
    """With the output norm, whose weight gradients are taken with respect to."""

    apply_gated_norm: Any = GatedDeltaNet._apply_gated_norm

    def __init__(self, weight: torch.nn.Parameter, **options: Any) -> None:
        sizes = {"key_heads": KEY_HEADS, "value_heads": HEADS, "head_dim": HEAD_DIM}
        super().__init__(**sizes, **options)
        self.out_norm = torch.nn.RMSNorm(HEAD_DIM, eps=EPS, device="meta")
        self.out_norm.register_parameter("weight", weight)


def _through_the_layer(inputs: Inputs) -> Stage:
    layer = _Layer(_parameter(inputs), gdn_gated_output_norm_fusion=True)
    return lambda given: (layer.apply_gated_norm(given["x"], given["gate"]),)


def _consult(inputs: Inputs) -> Callable[[], object]:
    layer = _Layer(_parameter(inputs), gdn_gated_output_norm_fusion=True)
    return layer.consult("gated_output_norm", **inputs, eps=EPS, zero_centered_gamma=False)


def _megatron_core(inputs: Inputs) -> Stage:
    from megatron.gdn.unfused import gated_output_norm

    layer = _Layer(_parameter(inputs))

    def run(given: Inputs) -> tuple[Tensor, ...]:
        x, gate, weight = given["x"], given["gate"], given["weight"]
        return (gated_output_norm(layer, x, gate, weight, EPS, False),)

    return run


def _fla(inputs: Inputs) -> Stage:
    from fla.modules import FusedRMSNormGated

    norm = FusedRMSNormGated(HEAD_DIM, eps=EPS, activation="swish", device="meta")
    norm.weight = _parameter(inputs)
    return lambda given: (norm(given["x"], given["gate"]),)


_BYTES = BATCH * LENGTH * HEADS * HEAD_DIM * DTYPE.itemsize

CASES = (
    BenchCase(
        stage="gated_output_norm",
        label=f"b={BATCH} s={LENGTH} h={HEADS} d={HEAD_DIM} bf16, gate a slice of the projection",
        forward_bytes=3 * _BYTES,  # x, gate; out
        backward_bytes=5 * _BYTES,  # x, gate, dout; dx, dgate
        make_inputs=_make_inputs,
        make_output_gradients=_make_output_gradients,
        errors=_errors,
        tolerance=TOLERANCE,
        implementations=(
            Implementation("fused_gated_output_norm", _fused, is_ours=True),
            Implementation("the same through the layer's stage", _through_the_layer, is_ours=True),
            Implementation("megatron-core unfused, torch.compile", _megatron_core),
            Implementation("fla FusedRMSNormGated", _fla),
        ),
        consult=_consult,
    ),
)
