# SPDX-License-Identifier: Apache-2.0
"""Two pipeline stages of our block spec are the whole model: loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.layer_on_ranks import PRE
from tests.distributed.pipeline_on_ranks import compare_stages
from tests.distributed.ranks import start_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("options", [{}, PRE], ids=["unfused", "pre"])
def test_two_stages_equal_the_whole_model(options: dict[str, Any]) -> None:
    """In float32 the same operations run in the same order: a few ulp at most."""
    first, last = start_ranks(compare_stages, 2, options)
    assert "loss" in last
    assert any("embedding" in name for name in first)
    assert len(first) > 10
    assert len(last) > 10
    for errors in (first, last):
        assert max(errors.values()) < 16 * 2**-23, errors
