# SPDX-License-Identifier: Apache-2.0
"""The fused output norm against the float64 reference: forward, all gradients, and what it touches.

Runs on CUDA when there is one and under Triton's interpreter otherwise.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.gdn import reference
from megatron.gdn.fusions import gated_output_norm as fusion
from megatron.gdn.fusions.gated_output_norm import LaunchConfig, fused_gated_output_norm
from megatron.gdn.fusions.kernel_launch import KernelLauncher
from tests.fusions.interpreter_support import round_bfloat16_to_nearest_even

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6


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
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))


@dataclass(frozen=True)
class Case:
    """One combination of sizes, dtypes and layouts."""

    batch: int = 2
    length: int = 3
    heads: int = 4
    head_dim: int = 32
    dtype: torch.dtype = torch.float16
    gate_dtype: torch.dtype | None = None
    weight_dtype: torch.dtype = torch.float32
    zero_centered: bool = False
    x_layout: str = "contiguous"
    gate_layout: str = "projection"
    dout_layout: str = "contiguous"

    def __str__(self) -> str:
        gate_dtype = self.gate_dtype or self.dtype
        names = [str(t).removeprefix("torch.") for t in (self.dtype, gate_dtype, self.weight_dtype)]
        return (
            f"b{self.batch}-s{self.length}-h{self.heads}-d{self.head_dim}"
            f"-x_{names[0]}_{self.x_layout}-gate_{names[1]}_{self.gate_layout}"
            f"-weight_{names[2]}_{'zero_centered' if self.zero_centered else 'plain'}"
            f"-dout_{self.dout_layout}"
        )


def cases(*several: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", several, ids=str)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The values `[b, s, h, d]` in memory of the given layout; the rest of that memory is NaN."""
    batch, length, heads, head_dim = values.shape

    def memory(*shape: int) -> Tensor:
        return torch.full(shape, float("nan"), dtype=values.dtype, device=values.device)

    if layout == "contiguous":
        view = memory(batch, length, heads, head_dim)
    elif layout == "projection":  # [s, b, C] to [b, s, C], a slice of C, unflattened
        before, channels = 16, heads * head_dim
        wide = memory(length, batch, before + channels + 2 * heads).transpose(0, 1)
        view = wide[..., before : before + channels].unflatten(-1, (heads, head_dim))
    elif layout == "unaligned":  # a slice that starts and strides at odd elements
        view = memory(batch, length, heads * head_dim + 3)[..., 1:-2]
        view = view.unflatten(-1, (heads, head_dim))
    elif layout == "heads_first":  # a recurrence output [b, h, s, d]
        view = memory(batch, heads, length, head_dim).transpose(1, 2)
    elif layout == "sliced":  # every second token of every second head
        view = memory(batch, 2 * length, 2 * heads, head_dim)[:, 1::2, ::2]
    elif layout == "strided_elements":  # last dimension not of stride 1
        view = memory(batch, length, head_dim, heads).transpose(2, 3)
    elif layout == "expanded_elements":  # all strides 0, as from sum().backward()
        view = memory(1).expand(batch, length, heads, head_dim)
        view[0, 0, 0, :1] = values[0, 0, 0, 0]
        return view
    elif layout == "expanded_tokens":
        view = memory(batch, 1, heads, head_dim)
        view.copy_(values[:, :1])
        return view.expand(batch, length, heads, head_dim)
    else:
        raise ValueError(layout)
    view.copy_(values)
    return view


