# SPDX-License-Identifier: Apache-2.0
"""Training on megatron-core's own loop: 3 GDN layers and 1 of softmax attention, 50 steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gpu.pretrain_support import (
    Pretraining,
    fused_layers,
    run_pretraining,
    write_byte_dataset,
)

pytestmark = pytest.mark.timeout(900)

STEPS = 50
NORM = "--gdn-gated-output-norm-fusion"
PRE = "--gdn-pre-gated-delta-rule-fusion"
STAGES = {"pre_gated_delta_rule": PRE, "gated_output_norm": NORM}
Train = Callable[..., Pretraining]
RECOMPUTE = ("--recompute-granularity", "selective", "--recompute-modules", "gdn_norm_out")


RUNS = ((), (NORM,), (PRE,), (PRE, NORM), (PRE, NORM, *RECOMPUTE))


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains on Python's own source files, all runs side by side: most of a run is start-up."""
    data = str(write_byte_dataset(tmp_path_factory.mktemp("data")))
    with ThreadPoolExecutor(len(RUNS)) as pool:
        done = dict(zip(RUNS, pool.map(functools.partial(_train, data), RUNS), strict=True))
    return lambda *flags: done[flags]


def _train(data: str, flags: tuple[str, ...]) -> Pretraining:
    done = run_pretraining("--data-path", data, *flags, steps=STEPS)
    assert done.status == 0, done.output[-5000:]
    assert list(done.losses) == list(range(1, STEPS + 1))
    return done


def test_unfused_loss_falls(train: Train) -> None:
    losses = train().losses
    assert losses[STEPS] < losses[1] - 1.0
    for stage in STAGES:
        assert fused_layers(train(), stage) == "0/3"


@pytest.mark.parametrize("flags", [(NORM,), (PRE,), (PRE, NORM)], ids=["norm", "pre", "both"])
def test_fused_losses_agree(train: Train, flags: tuple[str, ...]) -> None:
    unfused, fused = train(), train(*flags)
    errors = {n: abs(fused.losses[n] / loss - 1) for n, loss in unfused.losses.items()}
    worst = max(errors, key=errors.__getitem__)
    print(
        f"\n{flags}: loss {unfused.losses[1]:.3f} -> unfused {unfused.losses[STEPS]:.4f}, fused "
        f"{fused.losses[STEPS]:.4f}; largest relative difference {errors[worst]:.1e}, step {worst}"
    )
    assert errors[worst] < 1e-2
    for stage, flag in STAGES.items():
        assert fused_layers(fused, stage) == ("3/3" if flag in flags else "0/3")


def test_recomputation_changes_no_loss(train: Train) -> None:
    assert train(PRE, NORM, *RECOMPUTE).losses == train(PRE, NORM).losses


def test_mock_data() -> None:
    done = run_pretraining("--mock-data", "--lr-warmup-iters", "0", PRE, NORM, steps=3)
    assert done.status == 0, done.output[-5000:]
    assert list(done.losses) == [1, 2, 3]


def test_a_refused_flag_ends_the_run() -> None:
    done = run_pretraining("--mock-data", NORM, "--deterministic-mode", steps=1)
    assert done.status != 0
    assert "gdn_gated_output_norm_fusion requires deterministic_mode=False" in done.output
