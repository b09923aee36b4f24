# SPDX-License-Identifier: Apache-2.0
"""The fused stage `pre_gated_delta_rule` at real sizes on a GPU: parity, limits, launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.gdn import reference
from megatron.gdn.fusions import pre_gated_delta_rule as fusion
from megatron.gdn.fusions.pre_gated_delta_rule import HeadSizes, fused_pre_gated_delta_rule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

OUTPUTS = ("q", "k", "v", "gate", "beta", "g")
TARGET = HeadSizes(16, 32, 128, 128)
TINY = HeadSizes(1, 2, 16, 16)
WIDTH = 4
# Relative errors in the Frobenius norm. A row is rounded twice, each time with a root mean square
# of 0.58 units of roundoff; a chunk that loses a token past its end, 1 of 128, is off by 9 percent.
TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 4e-6}


@dataclass(frozen=True)
class Call:
    """Inputs of one call, leaves that require gradients, and the incoming gradients."""

    sizes: HeadSizes
    inputs: dict[str, Tensor | None]
    gradients: tuple[Tensor, ...]
    cu_seqlens: Tensor | None = None

    def forward(self) -> tuple[Tensor, ...]:
        return fused_pre_gated_delta_rule(
            **self.inputs, **self.sizes._asdict(), cu_seqlens=self.cu_seqlens
        )

    def leaves(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.inputs.items() if tensor is not None}

    def forward_backward(self) -> dict[str, Tensor]:
        outputs, leaves = self.forward(), self.leaves()
        found = torch.autograd.grad(outputs, tuple(leaves.values()), self.gradients)
        results = {name: out.detach() for name, out in zip(OUTPUTS, outputs, strict=True)}
        return results | {f"d{name}": grad for name, grad in zip(leaves, found, strict=True)}

    def tokens(self, begin: int, end: int) -> Call:
        """The same call on some of the tokens."""
        x = self.inputs["qkvzba"]
        assert x is not None
        inputs = self.inputs | {"qkvzba": x.detach()[begin:end].requires_grad_()}
        return Call(self.sizes, inputs, tuple(d[:, begin:end] for d in self.gradients))


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def make(
    sizes: HeadSizes = TARGET,
    batch: int = 4,
    length: int = 4096,
    *,
    dtype: torch.dtype = torch.bfloat16,
    width: int = WIDTH,
    bias: bool = False,
    documents: list[int] | None = None,
) -> Call:
    torch.manual_seed(1)
    heads = sizes.num_value_heads
    inputs = {
        "qkvzba": normal(length, batch, sizes.channels, dtype=dtype),
        "conv_weight": (0.5 * normal(sizes.conv_channels, 1, width)).to(dtype),
        "conv_bias": (0.3 * normal(sizes.conv_channels)).to(dtype) if bias else None,
        "A_log": 0.5 * normal(heads) + 1,
        "dt_bias": normal(heads),
    }
    for tensor in inputs.values():
        if tensor is not None:
            tensor.requires_grad_()
    dims = (sizes.key_head_dim, sizes.key_head_dim, sizes.value_head_dim, sizes.value_head_dim)
    gradients = (
        *(normal(batch, length, heads, dim, dtype=dtype) for dim in dims),
        normal(batch, length, heads),
        normal(batch, length, heads),
    )
    cu_seqlens = None
    if documents is not None:
        ends = torch.tensor([0, *documents]).cumsum(0)
        assert ends[-1] == length
        cu_seqlens = ends.to("cuda", torch.int32)
    return Call(sizes, inputs, gradients, cu_seqlens)


def reference_results(call: Call) -> dict[str, Tensor]:
    """In float64, one batch entry at a time, rounded to float32 for memory."""
    parts = []
    x = call.inputs["qkvzba"]
    assert x is not None
    for entry in range(x.shape[1]):
        inputs = {
            name: None if t is None else t.detach().double().requires_grad_()
            for name, t in (call.inputs | {"qkvzba": x[:, entry : entry + 1]}).items()
        }
        outputs = reference.pre_gated_delta_rule(
            **inputs, **call.sizes._asdict(), cu_seqlens=call.cu_seqlens
        )
        leaves = {name: t for name, t in inputs.items() if t is not None}
        gradients = [d[entry : entry + 1].double() for d in call.gradients]
        found = torch.autograd.grad(outputs, tuple(leaves.values()), gradients)
        parts.append(
            {name: out.detach().float() for name, out in zip(OUTPUTS, outputs, strict=True)}
            | {f"d{name}": grad.float() for name, grad in zip(leaves, found, strict=True)}
        )
    return {
        name: torch.cat(values, dim=1 if name == "dqkvzba" else 0)
        if name in OUTPUTS or name == "dqkvzba"
        else torch.stack(values).sum(0)
        for name in parts[0]
        for values in [[part[name] for part in parts]]
    }


def assert_parity(call: Call) -> None:
    x = call.inputs["qkvzba"]
    assert x is not None
    got, want = call.forward_backward(), reference_results(call)
    errors = {
        name: ((value.double() - want[name]).norm() / want[name].double().norm()).item()
        for name, value in got.items()
    }
    assert errors.keys() == want.keys()
    limits = dict.fromkeys(errors, TOLERANCE[x.dtype]) | {"beta": 2e-6, "g": 2e-6}
    # Written so that a NaN fails.
    assert all(error <= limits[name] for name, error in errors.items()), errors


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def random_documents(total: int, seed: int, longest: int = 3000) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    documents: list[int] = []
    while sum(documents) < total:
        draw = int(torch.randint(0, longest, (1,), generator=generator))
        documents.append(min(draw, total - sum(documents)))
    return documents


@pytest.mark.parametrize(
    "sizes",
    [TARGET, HeadSizes(16, 64, 128, 128), HeadSizes(3, 9, 96, 192), HeadSizes(2, 16, 256, 64)],
    ids=lambda s: "hk{}-hv{}-dk{}-dv{}".format(*s[:4]),
)
def test_parity_bf16(sizes: HeadSizes) -> None:
    assert_parity(make(sizes))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("width", range(2, 9), ids=lambda w: f"w{w}")
def test_parity_of_widths(width: int, dtype: torch.dtype) -> None:
    sizes = HeadSizes(4, 8, 128, 128, use_qk_l2norm=width % 2 == 0)
    assert_parity(make(sizes, 2, 1037, dtype=dtype, width=width, bias=True))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8], ids=lambda g: f"group{g}")
def test_parity_of_packed_documents(group: int) -> None:
    documents = [0, 1, 2, 3, 1, 0, 0, *random_documents(4096 - 7, seed=group, longest=400)]
    sizes = HeadSizes(4, 4 * group, 128, 128)
    assert_parity(make(sizes, 1, 4096, bias=group % 2 == 0, documents=documents))


def test_parity_of_many_documents() -> None:
    """70,000 documents of 0 to 3 tokens, none as long as the convolution is wide."""
    lengths = torch.randint(0, 4, (70_000,), generator=torch.Generator().manual_seed(2)).tolist()
    assert_parity(make(TINY, 1, sum(lengths), dtype=torch.float16, documents=lengths))


def test_many_documents_cost_no_more_than_few() -> None:
    def milliseconds(documents: list[int]) -> float:
        call = make(TARGET, 1, 65_536 * 2, documents=documents)
        call.forward()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)
        start.record()
        for _ in range(5):
            call.forward()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 5

    few, many = milliseconds([65_536] * 2), milliseconds([2] * 65_536)
    assert many < 1.1 * few, (many, few)


def test_a_packed_batch_equals_its_documents_bitwise() -> None:
    documents = random_documents(8192, seed=9)
    call = make(TARGET, 1, 8192, documents=documents)
    packed = call.forward_backward()
    begin = 0
    for length in documents:
        if length:
            single = call.tokens(begin, begin + length).forward_backward()
            for name in OUTPUTS:
                assert torch.equal(packed[name][:, begin : begin + length], single[name]), name
        begin += length


@pytest.mark.parametrize("documents", [None, [5, 0, 1, 4090]], ids=["dense", "packed"])
def test_is_reproducible_bit_for_bit(documents: list[int] | None) -> None:
    call = make(batch=1 if documents else 4, bias=True, documents=documents)
    first = call.forward_backward()
    for _ in range(3):
        assert_equal(call.forward_backward(), first)


def assert_windows_equal(call: Call, windows: list[int], size: int = 64) -> None:
    """Tokens of the whole run, bitwise, against runs on those tokens and their neighbours."""
    whole = call.forward_backward()
    halo = WIDTH - 1
    for begin in windows:
        part = call.tokens(begin - halo, begin + size + halo).forward_backward()
        for name in OUTPUTS:
            assert torch.equal(whole[name][:, begin : begin + size], part[name][:, halo:-halo])
        assert torch.equal(whole["dqkvzba"][begin : begin + size], part["dqkvzba"][halo:-halo])


def test_beyond_two_to_the_31_elements() -> None:
    per_token = TARGET.num_value_heads * TARGET.key_head_dim
    length = 2**31 // per_token + 3000
    free, _ = torch.cuda.mem_get_info()
    if free < 80 * 2**30:
        pytest.skip("needs 80 GiB of free GPU memory")
    call = make(batch=1, length=length)
    assert length * per_token > 2**31
    near = [2**31 // TARGET.channels, 2**31 // per_token]
    assert_windows_equal(
        call, [3, *(n + shift for n in near for shift in (-64, 0, 64)), length - 67]
    )


def test_beyond_a_million_tokens() -> None:
    call = make(TINY, 1, 1_200_000, dtype=torch.float32)
    assert_windows_equal(call, [3, 1_048_576 - 32, 1_200_000 - 67])
    assert_parity(call)


def test_beyond_the_limits_of_the_small_grid_axes_in_the_batch() -> None:
    call = make(TINY, 70_000, 2, dtype=torch.float16)
    got = call.forward_backward()
    x = call.inputs["qkvzba"]
    assert x is not None
    last = Call(
        TINY,
        call.inputs | {"qkvzba": x.detach()[:, -3:].requires_grad_()},
        tuple(d[-3:] for d in call.gradients),
    ).forward_backward()
    for name in OUTPUTS:
        assert torch.equal(got[name][-3:], last[name])
    assert torch.equal(got["dqkvzba"][:, -3:], last["dqkvzba"])


@pytest.mark.parametrize("documents", [None, [100, 0, 1, 155]], ids=["dense", "packed"])
def test_never_waits_for_the_device(documents: list[int] | None) -> None:
    call = make(batch=1 if documents else 4, length=256, bias=True, documents=documents)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.forward_backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_a_captured_graph_replays_on_new_data(packed: bool) -> None:
    documents = [100, 28, 0, 128]
    call = make(batch=1 if packed else 3, length=256, documents=documents if packed else None)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call.forward_backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call.forward_backward()
    for seed in (5, 6):
        torch.manual_seed(seed)
        with torch.no_grad():
            for tensor in (*call.leaves().values(), *call.gradients):
                tensor.normal_()
            if call.cu_seqlens is not None:
                call.cu_seqlens[1:4] = torch.tensor([seed, seed + 1, 200], device="cuda")
        graph.replay()
        replayed = {name: value.clone() for name, value in captured.items()}
        assert_equal(call.forward_backward(), replayed)


def compiled_kernels() -> int:
    device = torch.cuda.current_device()
    kernels = (
        fusion._pre_gated_delta_rule_forward_kernel,
        fusion._pre_gated_delta_rule_backward_kernel,
        fusion._document_lookback_kernel,
        fusion._sum_parts_kernel,
    )
    return sum(len(kernel.device_caches[device][0]) for kernel in kernels)


# 100 channels in the second and head sizes in the third are no multiples of the 8 of a vector.
@pytest.mark.parametrize(
    "sizes",
    [TARGET, TINY, HeadSizes(1, 1, 20, 3)],
    ids=lambda s: "hk{}-hv{}-dk{}-dv{}".format(*s[:4]),
)
def test_new_lengths_and_packings_compile_nothing(sizes: HeadSizes) -> None:
    make(sizes, batch=2, length=64).forward_backward()
    make(sizes, batch=1, length=64, documents=[60, 4]).forward_backward()
    before = compiled_kernels()
    for step in range(20):
        length = (1, 2, 3, 16, 17, 127, 500, 1024, 2049, 5000)[step % 10] + step
        make(sizes, batch=1 + step % 4, length=length).forward_backward()
        documents = random_documents(length, seed=step, longest=2 + length // 2)
        make(sizes, batch=1, length=length, documents=documents).forward_backward()
    assert compiled_kernels() == before


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_memory_kept_for_backward(packed: bool) -> None:
    """The outputs, which the recurrence keeps anyway; 388 MiB at this shape, and a byte a token."""
    batch, length = (1, 16_384) if packed else (4, 4096)
    call = make(batch=batch, length=length, documents=[length // 16] * 16 if packed else None)
    call.forward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    outputs = call.forward()
    kept = torch.cuda.memory_allocated() - before
    sizes = [
        o.numel() * o.element_size()
        for name, o in zip(OUTPUTS, outputs, strict=True)
        if name != "gate"
    ]
    expected = sum(sizes) + (length if packed else 0)
    print(
        f"kept for backward: {kept / 2**20:.1f} MiB, of which outputs {sum(sizes) / 2**20:.1f} MiB"
    )
    assert expected <= kept <= expected + 2**20


def test_workspace_of_backward_is_small() -> None:
    call = make()
    outputs, leaves = call.forward(), call.leaves()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(outputs, tuple(leaves.values()), call.gradients)
    extra = torch.cuda.max_memory_allocated() - before
    gradients = sum(t.numel() * t.element_size() for t in leaves.values())
    assert extra <= 1.1 * gradients


def test_runs_on_the_current_stream() -> None:
    call = make(length=512)
    want = call.forward_backward()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x = call.inputs["qkvzba"]
        assert x is not None
        late = Call(
            call.sizes, call.inputs | {"qkvzba": (x.detach() * 1).requires_grad_()}, call.gradients
        )
        got = late.forward_backward()
    side.synchronize()
    assert_equal(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_a_device_that_is_not_current() -> None:
    call = make(length=64)
    want = call.forward_backward()
    inputs: dict[str, Any] = {
        name: t if t is None else t.detach().to("cuda:1").requires_grad_()
        for name, t in call.inputs.items()
    }
    got = Call(call.sizes, inputs, tuple(d.to("cuda:1") for d in call.gradients)).forward_backward()
    assert torch.cuda.current_device() == 0
    assert_equal({name: value.to("cuda:0") for name, value in got.items()}, want)
