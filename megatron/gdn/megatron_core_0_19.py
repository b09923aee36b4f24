# SPDX-License-Identifier: Apache-2.0
"""Everything that this project takes from megatron-core without a promise that it stays.

Written for and tested with megatron-core 0.19.2. Private names, and public ones whose behaviour
needs help on a machine without CUDA, are gathered here, so that a new release is checked in one
place.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as CoreGatedDeltaNet
from megatron.core.ssm.gated_delta_net.common import (
    _build_head_perm_for_split_sections,
    _build_thd_cp_a2a_perm,
)
from megatron.core.tensor_parallel.random import (
    CheckpointWithoutOutput,
    CheckpointWithoutOutputFunction,
)
from torch import Tensor

__all__ = [
    "CoreGatedDeltaNet",
    "compiled_datasets_helpers",
    "eager_without_cuda",
    "flags_checked_for",
    "group_sizes_without_distributed",
    "head_permutation_for_context_parallel",
    "norm_out_checkpoint",
    "parameters_on_cpu_without_cuda",
    "printable_help",
    "rewritten_command_line",
    "token_permutation_for_packed_context_parallel",
]


def head_permutation_for_context_parallel(
    sections: tuple[int, ...], cp_size: int, device: torch.device
) -> Tensor:
    """Channel order that lets one all-to-all hand each rank its share of every section."""
    order: Tensor = _build_head_perm_for_split_sections(sections, cp_size, device)
    return order


def token_permutation_for_packed_context_parallel(
    cu_seqlens: Tensor, cp_size: int, total_length: int
) -> tuple[Tensor, Tensor]:
    """Token order that undoes the load balancing of packed sequences, and its inverse."""
    forward, inverse = _build_thd_cp_a2a_perm(cu_seqlens, cp_size, total_length)
    return forward, inverse


@contextlib.contextmanager
def parameters_on_cpu_without_cuda() -> Iterator[None]:
    """Let megatron-core's GDN constructor run on a machine without CUDA.

    It asks `torch.cuda.current_device()` where to put its parameters; here the answer is the CPU.
    """
    if torch.cuda.is_available():
        yield
        return
    with mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")):
        yield


def eager_without_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run megatron-core's `torch.compile`d methods eagerly on CPU tensors.

    Compiling them for a CPU costs tens of seconds at the first call and gains nothing in tests.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_available():
            return function(*args, **kwargs)
        with torch.compiler.set_stance("force_eager"):
            return function(*args, **kwargs)

    return run


class _CheckpointWithoutCuda(CheckpointWithoutOutput):
    """The same lifecycle (checkpoint, discard, recompute in backward) on a CPU.

    Differs in two things: no CUDA random state is saved, and the recomputed output is copied into
    the discarded storage instead of shared through a C++ extension compiled on first use.
    """

    ctx: Any
    outputs: Any
    run_function: Any

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        self.run_function = run_function
        output = CheckpointWithoutOutputFunction.apply(run_function, self, *args)
        self.outputs = (output,)
        return output

    def _recompute(self, _: Any) -> None:
        if self.ctx is None:
            return
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "recomputation requires backward(), got autograd.grad(); call backward()"
            )
        inputs = tuple(
            item.detach().requires_grad_(item.requires_grad) if isinstance(item, Tensor) else item
            for item in self.ctx.saved_tensors
        )
        with torch.enable_grad():
            again = self.run_function(*inputs)
        (output,) = self.outputs
        source = again.untyped_storage()
        output.untyped_storage().resize_(source.nbytes()).copy_(source)
        self.ctx.outputs, self.ctx.inputs = (again,), inputs
        self.run_function = self.outputs = self.ctx = None


def norm_out_checkpoint(fp8: str | None) -> CheckpointWithoutOutput:
    """A checkpoint for the recomputation of the output norm.

    Args:
        fp8: `config.fp8`. megatron-core reads anything but None as "fp8 is on" and then needs
            Transformer Engine.
    """
    if torch.cuda.is_available():
        return CheckpointWithoutOutput(fp8=fp8)
    return _CheckpointWithoutCuda(fp8=None)


@contextlib.contextmanager
def compiled_datasets_helpers() -> Iterator[None]:
    """Spare `initialize_megatron` a `make` in site-packages when the wheel's helper is built.

    The wheel ships the compiled helper and no Makefile, so the call would end the process.
    """
    import megatron.core.datasets.utils as datasets_utils

    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError:
        yield
        return
    with mock.patch.object(datasets_utils, "compile_helpers"):
        yield


@contextlib.contextmanager
def flags_checked_for(capability: tuple[int, int] | None) -> Iterator[None]:
    """Let megatron-core's checks of the flags ask a planned GPU and not this machine's.

    They want to know the architecture only to demand environment variables of the launch below
    Blackwell, which a plan has no part in.

    Args:
        capability: CUDA compute capability; None, a machine without a GPU, passes for a Hopper.
    """
    with (
        mock.patch("megatron.training.arguments.get_device_arch_version", return_value=10),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability or (9, 0)),
    ):
        yield


@contextlib.contextmanager
def group_sizes_without_distributed() -> Iterator[None]:
    """Let megatron-core's linear layers believe a group's size without torch.distributed."""
    with mock.patch.multiple(
        "megatron.core.tensor_parallel.layers",
        get_pg_size=lambda group=None: 1 if group is None else group.size(),
        get_pg_rank=lambda group=None: 0 if group is None else group.rank(),
    ):
        yield


def printable_help(parser: argparse.ArgumentParser) -> None:
    """Let `--help` print: some of megatron-core's help texts hold a bare percent sign."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = (action.help or "").replace("%", "%%")


@contextlib.contextmanager
def rewritten_command_line(flag: str, value: str, instead: str) -> Iterator[None]:
    """Show `flag instead` in place of `flag value` to whoever reads `sys.argv` meanwhile.

    `megatron.training.pretrain` parses the command line a second time, for its fault-tolerance
    package, with a parser that knows only megatron-core's own choices.
    """
    rewritten = [
        instead
        if word == value and index and sys.argv[index - 1] == flag
        else f"{flag}={instead}"
        if word == f"{flag}={value}"
        else word
        for index, word in enumerate(sys.argv)
    ]
    with mock.patch.object(sys, "argv", rewritten):
        yield
