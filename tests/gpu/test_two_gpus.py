# SPDX-License-Identifier: Apache-2.0
"""Training split over two GPUs under NCCL, checkpoints between layouts, and a second device.

Layers and models on the same two GPUs are compared with the whole ones in tests/distributed.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.distributed.layer_on_ranks import REFERENCE_KERNELS
from tests.gdn.layer_support import make_config, make_input, make_layer
from tests.gpu.pretrain_support import (
    FOUR_LAYERS,
    HYBRID_LAYERS,
    Pretraining,
    fused_layers,
    run_pretraining,
    write_byte_dataset,
)

pytestmark = [
    pytest.mark.timeout(580),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

STEPS, SAVED_AT = 50, 25
FUSED = ("--gdn-pre-gated-delta-rule-fusion", "--gdn-gated-output-norm-fusion")
RECOMPUTED = (*FUSED, "--recompute-granularity", "selective", "--recompute-modules", "gdn_norm_out")
TP2 = ("--tensor-model-parallel-size", "2")
# megatron-core's softmax attention refuses context parallelism without Transformer Engine.
GDN_ALONE = ("--linear-attention-freq", "[1,1,1,1]")
CP2 = ("--context-parallel-size", "2", *GDN_ALONE)
SAVE = ("--save-interval", str(SAVED_AT), "--ckpt-format", "torch_dist")
LOAD = ("--ckpt-step", str(SAVED_AT), "--ckpt-format", "torch_dist")

RUNS = {
    "tp2_saved": (*TP2, *FUSED, *SAVE, "--save", "{folder}/tp2"),
    "tp1_saved": (*SAVE, "--save", "{folder}/tp1"),
    "tp2_unfused": TP2,
    "tp2_fused": (*TP2, *FUSED),
    "cp2_unfused": CP2,
    "cp2_fused": (*CP2, *FUSED),
    "tp2_recomputed": (*TP2, *RECOMPUTED),
    "cp2_recomputed": (*CP2, *RECOMPUTED),
    "tp1_loaded": (*LOAD, "--load", "{folder}/tp2"),
    "tp2_loaded": (*TP2, *FUSED, *LOAD, "--load", "{folder}/tp1"),
}
OTHER_LAYOUTS = {
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "dp2": ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    "packed_tp2": ("--dataloader-inter-document-masking", *GDN_ALONE, *TP2),
    "hybrid_tp2": TP2,
}
"""Their steps are not timed."""
for _layout, _flags in OTHER_LAYOUTS.items():
    RUNS[f"{_layout}_unfused"] = _flags
    RUNS[f"{_layout}_fused"] = (*_flags, *FUSED)
PHASES = [
    # Side by side on the same two GPUs: most of a run is start-up. These also tune FLA's kernels;
    # the later runs find the choice in Triton's cache.
    [
        *("tp2_saved", "tp1_saved", "tp2_recomputed", "cp2_recomputed"),
        *(f"{layout}_{fusions}" for layout in OTHER_LAYOUTS for fusions in ("unfused", "fused")),
    ],
    ["tp1_loaded", "tp2_loaded"],
    # One after another, since steps are timed.
    *[["tp2_unfused"], ["tp2_fused"], ["cp2_unfused"], ["cp2_fused"]],
]
GDN_LAYERS = {
    "tp2": [3],
    "cp2": [4],
    "pp2": [2, 1],
    "dp2": [3],
    "packed_tp2": [4],
    "hybrid_tp2": [2],
}
"""On each pipeline rank, which logs a report of its own."""
TIMED = ("tp2", "cp2")
STAGES = ("pre_gated_delta_rule", "gated_output_norm")
Runs = dict[str, Pretraining]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All runs by name, whether they succeeded or not: a test speaks for its own."""
    folder = tmp_path_factory.mktemp("two_gpus")
    data = write_byte_dataset(folder)

    def run(name: str) -> Pretraining:
        started = time.monotonic()
        try:
            done = run_pretraining(
                *("--data-path", str(data), "--data-cache-path", str(folder / f"{name}_cache")),
                *(flag.format(folder=folder) for flag in RUNS[name]),
                model=HYBRID_LAYERS if name.startswith("hybrid") else FOUR_LAYERS,
                ranks=1 if name.startswith("tp1") else 2,
                steps=STEPS,
                timeout=240,
            )
        except subprocess.TimeoutExpired as expired:
            done = Pretraining(-1, {}, {}, (expired.stdout or b"").decode())
        seconds = time.monotonic() - started
        # At once, so that a run that is cut short has said what it saw.
        print(f"\n{name}: {seconds:.0f} s, status {done.status}, losses {done.losses}", flush=True)
        return done

    found: Runs = {}
    for names in PHASES:
        with ThreadPoolExecutor(len(names)) as pool:
            found |= zip(names, pool.map(run, names), strict=True)
    return found


