# SPDX-License-Identifier: Apache-2.0
"""Checkpoints know nothing of fusions, and are cut anew for another tensor-parallel size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.checkpoint_on_ranks import there_and_back
from tests.distributed.ranks import start_ranks

pytestmark = pytest.mark.distributed


def test_fused_to_unfused_and_back_over_tensor_parallel_sizes(tmp_path: Path) -> None:
    for found in start_ranks(there_and_back, 2, str(tmp_path)):
        assert found == {"tp2_unfused": [], "tp1_fused": []}
