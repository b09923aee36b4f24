# SPDX-License-Identifier: Apache-2.0
"""AdamW on float32 copies of half-precision parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

LOSS_SCALE = 1024.0
"""Factor on the loss in FP16: lifts gradients above its smallest number, 6e-8."""


class MasterWeightAdamW:
    """AdamW with gradient clipping, in float32, for BF16 and FP16 parameters.

    Megatron-core's mixed-precision optimiser wants CUDA buffers; this one runs anywhere.

    Args:
        parameters: the model's; rounded copies of the float32 weights are written back to them.
        scales_loss: whether gradients need a loss scale (FP16). It halves whenever a gradient
            overflows, and that step is skipped.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], scales_loss: bool) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.weights = [p.detach().float().clone() for p in self.parameters]
        self.loss_scale = LOSS_SCALE if scales_loss else 1.0
        self.skipped_steps = 0
        self._adamw = torch.optim.AdamW(
            self.weights, lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01
        )

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of a float32 loss."""
        (loss * self.loss_scale).backward()

    def step(self, learning_rate: float, clip: float = 1.0) -> None:
        """Update the weights, round them into the parameters, forget the gradients."""
        for weight, parameter in zip(self.weights, self.parameters, strict=True):
            gradient = parameter.grad
            weight.grad = None if gradient is None else gradient.float() / self.loss_scale
            parameter.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.weights, clip)
        if not torch.isfinite(norm):
            self.skipped_steps += 1
            self.loss_scale = max(1.0, self.loss_scale / 2)
            return
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        with torch.no_grad():
            for weight, parameter in zip(self.weights, self.parameters, strict=True):
                parameter.copy_(weight)
