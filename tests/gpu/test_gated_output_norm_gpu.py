# SPDX-License-Identifier: Apache-2.0
"""The fused output norm at real sizes on a GPU: parity, reproducibility, launches, memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron.gdn import reference
from megatron.gdn.fusions import gated_output_norm as fusion
from megatron.gdn.fusions.gated_output_norm import fused_gated_output_norm

EPS = 1e-6
BATCH, LENGTH, HEADS, HEAD_DIM = 4, 4096, 32, 128
TOLERANCE = 2.0**-8
"""Relative error in the Frobenius norm. Two BF16 roundings have a root mean square of 2.3e-3; an
element left unwritten or a row normalised with another row's scale is far outside."""


def projection_slice(
    batch: int,
    length: int,
    heads: int,
    head_dim: int,
    extra: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """A gate as the layer hands it over: channels of the projection `[s, b, C]`."""
    before, channels = 2 * 16 * head_dim + heads * head_dim, heads * head_dim
    width = before + channels + 2 * heads + extra
    projection = normal(length, batch, width, dtype=dtype)
    sliced = projection.transpose(0, 1)[..., before : before + channels]
    return sliced.unflatten(-1, (heads, head_dim))


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def leaves(
    batch: int = BATCH, length: int = LENGTH, heads: int = HEADS, head_dim: int = HEAD_DIM
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return (
        normal(batch, length, heads, head_dim).requires_grad_(),
        projection_slice(batch, length, heads, head_dim).requires_grad_(),
        (1 + 0.2 * normal(head_dim)).requires_grad_(),
    )


def forward_backward(
    inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = fused_gated_output_norm(*inputs, EPS, zero_centered)
    return (out.detach(), *torch.autograd.grad(out, inputs, dout))


def token_chunks(length: int, size: int) -> Iterator[slice]:
    for begin in range(0, length, size):
        yield slice(begin, min(begin + size, length))


def relative_errors(
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    got: tuple[Tensor, Tensor, Tensor, Tensor],
    zero_centered: bool = False,
    chunk: int = 256,
) -> dict[str, float]:
    """Against the float64 reference, which takes `chunk` tokens at a time."""
    x, gate, weight = (t.detach() for t in inputs)
    names = ("out", "dx", "dgate", "dweight")
    wrong, norm = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    weight = weight.double().requires_grad_()
    dweight = torch.zeros_like(weight)

    def add(name: str, mine: Tensor, want: Tensor) -> None:
        wrong[name] += (mine.double() - want).square().sum().item()
        norm[name] += want.square().sum().item()

    for tokens in token_chunks(x.shape[1], chunk):
        x_, gate_ = (t[:, tokens].double().requires_grad_() for t in (x, gate))
        out = reference.gated_output_norm(x_, gate_, weight, EPS, zero_centered)
        grads = torch.autograd.grad(out, (x_, gate_, weight), dout[:, tokens].double())
        add("out", got[0][:, tokens], out.detach())
        add("dx", got[1][:, tokens], grads[0])
        add("dgate", got[2][:, tokens], grads[1])
        dweight += grads[2]
    add("dweight", got[3], dweight)
    return {name: (wrong[name] / norm[name]) ** 0.5 for name in names}


def assert_parity(*args: object, **kwargs: object) -> None:
    errors = relative_errors(*args, **kwargs)  # type: ignore[arg-type]
    # Written so that a NaN fails.
    assert all(error <= TOLERANCE for error in errors.values()), errors


@pytest.mark.parametrize("zero_centered", [False, True], ids=["plain", "zero_centered"])
def test_parity_at_the_shape_of_a_large_model(zero_centered: bool) -> None:
    inputs, dout = leaves(), normal(BATCH, LENGTH, HEADS, HEAD_DIM)
    assert_parity(inputs, dout, forward_backward(inputs, dout, zero_centered), zero_centered)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("heads", [1, 3, 4, 32], ids=lambda h: f"h{h}")
def test_parity_with_nothing_contiguous(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    batch, length = 3, 517
    torch.manual_seed(2)
    x = normal(batch, heads, length, head_dim, dtype=dtype).transpose(1, 2)
    # Two channels more: the strides of the gate are no multiple of 16 bytes.
    gate = projection_slice(batch, length, heads, head_dim, extra=2, dtype=dtype)
    inputs = (x.requires_grad_(), gate.requires_grad_(), normal(head_dim).float().requires_grad_())
    for dout in (
        normal(1, 1, 1, 1, dtype=dtype).expand(batch, length, heads, head_dim),
        normal(batch, length, 2 * heads, head_dim + 1, dtype=dtype)[:, :, ::2, 1:],
        normal(batch, head_dim, length, heads, dtype=dtype).permute(0, 2, 3, 1),
    ):
        assert_parity(inputs, dout, forward_backward(inputs, dout))


def test_parity_with_a_float32_gate() -> None:
    inputs = leaves(length=777)
    gate = inputs[1].detach().float().requires_grad_()
    dout = normal(BATCH, 777, HEADS, HEAD_DIM)
    got = forward_backward((inputs[0], gate, inputs[2]), dout)
    assert got[2].dtype == torch.float32
    assert_parity((inputs[0], gate, inputs[2]), dout, got)


def test_parity_beyond_the_limits_of_the_small_grid_axes() -> None:
    inputs, dout = leaves(batch=70_000, length=2, heads=1, head_dim=16), normal(70_000, 2, 1, 16)
    assert_parity(inputs, dout, forward_backward(inputs, dout))


def test_parity_beyond_two_to_the_31_elements() -> None:
    length = 2**31 // (HEADS * HEAD_DIM) + 100
    free, _ = torch.cuda.mem_get_info()
    if free < 8 * 2 * 2**31:
        pytest.skip("needs 32 GiB of free GPU memory")
    # The recurrence output with heads first: also the offset of a head passes 2^31.
    x = normal(1, HEADS, length, HEAD_DIM).transpose(1, 2)
    gate, dout = normal(1, length, HEADS, HEAD_DIM), normal(1, length, HEADS, HEAD_DIM)
    assert x.numel() > 2**31
    inputs = (x.requires_grad_(), gate.requires_grad_(), normal(HEAD_DIM).requires_grad_())
    assert_parity(inputs, dout, forward_backward(inputs, dout), chunk=16384)


def test_is_reproducible_bit_for_bit() -> None:
    inputs, dout = leaves(), normal(BATCH, LENGTH, HEADS, HEAD_DIM)
    first = forward_backward(inputs, dout)
    for _ in range(3):
        for mine, other in zip(first, forward_backward(inputs, dout), strict=True):
            assert torch.equal(mine, other)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    inputs, dout = leaves(), normal(BATCH, LENGTH, HEADS, HEAD_DIM)
    whole = forward_backward(inputs, dout)
    tokens = slice(1000, 1003)
    few = (inputs[0].detach()[:, tokens], inputs[1].detach()[:, tokens], inputs[2].detach())
    part = forward_backward(tuple(t.requires_grad_() for t in few), dout[:, tokens])  # type: ignore[arg-type]
    for mine, other in zip(whole[:3], part[:3], strict=True):
        assert torch.equal(mine[:, tokens], other)


def test_never_waits_for_the_device() -> None:
    inputs, dout = leaves(length=64), normal(BATCH, 64, HEADS, HEAD_DIM)
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_backward(inputs, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_replays_on_new_data() -> None:
    inputs, dout = leaves(length=256), normal(BATCH, 256, HEADS, HEAD_DIM)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward_backward(inputs, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_backward(inputs, dout)
    for seed in (5, 6):
        torch.manual_seed(seed)
        with torch.no_grad():
            for tensor in (*inputs, dout):
                tensor.normal_()
        graph.replay()
        for mine, other in zip(captured, forward_backward(inputs, dout), strict=True):
            assert torch.equal(mine, other)


def test_runs_on_the_current_stream() -> None:
    inputs, dout = leaves(length=512), normal(BATCH, 512, HEADS, HEAD_DIM)
    want = forward_backward(inputs, dout)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = (inputs[0].detach() * 1).requires_grad_()
        got = forward_backward((late, *inputs[1:]), dout)
    side.synchronize()
    for mine, other in zip(want, got, strict=True):
        assert torch.equal(mine, other)


def test_a_new_length_or_batch_compiles_nothing() -> None:
    device = torch.cuda.current_device()

    def compiled() -> int:
        kernels = (fusion._forward_kernel, fusion._backward_kernel, fusion._sum_partials_kernel)
        return sum(len(kernel.device_caches[device][0]) for kernel in kernels)

    def step(batch: int, length: int) -> None:
        forward_backward(leaves(batch, length), normal(batch, length, HEADS, HEAD_DIM))

    step(2, 64)
    before = compiled()
    for batch, length in ((2, 1), (1, 7), (3, 128), (4, 1000), (1, 4096), (1, 1), (16, 15)):
        step(batch, length)
    assert compiled() == before


def test_allocates_its_results_and_a_small_workspace() -> None:
    inputs, dout = leaves(), normal(BATCH, LENGTH, HEADS, HEAD_DIM)
    size = inputs[0].numel() * inputs[0].element_size()

    def peak_of(call: object) -> tuple[int, object]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()  # type: ignore[operator]
        return torch.cuda.max_memory_allocated() - before, result

    forward_peak, out = peak_of(lambda: fused_gated_output_norm(*inputs, EPS))
    backward_peak, _ = peak_of(lambda: torch.autograd.grad(out, inputs, dout))  # type: ignore[arg-type]
    workspace = 4 * 2**20
    assert size <= forward_peak <= size + workspace
    assert 2 * size <= backward_peak <= 2 * size + workspace


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_device_of_its_inputs() -> None:
    inputs, dout = leaves(length=64), normal(BATCH, 64, HEADS, HEAD_DIM)
    want = forward_backward(inputs, dout)
    moved = tuple(t.detach().to("cuda:1").requires_grad_() for t in inputs)
    got = forward_backward(moved, dout.to("cuda:1"))  # type: ignore[arg-type]
    assert torch.cuda.current_device() == 0
    for mine, other in zip(want, got, strict=True):
        assert torch.equal(mine, other.to("cuda:0"))
