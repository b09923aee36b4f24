# SPDX-License-Identifier: Apache-2.0
"""Lets megatron-core's schedules, gradient buffers, optimizers and checkpoints run on a CPU.

They ask for the device "cuda" by name and wait for it, whether or not there is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from megatron.gdn.megatron_core_0_19 import parameters_on_cpu_without_cuda


class _TensorsOnCpu(TorchFunctionMode):
    """A tensor made for CUDA is made for the CPU, and one moved there stays."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        found = function(*args, **kwargs)
        # megatron-core's optimizers know parameters by the name of their type.
        if function is torch.Tensor.type and isinstance(found, str) and "cuda" not in found:
            return found.replace("torch.", "torch.cuda.")
        return found


@contextlib.contextmanager
def cpu_in_place_of_cuda() -> Iterator[None]:
    """Within, "cuda" means the CPU; with a GPU nothing changes."""
    if torch.cuda.is_available():
        yield
        return
    with (
        _TensorsOnCpu(),
        parameters_on_cpu_without_cuda(),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.cuda, "current_stream"),
    ):
        yield
