# SPDX-License-Identifier: Apache-2.0
"""The fused stage `pre_gated_delta_rule` against the float64 reference: outputs and all gradients.

Runs on CUDA when there is one and under Triton's interpreter otherwise.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from megatron.gdn import reference
from megatron.gdn.fusions import pre_gated_delta_rule as fusion
from megatron.gdn.fusions.kernel_launch import KernelLauncher
from megatron.gdn.fusions.pre_gated_delta_rule import HeadSizes, fused_pre_gated_delta_rule
from tests.fusions.interpreter_support import round_bfloat16_to_nearest_even

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OUTPUTS = ("q", "k", "v", "gate", "beta", "g")
INPUTS = ("qkvzba", "conv_weight", "conv_bias", "A_log", "dt_bias")

# Relative errors in the Frobenius norm. A rounding to a dtype with unit roundoff u has a root mean
# square error of about 0.58 u. q and k are rounded twice, their gradient once after a norm that
# reads a rounded row: below 1.2 u. FP32 adds sums of at most 192 terms over a head and 42 over
# tokens, and a sigmoid good to 4e-7. A tap lost or taken from another document at one token of 21,
# a chunk that drops one of its W - 1 tokens past the end, or a value head left out of the gradient
# of its key head are each wrong by several percent, an expansion in blocks by more than one.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
FLOAT32_TOLERANCE = 2e-6
"""beta and g, which are never rounded below float32."""


@pytest.fixture(autouse=True)
def rounding_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        round_bfloat16_to_nearest_even(monkeypatch)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, so that an element that no kernel writes shows."""

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poisoned(*args: Any, **kwargs: Any) -> Tensor:
            made = make(*args, **kwargs)
            return made.fill_(float("nan") if made.is_floating_point() else 77)

        return poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))


@dataclass(frozen=True)
class Case:
    """One combination of sizes, dtypes and layouts. 21 tokens are one chunk of 16 and a rest."""

    batch: int = 1
    length: int = 21
    key_heads: int = 2
    group: int = 2
    key_dim: int = 16
    value_dim: int = 16
    width: int = 4
    bias: bool = True
    l2norm: bool = True
    dtype: torch.dtype = torch.float32
    parameter_dtype: torch.dtype = torch.float32
    ends: tuple[int, ...] | None = None
    ends_dtype: torch.dtype = torch.int32
    layout: str = "contiguous"
    gradient_layouts: tuple[str, ...] = ("contiguous",)
    """Of the gradients of q, k, v, gate, beta and g, from the start again after the last."""
    strided: bool = False
    """Whether parameters and cu_seqlens are views with gaps between their elements."""

    def __str__(self) -> str:
        dtypes = [str(t).removeprefix("torch.") for t in (self.dtype, self.parameter_dtype)]
        documents = "dense"
        if self.ends is not None:
            kind = str(self.ends_dtype).removeprefix("torch.")
            documents = f"ends_{'_'.join(map(str, self.ends))}_{kind}"
        return (
            f"b{self.batch}-s{self.length}-hk{self.key_heads}-hv{self.key_heads * self.group}"
            f"-dk{self.key_dim}-dv{self.value_dim}-w{self.width}"
            f"-{'bias' if self.bias else 'nobias'}-{'l2norm' if self.l2norm else 'nonorm'}"
            f"-{dtypes[0]}-parameters_{dtypes[1]}-{documents}"
            f"-{self.layout}-gradients_{'_'.join(self.gradient_layouts)}"
            f"{'-strided' if self.strided else ''}"
        )

    @property
    def sizes(self) -> HeadSizes:
        heads = self.key_heads * self.group
        return HeadSizes(self.key_heads, heads, self.key_dim, self.value_dim, self.l2norm)

    def keywords(self) -> dict[str, Any]:
        cu_seqlens = None
        if self.ends is not None:
            cu_seqlens = torch.tensor((0, *self.ends), dtype=self.ends_dtype, device=DEVICE)
            if self.strided:
                cu_seqlens = torch.stack((cu_seqlens, cu_seqlens + 1), dim=1).view(-1)[::2]
        return {**self.sizes._asdict(), "cu_seqlens": cu_seqlens}


