# SPDX-License-Identifier: Apache-2.0
"""Convolution to decay at the shapes of Qwen3-Next and Qwen3.5; long, short and packed too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.gdn import reference
from megatron.gdn.commands.bench_cases.case import BenchCase, Implementation, Inputs, Stage
from megatron.gdn.commands.bench_cases.one_stage import LayerWithOneStage
from megatron.gdn.fusions.pre_gated_delta_rule import HeadSizes, fused_pre_gated_delta_rule

WIDTH = 4
DTYPE = torch.bfloat16
WINDOW = 2048
"""Tokens that the float64 reference takes at a time."""
OUTPUTS = ("q", "k", "v", "gate", "beta", "g")
# BF16 rounds with a root mean square error of 1.1e-3; q and k are rounded twice, their gradient
# passes two roundings too. A tap lost at the edge of a chunk of 128 tokens is off by 9e-2.
TOLERANCE = 2.0**-7


@dataclass(frozen=True)
class Shape:
    """Sizes of one case; documents of equal length when there are any."""

    sizes: HeadSizes
    batch: int
    length: int
    documents: int = 0

    def __str__(self) -> str:
        packed = f" packed, {self.documents} documents" if self.documents else ""
        return (
            f"b={self.batch} s={self.length} Hk={self.sizes.num_key_heads} "
            f"Hv={self.sizes.num_value_heads} d={self.sizes.key_head_dim} W={WIDTH} bf16{packed}"
        )

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def forward_bytes(self) -> int:
        """Reads q, k, v, beta and alpha; writes q and k of every value head, v, beta and g."""
        heads, key_dim = self.sizes.num_value_heads, self.sizes.key_head_dim
        read = (self.sizes.conv_channels + 2 * heads) * DTYPE.itemsize
        written = (2 * heads * key_dim + self.sizes.gate_channels) * DTYPE.itemsize + 8 * heads
        return self.tokens * (read + written)

    def backward_bytes(self) -> int:
        """Reads the forward's inputs and the six gradients; writes that of the projection."""
        gate = self.sizes.gate_channels * DTYPE.itemsize
        projection = self.sizes.channels * DTYPE.itemsize
        return self.forward_bytes() + self.tokens * (gate + projection)


