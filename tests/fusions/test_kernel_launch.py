# SPDX-License-Identifier: Apache-2.0
"""The variants that launchers name: never one name for two kernels that Triton tells apart.

Triton compiles nothing here: its choice of a kernel is watched, in a process without the
interpreter and with a driver that launches nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from megatron.gdn.fusions.kernel_launch import KernelLauncher, alignment_bits, fits_int32
from tests.fusions import kernel_choices


def test_alignment_is_told_tensor_by_tensor() -> None:
    import torch

    memory = torch.empty(64, dtype=torch.bfloat16)
    assert memory.data_ptr() % 16 == 0
    assert alignment_bits(memory, memory[1:], None, memory[8:]) == 0b1001
    assert alignment_bits(memory[1:], memory) == 0b01


def test_a_count_of_32_bits() -> None:
    assert fits_int32(2**31 - 1)
    assert not fits_int32(2**31)


class _Compiled:
    """What a launch of a jit kernel returns, as far as a launcher uses it."""

    def __init__(self) -> None:
        self.launched: list[tuple[tuple[int, ...], tuple[object, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args: self.launched.append((grid, args))


class _Kernel:
    def __init__(self, returns: Callable[[_Compiled], object] = lambda compiled: compiled) -> None:
        self.compiled: list[_Compiled] = []
        self.returns = returns

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*args: object, num_warps: int) -> object:
            self.compiled.append(_Compiled())
            return self.returns(self.compiled[-1])

        return launch


def test_a_variant_is_looked_up_once() -> None:
    import torch

    kernel, tensor = _Kernel(), torch.empty(1)
    launch = KernelLauncher(kernel)
    for number in range(3):
        launch(5 + number, tensor, (tensor, number), 4, "one")
    launch(5, tensor, (tensor, 9), 4, "another")
    for _ in range(2):
        launch(5, tensor, (tensor, 9), 4, None)
    assert len(kernel.compiled) == 4
    assert kernel.compiled[0].launched == [((6, 1, 1), (tensor, 1)), ((7, 1, 1), (tensor, 2))]
    assert not any(compiled.launched for compiled in kernel.compiled[1:])


def test_nothing_is_remembered_of_the_interpreter() -> None:
    import torch

    kernel = _Kernel(returns=lambda compiled: None)
    launch = KernelLauncher(kernel)
    for _ in range(3):
        launch(1, torch.empty(1), (), 4, "one")
    assert len(kernel.compiled) == 3


class _Promise:
    """As Triton's: it forwards attributes to the compiled kernel, but takes no grid."""

    def __init__(self, compiled: _Compiled) -> None:
        self.compiled = compiled

    def __getattr__(self, name: str):
        return getattr(self.compiled, name)


def test_a_promise_of_a_kernel_is_not_remembered() -> None:
    import torch

    kernel = _Kernel(returns=_Promise)
    launch = KernelLauncher(kernel)
    for _ in range(2):
        launch(1, torch.empty(1), (), 4, "one")
    assert len(kernel.compiled) == 2


def test_nothing_is_remembered_for_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "hip", "6.4")
    kernel = _Kernel()
    launch = KernelLauncher(kernel)
    for _ in range(2):
        launch(1, torch.empty(1), (), 4, "one")
    assert len(kernel.compiled) == 2


@pytest.mark.parametrize("fusion", ["gated_output_norm", "pre_gated_delta_rule"])
def test_a_variant_names_one_compiled_kernel(fusion: str) -> None:
    environment = {key: text for key, text in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", kernel_choices.__name__, fusion],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    calls, variants, compiled = map(int, done.stdout.split()[-3:])
    # The sample does tell kernels apart, and names fewer of them than it makes launches.
    assert calls > variants >= compiled > 50
