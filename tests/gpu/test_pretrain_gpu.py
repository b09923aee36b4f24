# SPDX-License-Identifier: Apache-2.0
"""Training on megatron-core's own loop: 3 GDN layers and 1 of softmax attention, 50 steps."""

from __future__ import annotations

import functools

import pytest

from tests.gpu.pretrain_support import Pretraining, run_pretraining

pytestmark = pytest.mark.timeout(900)

STEPS = 50
NORM = "--gdn-gated-output-norm-fusion"
RECOMPUTE = ("--recompute-granularity", "selective", "--recompute-modules", "gdn_norm_out")


@functools.cache
def trained(*flags: str) -> Pretraining:
    done = run_pretraining(*flags, steps=STEPS)
    assert done.status == 0, done.output[-5000:]
    assert list(done.losses) == list(range(1, STEPS + 1))
    return done


def report_line(done: Pretraining, stage: str) -> list[str]:
    """The stage's row of the fusion report, which must have been logged once."""
    assert done.output.count("fusion report\n") == 1
    report = done.output.split("fusion report\n")[1]
    return next(line.split() for line in report.splitlines() if line.split()[:1] == [stage])


def test_unfused_loss_falls() -> None:
    losses = trained().losses
    assert losses[STEPS] < losses[1] / 2
    assert report_line(trained(), "gated_output_norm")[1] == "0/3"


def test_fused_losses_agree() -> None:
    done = trained(NORM)
    print(f"\nstep: unfused, fused: {[(n, trained().losses[n], done.losses[n]) for n in (1, 25, 50)]}")
    for step, expected in trained().losses.items():
        assert done.losses[step] == pytest.approx(expected, rel=1e-2), step
    assert report_line(done, "gated_output_norm")[1] == "3/3"


def test_recomputation_changes_no_loss() -> None:
    assert trained(NORM, *RECOMPUTE).losses == trained(NORM).losses


def test_a_refused_flag_ends_the_run() -> None:
    done = run_pretraining(NORM, "--deterministic-mode", steps=1)
    assert done.status != 0
    assert f"{NORM[2:].replace('-', '_')} requires deterministic_mode=False" in done.output