def cases(*several: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", several, ids=str)


def projection(values: Tensor, layout: str) -> Tensor:
    """The values `[s, b, C]` in memory of the given layout; the rest of that memory is NaN."""
    length, batch, channels = values.shape

    def memory(*shape: int) -> Tensor:
        return torch.full(shape, float("nan"), dtype=values.dtype, device=values.device)

    if layout == "contiguous":
        view = memory(length, batch, channels)
    elif layout == "batch_first":
        view = memory(batch, length, channels).transpose(0, 1)
    elif layout == "channel_slice":
        view = memory(length, batch, channels + 32)[..., 16:-16]
    elif layout == "unaligned":
        view = memory(length, batch, channels + 3)[..., 1:-2]
    elif layout == "every_second":
        view = memory(2 * length, 2 * batch, channels)[1::2, ::2]
    else:
        raise ValueError(layout)
    return view.copy_(values)


def gradient(values: Tensor, layout: str) -> Tensor:
    """An incoming gradient with the shape of the values and other strides."""
    if layout == "contiguous":
        return values.contiguous()
    if layout == "expanded":  # all strides 0, as from sum().backward()
        return values.reshape(-1)[0].expand(values.shape)
    if layout == "expanded_tokens":
        return values[:, :1].expand(values.shape)
    if layout == "heads_first":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "length_first":
        return values.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "strided_elements":
        return values.transpose(1, -1).contiguous().transpose(1, -1)
    if layout == "unaligned":
        wide = values.new_full((*values.shape[:-1], values.shape[-1] + 3), float("nan"))
        wide[..., 1:-2] = values
        return wide[..., 1:-2]
    raise ValueError(layout)


def strided(values: Tensor) -> Tensor:
    """A parameter as a view with the order of its dimensions reversed and NaN in the gaps."""
    order = tuple(reversed(range(values.ndim)))
    wide = values.new_full((*reversed(values.shape), 2), float("nan"))
    wide[..., 0] = values.permute(order)
    return wide[..., 0].permute(order)


def make_inputs(case: Case) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    sizes, heads = case.sizes, case.key_heads * case.group

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = 1.5 * normal(case.length, case.batch, sizes.channels)
    parameters = {
        "conv_weight": 0.5 * normal(sizes.conv_channels, 1, case.width),
        "conv_bias": 0.3 * normal(sizes.conv_channels) if case.bias else None,
        "A_log": 0.5 * normal(heads) + 1,
        "dt_bias": normal(heads),
    }
    made: dict[str, Tensor | None] = {
        "qkvzba": projection(x.to(DEVICE, case.dtype), case.layout).requires_grad_()
    }
    for name, value in parameters.items():
        if value is not None:
            value = value.to(DEVICE, case.parameter_dtype)
            value = (strided(value) if case.strided else value).requires_grad_()
        made[name] = value
    return made


def make_gradients(case: Case, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    return tuple(
        gradient(torch.randn(out.shape, generator=generator).to(DEVICE, out.dtype), layout)
        for out, layout in zip(outputs, itertools.cycle(case.gradient_layouts), strict=False)
    )


def differentiate(
    outputs: tuple[Tensor, ...],
    inputs: dict[str, Tensor | None],
    gradients: tuple[Tensor | None, ...],
) -> dict[str, Tensor]:
    used = [(o, d) for o, d in zip(outputs, gradients, strict=True) if d is not None]
    wanted = {n: t for n, t in inputs.items() if t is not None and t.requires_grad}
    found = torch.autograd.grad(
        [o for o, _ in used], tuple(wanted.values()), [d for _, d in used], allow_unused=True
    )
    return {
        f"d{name}": torch.zeros_like(wanted[name]) if grad is None else grad
        for name, grad in zip(wanted, found, strict=True)
    }


def run(case: Case, inputs: dict[str, Tensor | None] | None = None) -> dict[str, Tensor]:
    inputs = inputs or make_inputs(case)
    outputs = fused_pre_gated_delta_rule(**inputs, **case.keywords())
    results = {name: out.detach() for name, out in zip(OUTPUTS, outputs, strict=True)}
    return results | differentiate(outputs, inputs, make_gradients(case, outputs))


def run_reference(
    case: Case,
    outputs_used: tuple[str, ...] = OUTPUTS,
    inputs: dict[str, Tensor | None] | None = None,
) -> dict[str, Tensor]:
    inputs = {
        name: None if t is None else t.detach().double().requires_grad_()
        for name, t in (inputs or make_inputs(case)).items()
    }
    outputs = reference.pre_gated_delta_rule(**inputs, **case.keywords())
    results = {name: out.detach() for name, out in zip(OUTPUTS, outputs, strict=True)}
    narrow = tuple(
        out.detach().to(torch.float32 if name in ("beta", "g") else case.dtype)
        for name, out in results.items()
    )
    gradients = tuple(
        d.double() if name in outputs_used else None
        for name, d in zip(OUTPUTS, make_gradients(case, narrow), strict=True)
    )
    return results | differentiate(outputs, inputs, gradients)


def assert_close(case: Case, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    errors, limits = {}, {}
    for name, value in got.items():
        scale = want[name].norm().item()
        difference = (value.double() - want[name]).norm().item()
        errors[name] = difference / scale if scale else difference
        if name in ("beta", "g"):
            limits[name] = FLOAT32_TOLERANCE
        elif name in OUTPUTS or name == "dqkvzba":
            limits[name] = TOLERANCE[case.dtype]
        else:  # a sum of products of rounded and unrounded values, then its own rounding
            limits[name] = max(TOLERANCE[case.dtype] / 2, TOLERANCE[case.parameter_dtype])
    # Written so that a NaN fails.
    assert all(error <= limits[name] for name, error in errors.items()), errors


BASE = Case()
SMALL = Case(length=19, key_heads=1, group=2, key_dim=8, value_dim=8)


@cases(
    replace(BASE, batch=2),
    replace(BASE, batch=2, length=40, bias=False),
    *(replace(SMALL, width=width) for width in range(2, 9)),
    *(replace(SMALL, group=group, key_heads=3 if group < 4 else 1) for group in (1, 2, 3, 4, 8)),
    *(
        replace(SMALL, key_dim=key_dim, value_dim=value_dim, length=17, dtype=torch.float16)
        for key_dim, value_dim in ((96, 192), (128, 64), (20, 12), (1, 3))
    ),
    *(
        replace(SMALL, bias=bias, l2norm=l2norm)
        for bias, l2norm in itertools.product((False, True), repeat=2)
    ),
    *(
        replace(SMALL, dtype=dtype, parameter_dtype=parameter_dtype)
        for dtype, parameter_dtype in itertools.product(
            (torch.bfloat16, torch.float16, torch.float32), repeat=2
        )
    ),
    *(replace(SMALL, batch=2, length=length) for length in (1, 2, 3, 16, 18)),
)
def test_parity(case: Case) -> None:
    got = run(case)
    assert_close(case, got, run_reference(case))
    for name in ("q", "k", "v", "beta", "g", "dqkvzba"):
        assert got[name].is_contiguous()
    assert got["beta"].dtype == got["g"].dtype == torch.float32
    assert got["q"].dtype == got["k"].dtype == got["v"].dtype == case.dtype


@cases(
    *(
        replace(SMALL, length=21, ends=ends, width=width, ends_dtype=ends_dtype)
        for ends, width, ends_dtype in (
            ((21,), 4, torch.int64),
            ((1, 1, 2, 21), 4, torch.int32),
            ((0, 5, 5, 15, 16, 19, 21), 4, torch.int64),
            ((2, 4, 17, 21, 21), 8, torch.int32),
            ((1, 2, 3, 20, 21), 2, torch.int32),
            ((18, 18, 21), 3, torch.int32),
            ((5, 14), 4, torch.int32),  # tokens past the last entry: one more document
        )
    ),
    replace(SMALL, length=33, ends=tuple(range(1, 34)), dtype=torch.float16),
    replace(SMALL, length=21, ends=(2, 2, 17, 21), strided=True),
)
def test_parity_of_packed_documents(case: Case) -> None:
    assert_close(case, run(case), run_reference(case))


UNIT_STRIDE_LAYOUTS = ("heads_first", "contiguous", "length_first", "expanded_tokens")
MIXED_LAYOUTS = (*UNIT_STRIDE_LAYOUTS, "unaligned", "strided_elements")


def rotations(layouts: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [layouts[shift:] + layouts[:shift] for shift in range(len(layouts))]


@cases(
    *(
        replace(SMALL, batch=2, layout=layout, dtype=torch.float16)
        for layout in ("batch_first", "channel_slice", "unaligned", "every_second")
    ),
    replace(SMALL, batch=2, gradient_layouts=("expanded",)),
    # Never two alike among neighbours, so that one read with the strides of another shows.
    *(
        replace(SMALL, batch=2, gradient_layouts=layouts)
        for layouts in (*rotations(MIXED_LAYOUTS), *rotations(UNIT_STRIDE_LAYOUTS)[:2])
    ),
    replace(SMALL, strided=True),
)
def test_parity_with_any_strides(case: Case) -> None:
    assert_close(case, run(case), run_reference(case))


class _Round(torch.autograd.Function):
    """Rounding to a dtype, which the gradient does not see."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(dtype).double()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@cases(replace(SMALL, dtype=torch.float16), replace(SMALL, dtype=torch.bfloat16))
def test_the_convolution_is_rounded_before_the_norm(case: Case) -> None:
    """Against the reference with that rounding, forward and backward agree to float32.

    Without it a quarter of the elements of q and k differ, and as many of dx. A few may, where a
    value lies so close to the middle of two that float32 decides otherwise than float64.
    """
    sizes, inputs = case.sizes, make_inputs(case)
    exact = {n: t.detach().double().requires_grad_() for n, t in inputs.items() if t is not None}
    qkv = reference.split_projection(exact["qkvzba"], *sizes[:4])[0]
    convolved = reference.causal_conv1d(qkv, exact["conv_weight"], exact["conv_bias"])
    want = reference.prepare_qkv(_Round.apply(convolved, case.dtype), *sizes)
    outputs = fused_pre_gated_delta_rule(**inputs, **case.keywords())[:3]

    names = ("qkvzba", "conv_weight", "conv_bias")
    gradients = make_gradients(case, outputs)
    got_gradients = torch.autograd.grad(outputs, [inputs[n] for n in names], gradients)
    want_gradients = torch.autograd.grad(
        want, [exact[n] for n in names], [d.double() for d in gradients]
    )
    for name, got, exactly in zip(
        ("q", "k", "v", "dqkvzba"),
        (*outputs, got_gradients[0]),
        (*want, want_gradients[0]),
        strict=True,
    ):
        off = (got != exactly.to(case.dtype)).double().mean().item()
        assert off < 0.02, (name, off)
    for name, got, exactly in zip(names[1:], got_gradients[1:], want_gradients[1:], strict=True):
        error = ((got.double() - exactly).norm() / exactly.norm()).item()
        assert error < torch.finfo(case.dtype).eps / 25, (name, error)


def test_a_slice_of_wider_channels_changes_no_bit() -> None:
    want = run(SMALL)
    for name, value in run(replace(SMALL, layout="channel_slice")).items():
        torch.testing.assert_close(value, want[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    "used",
    [*((name,) for name in OUTPUTS), ("q", "gate"), ("k", "v", "beta"), ("v", "gate", "g")],
    ids="_".join,
)
def test_unused_outputs(used: tuple[str, ...]) -> None:
    inputs = make_inputs(SMALL)
    outputs = fused_pre_gated_delta_rule(**inputs, **SMALL.keywords())
    gradients = tuple(
        d if name in used else None
        for name, d in zip(OUTPUTS, make_gradients(SMALL, outputs), strict=True)
    )
    got = differentiate(outputs, inputs, gradients)
    want = run_reference(SMALL, used)
    assert_close(SMALL, got, {name: want[name] for name in got})


@pytest.mark.parametrize(
    "trained",
    [*((name,) for name in INPUTS), ("conv_weight", "A_log"), ("conv_bias", "dt_bias"), INPUTS[1:]],
    ids="_".join,
)
def test_frozen_inputs(trained: tuple[str, ...]) -> None:
    """Only what is asked for is computed, and it is what it is beside the others."""
    inputs = make_inputs(SMALL)
    for name, tensor in inputs.items():
        assert tensor is not None
        tensor.requires_grad_(name in trained)
    outputs = fused_pre_gated_delta_rule(**inputs, **SMALL.keywords())
    for name, got_output, want_output in zip(
        OUTPUTS, outputs, reference.pre_gated_delta_rule(**inputs, **SMALL.keywords()), strict=True
    ):
        assert got_output.requires_grad == want_output.requires_grad, name
    gradients = tuple(
        d if out.requires_grad else None
        for out, d in zip(outputs, make_gradients(SMALL, outputs), strict=True)
    )
    got = differentiate(outputs, inputs, gradients)
    want = run(SMALL)
    assert got.keys() == {f"d{name}" for name in trained}
    # On a GPU a variant of the kernel may lay its threads out, and so add, in another order.
    limits = {"rtol": 0, "atol": 0} if DEVICE == "cpu" else {"rtol": 1e-5, "atol": 1e-5}
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], **limits, msg=name)


def test_nothing_trained_builds_no_graph() -> None:
    inputs = {n: None if t is None else t.detach() for n, t in make_inputs(SMALL).items()}
    assert not any(
        o.requires_grad for o in fused_pre_gated_delta_rule(**inputs, **SMALL.keywords())
    )


PACKED = replace(SMALL, length=26, ends=(2, 2, 17, 18, 26), dtype=torch.float16)


def test_packed_documents_equal_single_runs_bitwise() -> None:
    inputs, packed = make_inputs(PACKED), packed_results()
    assert PACKED.ends is not None
    for begin, end in itertools.pairwise((0, *PACKED.ends)):
        if begin == end:
            continue
        x = inputs["qkvzba"]
        assert x is not None
        single = fused_pre_gated_delta_rule(
            **inputs | {"qkvzba": x.detach()[begin:end]},
            **PACKED.keywords() | {"cu_seqlens": None},
        )
        for name, value in zip(OUTPUTS, single, strict=True):
            assert torch.equal(packed[name][:, begin:end], value), (name, begin, end)


@functools.cache
def packed_results() -> dict[str, Tensor]:
    return run(PACKED)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter, of infinities
@pytest.mark.parametrize("value", [2.0, float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("document", range(4), ids=lambda d: f"document{d}")
def test_changing_a_document_leaves_the_others_bitwise_unchanged(
    document: int, value: float
) -> None:
    inputs, before = make_inputs(PACKED), packed_results()
    assert PACKED.ends is not None
    begin, end = [pair for pair in itertools.pairwise((0, *PACKED.ends)) if pair[0] < pair[1]][
        document
    ]
    x = inputs["qkvzba"]
    assert x is not None
    changed = x.detach().clone()
    changed[begin:end] *= value
    after = run(PACKED, inputs | {"qkvzba": changed.requires_grad_()})
    others = torch.ones(PACKED.length, dtype=torch.bool, device=DEVICE)
    others[begin:end] = False
    for name in OUTPUTS:
        assert torch.equal(before[name][:, others], after[name][:, others]), name
    assert torch.equal(before["dqkvzba"][others], after["dqkvzba"][others])


def test_gate_is_a_view_of_the_projection_to_autograd_too() -> None:
    inputs = make_inputs(replace(BASE, batch=2))
    x = inputs["qkvzba"]
    assert x is not None
    gate = fused_pre_gated_delta_rule(**inputs, **BASE.keywords())[3]
    want = reference.split_projection(x, *BASE.sizes[:4])[1]
    assert gate.data_ptr() == want.data_ptr()
    assert gate.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert (gate.shape, gate.stride()) == (want.shape, want.stride())
    assert gate.grad_fn is not None
    assert gate._base is x
    with pytest.raises(RuntimeError, match="view"):
        gate.mul_(2)
    gate.square().sum().backward()  # saves the gate: its version counter must be intact
    want_gradient = torch.autograd.grad(want.square().sum(), x)[0]
    torch.testing.assert_close(x.grad, want_gradient, rtol=0, atol=0)


def test_projection_changed_in_place_is_noticed_in_backward() -> None:
    inputs = make_inputs(SMALL)
    x = inputs["qkvzba"]
    assert x is not None
    projected = x * 1
    outputs = fused_pre_gated_delta_rule(**inputs | {"qkvzba": projected}, **SMALL.keywords())
    projected.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()


@pytest.mark.parametrize("power", [1, 2], ids=lambda p: f"power{p}")
def test_second_order_gradients_are_refused(power: int) -> None:
    inputs = make_inputs(SMALL)
    q = fused_pre_gated_delta_rule(**inputs, **SMALL.keywords())[0]
    (first,) = torch.autograd.grad(q.pow(power).sum(), [inputs["qkvzba"]], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        first.sum().backward()


@pytest.mark.parametrize("case", [SMALL, PACKED], ids=["dense", "packed"])
def test_autograd_keeps_the_inputs_and_a_byte_per_packed_token(case: Case) -> None:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    inputs = make_inputs(case)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fused_pre_gated_delta_rule(**inputs, **case.keywords())
    pointers = {t.data_ptr() for t in inputs.values() if t is not None}
    own = [t for t in kept if t.data_ptr() not in pointers]
    assert len(kept) - len(own) == len(pointers)
    assert [(t.dtype, t.numel()) for t in own] == (
        [] if case.ends is None else [(torch.uint8, case.length)]
    )


TAILS = (-80.0, -60.0, -30.0, -17.0, -8.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 8.0, 17.0, 20.0, 30.0, 80.0)


def test_decay_and_beta_are_accurate_element_by_element_at_both_tails() -> None:
    """1e-6 is 8 float32 units. log(1 + exp(x)) without its own log1p is wrong by one below -17."""
    case = replace(SMALL, length=len(TAILS))
    inputs = make_inputs(case)
    x = inputs["qkvzba"]
    assert x is not None
    values = torch.tensor(TAILS, device=DEVICE)[:, None]
    with torch.no_grad():
        x[..., -2 * case.group :] = values[..., None]
        for name in ("A_log", "dt_bias"):
            parameter = inputs[name]
            assert parameter is not None
            parameter.zero_()
    outputs = fused_pre_gated_delta_rule(**inputs, **case.keywords())
    d_beta, d_g = make_gradients(case, outputs)[4:]
    (dx,) = torch.autograd.grad(outputs[4:], x, (d_beta, d_g))

    # The float64 reference differentiates a sigmoid s as s (1 - s), which cancels at the upper
    # tail; with the tail t = exp(-|x|) nothing does.
    values = values.double()
    tail = (-values.abs()).exp()
    sigmoid = torch.where(values < 0, tail, 1.0) / (1 + tail)
    want = {
        "beta": sigmoid.expand(-1, case.group),
        "g": -(values.clamp(min=0) + tail.log1p()).expand(-1, case.group),
        "d beta": d_beta[0].double() * tail / (1 + tail).square(),
        "d alpha": -d_g[0].double() * sigmoid,
    }
    got = {"beta": outputs[4][0], "g": outputs[5][0]}
    got["d beta"], got["d alpha"] = dx[:, 0, -2 * case.group :].split(case.group, dim=-1)
    for name, value in want.items():
        torch.testing.assert_close(got[name].double(), value, rtol=1e-6, atol=0, msg=name)


def test_decay_of_minus_infinity_in_one_head_leaves_the_others_intact() -> None:
    case = replace(SMALL, group=4)
    inputs = make_inputs(case)
    before = run(case, inputs)
    a_log = inputs["A_log"]
    assert a_log is not None
    with torch.no_grad():
        a_log[1] = float("-inf")
    after = run(case, inputs)
    others = [0, 2, 3]
    assert torch.equal(after["g"][..., 1], torch.zeros_like(after["g"][..., 1]))
    assert torch.equal(after["g"][..., others], before["g"][..., others])
    for name in ("dA_log", "ddt_bias"):
        assert after[name][1] == 0
        assert torch.equal(after[name][others], before[name][others])
    alpha = after["dqkvzba"][..., -4:]
    assert torch.equal(alpha[..., 1], torch.zeros_like(alpha[..., 1]))
    assert torch.equal(after["dqkvzba"][..., :-4], before["dqkvzba"][..., :-4])


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1e-4], ids=lambda s: f"scale{s:g}")
def test_rows_near_zero(scale: float) -> None:
    """The 1e-6 under the root decides here: without it the small rows would have norm one."""
    case = replace(SMALL, bias=False)
    inputs = make_inputs(case)
    x = inputs["qkvzba"]
    assert x is not None
    with torch.no_grad():
        x[..., : case.sizes.conv_channels] *= scale
    got = run(case, inputs)
    assert all(value.isfinite().all() for value in got.values())
    if scale:
        assert_close(case, got, run_reference(case, inputs=inputs))
    else:
        assert got["q"].count_nonzero() == got["k"].count_nonzero() == 0


def test_gradients_of_huge_rows() -> None:
    """The part along the row itself, which the norm takes out, is as large as the rest."""
    case = replace(SMALL, bias=False, dtype=torch.float32)
    inputs = make_inputs(case)
    x = inputs["qkvzba"]
    assert x is not None
    channels = 2 * case.sizes.num_key_heads * case.sizes.key_head_dim
    with torch.no_grad():
        x[..., :channels] *= 1e15
    got, want = run(case, inputs)["dqkvzba"], run_reference(case, inputs=inputs)["dqkvzba"]
    got, want = got[..., :channels].double(), want[..., :channels]
    assert 0 < want.abs().max() < 1e-13
    assert ((got - want).norm() / want.norm()).item() < 1e-5


REFUSED = {
    "zero_key_heads": ({"num_key_heads": 0}, "num_key_heads=0"),
    "no_value_heads": ({"num_value_heads": 0}, "num_value_heads=0"),
    "negative_head_dim": ({"key_head_dim": -2}, "key_head_dim=-2"),
    "float_head_dim": ({"value_head_dim": 8.5}, "value_head_dim=8.5"),
    "bool_heads": ({"num_key_heads": True}, "num_key_heads=True"),
    "numpy_heads": ({"num_key_heads": np.int64(1)}, r"num_key_heads=np.int64\(1\)"),
    "text_heads": ({"num_key_heads": "1"}, "num_key_heads='1'"),
    "no_heads": ({"num_key_heads": None}, "num_key_heads=None"),
    "l2norm_text": ({"use_qk_l2norm": "no"}, "use_qk_l2norm='no'"),
    "channels": (
        {"qkvzba": torch.zeros(3, 1, 53)},
        "53 projection channels where the heads make 52",
    ),
    "conv_channels": ({"conv_weight": torch.zeros(33, 1, 4)}, "33 convolution channels"),
    "width": ({"conv_weight": torch.zeros(32, 1, 9)}, "conv_width of conv_weight"),
    "dtype": ({"qkvzba": torch.zeros(3, 1, 52, dtype=torch.float64)}, "float64"),
    "length": ({"qkvzba": torch.zeros(0, 1, 52)}, "nonempty"),
    "channel_stride": ({"qkvzba": torch.zeros(52, 1, 3).transpose(0, 2)}, "stride 1"),
    "heads": ({"num_key_heads": 3}, "num_value_heads"),
    "cu_seqlens_dtype": ({"cu_seqlens": torch.zeros(2)}, "float32"),
    "cu_seqlens_rank": ({"cu_seqlens": torch.zeros(1, 2, dtype=torch.int32)}, "2 dimensions"),
    "cu_seqlens_length": ({"cu_seqlens": torch.zeros(1, dtype=torch.int32)}, "bound no document"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what: str) -> None:
    changed, reason = REFUSED[what]
    good = replace(SMALL, length=3)
    arguments = make_inputs(good) | good.keywords()
    for name, value in changed.items():
        arguments[name] = value.to(DEVICE) if isinstance(value, Tensor) else value
    with pytest.raises(ValueError, match=reason):
        fused_pre_gated_delta_rule(**arguments)


def test_packed_documents_of_several_batch_entries_are_refused() -> None:
    case = replace(SMALL, batch=2, ends=(19,))
    with pytest.raises(ValueError, match="cu_seqlens with batch size 2"):
        run(case)


@pytest.mark.parametrize("ends_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("width", [2, 4, 8], ids=lambda w: f"w{w}")
def test_lookback_of_many_documents(width: int, ends_dtype: torch.dtype) -> None:
    lengths = torch.randint(0, 7, (700,), generator=torch.Generator().manual_seed(5))
    ends = lengths.cumsum(0)
    total = int(ends[-1]) + 11
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    got = fusion._document_lookback(cu_seqlens.to(DEVICE, ends_dtype), total, width)
    first = torch.zeros(total, dtype=torch.int64)
    for begin in [*cu_seqlens.tolist()]:
        first[begin:] = begin
    want = (torch.arange(total) - first).clamp(max=width - 1)
    assert torch.equal(got.cpu().long(), want)


@pytest.mark.parametrize(
    "cu_seqlens",
    [(5, 3, 9, 2), (0, -4, 999, 2**31 - 1), (7, 7)],
    ids=lambda c: "_".join(map(str, c)),
)
def test_malformed_documents_stay_in_bounds(cu_seqlens: tuple[int, ...]) -> None:
    found = fusion._document_lookback(torch.tensor(cu_seqlens, device=DEVICE), 40, 4)
    assert found.max() <= 3


TARGET = HeadSizes(16, 32, 128, 128)


def test_launch_at_the_shape_of_a_large_model() -> None:
    forward = fusion.forward_config(TARGET, 4, 4, 4096)
    backward = fusion.backward_config(TARGET, 4, 4, 4096, 2, False)
    assert (forward.key_rows, forward.value_rows, forward.num_warps) == (4, 4, 4)
    assert (backward.key_rows, backward.value_rows, backward.num_warps) == (4, 4, 4)
    assert (forward.unroll, forward.chunk) == (8, 32)
    assert (backward.unroll, backward.chunk) == (4, 128)


@pytest.mark.parametrize(
    "sizes",
    [TARGET, HeadSizes(1, 1, 64, 64), HeadSizes(2, 16, 96, 192), HeadSizes(3, 9, 256, 8)],
    ids=lambda s: "hk{}-hv{}-dk{}-dv{}".format(*s[:4]),
)
@pytest.mark.parametrize("width", [2, 4, 5, 8], ids=lambda w: f"w{w}")
def test_launches_depend_on_the_length_in_their_runtime_argument_alone(
    sizes: HeadSizes, width: int
) -> None:
    for element_size, extra in itertools.product((2, 4), (False, True)):
        seen = set()
        for batch, length in ((1, 1), (1, 777), (3, 4096), (1, 65_536), (8, 1_048_576)):
            for config in (
                fusion.forward_config(sizes, width, batch, length),
                fusion.backward_config(sizes, width, batch, length, element_size, extra),
            ):
                assert config.chunk % config.unroll == 0
                for rows in (config.key_rows, config.value_rows, config.unroll, config.num_warps):
                    assert rows & (rows - 1) == 0
                seen.add(replace(config, chunk=0))
        assert len(seen) == 2  # one forward, one backward


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Every kernel that would be compiled for an H100, by Triton's own key; none is, nor runs."""

    class Driver:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    seen = set()

    def note(kernel: JITFunction[Any], key: str, *args: Any, **kwargs: Any) -> None:
        seen.add((kernel.__name__, key))

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(JITFunction, "_do_compile", note)
    for name in (
        "_launch_forward_kernel",
        "_launch_backward_kernel",
        "_launch_document_lookback_kernel",
        "_launch_sum_parts_kernel",
    ):
        interpreted = getattr(fusion, name).kernel
        compiled = JITFunction(interpreted.fn, **interpreted.kwargs)
        monkeypatch.setattr(fusion, name, KernelLauncher(compiled))
    return seen


@pytest.mark.skipif(DEVICE == "cuda", reason="counted in the GPU tests")
@pytest.mark.parametrize("layout", ["contiguous", "batch_first"])
@pytest.mark.parametrize(
    "gradient_layout", ["contiguous", "heads_first"], ids="gradients_{}".format
)
@cases(
    *(
        replace(SMALL, key_heads=heads, group=group, key_dim=key_dim, value_dim=value_dim)
        # C is 128, 52, 130, 48 and 50 channels: a multiple of the 8 of a vector or not.
        for heads, group, key_dim, value_dim in (
            (2, 2, 8, 8),
            (1, 2, 8, 8),
            (1, 1, 32, 32),
            (1, 1, 20, 3),
            (1, 1, 12, 12),
        )
    )
)
def test_new_lengths_and_packings_compile_nothing(
    case: Case, layout: str, gradient_layout: str, compilations: set[tuple[str, str]]
) -> None:
    case = replace(case, dtype=torch.bfloat16, layout=layout, gradient_layouts=(gradient_layout,))
    run(replace(case, batch=2, length=64))
    run(replace(case, length=64, ends=(60, 64)))
    known = set(compilations)
    # Forward and backward, each dense and packed; the lookback; the parameter gradients.
    assert len(known) == 6
    for batch, length in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 3), (1, 16), (3, 17), (2, 333)):
        run(replace(case, batch=batch, length=length))
        assert compilations == known, (batch, length)
    for ends in ((1,), (1, 2), (0, 7), (10, 500)):
        run(replace(case, length=ends[-1], ends=ends))
        assert compilations == known, ends
