# SPDX-License-Identifier: Apache-2.0
"""What a conformance check finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    REPORTED = "reported"
    """Measured, and nothing was promised that it could break."""
    OUTSIDE = "outside"
    """The declaration excludes what the check would try."""
    NOT_GENERATED = "not generated"
    """No call that breaks the rule was found, which proves nothing; test that rule yourself."""
    UNCHECKED = "not checked"
    """Impossible here; the detail says why."""


@dataclass(frozen=True)
class Measurement:
    """How far one tensor lies from its reference, and how far it may.

    Args:
        name: of the output, or of the input whose gradient it is.
        error: norm of the difference over norm of the reference.
        tolerance: see `megatron.gdn.conformance.parity`.
    """

    name: str
    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        # Written so that NaN does not hold.
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Result:
    """The outcome of one check.

    Args:
        verdict: how it ended.
        detail: for people: why it failed, why it was not checked, what was measured.
        measurements: of a comparison with the reference, worst first.
    """

    verdict: Verdict
    detail: str = ""
    measurements: tuple[Measurement, ...] = ()

    @classmethod
    def of_problems(cls, problems: list[str]) -> Result:
        """Failed with these problems, passed without any."""
        return cls(Verdict.FAILED if problems else Verdict.PASSED, "; ".join(problems))

    @classmethod
    def of_measurements(cls, measurements: list[Measurement], detail: str = "") -> Result:
        """Passed when every measurement holds."""
        worst_first = sorted(
            measurements, key=lambda item: (item.holds, -item.error / item.tolerance)
        )
        wrong = [
            f"{item.name} is off by {item.error:.1e}, tolerance {item.tolerance:.1e}"
            for item in worst_first
            if not item.holds
        ]
        return cls(
            Verdict.FAILED if wrong else Verdict.PASSED,
            "; ".join(wrong) or detail,
            tuple(worst_first),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON: a number that JSON cannot hold becomes a text."""
        return {
            "verdict": str(self.verdict),
            "detail": self.detail,
            "measurements": [
                {
                    "name": item.name,
                    "error": item.error if item.error < float("inf") else str(item.error),
                    "tolerance": item.tolerance,
                }
                for item in self.measurements
            ],
        }