def finished(runs: Runs, name: str, first: int = 1) -> Pretraining:
    """A run that ended well and logged every step from `first` on."""
    done = runs[name]
    assert done.status == 0, done.output[-5000:]
    assert list(done.losses) == list(range(first, STEPS + 1))
    return done


def largest_difference(got: Pretraining, wanted: Pretraining) -> float:
    """Relative, of the loss, over the steps of `got`."""
    return max(abs(loss / wanted.losses[step] - 1) for step, loss in got.losses.items())


@pytest.mark.parametrize("layout", GDN_LAYERS)
def test_fused_losses_agree(runs: Runs, layout: str) -> None:
    unfused, fused = finished(runs, f"{layout}_unfused"), finished(runs, f"{layout}_fused")
    difference = largest_difference(fused, unfused)
    print(
        f"\n{layout}: loss {unfused.losses[1]:.3f} -> unfused {unfused.losses[STEPS]:.4f}, fused "
        f"{fused.losses[STEPS]:.4f}; largest relative difference of a step {difference:.1e}"
    )
    assert unfused.losses[STEPS] < unfused.losses[1] - 1.0
    assert difference < 1e-2


@pytest.mark.parametrize("layout", GDN_LAYERS)
def test_every_layer_is_fused(runs: Runs, layout: str) -> None:
    for fusions in ("unfused", "fused", *(("recomputed",) if layout in TIMED else ())):
        done = finished(runs, f"{layout}_{fusions}")
        wanted = [f"{0 if fusions == 'unfused' else n}/{n}" for n in GDN_LAYERS[layout]]
        for stage in STAGES:
            assert sorted(fused_layers(done, stage)) == sorted(wanted)


@pytest.mark.parametrize("layout", TIMED)
def test_recomputation_changes_no_loss(runs: Runs, layout: str) -> None:
    recomputed, fused = finished(runs, f"{layout}_recomputed"), finished(runs, f"{layout}_fused")
    assert recomputed.losses == fused.losses


@pytest.mark.parametrize("layout", TIMED)
def test_step_times(runs: Runs, layout: str) -> None:
    """Printed for the documentation; a time has no bound here."""
    for name in (f"{layout}_unfused", f"{layout}_fused"):
        times = [ms for step, ms in finished(runs, name).step_ms.items() if step > 10]
        median, fastest, slowest = statistics.median(times), min(times), max(times)
        print(
            f"\n{name}: {median:.1f} ms a step, median of {len(times)}, {fastest:.1f} to "
            f"{slowest:.1f}"
        )
        assert len(times) == STEPS - 10


@pytest.mark.parametrize(("saved", "loaded"), [("tp2", "tp1"), ("tp1", "tp2")])
def test_a_checkpoint_goes_on_in_another_layout(runs: Runs, saved: str, loaded: str) -> None:
    """TP 2 is fused and TP 1 is not: the loss goes on as in the run that was not interrupted."""
    through = finished(runs, f"{saved}_saved")
    after = finished(runs, f"{loaded}_loaded", first=SAVED_AT + 1)
    # megatron-core logs the first step of a run alone, and again in its mean with the second.
    del after.losses[SAVED_AT + 2]
    difference = largest_difference(after, through)
    print(f"\n{saved} -> {loaded}: largest relative difference of a step {difference:.1e}")
    assert difference < 1e-2


def test_a_layer_on_a_device_that_is_not_current() -> None:
    """Both fusions, forward and backward, equal the first device's bit for bit.

    The tests of each kernel have the same for the function alone.
    """
    config = make_config(
        params_dtype=torch.bfloat16,
        bf16=True,
        gdn_pre_gated_delta_rule_fusion=True,
        gdn_gated_output_norm_fusion=True,
        # FLA's recurrence, not ours to test, would be tuned for these shapes.
        gdn_fusions=("reference_gated_delta_rule",),
        gdn_fusion_config=str(REFERENCE_KERNELS),
    )

    def run(device: str) -> list[Tensor]:
        layer = make_layer(config).to(device)
        x = make_input(config).detach().to(device).requires_grad_()
        out, _ = layer(x, None)
        out.backward(torch.ones_like(out))
        assert torch.cuda.current_device() == 0
        assert x.grad is not None
        assert out.device == x.grad.device == torch.device(device)
        return [out, x.grad, *(parameter.grad for parameter in layer.parameters())]

    for first, second in zip(run("cuda:0"), run("cuda:1"), strict=True):
        assert torch.equal(first, second.to("cuda:0"))
