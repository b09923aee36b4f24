# SPDX-License-Identifier: Apache-2.0
"""The two errors of the registry, and the reasons that they carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """Why a declared precondition does not hold.

    Args:
        code: stable name for programs: the kind of the precondition and its subject.
        text: for people: what is required and what was found.
    """

    code: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ConfigProblem:
    """One fault in a file, a name or a selection, and where it stands.

    Args:
        text: rule, value and remedy.
        origin: the file, plug-in or option that it came from.
        line: line in the file, from 1, when known.
        path: key path inside the file, such as `fusions[0].stage`.
    """

    text: str
    origin: str = ""
    line: int | None = None
    path: str = ""

    def __str__(self) -> str:
        place = self.origin if self.line is None else f"{self.origin}:{self.line}"
        return ": ".join(part for part in (place, self.path, self.text) if part)


class FusionConfigError(ValueError):
    """A declaration file, a fusion name or a selection is wrong.

    Attributes:
        problems: every fault found, in order.
    """

    def __init__(self, *problems: ConfigProblem | str) -> None:
        self.problems = tuple(
            ConfigProblem(problem) if isinstance(problem, str) else problem for problem in problems
        )
        super().__init__("\n".join(str(problem) for problem in self.problems))


@dataclass(frozen=True)
class CandidateRefusal:
    """One fusion that was asked for and cannot run, with all its reasons."""

    fusion: str
    option: str | None
    reasons: tuple[Reason, ...]


class FusionUnsupportedError(ValueError):
    """An enabled fusion cannot serve this configuration, layer or call.

    Attributes:
        reasons: every reason of every candidate, in order of declaration.
        stage: the stage that was asked for.
        fusion: the fusion refused (the first candidate when there were several).
        layer: layer number, from 1, or None when no layer exists yet.
        candidates: the refusals one by one.
    """

    def __init__(
        self,
        *,
        stage: str,
        candidates: Sequence[CandidateRefusal],
        layer: int | None = None,
        origin: str | None = None,
    ) -> None:
        self.stage = stage
        self.layer = layer
        self.candidates = tuple(candidates)
        self.fusion = self.candidates[0].fusion
        self.reasons = tuple(reason for item in self.candidates for reason in item.reasons)
        where = "" if layer is None else f", layer {layer}"
        blocks = []
        for item in self.candidates:
            title = item.option or f"fusion {item.fusion}"
            lines = [f"{title} requires {reason}" for reason in item.reasons]
            lines.append(f"  (stage {stage}, fusion {item.fusion}{where})")
            blocks.append("\n".join(lines))
        option = self.candidates[0].option
        if len(self.candidates) == 1 and option and (origin is None or option in origin):
            remedy = "disable the option to run unfused"
        else:
            remedy = f"deselect it ({origin or 'the selection'}) to run unfused"
        super().__init__("\n".join(blocks) + "; " + remedy)
