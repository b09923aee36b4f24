# SPDX-License-Identifier: Apache-2.0
"""The gradient of the output norm's parameters under tensor parallelism.

Every tensor-parallel rank holds the whole output norm and normalises its own heads, so what reaches
its weight in backward is the sum over these heads only. megatron-core 0.19 adds the ranks' parts up
when sequence parallelism is on and the parameter says so (`sequence_parallel`), and leaves them
apart otherwise: replicas of one weight then drift. Here the parts are added up in that case.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


class _SumOverTensorParallelRanks:
    """Hook of a parameter: its gradient, before it is accumulated, becomes the sum over `group`.

    The sum is taken in float32 and rounded once, so that all replicas get the same bits.
    """

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        self.group = group

    def __call__(self, gradient: Tensor) -> Tensor:
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        torch.distributed.all_reduce(total, group=self.group)
        return total.to(gradient.dtype)


def sum_norm_gradient(
    parameters: Iterable[nn.Parameter],
    config: TransformerConfig,
    group: torch.distributed.ProcessGroup,
) -> None:
    """Let the gradients of an output norm's parameters be sums over tensor-parallel ranks.

    Called at every forward, since a parameter may have been replaced (moved from the meta device,
    copied with its module). It costs nothing with one rank, and one small all-reduce for each
    parameter in a backward with several.

    Args:
        parameters: of the output norm; frozen ones are left alone, and those that megatron-core
            adds up itself under sequence parallelism.
        config: `sequence_parallel` is read.
        group: tensor-parallel ranks.
    """
    if group.size() == 1:
        return
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if config.sequence_parallel and getattr(parameter, "sequence_parallel", False):
            continue
        # Asked of the tensor itself: a marker of ours could be copied to one that has no hook.
        hooks = (parameter._backward_hooks or {}).values()
        if not any(isinstance(hook, _SumOverTensorParallelRanks) for hook in hooks):
            parameter.register_hook(_SumOverTensorParallelRanks(group))