def make(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, gate, weight (leaves that require gradients) and dout."""
    generator = torch.Generator().manual_seed(7)
    shape = (case.batch, case.length, case.heads, case.head_dim)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    x = normal(*shape) * (0.2 + 3 * torch.rand(shape[:3], generator=generator))[..., None]
    weight = normal(case.head_dim) * 0.5 + (0 if case.zero_centered else 1)
    # Both tails of the sigmoid, and its middle.
    gate, dout = 3 * normal(*shape), normal(*shape)
    return (
        laid_out(x.to(DEVICE, case.dtype), case.x_layout).requires_grad_(),
        laid_out(gate.to(DEVICE, case.gate_dtype or case.dtype), case.gate_layout).requires_grad_(),
        weight.to(DEVICE, case.weight_dtype).requires_grad_(),
        laid_out(dout.to(DEVICE, case.dtype), case.dout_layout),
    )


def run(case: Case, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    x, gate, weight, dout = tensors
    out = fused_gated_output_norm(x, gate, weight, EPS, case.zero_centered)
    dx, dgate, dweight = torch.autograd.grad(out, (x, gate, weight), dout)
    return {"out": out.detach(), "dx": dx, "dgate": dgate, "dweight": dweight}


def oracle(case: Case, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    x, gate, weight = (t.detach().double().requires_grad_() for t in tensors[:3])
    out = reference.gated_output_norm(x, gate, weight, EPS, case.zero_centered)
    dx, dgate, dweight = torch.autograd.grad(out, (x, gate, weight), tensors[3].double())
    return {"out": out.detach(), "dx": dx, "dgate": dgate, "dweight": dweight}


def tolerances(case: Case, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    """Largest error of each element that the roundings of the contract can cause.

    With u the unit roundoff of the activation dtype (2^-11 for FP16, 2^-8 for BF16):

    - out is rounded twice (`y`, then the product): 2u of itself.
    - dgate carries the rounding of `y`, u of itself, and its own.
    - dx carries the rounding of `dy`, which enters directly and through the mean over the row: u of
      the sum of the magnitudes of both terms, before they cancel. And its own.
    - dweight carries the rounding of every `dy`: u of the sum of magnitudes over the rows (rounding
      errors of both signs cancel, so this is generous for many rows). And its own.
    - float32 arithmetic adds the noise of a reduction over d elements or over the rows, by pairs:
      below 32 ulp of the magnitudes here, 2^-19.

    A missing `+1` of a zero-centred weight, a sigmoid in place of SiLU, or a mean over the wrong
    number of elements is off by tens of percent: 100 times the tolerance in FP16. A missing
    materialisation boundary stays within it and has its own test below.
    """
    x, gate, weight, dout = (t.detach().double() for t in tensors)
    unit = torch.finfo(case.dtype).eps / 2
    noise = 2.0**-19
    smallest = torch.finfo(case.dtype).smallest_normal * torch.finfo(case.dtype).eps
    weight = weight + 1 if case.zero_centered else weight
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    x_hat = x * rstd
    y, sigmoid = x_hat * weight, torch.sigmoid(gate)
    silu = gate * sigmoid
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    dy = dout * silu
    dx_terms = rstd * (
        (dy * weight).abs() + x_hat.abs() * (dy * weight * x_hat).abs().mean(-1, keepdim=True)
    )
    dweight_terms = (dy * x_hat).abs().sum((0, 1, 2))
    want = oracle(case, tensors)

    def own(name: str, dtype: torch.dtype) -> Tensor:
        return want[name].abs() * torch.finfo(dtype).eps / 2

    # A subnormal `y` or `dy` has an absolute error of half the smallest subnormal.
    tails = smallest * (1 + silu.abs() + (dout * slope).abs() + rstd * weight.abs())
    return {
        "out": own("out", case.dtype) + (unit + noise) * (y * silu).abs() + tails,
        "dx": own("dx", case.dtype) + (unit + noise) * dx_terms + tails,
        "dgate": own("dgate", gate_dtype(case))
        + unit * (dout * y * slope).abs()
        + noise * (dout * y).abs()
        + tails,
        "dweight": own("dweight", case.weight_dtype)
        + (unit + noise) * dweight_terms
        + smallest * x_hat.abs().sum((0, 1, 2)),
    }


def gate_dtype(case: Case) -> torch.dtype:
    return case.gate_dtype or case.dtype


def check(case: Case) -> None:
    tensors = make(case)
    got, want, allowed = run(case, tensors), oracle(case, tensors), tolerances(case, tensors)
    for name, dtype in {
        "out": case.dtype,
        "dx": case.dtype,
        "dgate": gate_dtype(case),
        "dweight": case.weight_dtype,
    }.items():
        assert got[name].dtype == dtype
        assert got[name].shape == want[name].shape
        assert got[name].is_contiguous()
        excess = (got[name].double() - want[name]).abs() / allowed[name]
        # Written so that a NaN fails.
        assert bool((excess <= 1.05).all()), f"{name}: {excess.max():.2f} times the tolerance"


@cases(
    *(
        Case(
            heads=3,
            dtype=dtype,
            gate_dtype=dtype if same else torch.float32,
            weight_dtype=weight,
            zero_centered=zero,
        )
        for dtype in (torch.float16, torch.bfloat16)
        for same in (True, False)
        for weight in (torch.float16, torch.bfloat16, torch.float32)
        for zero in (False, True)
    )
)
def test_dtypes(case: Case) -> None:
    check(case)


@cases(
    *(
        Case(batch=1, length=length, heads=heads, head_dim=head_dim, dtype=dtype)
        for head_dim in (16, 32, 64, 128, 256)
        for heads, length in ((4, 3), (3, 2))
        for dtype in (torch.float16, torch.bfloat16)
    ),
    # Outside the shapes that models use: still every power of two.
    *(Case(batch=1, length=3, heads=2, head_dim=head_dim) for head_dim in (1, 2, 8, 512, 4096)),
)
def test_head_dims(case: Case) -> None:
    check(case)


@cases(
    *(Case(batch=batch, length=5, heads=heads) for batch in (1, 2, 3) for heads in (1, 6)),
    Case(batch=3, length=1, heads=4),
    Case(batch=1, length=33, heads=2, head_dim=64),
)
def test_batches_and_lengths(case: Case) -> None:
    check(case)


@cases(
    *(
        Case(batch=3, x_layout=layout, zero_centered=True)
        for layout in ("heads_first", "sliced", "strided_elements", "unaligned", "projection")
    ),
    *(
        Case(batch=3, gate_layout=layout, gate_dtype=gate)
        for layout in ("contiguous", "heads_first", "sliced", "strided_elements", "unaligned")
        for gate in (None, torch.float32)
    ),
    *(
        Case(batch=3, dout_layout=layout)
        for layout in (
            "expanded_elements",
            "expanded_tokens",
            "heads_first",
            "sliced",
            "strided_elements",
            "unaligned",
        )
    ),
    Case(
        batch=2,
        heads=6,
        dtype=torch.bfloat16,
        x_layout="heads_first",
        gate_layout="projection",
        dout_layout="expanded_elements",
    ),
)
def test_layouts(case: Case) -> None:
    check(case)


def rounded_path(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor], boundary: bool
) -> dict[str, Tensor]:
    """Float64 arithmetic with the contract's roundings, with or without the inner two."""
    x, gate, weight, dout = (t.detach().double() for t in tensors)
    dtype = tensors[0].dtype

    def inner(value: Tensor) -> Tensor:
        return value.to(dtype).double() if boundary else value

    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    x_hat, sigmoid = x * rstd, torch.sigmoid(gate)
    y, dy = inner(x_hat * weight), inner(dout * gate * sigmoid)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    mean = (dy * weight * x_hat).mean(-1, keepdim=True)
    return {
        "out": (y * gate * sigmoid).to(dtype),
        "dgate": (dout * y * slope).to(dtype),
        "dx": ((dy * weight - x_hat * mean) * rstd).to(dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["out", "dgate", "dx"])
def test_rounds_at_the_materialisation_boundary(dtype: torch.dtype, name: str) -> None:
    # Float32 noise moves a value across a rounding boundary once in thousands of elements. Without
    # the inner rounding a third of the elements differ in their last bit.
    case = Case(batch=1, length=4, heads=4, head_dim=64, dtype=dtype)
    tensors = make(case)
    got = run(case, tensors)[name]
    differing = {
        boundary: (got != rounded_path(tensors, boundary)[name]).double().mean().item()
        for boundary in (True, False)
    }
    assert differing[True] < 0.01
    assert differing[False] > 0.1


@pytest.mark.parametrize("length", [1, 5])
def test_without_epsilon(length: int) -> None:
    """The rows that fill up the last tile of a sequence add nothing to the weight's gradient."""
    x, gate, weight, dout = make(Case(length=length, heads=1))
    out = fused_gated_output_norm(x, gate, weight, 0, False)
    gradients = torch.autograd.grad(out, (x, gate, weight), dout)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, gate, weight)]
    wanted = torch.autograd.grad(
        reference.gated_output_norm(*exact, 0, False), exact, dout.double()
    )
    # Wide enough for the roundings to FP16; a lost or doubled row is off by far more.
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)


