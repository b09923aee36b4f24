# SPDX-License-Identifier: Apache-2.0
"""Ranks that would fuse differently all end in a ValueError, within seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.agreement_on_ranks import (
    agree_in_every_case,
    enter_training,
    settings_by_rank,
)
from tests.distributed.ranks import start_bare_ranks, start_ranks

pytestmark = pytest.mark.distributed

AGREED = ("nothing", "same", "same_file_elsewhere")
MESSAGES = {
    "option": ["layer 1, stage gated_output_norm", "rank 0: gated_output_norm", "rank 1: nothing"],
    "deterministic": ["rank 0: accepted", "rank 1: refused: ", "requires deterministic_mode=False"],
    "missing_file": ["rank 0: accepted", "rank 1: refused: ", "missing.yaml: cannot be read"],
    "layer": ["layer 1, stage gated_output_norm", "layer 2, stage gated_output_norm"],
    "rule": ["declaration of mine", "rank 0: digest", "rank 1: digest"],
    "package": ["machine for gated_output_norm", "rank 1: needs triton >=3.4, got 3.1"],
}


@pytest.mark.parametrize("before_start", [True, False], ids=["before_start", "default_group"])
def test_every_rank_says_the_same(before_start: bool, tmp_path: Path) -> None:
    start = start_bare_ranks if before_start else start_ranks
    settings = settings_by_rank(str(tmp_path))
    first, second = start(agree_in_every_case, 2, settings, before_start, timeout=100.0)
    assert {case: first[case] for case in AGREED} == dict.fromkeys(AGREED, "agreed")
    assert first == second
    # The same refusal everywhere is no disagreement: each rank raises its own.
    assert "cannot be read" in first["all_refuse"]
    assert "disagree" not in first["all_refuse"]
    for case, parts in MESSAGES.items():
        assert first[case].startswith("FusionConfigError: ranks disagree"), case
        for part in parts:
            assert part in first[case], (case, first[case])


def test_the_training_entry_point_asks() -> None:
    """Without it rank 0 would wait in megatron-core's start for a rank that has ended."""
    first, second = start_bare_ranks(enter_training, 2, timeout=100.0)
    assert first == second
    assert "rank 1: refused: gdn_gated_output_norm_fusion requires deterministic_mode" in first