def _make_inputs(shape: Shape) -> Inputs:
    sizes, heads = shape.sizes, shape.sizes.num_value_heads

    def normal(*size: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.randn(size, device="cuda", dtype=dtype)

    made = {
        "qkvzba": normal(shape.length, shape.batch, sizes.channels).requires_grad_(),
        "conv_weight": (normal(sizes.conv_channels, 1, WIDTH) / 2).requires_grad_(),
        "A_log": (normal(heads, dtype=torch.float32) / 2 + 1).requires_grad_(),
        "dt_bias": normal(heads, dtype=torch.float32).requires_grad_(),
    }
    if shape.documents:
        step = shape.length // shape.documents
        made["cu_seqlens"] = torch.arange(
            0, shape.length + 1, step, dtype=torch.int32, device="cuda"
        )
    return made


def _make_output_gradients(shape: Shape) -> tuple[Tensor, ...]:
    heads = shape.sizes.num_value_heads
    key_dim, value_dim = shape.sizes.key_head_dim, shape.sizes.value_head_dim
    token = (shape.batch, shape.length, heads)
    wide = [
        torch.randn(*token, dim, device="cuda", dtype=DTYPE)
        for dim in (key_dim, key_dim, value_dim, value_dim)
    ]
    return (*wide, *(torch.randn(token, device="cuda") for _ in range(2)))


def _errors(
    shape: Shape,
    inputs: Inputs,
    outputs: tuple[Tensor, ...],
    output_gradients: tuple[Tensor, ...],
    gradients: Mapping[str, Tensor],
) -> dict[str, float]:
    """The reference takes windows of tokens, each with the W - 1 tokens before it."""
    projection, cu_seqlens = inputs["qkvzba"].detach(), inputs.get("cu_seqlens")
    parameters = {
        name: inputs[name].detach().double().requires_grad_()
        for name in ("conv_weight", "A_log", "dt_bias")
    }
    sums = {name: torch.zeros_like(value) for name, value in parameters.items()}
    d_projection = torch.zeros_like(projection, dtype=torch.float64)
    squares = {name: [0.0, 0.0] for name in OUTPUTS}
    for begin in range(0, shape.length, WINDOW):
        end, first = min(begin + WINDOW, shape.length), max(0, begin - (WIDTH - 1))
        x = projection[first:end].double().requires_grad_()
        ends = None if cu_seqlens is None else cu_seqlens.clamp(first, end) - first
        whole = reference.pre_gated_delta_rule(
            x,
            parameters["conv_weight"],
            None,
            parameters["A_log"],
            parameters["dt_bias"],
            *shape.sizes,
            cu_seqlens=ends,
        )
        found = tuple(out[:, begin - first :] for out in whole)
        for name, got, want in zip(OUTPUTS, outputs, found, strict=True):
            squares[name][0] += (got.detach()[:, begin:end].double() - want).square().sum().item()
            squares[name][1] += want.square().sum().item()
        incoming = [d[:, begin:end].double() for d in output_gradients]
        dx, *others = torch.autograd.grad(found, (x, *parameters.values()), incoming)
        d_projection[first:end] += dx
        for name, value in zip(parameters, others, strict=True):
            sums[name] += value
    errors = {name: (wrong / norm) ** 0.5 for name, (wrong, norm) in squares.items()}
    for name, want in {"qkvzba": d_projection, **sums}.items():
        errors[f"d{name}"] = ((gradients[name].double() - want).norm() / want.norm()).item()
    return errors


def _fused(shape: Shape) -> Callable[[Inputs], Stage]:
    def run(given: Inputs) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = fused_pre_gated_delta_rule(
            given["qkvzba"],
            given["conv_weight"],
            None,
            given["A_log"],
            given["dt_bias"],
            **shape.sizes._asdict(),
            cu_seqlens=given.get("cu_seqlens"),
        )
        return found

    return lambda inputs: run


def _layer(shape: Shape) -> LayerWithOneStage:
    return LayerWithOneStage(
        key_heads=shape.sizes.num_key_heads,
        value_heads=shape.sizes.num_value_heads,
        head_dim=shape.sizes.key_head_dim,
        gdn_pre_gated_delta_rule_fusion=True,
    )


def _stage_inputs(shape: Shape, given: Inputs) -> dict[str, Any]:
    return {"conv_bias": None, "cu_seqlens": None, **given, **shape.sizes._asdict()}


def _through_the_layer(shape: Shape) -> Callable[[Inputs], Stage]:
    layer = _layer(shape)

    def run(given: Inputs) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = layer.run_stage(
            "pre_gated_delta_rule", **_stage_inputs(shape, given)
        )
        return found

    return lambda inputs: run


def _megatron_core(shape: Shape) -> Callable[[Inputs], Stage]:
    def build(inputs: Inputs) -> Stage:
        from megatron.gdn import unfused
        from megatron.gdn.megatron_core_0_19 import CoreGatedDeltaNet

        sizes = shape.sizes

        class Layer:
            """What megatron-core's methods read of their layer."""

            activation, act_fn, cp_size = "silu", staticmethod(F.silu), 1
            config = SimpleNamespace(deterministic_mode=False)
            qk_dim_local_tp = sizes.num_key_heads * sizes.key_head_dim
            v_dim_local_tp = sizes.gate_channels
            num_key_heads, num_value_heads = sizes.num_key_heads, sizes.num_value_heads
            key_head_dim, value_head_dim = sizes.key_head_dim, sizes.value_head_dim
            use_qk_l2norm = sizes.use_qk_l2norm
            _prepare_input_for_gated_delta_rule = (
                CoreGatedDeltaNet._prepare_input_for_gated_delta_rule
            )

            def run_stage(self, stage: str, **given: Any) -> Any:
                return getattr(unfused, stage)(self, **given)

        layer = Layer()

        def run(given: Inputs) -> tuple[Tensor, ...]:
            return unfused.pre_gated_delta_rule(
                layer,
                given["qkvzba"],
                given["conv_weight"],
                None,
                given["A_log"],
                given["dt_bias"],
                **sizes._asdict(),
                cu_seqlens=given.get("cu_seqlens"),
            )

        return run

    return build


def _case(shape: Shape) -> BenchCase:
    return BenchCase(
        stage="pre_gated_delta_rule",
        label=str(shape),
        forward_bytes=shape.forward_bytes(),
        backward_bytes=shape.backward_bytes(),
        make_inputs=lambda: _make_inputs(shape),
        make_output_gradients=lambda: _make_output_gradients(shape),
        errors=lambda *results: _errors(shape, *results),
        tolerance=TOLERANCE,
        implementations=(
            Implementation("fused_pre_gated_delta_rule", _fused(shape), is_ours=True),
            Implementation(
                "the same through the layer's stage", _through_the_layer(shape), is_ours=True
            ),
            Implementation("megatron-core unfused, torch.compile", _megatron_core(shape)),
        ),
        consult=lambda inputs: _layer(shape).consult(
            "pre_gated_delta_rule", **_stage_inputs(shape, inputs)
        ),
    )


_QWEN3_NEXT = HeadSizes(16, 32, 128, 128)
_QWEN3_5 = HeadSizes(16, 64, 128, 128)

CASES = tuple(
    map(
        _case,
        (
            Shape(_QWEN3_NEXT, 4, 4096),
            Shape(_QWEN3_5, 4, 4096),
            Shape(_QWEN3_NEXT, 1, 65_536),
            Shape(_QWEN3_NEXT, 1, 2048),
            Shape(_QWEN3_NEXT, 1, 16_384, documents=16),
        ),
    )
)
