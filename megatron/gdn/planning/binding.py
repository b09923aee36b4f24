# SPDX-License-Identifier: Apache-2.0
"""Judges the stages of a planned layer in place of its binding.

The rules are the compiled preconditions that refuse a real call; nothing about support is said
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusion_registry import FusionConfigError, Machine, Registry
from fusion_registry.binding import (
    ALL_PHASES,
    CompiledRules,
    load_implementation,
    package_problems,
)
from fusion_registry.preconditions import Inputs, Phase
from fusion_registry.selection import Claim
from megatron.gdn.planning.outputs import CONTRACT_OUTPUTS, UNFUSED
from megatron.gdn.planning.plan import (
    PlannedCandidate,
    PlannedReason,
    PlannedStage,
    UnplannableError,
    error_words,
)


class Judges:
    """Every fusion's compiled rules for one machine, compiled once a plan.

    Args:
        registry: where the fusions stand.
        machine: where the run is planned. When it has the packages of this Python, the
            implementations are imported too, as a run would do.
    """

    def __init__(self, registry: Registry, machine: Machine) -> None:
        self.registry = registry
        self.machine = machine
        self._rules: dict[str, CompiledRules | None] = {}
        self._unusable: dict[str, tuple[PlannedReason, ...]] = {}

    def candidate(self, name: str, layer: Any, inputs: Inputs) -> PlannedCandidate:
        """Judge one fusion for one call.

        Raises:
            UnplannableError: a rule reads more than metadata.
        """
        if name not in self._unusable:
            self._load(name)
        reasons = self._unusable[name]
        rules = self._rules[name]
        if rules is not None:
            phases = {rule.code: rule.phase for rule in rules.rules}
            try:
                found = rules.reasons(inputs, layer)
            except (Exception, SystemExit) as error:  # a predicate may do anything
                raise UnplannableError(
                    f"the preconditions of fusion {name!r} cannot be judged before the run: "
                    f"{error_words(error)}; a predicate must take what it `reads` by keyword, and "
                    "read metadata only"
                ) from error
            reasons += tuple(PlannedReason(r.code, phases[r.code], r.text) for r in found)
        option = self.registry.fusions[name].declaration.option
        return PlannedCandidate(name, option, reasons, not self._unusable[name])

    def _load(self, name: str) -> None:
        fusion = self.registry.fusions[name]
        contract = self.registry.stages[fusion.declaration.stage]
        problems = [
            PlannedReason(reason.code, "layer", reason.text)
            for reason in package_problems(fusion, self.machine)
        ]
        self._rules[name] = None
        try:
            # What another machine has installed is not here to be imported.
            if self.machine.packages is None and not problems:
                load_implementation(fusion, contract)
            self._rules[name] = CompiledRules(fusion, contract, ALL_PHASES, self.machine)
        except FusionConfigError as error:
            problems.append(PlannedReason("implementation", "layer", error.problems[0].text))
        self._unusable[name] = tuple(problems)


@dataclass
class PlannedBinding:
    """Stands where a layer has its binding: judges every stage and notes what it would do."""

    claims: Mapping[str, Claim]
    judges: Judges
    found: dict[str, PlannedStage] = field(default_factory=dict)

    def run(self, stage: str, layer: Any, inputs: Inputs) -> Any:
        claim = self.claims.get(stage)
        if claim is None:
            return self._run_unfused(stage, layer, inputs)
        candidates = tuple(self.judges.candidate(name, layer, inputs) for name in claim.candidates)
        refused_at = _refused_at(candidates)
        chosen = next((c.fusion for c in candidates if not c.reasons), None)
        self.found[stage] = PlannedStage(
            stage,
            "refused" if refused_at else "fused",
            fusion=None if refused_at else chosen,
            refused_at=refused_at,
            origin=claim.origin,
            candidates=candidates,
        )
        return CONTRACT_OUTPUTS[stage](inputs)

    def _run_unfused(self, stage: str, layer: Any, inputs: Inputs) -> Any:
        self.found[stage] = PlannedStage(stage, "unfused")
        run = UNFUSED.get(stage)
        if run is None:
            return CONTRACT_OUTPUTS[stage](inputs)
        try:
            return run(layer, **inputs)
        except ValueError as error:
            self.found[stage] = PlannedStage(stage, "fails", problem=str(error))
            return CONTRACT_OUTPUTS[stage](inputs)


def _refused_at(candidates: Sequence[PlannedCandidate]) -> Phase | None:
    """The moment at which a run would stop, None when a candidate can serve the call."""
    for moment in ALL_PHASES:
        if all(candidate.is_refused_at(moment) for candidate in candidates):
            return moment
        if moment == "layer" and not all(c.can_be_loaded for c in candidates):
            return moment
    return None
