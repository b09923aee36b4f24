# SPDX-License-Identifier: Apache-2.0
"""Training on megatron-core's own loop: 3 GDN layers and 1 of softmax attention, 50 steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gpu.pretrain_support import (
    Pretraining,
    fused_calls,
    fused_layers,
    largest_difference,
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


# Documents packed in rows; megatron-core's softmax attention takes none without Transformer Engine.
PACKED = ("--dataloader-inter-document-masking", "--linear-attention-freq", "[1,1,1,1]")
SAVED_AT = 25
CHECKPOINT = ("--ckpt-format", "torch_dist")
RUNS = (
    (),
    (NORM,),
    (PRE,),
    (PRE, NORM),
    (PRE, NORM, *RECOMPUTE),
    PACKED,
    (*PACKED, PRE, NORM),
    (*PACKED, PRE, NORM, *RECOMPUTE),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data set and checkpoints."""
    folder = tmp_path_factory.mktemp("pretrain")
    write_byte_dataset(folder)
    return folder


@pytest.fixture(scope="module")
def train(folder: Path) -> Train:
    """Trains on Python's own source files, all runs side by side: most of a run is start-up."""
    with ThreadPoolExecutor(len(RUNS)) as pool:
        done = dict(zip(RUNS, pool.map(functools.partial(_train, folder), RUNS), strict=True))
    return lambda *flags: done[flags]


def _train(folder: Path, flags: tuple[str, ...]) -> Pretraining:
    cache = folder / f"cache{RUNS.index(flags)}"
    more = ["--data-path", str(folder / "stdlib"), "--data-cache-path", str(cache)]
    if flags == (PRE, NORM):
        more += [*CHECKPOINT, "--save-interval", str(SAVED_AT), "--save", str(folder / "saved")]
    done = run_pretraining(*more, *flags, steps=STEPS)
    assert done.status == 0, done.output[-5000:]
    assert list(done.losses) == list(range(1, STEPS + 1))
    return done


def test_unfused_loss_falls(train: Train) -> None:
    losses = train().losses
    assert losses[STEPS] < losses[1] - 1.0
    for stage in STAGES:
        assert fused_layers(train(), stage) == ["0/3"]


@pytest.mark.parametrize(
    ("base", "flags"),
    [((), (NORM,)), ((), (PRE,)), ((), (PRE, NORM)), (PACKED, (PRE, NORM))],
    ids=["norm", "pre", "both", "both_packed"],
)
def test_fused_losses_agree(train: Train, base: tuple[str, ...], flags: tuple[str, ...]) -> None:
    unfused, fused = train(*base), train(*base, *flags)
    difference, step = largest_difference(fused, unfused)
    print(
        f"\n{(*base, *flags)}: loss {unfused.losses[1]:.3f} -> unfused "
        f"{unfused.losses[STEPS]:.4f}, fused {fused.losses[STEPS]:.4f}; largest relative "
        f"difference {difference:.1e}, step {step}"
    )
    assert difference < 1e-2
    layers = 4 if base else 3
    for stage, flag in STAGES.items():
        assert fused_layers(fused, stage) == [f"{layers if flag in flags else 0}/{layers}"]


@pytest.mark.parametrize("base", [(), PACKED], ids=["dense", "packed"])
def test_recomputation_changes_no_loss(train: Train, base: tuple[str, ...]) -> None:
    recomputed, fused = train(*base, PRE, NORM, *RECOMPUTE), train(*base, PRE, NORM)
    assert recomputed.losses == fused.losses
    calls = fused_calls(fused, "gated_output_norm")
    assert calls > 0
    assert fused_calls(recomputed, "gated_output_norm") == 2 * calls


def test_a_checkpoint_goes_on_with_the_fusions_off(train: Train, folder: Path) -> None:
    """Saved fused, stopped, loaded unfused: the loss goes on as in the run that went on fused."""
    through = train(PRE, NORM)
    data = ("--data-path", str(folder / "stdlib"), "--data-cache-path", str(folder / "cache3"))
    load = (*CHECKPOINT, "--load", str(folder / "saved"), "--ckpt-step", str(SAVED_AT))
    after = run_pretraining(*data, *load, steps=STEPS)
    assert after.status == 0, after.output[-5000:]
    assert list(after.losses) == list(range(SAVED_AT + 1, STEPS + 1))
    # megatron-core logs the first step of a run alone, and again in its mean with the second.
    del after.losses[SAVED_AT + 2]
    difference, step = largest_difference(after, through)
    print(
        f"\nloaded unfused at step {SAVED_AT}: largest relative difference {difference:.1e}, "
        f"step {step}"
    )
    assert difference < 1e-2
    assert [fused_layers(after, stage) for stage in STAGES] == [["0/3"], ["0/3"]]


def test_mock_data() -> None:
    done = run_pretraining("--mock-data", "--lr-warmup-iters", "0", PRE, NORM, steps=3)
    assert done.status == 0, done.output[-5000:]
    assert list(done.losses) == [1, 2, 3]


def test_a_refused_flag_ends_the_run() -> None:
    done = run_pretraining("--mock-data", NORM, "--deterministic-mode", steps=1)
    assert done.status != 0
    assert "gdn_gated_output_norm_fusion requires deterministic_mode=False" in done.output
