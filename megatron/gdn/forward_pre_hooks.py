# SPDX-License-Identifier: Apache-2.0
"""Forward pre-hooks of modules whose parameters are read without calling the module.

megatron-core's `--overlap-param-gather` registers one on every module: it waits until the
module's own parameters have been gathered (`DistributedDataParallel._make_forward_pre_hook` of
0.19). A parameter read without it may be the one from before the optimizer step. megatron-core's
layer itself reads `conv1d.weight` so, and a fusion reads `out_norm.weight` so.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_pre_hooks


def has_forward_pre_hooks(module: nn.Module) -> bool:
    """Whether a call of `module` would run any: its own, or those of all modules."""
    return bool(module._forward_pre_hooks or _global_forward_pre_hooks)


def run_forward_pre_hooks(module: nn.Module, x: Tensor) -> Tensor:
    """Run the hooks that `module(x)` would run, in the same order.

    Returns:
        x, or what a hook puts in its place.

    Raises:
        ValueError: a hook returned something else than one tensor.
    """
    args: Any = (x,)
    kwargs: Any = {}
    hooks = (*_global_forward_pre_hooks.items(), *module._forward_pre_hooks.items())
    for number, hook in hooks:
        if number in module._forward_pre_hooks_with_kwargs:
            answer: Any = hook(module, args, kwargs)
            if answer is not None:
                args, kwargs = answer
        else:
            answer = hook(module, args)
            if answer is not None:
                args = answer if isinstance(answer, tuple) else (answer,)
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
        raise ValueError(
            f"a forward pre-hook of {type(module).__name__} must return one tensor or None where "
            f"its module is not called itself, got {len(args)} positional and {len(kwargs)} "
            "keyword arguments; return the input alone, or take the hook from this module"
        )
    return args[0]