def test_zero_rows_and_zero_gates() -> None:
    case = Case(heads=2)
    x, gate, weight, dout = make(case)
    x, gate = x.detach().clone(), gate.detach().clone()
    x[0, 1], gate[1, 0] = 0, 0
    tensors = (x.requires_grad_(), gate.requires_grad_(), weight, dout)
    got, want = run(case, tensors), oracle(case, tensors)
    assert not got["out"][0, 1].any()
    assert not got["out"][1, 0].any()
    # A zero row has the gradient dy * w / sqrt(eps), and a zero gate dout * y / 2.
    for name, row in (("dx", (0, 1)), ("dgate", (1, 0))):
        assert want[name][row].any()
        torch.testing.assert_close(
            got[name][row].double(), want[name][row], rtol=2**-10, atol=2**-20
        )
    assert not got["dgate"][0, 1].any()
    assert not got["dx"][1, 0].any()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])
@pytest.mark.parametrize("magnitude", [30.0, 90.0, 60000.0])
def test_gates_far_out(sign: float, magnitude: float) -> None:
    case = Case(heads=1, gate_dtype=torch.float32)
    x, gate, weight, dout = make(case)
    gate = torch.full_like(gate, sign * magnitude).requires_grad_()
    x = (x.detach() / 65536).requires_grad_()  # out stays within FP16
    tensors = (x, gate, weight, dout / 65536)
    got, want = run(case, tensors), oracle(case, tensors)
    for name in got:
        assert bool(got[name].isfinite().all())
        torch.testing.assert_close(
            got[name].double(), want[name], rtol=2**-8, atol=2**-12, check_dtype=False
        )


