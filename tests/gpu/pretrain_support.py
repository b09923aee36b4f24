# SPDX-License-Identifier: Apache-2.0
"""Starts `megatron.gdn.pretrain` under torchrun and reads what it logged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

ROOT = Path(__file__).resolve().parents[2]

FOUR_LAYERS = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1024 "
    "--seq-length 512 --max-position-embeddings 512 --position-embedding-type rope "
    "--experimental-attention-variant gdn --linear-attention-freq 4 "
    "--linear-conv-kernel-dim 4 --linear-key-head-dim 64 --linear-value-head-dim 64 "
    "--linear-num-key-heads 4 --linear-num-value-heads 8 "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--transformer-impl local --no-persist-layer-norm --no-rope-fusion "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--attention-dropout 0 --hidden-dropout 0 "
    "--micro-batch-size 2 --global-batch-size 4 "
    "--lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 10 --lr-decay-style cosine "
    "--clip-grad 1.0 --bf16 --seed 1234 "
    "--tokenizer-type NullTokenizer --vocab-size 255 --split 90,5,5 "
    "--log-interval 1 --eval-interval 1000 --eval-iters 0"
)
"""Three GDN layers and one of softmax attention, over bytes.

The learning rate is warmed up. Without (1e-3 from the first step) Adam turns the rounding of the
first gradients into steps of full size, and runs that differ in rounding alone differ by percents.
"""

HYBRID_LAYERS = FOUR_LAYERS.replace("--num-layers 4", "--hybrid-layer-pattern G-G-*-").replace(
    "--experimental-attention-variant gdn --linear-attention-freq 4", ""
)
"""Two GDN layers and one of softmax attention, each followed by an MLP, as a hybrid model."""


def write_byte_dataset(folder: Path, files: int = 60) -> Path:
    """Write Python's own source files as an indexed data set of bytes.

    Returns:
        The prefix for `--data-path`.
    """
    prefix = folder / "stdlib"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint8)
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]:
        content = numpy.frombuffer(file.read_bytes(), dtype=numpy.uint8)
        builder.add_document(torch.from_numpy(content.copy()), [content.size])
    builder.finalize(f"{prefix}.idx")
    return prefix


_LOSS = re.compile(r"iteration\s+(\d+)/.*?lm loss: ([0-9.E+-]+)")
_TIME = re.compile(r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([0-9.]+)")


@dataclass(frozen=True)
class Pretraining:
    """What one run printed: exit status, loss and milliseconds by iteration, all its output."""

    status: int
    losses: dict[int, float]
    step_ms: dict[int, float]
    output: str


def largest_difference(
    got: Pretraining, wanted: Pretraining, last: int | None = None
) -> tuple[float, int]:
    """Relative, of the loss over the steps of `got` up to `last`, and the step where it is seen."""
    return max(
        (abs(loss / wanted.losses[step] - 1), step)
        for step, loss in got.losses.items()
        if last is None or step <= last
    )


def fused_layers(done: Pretraining, stage: str) -> list[str]:
    """`fused/all` layers of a stage, from the fusion report that each pipeline rank logs once."""
    found = []
    for report in done.output.split("fusion report\n")[1:]:
        rows = (line.split() for line in report.splitlines())
        found.append(next(row[1] for row in rows if row[:1] == [stage]))
    return found


def fused_calls(done: Pretraining, fusion: str) -> int:
    """Calls of a fusion in the first step, of all layers, from the only report."""
    (calls,) = re.findall(rf"\b{fusion} \((\d+)\)", done.output)
    return int(calls)


def run_pretraining(
    *flags: str, model: str = FOUR_LAYERS, ranks: int = 1, steps: int = 50, timeout: float = 400.0
) -> Pretraining:
    """Train for `steps` iterations, with a GPU for each rank.

    FLA tunes its kernels at first use; the results are kept in Triton's cache, so that a second
    run with the same shapes starts quickly. A run that takes longer than `timeout` seconds has
    another status than 0.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks)),
        *("-m", "megatron.gdn.pretrain", *model.split(), "--train-iters", str(steps), *flags),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "TRITON_CACHE_AUTOTUNING": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    status, output = run_until(command, environment, timeout)
    losses, times = (
        {int(step): float(value) for step, value in pattern.findall(output)}
        for pattern in (_LOSS, _TIME)
    )
    return Pretraining(status, losses, times, output)


def run_until(command: list[str], environment: dict[str, str], timeout: float) -> tuple[int, str]:
    """Run a command in the repository; returns its exit status and what it printed.

    After `timeout` seconds it is asked to end, not killed: torchrun then ends its ranks, which
    would otherwise stay on the GPUs.
    """
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            said = f"ended after {timeout:.0f} s"
            process.terminate()
            try:
                output, _ = process.communicate(timeout=60)
            except subprocess.TimeoutExpired as expired:
                # Its children may live and hold the pipe: what they still say is not waited for.
                process.kill()
                output = (expired.output or b"").decode(errors="replace")
                said = f"killed after {timeout:.0f} s and 60 more; its ranks may still run"
            output = f"{output.rstrip()}\n{said}"
    return process.returncode, output
