# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, evaluations on held-out text, and what they measured."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from fusion_registry import FusionReport
from megatron.gdn.config import TransformerConfig
from megatron.gdn.megatron_core_0_19 import parameters_on_cpu_without_cuda
from megatron.gdn.report import fusion_report
from megatron.gdn.tiny_training.corpus import Corpus
from megatron.gdn.tiny_training.master_weights import MasterWeightAdamW
from megatron.gdn.tiny_training.model import make_model
from megatron.gdn.tiny_training.sizes import TrainingSize

WARM_UP_STEPS = 10
FINAL_LEARNING_RATE = 0.1
"""Part of the highest learning rate that the cosine schedule ends at."""

OnStep = Callable[[int, float, float], None]
"""Told after each step: its number from 1, its loss, tokens per second so far."""


@dataclass
class TrainingRun:
    """What a run measured.

    Args:
        losses: training loss of each step, nats per byte.
        held_out: pairs of (steps done, held-out loss).
        forward_passes: of the model, in training and evaluation.
        skipped_steps: steps without an update, since a gradient overflowed.
        tokens_per_second: of the steps after the first; evaluations are not counted.
        seconds: wall time of the run.
        report: what the layers ran.
    """

    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    forward_passes: int = 0
    skipped_steps: int = 0
    tokens_per_second: float = 0.0
    seconds: float = 0.0
    report: FusionReport = field(default_factory=lambda: FusionReport(()))

    @property
    def held_out_start(self) -> float:
        return self.held_out[0][1]

    @property
    def held_out_end(self) -> float:
        return self.held_out[-1][1]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        data = {name: value for name, value in asdict(self).items() if name != "report"}
        return data | {
            "held_out_start": self.held_out_start,
            "held_out_end": self.held_out_end,
            "fusion_report": self.report.as_dict(),
        }


def train(
    config: TransformerConfig,
    size: TrainingSize,
    corpus: Corpus,
    seed: int,
    device: torch.device,
    on_step: OnStep = lambda step, loss, rate: None,
) -> TrainingRun:
    """Train a new model; the same seed gives the same weights and the same batches."""
    with small_tensors_on(device):
        return _train(config, size, corpus, seed, device, on_step)


def _train(
    config: TransformerConfig,
    size: TrainingSize,
    corpus: Corpus,
    seed: int,
    device: torch.device,
    on_step: OnStep,
) -> TrainingRun:
    start = time.perf_counter()
    model = make_model(config, size.sequence, seed, device)
    optimizer = MasterWeightAdamW(model.parameters(), scales_loss=config.fp16)
    text = _tokens(corpus.train)
    held_out = _held_out_rows(corpus, size)
    draw = torch.Generator().manual_seed(seed)
    run = TrainingRun()
    evaluate_after = _evaluation_steps(size)
    timed = 0.0

    for step in range(size.steps + 1):
        if step in evaluate_after:
            run.held_out.append((step, _evaluate(model, held_out, size.batch, device, run)))
        if step == size.steps:
            break
        began = time.perf_counter()
        starts = torch.randint(len(text) - size.sequence, (size.batch,), generator=draw)
        loss = _loss(model, _rows(text, starts, size.sequence), device, run)
        optimizer.backward(loss)
        optimizer.step(learning_rate(step, size))
        run.losses.append(loss.item())
        # The first step compiles kernels on a GPU.
        timed += time.perf_counter() - began if step else 0.0
        if timed:
            run.tokens_per_second = step * size.batch * size.sequence / timed
        on_step(step + 1, run.losses[-1], run.tokens_per_second)

    run.skipped_steps = optimizer.skipped_steps
    run.seconds = time.perf_counter() - start
    run.report = fusion_report(model)
    return run


def learning_rate(step: int, size: TrainingSize) -> float:
    """Linear warm-up, then half a cosine."""
    warm_up = min(WARM_UP_STEPS, max(1, size.steps // 4))
    if step < warm_up:
        return size.learning_rate * (step + 1) / warm_up
    done = (step - warm_up) / max(1, size.steps - warm_up)
    share = FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * (1 + math.cos(math.pi * done)) / 2
    return size.learning_rate * share


@contextlib.contextmanager
def small_tensors_on(device: torch.device) -> Iterator[None]:
    """Settings that suit small tensors on a CPU; nothing changes for a GPU.

    Compiling megatron-core's small functions takes longer than the whole run. A second thread gains
    nothing on tensors of this size, and on a busy machine the threads wait for each other: 0.12 s a
    step became 0.2 to 3 s.
    """
    if device.type == "cuda":
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.compiler.set_stance("force_eager"), parameters_on_cpu_without_cuda():
            yield
    finally:
        torch.set_num_threads(threads)


def _evaluation_steps(size: TrainingSize) -> set[int]:
    last = max(1, size.evaluations - 1)
    return {round(size.steps * index / last) for index in range(last + 1)}


def _tokens(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _rows(text: Tensor, starts: Tensor, sequence: int) -> Tensor:
    """Rows of `sequence + 1` bytes: the inputs and, one byte on, the labels."""
    return text[starts[:, None] + torch.arange(sequence + 1)].long()


def _held_out_rows(corpus: Corpus, size: TrainingSize) -> Tensor:
    """Evenly spaced rows of the held-out text, always the same."""
    text = _tokens(corpus.held_out)
    last = len(text) - size.sequence - 1
    count = min(size.held_out_rows, last + 1)
    return _rows(text, torch.linspace(0, last, count).long(), size.sequence)


def _loss(model: GPTModel, rows: Tensor, device: torch.device, run: TrainingRun) -> Tensor:
    """Mean cross entropy per byte, float32."""
    rows = rows.to(device)
    tokens, labels = rows[:, :-1], rows[:, 1:]
    sequence = tokens.shape[1]
    positions = torch.arange(sequence, device=device).expand_as(tokens)
    # megatron-core would make this mask itself, on a CUDA device.
    hidden = torch.ones(sequence, sequence, dtype=torch.bool, device=device).triu(1)
    run.forward_passes += 1
    loss: Tensor = model(tokens, positions, hidden[None, None], labels=labels)
    return loss.float().mean()


@torch.no_grad()
def _evaluate(
    model: GPTModel, rows: Tensor, batch: int, device: torch.device, run: TrainingRun
) -> float:
    """Mean loss over the held-out rows."""
    model.eval()
    total = sum(_loss(model, part, device, run).item() * len(part) for part in rows.split(batch))
    model.train()
    return total / len(rows)
