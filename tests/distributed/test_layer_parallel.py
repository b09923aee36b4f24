# SPDX-License-Identifier: Apache-2.0
"""A layer split over tensor- and context-parallel ranks equals the whole layer."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from tests.distributed.layer_on_ranks import (
    EVERY_CASE,
    NORM,
    PRE,
    RECOMPUTE,
    Case,
    compare_all,
    norm_gradient_of_one_rank_each,
)
from tests.distributed.ranks import RankError, enough_gpus, skip_unless_fast, start_ranks

pytestmark = pytest.mark.distributed

TOLERANCE = {
    "cpu": {torch.float32: 16 * 2**-23, torch.float16: 4 * 2**-11},
    "cuda": {torch.float32: 64 * 2**-23, torch.float16: 8 * 2**-11},
}
"""Largest difference over largest value, of the output and of every gradient.

Ranks compute the same products in the same precision. Sums over ranks (output projection, input
gradient, gradients of shared weights) add partial results that are rounded to the dtype each: half
an ulp for a part and half for the sum, at both projections. FP16 was seen to reach 1.8 ulp, FP32 3
(its own sums, of up to 100 terms, are ordered differently too). The wrong slice of A_log, dt_bias
or a convolution weight, or a gradient that lacks a rank's part, is off by 0.1 to 1. On a GPU cuBLAS
orders every product's sums by its shape as well, which is another for the whole layer, so that
more values of more tensors land on the other side of a rounding: twice as much for FP16, four times
for FP32.
"""

CASES = [
    Case(name, dtype, options, packed)
    for (name, dtype, options), packed in itertools.product(
        [
            ("unfused", torch.float32, {}),
            ("pre", torch.float32, PRE),
            ("unfused_recomputed", torch.float16, RECOMPUTE),
            ("norm", torch.float16, NORM),
            ("both_recomputed", torch.float16, {**PRE, **NORM, **RECOMPUTE}),
        ],
        [False, True],
    )
] + [
    Case("unfused", torch.float32, {}, packed=True, padded=True),
    Case("both", torch.float16, {**PRE, **NORM}, packed=True, padded=True),
]

SEQUENCE_PARALLEL = [
    Case("unfused", torch.float32, {}, sequence_parallel=True),
    Case("unfused", torch.float32, {}, packed=True, sequence_parallel=True),
    Case("both", torch.float16, {**PRE, **NORM}, packed=True, sequence_parallel=True),
]


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (1, 2), (2, 2)], ids=["tp2", "cp2", "tp2_cp2"])
def test_layer_equals_the_whole_layer(tp: int, cp: int) -> None:
    cases = CASES + (SEQUENCE_PARALLEL if tp > 1 else [])
    if tp * cp == 4:  # more processes than a small machine has cores: unfused, and all fused
        cases = [case for case in CASES if case.name in ("unfused", "both_recomputed")]
    compare_with_the_whole(cases, tp, cp)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (1, 2)], ids=["tp2", "cp2"])
def test_every_combination(tp: int, cp: int) -> None:
    skip_unless_fast(2)
    compare_with_the_whole(EVERY_CASE, tp, cp, timeout=800.0)


def compare_with_the_whole(cases: list[Case], tp: int, cp: int, timeout: float = 220.0) -> None:
    tolerance = TOLERANCE["cuda" if enough_gpus(tp * cp) else "cpu"]
    by_rank = start_ranks(compare_all, tp * cp, cases, tp, cp, timeout=timeout)
    failures = [
        f"rank {rank}, {case}, {tensor}: {error:.2e} > {allowed:.2e}"
        for rank, errors in enumerate(by_rank)
        for case in cases
        for tensor, error in errors[str(case)].items()
        for allowed in [0.0 if tensor == "replicas" else tolerance[case.dtype]]
        if not error <= allowed
    ]
    assert not failures, "\n".join(failures)


def test_the_norm_gradient_is_summed_once() -> None:
    """1 + 2 in each backward; what megatron-core adds up itself, later, is left alone."""
    for rank, found in enumerate(start_ranks(norm_gradient_of_one_rank_each, 2)):
        assert found.pop("left_to_megatron_core") == [2.0 * (rank + 1)] * 2
        assert found == {case: [6.0, 6.0] for case in found}
        assert len(found) == 4


def raise_on_one_rank(rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        raise ValueError(f"rank {rank} has had enough")
    torch.distributed.barrier()


def test_a_rank_that_raises_ends_the_launch() -> None:
    with pytest.raises(RankError, match="rank 1 has had enough"):
        start_ranks(raise_on_one_rank, 2, 1)


def wait_for_ever() -> None:
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    threading.Event().wait()


def test_a_hang_ends_and_shows_where() -> None:
    with pytest.raises(RankError, match="wait_for_ever"):
        start_ranks(wait_for_ever, 2, timeout=3.0)
