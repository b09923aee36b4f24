# SPDX-License-Identifier: Apache-2.0
"""A plan as plain data: per layer and stage what would run, or every reason why not."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fusion_registry import Machine
from fusion_registry.binding import ALL_PHASES
from fusion_registry.preconditions import Phase

Outcome = Literal["fused", "unfused", "inside", "refused", "fails"]


@dataclass(frozen=True)
class PlannedReason:
    """Why a fusion cannot serve a stage.

    Args:
        code: of the precondition; `package:NAME` or `implementation` when the fusion itself cannot
            be used.
        phase: earliest moment at which a run knows it.
        text: what is required and what would be found.
    """

    code: str
    phase: Phase
    text: str


@dataclass(frozen=True)
class PlannedCandidate:
    """A fusion that was asked for.

    Args:
        fusion: its name.
        option: the field of the configuration that enables it, if any.
        reasons: every reason why it would not run.
        can_be_loaded: False stops the run, whatever other candidates there are.
    """

    fusion: str
    option: str | None
    reasons: tuple[PlannedReason, ...]
    can_be_loaded: bool = True

    def is_refused_at(self, moment: Phase) -> bool:
        """Whether a run would know by `moment` that this fusion cannot serve."""
        known = ALL_PHASES[: ALL_PHASES.index(moment) + 1]
        return any(reason.phase in known for reason in self.reasons)


@dataclass(frozen=True)
class PlannedStage:
    """What one stage of one layer would do.

    Args:
        stage: its name.
        outcome: `fused`; `unfused`; `inside` its parent, for which a fusion was asked; `refused`;
            or `fails`, when the unfused code itself raises.
        parent: the composite stage that it is part of.
        fusion: the fusion that would run.
        refused_at: when a run would stop: as the configuration is built, as the layer is built, or
            at its first call.
        origin: who asked for the candidates: an option, or a file and line.
        candidates: what was asked for, best first.
        problem: what the unfused code would raise.
    """

    stage: str
    outcome: Outcome
    parent: str | None = None
    fusion: str | None = None
    refused_at: Phase | None = None
    origin: str = ""
    candidates: tuple[PlannedCandidate, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class PlannedLayer:
    """What one layer would do. `problem` is what it would raise before its first stage."""

    layer: int
    stages: tuple[PlannedStage, ...]
    problem: str = ""

    @property
    def stops(self) -> bool:
        """Whether a run would stop here."""
        return bool(self.problem) or any(
            stage.outcome in ("refused", "fails") for stage in self.stages
        )


@dataclass(frozen=True)
class RunPlan:
    """What a run would do.

    Args:
        machine: where.
        sizes: of a layer, local to one rank, for the reader.
        layers: the Gated DeltaNet layers, in order.
        others: numbers of the layers that have no stages.
        hybrid: whether a pattern names the layers, so that others are of any kind.
    """

    machine: Machine
    sizes: Mapping[str, Any]
    layers: tuple[PlannedLayer, ...]
    others: tuple[int, ...]
    hybrid: bool = False

    @property
    def stops(self) -> bool:
        """Whether a run would stop anywhere."""
        return any(layer.stops for layer in self.layers)


def error_words(error: BaseException) -> str:
    """Name and text of an error; a bare assert has no text, so the line that failed stands in."""
    text = str(error).strip()
    if not text:
        frames = traceback.extract_tb(error.__traceback__)
        text = (frames[-1].line or "") if frames else ""
    return f"{type(error).__name__}: {text}"


class UnplannableError(ValueError):
    """Settings from which no layer can be made, or that make no Gated DeltaNet layer."""
