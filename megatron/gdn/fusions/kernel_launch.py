# SPDX-License-Identifier: Apache-2.0
"""Launches of jit kernels on the device of a tensor, with little host time.

On every launch Triton derives from all arguments which compiled variant of a kernel serves them:
the type of each, whether a pointer is a multiple of 16 bytes, whether a number is 1. For thirty
arguments that takes as long as everything else that a fusion does on the host. Where a launcher can
name in a few values all that Triton would look at, the compiled variant is remembered by them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

_POINTER_ALIGNMENT = 16
_INT32_MAX = 2**31 - 1


def alignment_bits(*tensors: Tensor | None) -> int:
    """One bit per tensor, set where its memory begins at a multiple of 16 bytes, as Triton asks.

    None, which Triton takes for a compile-time constant, leaves its bit unset: whether a tensor is
    given must be told beside.
    """
    bits = 0
    for tensor in tensors:
        bits += bits
        if tensor is not None and tensor.data_ptr() % _POINTER_ALIGNMENT == 0:
            bits += 1
    return bits


def fits_int32(count: int) -> bool:
    """Whether Triton passes a number as 32 bits; a larger one is another type."""
    return count <= _INT32_MAX


def _can_be_remembered(compiled: Any) -> bool:
    """Whether what a launch returned can be launched again by its variant.

    The interpreter returns None, and `triton.AsyncCompileMode` a promise, which takes no grid. For
    AMD Triton also looks at whether a tensor is smaller than 2 GiB, which no variant says.
    """
    return hasattr(type(compiled), "__getitem__") and torch.version.hip is None


class KernelLauncher:
    """Launches one jit kernel over a one-dimensional grid.

    Args:
        kernel: what `triton.jit` returned. Under the interpreter nothing is compiled and so nothing
            remembered.
    """

    __slots__ = ("_compiled", "kernel")

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        programs: int,
        tensor: Tensor,
        args: tuple[Any, ...],
        num_warps: int,
        variant: Hashable,
    ) -> None:
        """Launch on the current stream of the device of `tensor`, which need not be current.

        Args:
            programs: size of the grid.
            args: all arguments of the kernel in order, compile-time constants too.
            variant: equal for two calls only if the same compiled kernel serves both on one device,
                with `num_warps` taken into account; None when that is not known, and Triton looks.
        """
        device = tensor.get_device()  # -1 on the CPU
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._launch(programs, device, args, num_warps, variant)
        else:
            self._launch(programs, device, args, num_warps, variant)

    def _launch(
        self, programs: int, device: int, args: tuple[Any, ...], num_warps: int, variant: Hashable
    ) -> None:
        key = (device, variant)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[(programs, 1, 1)](*args)
            return
        compiled = self.kernel[(programs,)](*args, num_warps=num_warps)
        if variant is not None and _can_be_remembered(compiled):
            self._compiled[key] = compiled