@pytest.mark.parametrize(
    "needs",
    [
        (x, gate, weight)
        for x in (0, 1)
        for gate in (0, 1)
        for weight in (0, 1)
        if x + gate + weight
    ],
    ids=lambda needs: "x{}-gate{}-weight{}".format(*needs),
)
def test_computes_only_the_gradients_asked_for(
    needs: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(heads=3)
    *inputs, dout = make(case)
    want = run(case, (*inputs, dout))
    leaves = [t.detach().requires_grad_(bool(need)) for t, need in zip(inputs, needs, strict=True)]
    out = fused_gated_output_norm(*leaves, EPS)

    handed: list[tuple[bool, ...]] = []
    kernel = fusion._backward_kernel

    class Watched:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **kwargs: Any) -> None:
                handed.append(tuple(pointer is not None for pointer in args[4:7]))
                kernel[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(fusion, "_launch_backward_kernel", KernelLauncher(Watched()))
    out.backward(dout)
    assert handed == [tuple(map(bool, needs))]
    for leaf, need, name in zip(leaves, needs, ("dx", "dgate", "dweight"), strict=True):
        assert (leaf.grad is not None) == bool(need)
        if leaf.grad is not None:
            assert torch.equal(leaf.grad, want[name])


class _Operators(TorchDispatchMode):
    """Names of the torch operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class _NoKernel:
    """Takes the place of a kernel; keeps what it was launched with."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.args: tuple[Any, ...] = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.grids.append(grid)
            self.args = args

        return launch


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, _NoKernel]:
    stubs = {name: _NoKernel() for name in ("forward", "backward", "sum_partials")}
    for name, stub in stubs.items():
        monkeypatch.setattr(fusion, f"_launch_{name}_kernel", KernelLauncher(stub))
    return stubs


