# SPDX-License-Identifier: Apache-2.0
"""Runs Triton kernels in Triton's interpreter without CUDA, and skips what needs CUDA."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.distributed import ranks

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Read when a kernel is decorated, those of Triton itself among them.
    os.environ.setdefault("TRITON_INTERPRET", "1")
from megatron.gdn.triton_3_7 import speed_up_interpreter  # noqa: E402

speed_up_interpreter()

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-combination",
        action="store_true",
        help="tests/distributed: also what only GPUs do in seconds; without GPUs it takes minutes",
    )
    parser.addoption(
        "--ranks-on-cpu",
        action="store_true",
        help="tests/distributed: gloo and Triton's interpreter also where there are GPUs enough",
    )


def pytest_configure(config: pytest.Config) -> None:
    ranks.on_cpu = config.getoption("--ranks-on-cpu")
    ranks.every_combination = config.getoption("--every-combination")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not HAS_CUDA:
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))
