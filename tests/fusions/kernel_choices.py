# SPDX-License-Identifier: Apache-2.0
"""Launches a fusion in many ways and compares Triton's choice of a kernel with the launchers'.

    python -m tests.fusions.kernel_choices gated_output_norm

Prints the numbers of launches, of variants named and of kernels that Triton tells apart. A launch
is an error if its variant was named before by a launch that needed another kernel. Run without
TRITON_INTERPRET; no GPU is needed, since nothing is compiled and nothing launched.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from megatron.gdn.fusions import gated_output_norm as norm
from megatron.gdn.fusions import pre_gated_delta_rule as pre
from megatron.gdn.fusions.kernel_launch import KernelLauncher

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SAMPLES = 400
DRIVER = SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
)

chosen: dict[tuple[str, Hashable], int] = {}
"""Kernel that Triton chose, by kernel name and the variant that the launcher named."""
kernels: set[int] = set()
launches = 0


class Choice:
    """Stands for a compiled kernel: Triton keeps one for each set of arguments it tells apart."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, *_: Any) -> None: ...


class WatchedLauncher(KernelLauncher):
    """Lets Triton choose on every launch, and compares."""

    __slots__ = ()

    def __call__(
        self,
        programs: int,
        tensor: Tensor,
        args: tuple[Any, ...],
        num_warps: int,
        variant: Hashable,
    ) -> None:
        global launches
        launches += 1
        choice = id(self.kernel[(programs,)](*args, num_warps=num_warps))
        if variant is not None:
            kernels.add(choice)
            name = self.kernel.__name__
            before = chosen.setdefault((name, variant), choice)
            if before != choice:
                raise SystemExit(f"{name}: one variant for two kernels, {variant}")


def watch(module: Any) -> None:
    for name, launcher in vars(module).items():
        if isinstance(launcher, KernelLauncher):
            launcher.kernel._do_compile = keep_a_choice(launcher.kernel)
            setattr(module, name, WatchedLauncher(launcher.kernel))


def keep_a_choice(kernel: Any) -> Any:
    def compile_nothing(key: Any, signature: Any, device: int, *_: Any) -> Choice:
        choice = kernel.device_caches[device][0][key] = Choice()
        return choice

    return compile_nothing


class Pick:
    """Draws mostly the first of several values, so that launches differ in one or two things.

    Launches that differ in everything would be given different names by any launcher.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def of(self, *values: Any) -> Any:
        return values[0] if self.random.random() < 0.85 else self.random.choice(values)

    def tensor(self, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
        """A tensor that begins anywhere in memory, sometimes with gaps between its rows."""
        wide = (*shape[:-1], shape[-1] + self.of(0, 1, 8))
        begin = self.of(0, 1, 4, 8)
        whole = torch.zeros(torch.Size(wide).numel() + begin, dtype=self.of(*dtypes))
        return whole[begin:].view(wide)[..., : shape[-1]]


def launch_gated_output_norm(pick: Pick) -> None:
    heads, dim = pick.of(4, 1, 3), pick.of(16, 64)
    shape = (pick.of(2, 1), pick.of(5, 1, 16), heads, dim)
    x = pick.tensor(shape, *DTYPES[:2])
    gate = pick.tensor(shape, x.dtype, torch.float32)
    gate = pick.of(gate, torch.zeros(*shape[:3], 2 * dim, dtype=gate.dtype)[..., ::2])
    weight = pick.tensor((dim,), *DTYPES)
    eps, zero_centered = pick.of(1e-6, 0, 1), pick.of(False, True)
    norm.launch_forward(x, gate, weight, eps, zero_centered)
    dout = pick.of(pick.tensor(shape, x.dtype), torch.zeros((), dtype=x.dtype).expand(shape))
    needs = pick.of(*(needs for needs in itertools.product((True, False), repeat=3) if any(needs)))
    norm.launch_backward(dout, x, gate, weight, eps, zero_centered, needs)


def launch_pre_gated_delta_rule(pick: Pick) -> None:
    key_heads = pick.of(2, 1)
    sizes = pre.HeadSizes(
        key_heads, key_heads * pick.of(2, 1), pick.of(8, 16), pick.of(8, 24), pick.of(True, False)
    )
    packed = pick.of(False, True)
    length, batch, width = pick.of(7, 1, 40), 1 if packed else pick.of(2, 1), pick.of(4, 2)
    x = pick.tensor((length, batch, sizes.channels), *DTYPES)
    heads = sizes.num_value_heads
    parameters = (
        pick.tensor((sizes.conv_channels, 1, width), *DTYPES),
        pick.of(None, pick.tensor((sizes.conv_channels,), *DTYPES)),
        pick.tensor((heads,), *DTYPES),
        pick.tensor((heads,), *DTYPES),
    )
    lookback = None
    if packed:
        bounds = torch.tensor([0, length], dtype=pick.of(torch.int32, torch.int64))
        lookback = pre._document_lookback(bounds, length, width)
    pre._launch_forward(x, *parameters, lookback, sizes)
    gradients = [
        pick.of(
            pick.tensor((batch, length, heads, dim), x.dtype),
            torch.zeros((), dtype=x.dtype).expand(batch, length, heads, dim),
            None,
        )
        for dim in (*(sizes.key_head_dim,) * 2, *(sizes.value_head_dim,) * 2)
    ]
    gradients += [pick.of(pick.tensor((batch, length, heads), torch.float32), None) for _ in "bg"]
    needed = tuple(pick.of(True, False) for _ in range(5))
    pre._launch_backward(x, parameters, lookback, sizes, tuple(gradients), needed)


if __name__ == "__main__":
    triton.runtime.driver.set_active(DRIVER)
    fusion = sys.argv[1]
    watch({"gated_output_norm": norm, "pre_gated_delta_rule": pre}[fusion])
    for sample in range(SAMPLES):
        globals()[f"launch_{fusion}"](Pick(sample))
    print(launches, len(chosen), len(kernels))
