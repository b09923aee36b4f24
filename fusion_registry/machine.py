# SPDX-License-Identifier: Apache-2.0
"""Facts about a machine that preconditions can be judged against without running anything."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def installed_version(package: str) -> str | None:
    """Version of an installed distribution, or None when it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Machine:
    """What a machine offers.

    Args:
        name: for messages.
        device_type: `cuda` or `cpu`.
        capability: CUDA compute capability as (major, minor), None without a GPU.
        interpreter: Triton's interpreter is on, so that its kernels take CPU tensors.
        packages: versions of distributions; None means "ask this Python installation".
    """

    name: str
    device_type: str
    capability: tuple[int, int] | None = None
    interpreter: bool = False
    packages: Mapping[str, str] | None = field(default=None)

    def version(self, package: str) -> str | None:
        """Version of `package` on this machine, or None when it is absent."""
        if self.packages is None:
            return installed_version(package)
        return self.packages.get(package)

    @classmethod
    def here(cls) -> Machine:
        """This machine. Imports torch and triton if they are installed, and copes if not."""
        try:
            import torch
        except ImportError:
            return cls("this machine, without torch", "cpu")
        if torch.cuda.is_available():
            return cls(
                torch.cuda.get_device_name(),
                "cuda",
                torch.cuda.get_device_capability(),
                triton_interpreter_is_on(),
            )
        return cls("this machine, without a GPU", "cpu", None, triton_interpreter_is_on())


HOPPER = Machine("a Hopper GPU", "cuda", (9, 0))
AMPERE = Machine("an Ampere GPU", "cuda", (8, 0))
CPU = Machine("a CPU without Triton's interpreter", "cpu")
INTERPRETER = Machine("a CPU under Triton's interpreter", "cpu", None, True)

FIXTURE_MACHINES: Mapping[str, Machine] = {
    "hopper": HOPPER,
    "ampere": AMPERE,
    "cpu": CPU,
    "interpreter": INTERPRETER,
}
"""Machines to plan for without having them, with the packages of this Python installation."""


def triton_interpreter_is_on() -> bool:
    """Whether Triton runs its kernels in the interpreter (`TRITON_INTERPRET=1`)."""
    runtime = _triton_runtime_knobs()
    return runtime is not None and bool(runtime.interpret)


@functools.cache
def _triton_runtime_knobs() -> Any:
    # The import statement alone would cost a microsecond on every judged call.
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs.runtime
