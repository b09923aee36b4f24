# SPDX-License-Identifier: Apache-2.0
"""Does every declared precondition refuse, by itself and through the call path of a layer?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusion_registry import FusionUnsupportedError
from fusion_registry.binding import ALL_PHASES, BoundFusion, BoundStage, CompiledRules
from fusion_registry.contracts import StageContract
from fusion_registry.preconditions import Precondition, Predicate
from fusion_registry.registry import RegisteredFusion
from megatron.gdn.conformance.breaking import Call, broken_calls
from megatron.gdn.conformance.fitting import JudgedRule, judged_rules
from megatron.gdn.conformance.results import Result, Verdict


class _ItRan(Exception):
    """The implementation would have been called."""


def _must_not_run(**inputs: Any) -> Any:
    raise _ItRan


class Refuser:
    """Breaks the rules of one fusion, one at a time.

    Args:
        fusion: the fusion.
        contract: of its stage.
        accepted: a call that the declaration accepts, its optional inputs given where possible.
    """

    def __init__(self, fusion: RegisteredFusion, contract: StageContract, accepted: Call) -> None:
        self.fusion = fusion
        self.contract = contract
        self.accepted = accepted
        self.rules: Sequence[Precondition] = fusion.declaration.preconditions
        self.judged = judged_rules(self.rules, contract)

    def check(self, index: int) -> Result:
        """Break the rule at a place in the declaration and see that it refuses."""
        rule = self.rules[index]
        broken, others = self._break(index)
        if broken is None:
            return self._unbroken(rule)
        problems = self._call_path_problems(rule, broken)
        detail = "" if not others else "with it broke: " + "; ".join(others)
        return Result.of_problems(problems) if problems else Result(Verdict.PASSED, detail)

    def _break(self, index: int) -> tuple[Call | None, list[str]]:
        """The proposed call that breaks the rule and the fewest others, and the others' words."""
        best: tuple[Call | None, list[str]] = (None, [])
        for call in broken_calls(self.rules[index], self.accepted, self.contract):
            with call.surroundings():
                # Some judges remember what they found, so new surroundings need new ones.
                judged = (
                    self.judged
                    if call.surroundings == self.accepted.surroundings
                    else judged_rules(self.rules, self.contract)
                )
                # An exception is no verdict: such a call would crash, not be refused.
                if _verdict(judged[index], call) is None:
                    continue
                others = [
                    item.rule.describe()
                    for place, item in enumerate(judged)
                    if place != index and item.judged(call.inputs, call.layer)[0] is not None
                ]
            if best[0] is None or len(others) < len(best[1]):
                best = (call, others)
            if not others:
                break
        return best

    def _unbroken(self, rule: Precondition) -> Result:
        missing = [
            name
            for name in rule.subjects()
            if "." not in name and self.accepted.inputs.get(name, "") is None
        ]
        if missing and not isinstance(rule, Predicate):
            return Result(
                Verdict.NOT_GENERATED,
                f"no case that the declaration accepts has {', '.join(missing)}",
            )
        if isinstance(rule, Predicate):
            return Result(
                Verdict.NOT_GENERATED,
                "no change that was tried on what it reads makes the predicate refuse; test it "
                "yourself",
            )
        return Result(
            Verdict.FAILED, "never refuses: no call breaks this rule; remove or correct it"
        )

    def _call_path_problems(self, rule: Precondition, call: Call) -> list[str]:
        """What a layer with this fusion bound does wrong on the broken call."""
        bound = BoundFusion(self.fusion, self.contract)
        bound.call = _must_not_run
        stage = BoundStage(self.contract, (bound,), "check_fusions", None)
        with call.surroundings():
            bound.rules = CompiledRules(self.fusion, self.contract, ALL_PHASES)
            problems = _refusal_problems(
                rule, "the call", lambda: stage.run(call.layer, call.inputs)
            )
            if rule.phase in ("config", "layer"):
                # Known before any call, so the layer's constructor must refuse as well.
                bound.early = {rule.phase: CompiledRules(self.fusion, self.contract, (rule.phase,))}
                problems += _refusal_problems(
                    rule, "construction", lambda: stage.check_early(rule.phase, call.layer)
                )
        return problems


def _verdict(item: JudgedRule, call: Call) -> str | None:
    found, crashed = item.judged(call.inputs, call.layer)
    return None if crashed else found


def _refusal_problems(rule: Precondition, what: str, act: Any) -> list[str]:
    try:
        act()
    except FusionUnsupportedError as error:
        if any(
            reason.code == rule.code and reason.text.startswith(rule.describe())
            for reason in error.reasons
        ):
            return []
        codes = ", ".join(reason.code for reason in error.reasons)
        return [f"{what} was refused without this rule among the reasons: {codes}"]
    except _ItRan:
        return [f"{what} was not refused: the implementation would have run"]
    except (Exception, SystemExit) as error:
        return [f"{what} crashed instead of being refused: {type(error).__name__}: {error}"]
    return [f"{what} was not refused"]