@pytest.mark.parametrize("layout", ["projection", "heads_first", "sliced", "strided_elements"])
def test_reads_every_layout_in_place(
    layout: str, no_kernels: dict[str, _NoKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the poison would show among the operators
    for name, stub in no_kernels.items():
        monkeypatch.setattr(fusion, f"_launch_{name}_kernel", KernelLauncher(stub))
    case = Case(x_layout=layout, gate_layout=layout, dout_layout=layout)
    x, gate, weight, dout = make(case)
    with _Operators() as operators:
        out = fused_gated_output_norm(x, gate, weight, EPS)
        fusion.launch_backward(dout, x.detach(), gate.detach(), weight.detach(), EPS, False)
    assert set(operators.names) <= {"empty", "empty_like", "detach"}
    forward, backward = no_kernels["forward"].args, no_kernels["backward"].args
    for args, expected in ((forward, (x, gate, weight, out)), (backward, (x, gate, weight, dout))):
        assert [a.data_ptr() for a in args[:4]] == [t.data_ptr() for t in expected]


def test_the_grid_of_a_huge_input_is_one_dimensional(no_kernels: dict[str, _NoKernel]) -> None:
    x = torch.zeros(1, 1, 1, 16, device="meta", dtype=torch.bfloat16).expand(64, 2**20, 64, 16)
    fusion.launch_forward(x, x, x[0, 0, 0], EPS, False)
    (grid,) = no_kernels["forward"].grids
    config = fusion.forward_launch(64, 16)
    assert grid == (64 * 2**20 * 64 // (config.tile_tokens * config.tile_heads),)
    assert 65535 < grid[0] < 2**31


def test_is_reproducible_bit_for_bit() -> None:
    case = Case(batch=3, length=7, heads=3, dtype=torch.bfloat16)
    first, second = run(case, make(case)), run(case, make(case))
    for name in first:
        assert torch.equal(first[name], second[name])


@pytest.mark.parametrize(
    "config",
    [
        LaunchConfig(1, 1, 1, 1, 0),
        LaunchConfig(2, 2, 2, 1, 1),
        LaunchConfig(4, 1, 4, 1, 3),
        LaunchConfig(8, 4, 4, 1, 64),
    ],
    ids=lambda c: (
        f"tokens{c.tile_tokens}-heads{c.tile_heads}-programs{c.programs_per_multiprocessor}"
    ),
)
def test_any_launch_configuration_gives_the_same_result(config: LaunchConfig) -> None:
    case = Case(batch=2, length=5, heads=4, zero_centered=True)
    x, gate, weight, dout = make(case)
    want, allowed = (f(case, (x, gate, weight, dout)) for f in (run, tolerances))
    x, gate, weight = x.detach(), gate.detach(), weight.detach()
    out = fusion.launch_forward(x, gate, weight, EPS, True, config)
    dx, dgate, dweight = fusion.launch_backward(dout, x, gate, weight, EPS, True, config=config)
    # A row is reduced in one program, in an order that the layout of the tile decides.
    for name, got in (("out", out), ("dx", dx), ("dgate", dgate), ("dweight", dweight)):
        assert got is not None
        assert bool(((got.double() - want[name].double()).abs() <= allowed[name]).all()), name


@pytest.mark.parametrize("dout_requires_grad", [False, True], ids=["penalty", "through_dout"])
def test_second_order_autograd_raises(dout_requires_grad: bool) -> None:
    x, gate, weight, dout = make(Case())
    out = fused_gated_output_norm(x, gate, weight, EPS)
    dout.requires_grad_(dout_requires_grad)
    (dx,) = torch.autograd.grad(out, x, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="first-order autograd"):
        dx.float().square().sum().backward()


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"eps": 10**400}, "eps to be a finite number of at least 0, got 1000"),
        ({"zero_centered_gamma": []}, "zero_centered_gamma to be a bool, got []"),
        ({"zero_centered_gamma": 1}, "zero_centered_gamma to be a bool, got 1"),
        ({"zero_centered_gamma": torch.tensor(True)}, "zero_centered_gamma to be a bool, got ten"),
    ],
    ids=["eps_beyond_floats", "list", "int", "tensor"],
)
def test_numbers_that_no_kernel_takes(changes: dict[str, Any], rule: str) -> None:
    x, gate, weight, _ = make(Case())
    with pytest.raises(ValueError, match=re.escape(rule)):
        fused_gated_output_norm(**{"x": x, "gate": gate, "weight": weight, "eps": EPS} | changes)


