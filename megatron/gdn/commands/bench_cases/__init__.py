# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases, one module per stage, each with a tuple `CASES`."""

from __future__ import annotations

import importlib

from megatron.gdn.commands.bench_cases.case import BenchCase

STAGES_WITH_CASES = ("gated_output_norm", "pre_gated_delta_rule")
"""Stages that have a module of their name in this package."""


def bench_cases(stages: tuple[str, ...] = STAGES_WITH_CASES) -> tuple[BenchCase, ...]:
    """The cases of the given stages, in their order."""
    modules = (importlib.import_module(f"{__name__}.{stage}") for stage in stages)
    return tuple(case for module in modules for case in module.CASES)
