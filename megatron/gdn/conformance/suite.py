# SPDX-License-Identifier: Apache-2.0
"""Which checks a registered fusion gets, and how each is run.

The list of checks follows from the declaration and the stage alone: making it imports no
implementation. Everything that a check needs is made when it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from fusion_registry import FusionConfigError, Machine, Registry
from fusion_registry.binding import BoundFusion, BoundStage, load_implementation
from fusion_registry.contracts import StageContract
from fusion_registry.import_path import import_object
from fusion_registry.machine import triton_interpreter_is_on
from fusion_registry.preconditions import DtypeIn, Predicate, version_problem
from fusion_registry.registry import RegisteredFusion
from megatron.gdn.conformance.breaking import Call, pretend
from megatron.gdn.conformance.fitting import Fitter, NoCase, judged_rules, layer_for
from megatron.gdn.conformance.output_layout import layout_problems
from megatron.gdn.conformance.parity import (
    Comparison,
    ContractBroken,
    bitwise_equal,
    differentiable_inputs,
    expanded_gradient,
    normal_gradient,
    only,
)
from megatron.gdn.conformance.refusals import Refuser
from megatron.gdn.conformance.results import Measurement, Result, Verdict
from megatron.gdn.conformance.stage_inputs import BUILDERS, Setting, Sizes, make_inputs
from megatron.gdn.subjects import (
    config_attributes,
    layer_attributes,
    reads_attributes,
    unknown_attributes,
)

SHARPEST_FIRST = ("float32", "float16", "bfloat16", "float64")
"""Dtypes of activations, the usual one that shows the smallest mistake first."""

HEAD_DIMS = {"head_dim", "key_head_dim", "value_head_dim"}
"""Names of dimensions and inputs by which a contract speaks of the size of a head."""

MANY_TOKENS, MANY_TOKENS_INTERPRETED = 150, 35
"""Tokens of a long row; the interpreter spends milliseconds on each step of a march over them."""

SMALL_LENGTH = 5
"""Tokens of a case that is run many times."""


@dataclass(frozen=True)
class Check:
    """One check of one fusion.

    Args:
        fusion: name of the fusion.
        name: of the check, unique for the fusion.
        run: does it; raises nothing.
    """

    fusion: str
    name: str
    run: Callable[[], Result]


class Unchecked(Exception):
    """A check cannot be made here; the text says why."""


def checks_of(fusion: RegisteredFusion, registry: Registry) -> list[Check]:
    """Every check of a fusion, in the order in which a person wants to read them."""
    examined = ExaminedFusion(fusion, registry.stages[fusion.declaration.stage])
    named: dict[str, Callable[[], Result]] = {}
    for name, run in examined.checks():
        unique, number = name, 2
        while unique in named:  # two rules may say the same words
            unique, number = f"{name} #{number}", number + 1
        named[unique] = run
    return [
        Check(fusion.name, name, functools.partial(_contained, run)) for name, run in named.items()
    ]


def _contained(run: Callable[[], Result]) -> Result:
    try:
        return run()
    except Unchecked as error:
        return Result(Verdict.UNCHECKED, str(error))
    except ContractBroken as error:
        return Result(Verdict.FAILED, str(error))
    except (Exception, SystemExit) as error:  # an implementation may raise anything
        return Result(Verdict.FAILED, f"{type(error).__name__}: {error}")


def _layout(comparison: Comparison) -> Result:
    return Result.of_problems(layout_problems(comparison))


def _outputs(comparison: Comparison) -> Result:
    return Result.of_measurements(comparison.outputs())


def _gradients(comparison: Comparison) -> Result:
    return Result.of_measurements(comparison.gradients(normal_gradient))


def _case_words(setting: Setting) -> str:
    sizes = ", ".join(f"{name} {value}" for name, value in vars(setting.sizes).items())
    return f"case: {setting.dtype}, {sizes}"


class ExaminedFusion:
    """A fusion under examination: what its checks share, each made once and when needed."""

    def __init__(self, fusion: RegisteredFusion, contract: StageContract) -> None:
        self.fusion = fusion
        self.declaration = fusion.declaration
        self.contract = contract
        self.main_input = contract.inputs[0].name
        self._fitted: dict[str, Setting | Result] = {}
        self._comparisons: dict[str, Comparison] = {}

    def checks(self) -> Iterator[tuple[str, Callable[[], Result]]]:
        """Names and runs of all checks."""
        part = functools.partial
        yield "packages", self.check_packages
        yield "import", self.check_import
        yield "signature", self.check_signature
        if reads_attributes(self.fusion):
            yield "attributes exist", self.check_attributes
        yield "reads metadata only", self.check_metadata_only
        for name in self.settings:
            yield f"layout[{name}]", part(self.check_case, name, _layout)
            yield f"outputs[{name}]", part(self.check_case, name, _outputs)
            yield f"gradients[{name}]", part(self.check_case, name, _gradients)
        yield "gradients[incoming of stride 0]", self.check_expanded_gradients
        if len(self.contract.outputs) > 1:
            yield "gradients[one output used]", self.check_single_outputs
        yield "gradients[one input trained]", self.check_single_inputs
        yield "determinism", self.check_determinism
        for index, rule in enumerate(self.declaration.preconditions):
            yield f"refuses[{rule.describe()}]", part(self.check_refusal, index)

    def dtypes(self) -> tuple[str, ...]:
        """Dtypes of the activations that the declaration names, sharpest first."""
        lists = [
            set(rule.dtypes)
            for rule in self.declaration.preconditions
            if isinstance(rule, DtypeIn) and rule.tensor == self.main_input
        ]
        allowed = set.intersection(*lists) if lists else set(SHARPEST_FIRST[:3])
        return tuple(word for word in SHARPEST_FIRST if word in allowed) or SHARPEST_FIRST[:1]

    @functools.cached_property
    def settings(self) -> dict[str, Setting]:
        """Cases to compare, by name: every dtype once, everything else in the sharpest dtype."""
        dtypes = self.dtypes()
        base = Setting(dtype=dtypes[0])
        # One row is enough for what is no matter of rows; a march over tokens takes its time.
        row = replace(base, sizes=replace(base.sizes, batch=1))
        cases = {f"dense, {dtypes[0]}": base}
        cases |= {f"dense, {word}": replace(row, dtype=word) for word in dtypes[1:]}
        if self.contract.input("cu_seqlens") is not None:
            cases["packed documents"] = replace(row, packed=True)
        # More than one program of any sensible kernel. A composite stage marches over its tokens.
        slow = bool(self.contract.children) and triton_interpreter_is_on()
        many = MANY_TOKENS_INTERPRETED if slow else MANY_TOKENS
        cases["many tokens"] = replace(base, sizes=replace(base.sizes, length=many))
        named = {name for item in self.contract.inputs for name in (item.name, *item.dims)}
        for name, sizes, subjects in (
            ("odd head dimensions", {"key_dim": 12, "value_dim": 24}, HEAD_DIMS),
            ("one value head a key head", {"group": 1}, {"num_key_heads"}),
            ("six value heads", {"key_heads": 3}, named),
            ("one token", {"length": 1}, named),
        ):
            if named & subjects:
                cases[name] = replace(row, sizes=replace(row.sizes, **sizes))
        for option, value, name in (
            ("conv_bias", False, "no conv_bias"),
            ("use_qk_l2norm", False, "use_qk_l2norm=False"),
            ("zero_centered_gamma", True, "zero_centered_gamma=True"),
        ):
            if self.contract.input(option) is not None:
                cases[name] = replace(row, options={option: value})
        return cases

    # What must work before anything can run.

    def check_packages(self) -> Result:
        here = Machine("this machine", "cpu")
        return Result.of_problems(
            [
                f"needs {package} {versions}, got {found}"
                for package, versions in self.declaration.packages.items()
                if (found := version_problem(package, versions, here)) is not None
            ]
        )

    def check_import(self) -> Result:
        path = self.declaration.implementation
        try:
            implementation = import_object(path)
        except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
            return Result(Verdict.FAILED, f"cannot import {path}: {type(error).__name__}: {error}")
        return Result.of_problems([] if callable(implementation) else [f"{path} is not callable"])

    def check_signature(self) -> Result:
        self._require_import()
        try:
            load_implementation(self.fusion, self.contract)
        except FusionConfigError as error:
            return Result(Verdict.FAILED, error.problems[0].text)
        return Result(Verdict.PASSED)

    def check_attributes(self) -> Result:
        """What the rules read of the configuration and the layer is there to be read."""
        return Result.of_problems(
            [
                str(problem)
                for problem in unknown_attributes(
                    self.fusion, config_attributes(), layer_attributes()
                )
            ]
        )

    def check_metadata_only(self) -> Result:
        """The rules are judged on meta tensors, which have no contents to read."""
        try:
            call = self.accepted_call
        except Unchecked as error:
            if self.fitter.crashing:
                return Result.of_problems([str(error)])
            raise
        inputs = {
            name: value.to("meta") if isinstance(value, torch.Tensor) else value
            for name, value in call.inputs.items()
        }
        problems = []
        for item in judged_rules(self.declaration.preconditions, self.contract):
            if not isinstance(item.rule, Predicate):
                continue
            try:
                item.judge(inputs, call.layer)
            except (Exception, SystemExit) as error:
                problems.append(
                    f"{item.rule.code} cannot be judged on meta tensors: "
                    f"{type(error).__name__}: {error}"
                )
        return Result.of_problems(problems)

    # Numbers.

    def check_case(self, name: str, compare: Callable[[Comparison], Result]) -> Result:
        """Run one case, unless the declaration excludes it."""
        setting = self.fitted(name)
        if isinstance(setting, Result):
            return setting
        if name not in self._comparisons:
            self._comparisons[name] = self._bound(setting)
        result = compare(self._comparisons[name])
        if result.verdict is Verdict.FAILED:
            return replace(result, detail=f"{result.detail} ({_case_words(setting)})")
        return result

    def check_expanded_gradients(self) -> Result:
        comparison = self._bound(self.small_setting)
        return Result.of_measurements(comparison.gradients(expanded_gradient))

    def check_single_outputs(self) -> Result:
        comparison = self._bound(self.small_setting)
        measured: list[Measurement] = []
        for item in self.contract.outputs:
            measured += (
                replace(found, name=f"{found.name} with only {item.name} used")
                for found in comparison.gradients(only(item.name))
            )
        return Result.of_measurements(measured)

    def check_single_inputs(self) -> Result:
        comparison = self._bound(self.small_setting)
        measured: list[Measurement] = []
        for name in differentiable_inputs(comparison.inputs):
            measured += comparison.gradients(normal_gradient, [name])
        return Result.of_measurements(measured)

    def check_determinism(self) -> Result:
        declared = self.declaration.determinism
        comparison = self._bound(self.base_setting)
        first, second = comparison.results(), comparison.results()
        different = [
            name for name, value in first.items() if not bitwise_equal(value, second[name])
        ]
        if declared == "deterministic":
            return Result.of_problems(
                [f"declared deterministic, but two runs differ in {', '.join(different)}"]
                if different
                else []
            )
        seen = f"differ in {', '.join(different)}" if different else "are the same bit for bit"
        return Result(Verdict.REPORTED, f"declared {declared}; two runs {seen}")

    # Refusals.

    def check_refusal(self, index: int) -> Result:
        return self._refuser.check(index)

    # What the checks share.

    @functools.cached_property
    def importable(self) -> bool:
        return self.check_import().verdict is Verdict.PASSED

    def _require_import(self) -> None:
        if not self.importable:
            raise Unchecked("the implementation cannot be imported")

    @functools.cached_property
    def fitter(self) -> Fitter:
        if self.contract.name not in BUILDERS:
            raise Unchecked(f"no inputs are known for the stage {self.contract.name}")
        try:
            return Fitter(self.contract, self.declaration.preconditions)
        except (Exception, SystemExit) as error:  # the module of a predicate may raise anything
            raise Unchecked(
                f"a precondition is broken here: {type(error).__name__}: {error}"
            ) from error

    @functools.cached_property
    def base_setting(self) -> Setting:
        """The usual case, with whatever the declaration needs changed."""
        problem = "no case"
        for word in self.dtypes():
            try:
                return self.fitter.fit(Setting(dtype=word), [self.main_input])
            except NoCase as error:
                problem = str(error)
                # A usual case that cannot be had is sought by many checks, in many variants.
                self.fitter.searches_pairs = False
        raise Unchecked(problem)

    @functools.cached_property
    def device(self) -> str:
        """Where the fusion can run on this machine."""
        here = Machine.here()
        problems: list[str] = []
        for device in dict.fromkeys((here.device_type, "cpu")):
            machine = replace(here, device_type=device)
            problems = [
                found
                for rule in self.declaration.preconditions
                if (found := rule.machine_problem(machine)) is not None
            ]
            if not problems:
                return device
        raise Unchecked("cannot be checked here: " + "; ".join(problems))

    @functools.cached_property
    def small_setting(self) -> Setting:
        """The usual case with fewer tokens, for checks of many runs; as it is when refused."""
        small = replace(self.base_setting.sizes, batch=1, length=SMALL_LENGTH)
        setting = replace(self.base_setting, sizes=small)
        return self.base_setting if self.fitter.refusing(setting) else setting

    def fitted(self, name: str) -> Setting | Result:
        """A named case as the declaration accepts it, or the result that says that it does not.

        Raises:
            Unchecked: the declaration accepts no case at all.
        """
        if name not in self._fitted:
            base, setting, usual = self.base_setting, self.settings[name], Sizes()
            wanted = {
                size: value
                for size, value in vars(setting.sizes).items()
                if value != getattr(usual, size)
            }
            start = replace(
                setting,
                attributes=base.attributes,
                contiguous=base.contiguous,
                sizes=replace(base.sizes, **wanted),
                dtypes={k: word for k, word in base.dtypes.items() if word != base.dtype},
            )
            try:
                self._fitted[name] = self.fitter.fit(start, [self.main_input, *wanted])
            except NoCase as error:
                self._fitted[name] = Result(Verdict.OUTSIDE, str(error))
        return self._fitted[name]

    def _bound(self, setting: Setting) -> Comparison:
        """A case ready to run.

        Raises:
            Unchecked: it cannot run here.
        """
        self._require_import()
        device = self.device
        try:
            bound = BoundFusion(self.fusion, self.contract)
        except FusionConfigError as error:
            raise Unchecked(f"cannot be bound: {error.problems[0].text}") from error
        stage = BoundStage(self.contract, (bound,), "check_fusions", None)
        return Comparison(stage, layer_for(setting), make_inputs(self.contract, setting, device))

    @functools.cached_property
    def accepted_call(self) -> Call:
        """A call that the declaration accepts, with as many optional inputs as it accepts."""
        base = self.base_setting
        packed = replace(base, packed=True, sizes=replace(base.sizes, batch=1))
        setting = base
        if self.contract.input("cu_seqlens") is not None:
            try:
                setting = self.fitter.fit(packed, [self.main_input])
            except NoCase:
                setting = base
        layer = layer_for(setting)
        try:
            return Call(make_inputs(self.contract, setting, self.device), layer)
        except Unchecked:
            # A call that is refused never runs, so the devices it needs need not be there.
            shapes = make_inputs(self.contract, setting, "meta")
            return Call({}, layer).pretending(
                {
                    name: pretend(value, "cuda:0") if isinstance(value, torch.Tensor) else value
                    for name, value in shapes.items()
                }
            )

    @functools.cached_property
    def _refuser(self) -> Refuser:
        self._require_import()
        try:
            load_implementation(self.fusion, self.contract)
        except FusionConfigError as error:
            raise Unchecked(f"cannot be bound: {error.problems[0].text}") from error
        return Refuser(self.fusion, self.contract, self.accepted_call)