def test_without_gradients_nothing_is_kept() -> None:
    x, gate, weight, _ = make(Case())
    assert fused_gated_output_norm(x.detach(), gate.detach(), weight.detach(), EPS).grad_fn is None
    with torch.no_grad():
        assert not fused_gated_output_norm(x, gate, weight, EPS).requires_grad


def test_the_forward_saves_only_its_inputs() -> None:
    x, gate, weight, _ = make(Case())
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.data_ptr()) or t, lambda t: t
    ):
        fused_gated_output_norm(x, gate, weight, EPS)
    assert saved == [x.data_ptr(), gate.data_ptr(), weight.data_ptr()]


@pytest.mark.parametrize("launch", [fusion.forward_launch, fusion.backward_launch])
@pytest.mark.parametrize("head_dim", [2**k for k in range(13)], ids=lambda d: f"d{d}")
def test_every_launch_configuration_is_sound(
    launch: Callable[[int, int], LaunchConfig], head_dim: int
) -> None:
    for heads in (1, 2, 3, 4, 6, 12, 16, 24, 31, 32, 48, 64, 128):
        config = launch(heads, head_dim)
        rows = config.tile_tokens * config.tile_heads
        assert heads % config.tile_heads == 0
        for count in (config.tile_tokens, config.tile_heads, config.num_warps):
            assert count & (count - 1) == 0
        assert 1 <= config.num_warps <= 16
        assert rows * head_dim <= max(head_dim, 8192)
        assert launch(heads, head_dim) is config


def test_launch_configuration_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        fusion.forward_launch(32, 128).num_warps = 2  # type: ignore[misc]


def test_programs_are_bounded_by_the_device_and_by_the_work() -> None:
    config = LaunchConfig(1, 8, 4, 1, 6)
    assert config.programs(10, multiprocessors=132) == 10
    assert config.programs(10**6, multiprocessors=132) == 792
    assert dataclasses.replace(config, programs_per_multiprocessor=0).programs(10**6, 132) == 10**6


def test_the_sum_of_more_partials_than_one_block_holds() -> None:
    partials, head_dim = 2 * fusion.PARTIAL_ROWS + 3, 16
    partial = torch.randn(partials, head_dim, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    total = torch.zeros(head_dim, device=DEVICE)
    fusion._sum_partials_kernel[(head_dim // fusion.PARTIAL_COLUMNS,)](
        partial, total, partials, head_dim, fusion.PARTIAL_ROWS, fusion.PARTIAL_COLUMNS
    )
    torch.testing.assert_close(
        total.double(), partial.double().sum(0), rtol=1e-5, atol=1e-5, check_dtype=False
    )
