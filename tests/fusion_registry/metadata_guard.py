# SPDX-License-Identifier: Apache-2.0
"""A guard under which code may read the metadata of tensors and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _NoWork(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"a judge ran {function}")


@contextmanager
def metadata_only() -> Iterator[None]:
    """Fails on every operator, on every look into a tensor, and on every new tensor."""

    def refuse(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a judge read a tensor's contents")

    looks = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
    with pytest.MonkeyPatch.context() as patch, _NoWork():
        for name in looks:
            patch.setattr(torch.Tensor, name, refuse)
        yield
