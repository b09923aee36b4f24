# SPDX-License-Identifier: Apache-2.0
"""A model split over ranks in every way equals the whole model: loss and every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.distributed.layer_on_ranks import EVERY_CASE, NORM, PRE, RECOMPUTE, Case
from tests.distributed.model_on_ranks import Layout, compare_models
from tests.distributed.ranks import skip_unless_fast, start_ranks

pytestmark = pytest.mark.distributed

NORM_OPTIONS, BOTH_OPTIONS = {**NORM, **RECOMPUTE}, {**PRE, **NORM, **RECOMPUTE}
UNFUSED = Case("unfused", torch.float32)
UNFUSED_PACKED = Case("unfused", torch.float32, packed=True)
NORM_RECOMPUTED = Case("norm_recomputed", torch.float16, NORM_OPTIONS)
NORM_PACKED = Case("norm_recomputed", torch.float16, NORM_OPTIONS, packed=True)
BOTH_RECOMPUTED = Case("both_recomputed", torch.float16, BOTH_OPTIONS)
BOTH_PACKED = Case("both_recomputed", torch.float16, BOTH_OPTIONS, packed=True)

PP2, INTERLEAVED = Layout(pp=2), Layout(pp=2, chunks=2, layers=4)
# Smaller where the stage before the recurrence is fused: up to a second for each layer and
# microbatch in Triton's interpreter. test_layer_parallel has it in FP32.
CASES = {
    "tp2": (Layout(tp=2), [UNFUSED, UNFUSED_PACKED, NORM_RECOMPUTED]),
    "tp2_both": (Layout(tp=2, layers=1), [BOTH_PACKED]),
    "cp2": (Layout(cp=2), [UNFUSED, UNFUSED_PACKED, NORM_RECOMPUTED]),
    "cp2_both": (Layout(cp=2, layers=1), [BOTH_PACKED]),
    "tp2_cp2": (Layout(tp=2, cp=2, heads=4), [UNFUSED, UNFUSED_PACKED, NORM_PACKED]),
    "pp2": (replace(PP2, microbatches=4), [UNFUSED, UNFUSED_PACKED, NORM_PACKED]),
    "pp2_both": (PP2, [BOTH_PACKED]),
    "interleaved": (replace(INTERLEAVED, microbatches=4), [UNFUSED, NORM_RECOMPUTED]),
    "interleaved_both": (INTERLEAVED, [BOTH_RECOMPUTED]),
    "dp2": (Layout(dp=2), [UNFUSED, UNFUSED_PACKED]),
    "dp2_both": (Layout(dp=2, layers=1), [BOTH_RECOMPUTED, BOTH_PACKED]),
    "distributed_optimizer": (
        Layout(dp=2, distributed_optimizer=True),
        [UNFUSED_PACKED, NORM_RECOMPUTED],
    ),
}


def tolerance(case: Case, layout: Layout) -> float:
    """Largest difference over largest value, of the loss and of every gradient.

    Pipeline and data parallelism run the same operations, and microbatches add up in another order
    at most: 0 to 1 ulp seen. Tensor and context parallelism sum over ranks inside layers; norms and
    the way back magnify these ulps: 170 seen in FP32, 46 in FP16. On a GPU cuBLAS orders sums by
    shape besides. A wrong slice or a part that is missing is off by 0.1 to 1; test_layer_parallel
    is sharper, with one layer and more tokens.
    """
    ulp = {torch.float32: 2**-23, torch.float16: 2**-11}[case.dtype]
    if layout.tp == layout.cp == 1:
        return 16 * ulp if case.dtype == torch.float32 else 4 * ulp
    return 512 * ulp if case.dtype == torch.float32 else 128 * ulp


@pytest.mark.parametrize("name", CASES)
def test_split_model_equals_the_whole(name: str) -> None:
    compare_with_the_whole(*CASES[name])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2),
        Layout(cp=2),
        PP2,
        INTERLEAVED,
        Layout(dp=2),
        Layout(dp=2, distributed_optimizer=True),
    ],
    ids=["tp2", "cp2", "pp2", "interleaved", "dp2", "distributed_optimizer"],
)
def test_every_combination(layout: Layout) -> None:
    skip_unless_fast(2)
    compare_with_the_whole(layout, EVERY_CASE, timeout=800.0)


def compare_with_the_whole(layout: Layout, cases: list[Case], timeout: float = 200.0) -> None:
    by_rank = start_ranks(compare_models, layout.ranks, cases, layout, timeout=timeout)
    failures = [
        f"rank {rank}, {case}, {tensor}: {error:.2e} > {tolerance(case, layout):.2e}"
        for rank, found in enumerate(by_rank)
        for case, errors in zip(cases, found, strict=True)
        for tensor, error in errors.items()
        if not error <= tolerance(case, layout)
    ]
    assert not failures, "\n".join(failures)
    # The last pipeline rank says the loss, and together they hold every parameter.
    for number in range(len(cases)):
        assert "loss" in by_rank[-1][number]
        tensors = sum(len(found[number]) for found in by_rank[:: layout.ranks // layout.pp])
        assert tensors == 4 + 10 * layout.layers
