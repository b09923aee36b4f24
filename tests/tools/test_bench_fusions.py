# SPDX-License-Identifier: Apache-2.0
"""The benchmark prints a figure only beside a passing parity check, and says why it has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.gdn.commands import bench_fusions
from megatron.gdn.commands.bench_cases import bench_cases
from megatron.gdn.commands.bench_cases.case import BenchCase, Implementation, Inputs, Stage
from megatron.gdn.commands.bench_cases.pre_gated_delta_rule import Shape
from megatron.gdn.fusions.pre_gated_delta_rule import HeadSizes


class FixedTimer:
    """Takes the place of the device timer, without a device."""

    def device_ms(self, call: Callable[[], object]) -> float:
        call()
        return 0.5

    def host_ms(self, call: Callable[[], object]) -> float:
        return 0.03


def doubled(inputs: Inputs) -> Stage:
    return lambda given: (2 * given["x"],)


def trebled(inputs: Inputs) -> Stage:
    return lambda given: (3 * given["x"],)


def absent(inputs: Inputs) -> Stage:
    raise ImportError("no package named peer")


def errors(
    inputs: Inputs,
    outputs: tuple[Tensor, ...],
    output_gradients: tuple[Tensor, ...],
    gradients: Mapping[str, Tensor],
) -> dict[str, float]:
    want = 2 * inputs["x"].detach()
    return {
        "out": ((outputs[0].detach() - want).norm() / want.norm()).item(),
        "dx": (gradients["x"] - 2).abs().max().item(),
    }


CASE = BenchCase(
    stage="doubling",
    label="n=8",
    forward_bytes=2_000_000,
    backward_bytes=6_000_000,
    make_inputs=lambda: {"x": torch.randn(8, requires_grad=True)},
    make_output_gradients=lambda: (torch.ones(8),),
    errors=errors,
    tolerance=1e-3,
    implementations=(
        Implementation("right", doubled, is_ours=True),
        Implementation("wrong", trebled),
        Implementation("absent", absent),
    ),
    consult=lambda inputs: lambda: inputs["x"],
)


def measured(name: str) -> bench_fusions.Measurement:
    (implementation,) = (i for i in CASE.implementations if i.name == name)
    timer: Any = FixedTimer()
    return bench_fusions.measure(CASE, implementation, timer, copy_bytes_per_second=4e9)


def test_an_implementation_with_parity_is_timed_against_the_floor() -> None:
    right = measured("right")
    assert right.parity
    assert (right.forward_floor_ms, right.forward_backward_floor_ms) == (0.5, 2.0)
    assert right.forward_ms == right.forward_backward_ms == 0.5
    assert right.host_forward_ms == 0.03


@pytest.mark.parametrize(
    ("name", "says"),
    [("wrong", "FAILS (out 5.0e-01, dx 1.0e+00 > 1.0e-03)"), ("absent", "no package named peer")],
)
def test_no_figure_without_parity(name: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    measurement = measured(name)
    assert not measurement.parity
    assert measurement.forward_ms is measurement.host_forward_ms is None
    timer: Any = FixedTimer()
    rows = [measured("right"), measurement]
    bench_fusions.print_table(rows, bench_fusions.consultation(CASE, timer))
    printed = capsys.readouterr().out
    assert "registry's part of the host time: 30.0 us" in printed
    row = next(line for line in printed.splitlines() if line.startswith(f"│ {name}"))
    assert says in row
    assert row.replace(says, "").count("0.5") == 0


def test_nan_is_no_parity() -> None:
    case = replace(CASE, errors=lambda *_: {"out": float("nan")})
    timer: Any = FixedTimer()
    assert not bench_fusions.measure(case, CASE.implementations[0], timer, 4e9).parity


def test_our_own_failure_is_not_swallowed() -> None:
    timer: Any = FixedTimer()
    with pytest.raises(ImportError):
        bench_fusions.measure(CASE, Implementation("ours", absent, is_ours=True), timer, 4e9)


def small_inputs(stage: str, shape: Shape) -> dict[str, Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = shape.sizes
    values = sizes.num_value_heads, sizes.value_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "qkvzba": (shape.length, 1, sizes.channels),
        "conv_weight": (sizes.conv_channels, 1, 4),
        "A_log": values[:1],
        "dt_bias": values[:1],
    }
    if stage == "gated_output_norm":
        shapes = {"x": (1, shape.length, *values), "gate": (1, shape.length, *values)}
    made = {name: torch.randn(size, device=device).half() for name, size in shapes.items()}
    if stage == "gated_output_norm":
        made["weight"] = torch.nn.Parameter(torch.ones(values[1], device=device).half())
    return made


@pytest.mark.parametrize("case", bench_cases()[:2], ids=lambda case: case.stage)
def test_ours_through_the_layer_gives_the_same(case: BenchCase) -> None:
    """The stand-in layer of the benchmark keeps up with the real one."""
    inputs = small_inputs(case.stage, Shape(HeadSizes(16, 32, 128, 128), 1, 2))
    ours = [implementation for implementation in case.implementations if implementation.is_ours]
    first, second = (implementation.build(inputs)(inputs) for implementation in ours)
    assert len(first) == len(second) > 0
    assert all(map(torch.equal, first, second))
    assert case.consult(inputs)() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_without_cuda_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_fusions.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_an_unknown_shape_lists_the_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_fusions.main(["--stage", "gated_output_norm", "--shape", "s=5"])
    assert "got 's=5'; there are ['gated_output_norm: b=4 s=4096 h=32" in capsys.readouterr().err


def test_every_case_has_ours_first_and_a_peer() -> None:
    for case in bench_cases():
        ours = [implementation.is_ours for implementation in case.implementations]
        assert ours[0]
        assert not ours[-1]
        assert ours == sorted(ours, reverse=True)
        assert case.forward_bytes > 0 < case.backward_bytes
