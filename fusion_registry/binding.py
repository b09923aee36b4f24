# SPDX-License-Identifier: Apache-2.0
"""A selection resolved for one layer: what runs at each stage, judged on every call.

A binding is made once, when the layer is built: implementations are imported, their signatures
checked against the stage, preconditions compiled to closures. After that its choices never change;
only its counters do. It holds no reference to the layer and shares nothing with other bindings.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fusion_registry.contracts import StageContract
from fusion_registry.errors import (
    CandidateRefusal,
    FusionConfigError,
    FusionUnsupportedError,
    Reason,
    Refusal,
)
from fusion_registry.import_path import import_object
from fusion_registry.machine import Machine
from fusion_registry.preconditions import Inputs, Judge, Phase, Precondition, version_problem
from fusion_registry.registry import RegisteredFusion, Registry, load_registry
from fusion_registry.selection import Claim, Selection

logger = logging.getLogger("fusion_registry")


class CompiledRules:
    """The preconditions of one fusion as closures, in order of declaration.

    Args:
        fusion, contract: whose rules, for calls of which stage.
        phases: only rules of these phases.
        machine: judge calls planned for this machine; None for calls that really run here.

    Raises:
        FusionConfigError: a predicate that a rule names cannot be imported.
    """

    def __init__(
        self,
        fusion: RegisteredFusion,
        contract: StageContract,
        phases: Sequence[Phase],
        machine: Machine | None = None,
    ) -> None:
        self.rules: tuple[Precondition, ...] = tuple(
            rule for rule in fusion.declaration.preconditions if rule.phase in phases
        )
        judges: list[Judge] = []
        for rule in self.rules:
            try:
                judges.append(
                    rule.compile(contract)
                    if machine is None
                    else rule.compile_for(contract, machine)
                )
            except Exception as error:  # a predicate's module may raise anything
                raise _wrong(
                    fusion,
                    f"has a precondition that is broken here, {rule.code}: "
                    f"{type(error).__name__}: {error}",
                    *("preconditions", fusion.declaration.preconditions.index(rule)),
                ) from error
        self.judges = tuple(judges)

    def reasons(self, inputs: Inputs, layer: Any) -> tuple[Reason, ...]:
        """Every reason why the call cannot be served; empty when it can."""
        # Nearly every call passes, and a plain loop costs half of what collecting does.
        for judge in self.judges:
            if judge(inputs, layer) is not None:
                break
        else:
            return ()
        return tuple(
            Reason(rule.code, f"{rule.describe()}, got {found}")
            for rule, judge in zip(self.rules, self.judges, strict=True)
            if (found := judge(inputs, layer)) is not None
        )


ALL_PHASES: tuple[Phase, ...] = ("config", "layer", "call")
EARLY_PHASES: Mapping[Phase, tuple[Phase, ...]] = {
    "config": ("config",),
    "layer": ("config", "layer"),
}


@dataclass(frozen=True)
class ProfilerRange:
    """How a profiler is told that a stage begins and ends, each time by one name.

    The name is `stage:fusion` when a fusion runs and `stage` when the unfused code does. A refused
    call opens no range.
    """

    enter: Callable[[str], object]
    leave: Callable[[str], object]


class BoundFusion:
    """One candidate of a stage: the imported implementation and its rules.

    Args:
        fusion: the declaration; contract: of its stage.
        log_level: at which its first run is logged.
    """

    def __init__(
        self, fusion: RegisteredFusion, contract: StageContract, log_level: int = logging.INFO
    ) -> None:
        declaration = fusion.declaration
        self.name = declaration.name
        self.option = declaration.option
        self.determinism = declaration.determinism
        self.contract = contract
        self.log_level = log_level
        self.range_name = f"{contract.name}:{declaration.name}"
        implementation = load_implementation(fusion, contract)
        self.call = _without_second_judgement(implementation, fusion)
        self.rules = CompiledRules(fusion, contract, ALL_PHASES)
        self.early = {
            phase: CompiledRules(fusion, contract, phases) for phase, phases in EARLY_PHASES.items()
        }
        self.calls = 0

    def refusal(self, reasons: tuple[Reason, ...]) -> CandidateRefusal:
        return CandidateRefusal(self.name, self.option, reasons)


class BoundStage:
    """What a layer does at one stage."""

    __slots__ = (
        "candidates",
        "contract",
        "layer_number",
        "origin",
        "profiler",
        "refused_calls",
        "unfused",
        "unfused_calls",
    )

    def __init__(
        self,
        contract: StageContract,
        candidates: tuple[BoundFusion, ...],
        origin: str,
        layer_number: int | None,
        profiler: ProfilerRange | None = None,
    ) -> None:
        self.contract = contract
        self.candidates = candidates
        self.origin = origin
        self.layer_number = layer_number
        self.profiler = profiler
        self.unfused = import_object(contract.unfused)
        self.unfused_calls = 0
        self.refused_calls = 0

    def run(self, layer: Any, inputs: Inputs) -> Any:
        """Run the first candidate that may serve the call, or the unfused code if none is bound.

        Raises:
            FusionUnsupportedError: candidates are bound and none may serve the call.
        """
        for fusion in self.candidates:
            for judge in fusion.rules.judges:
                if judge(inputs, layer) is not None:
                    break
            else:
                if not fusion.calls:
                    logger.log(
                        fusion.log_level,
                        "layer %s: stage %s runs fusion %s",
                        self.layer_number,
                        self.contract.name,
                        fusion.name,
                    )
                fusion.calls += 1
                if self.profiler is None:
                    return fusion.call(**inputs)
                self.profiler.enter(fusion.range_name)
                try:
                    return fusion.call(**inputs)
                finally:
                    self.profiler.leave(fusion.range_name)
        if self.candidates:
            self.refused_calls += 1
            raise self.refusal(
                [fusion.refusal(fusion.rules.reasons(inputs, layer)) for fusion in self.candidates]
            )
        self.unfused_calls += 1
        if self.profiler is None:
            return self.unfused(layer, **inputs)
        self.profiler.enter(self.contract.name)
        try:
            return self.unfused(layer, **inputs)
        finally:
            self.profiler.leave(self.contract.name)

    def check_early(self, phase: Phase, layer: Any) -> None:
        """Judge what is known before any call. No call is refused by it, so none is counted.

        Args:
            phase: `config` or `layer`.
            layer: the layer, or anything with its `config`.

        Raises:
            FusionUnsupportedError: no candidate can ever serve this layer.
        """
        refusals = []
        for fusion in self.candidates:
            reasons = fusion.early[phase].reasons({}, layer)
            if not reasons:
                return
            refusals.append(fusion.refusal(reasons))
        if refusals:
            raise self.refusal(refusals)

    def refusal(self, refusals: list[CandidateRefusal]) -> FusionUnsupportedError:
        return FusionUnsupportedError(
            Refusal(self.contract.name, tuple(refusals), self.layer_number, self.origin)
        )


class Binding:
    """Every stage of one layer, resolved.

    Args:
        registry: where contracts and fusions stand.
        claims: what was decided, by stage (see `Selection.for_layer`).
        layer_number: for messages and reports.
        announces: names of the fusions whose first run here is logged at INFO, all when None;
            that of others is logged at DEBUG. With one layer of a model announcing each fusion,
            a log has one line a fusion and no state is shared between bindings.
        profiler: told about every stage that runs.

    Raises:
        FusionConfigError: an implementation or a package that it needs is absent or broken, or
            its signature does not fit the stage.
    """

    def __init__(
        self,
        registry: Registry,
        claims: Mapping[str, Claim],
        layer_number: int | None = None,
        announces: Collection[str] | None = None,
        profiler: ProfilerRange | None = None,
    ) -> None:
        self.layer_number = layer_number
        self.stages: dict[str, BoundStage] = {}
        for name, contract in registry.stages.items():
            claim = claims.get(name)
            candidates: tuple[BoundFusion, ...] = ()
            if claim is not None:
                candidates = tuple(
                    BoundFusion(
                        registry.fusion(fusion, claim.origin),
                        contract,
                        logging.INFO if announces is None or fusion in announces else logging.DEBUG,
                    )
                    for fusion in claim.candidates
                )
            self.stages[name] = BoundStage(
                contract, candidates, claim.origin if claim else "", layer_number, profiler
            )

    def run(self, stage: str, layer: Any, inputs: Inputs) -> Any:
        """Run `stage` for `layer` on its named inputs (see `BoundStage.run`)."""
        return self.stages[stage].run(layer, inputs)

    def check_layer(self, layer: Any) -> None:
        """Refuse now what the finished layer alone decides (see `BoundStage.check_early`)."""
        for stage in self.stages.values():
            stage.check_early("layer", layer)


def check_config(selection: Selection, config: Any, layers: Sequence[int | None]) -> None:
    """Refuse now what the configuration alone decides, for every layer of a model.

    Raises:
        FusionUnsupportedError: no candidate of some stage can ever run under `config`.
    """
    shim = SimpleNamespace(config=config)
    judged = set()
    for layer in layers:
        for stage, claim in selection.for_layer(layer).items():
            if claim in judged:
                continue
            judged.add(claim)
            contract = selection.registry.stages[stage]
            refusals = []
            for name in claim.candidates:
                fusion = selection.registry.fusion(name, claim.origin)
                reasons = CompiledRules(fusion, contract, ("config",)).reasons({}, shim)
                if not reasons:
                    break
                refusals.append(CandidateRefusal(name, fusion.declaration.option, reasons))
            else:
                raise FusionUnsupportedError(Refusal(stage, tuple(refusals), origin=claim.origin))


def unavailable(
    fusion: RegisteredFusion, contract: StageContract, machine: Machine
) -> Iterator[str]:
    """Why a fusion cannot run on a machine at all: packages, then devices.

    On this very machine, when nothing else is amiss, the implementation is imported as well, since
    a package can be installed and broken.
    """
    problems = [f"needs {reason}" for reason in package_problems(fusion, machine)]
    problems += [
        found
        for rule in fusion.declaration.preconditions
        if (found := rule.machine_problem(machine)) is not None
    ]
    yield from problems
    if machine.packages is None and not problems:
        try:
            load_implementation(fusion, contract)
        except FusionConfigError as error:
            yield error.problems[0].text


def package_problems(fusion: RegisteredFusion, machine: Machine) -> tuple[Reason, ...]:
    """Packages that the fusion declares and `machine` lacks, each with what it has instead."""
    return tuple(
        Reason(f"package:{package}", f"{package} {versions}, got {found}")
        for package, versions in fusion.declaration.packages.items()
        if (found := version_problem(package, versions, machine)) is not None
    )


def load_implementation(fusion: RegisteredFusion, contract: StageContract) -> Callable[..., Any]:
    """Import the implementation of a fusion and check its signature against its stage.

    Raises:
        FusionConfigError: a package is absent or of a wrong version, the import fails, or the
            callable does not accept the stage's inputs by keyword.
    """
    declaration = fusion.declaration
    for reason in package_problems(fusion, Machine("this machine", "cpu")):
        raise _wrong(fusion, f"needs {reason}", "packages")
    try:
        implementation: Callable[..., Any] = import_object(declaration.implementation)
    except Exception as error:  # a module may raise anything while imported
        raise _wrong(
            fusion,
            f"cannot import {declaration.implementation}, which is broken here: "
            f"{type(error).__name__}: {error}",
            "implementation",
        ) from error
    if not callable(implementation):
        raise _wrong(
            fusion, f"names {declaration.implementation}, which is not callable", "implementation"
        )
    try:
        inspect.signature(implementation).bind(**{item.name: None for item in contract.inputs})
    except TypeError as error:
        raise _wrong(
            fusion,
            f"names {declaration.implementation}, which does not accept the inputs of stage "
            f"{contract.name} ({', '.join(item.name for item in contract.inputs)}): {error}",
            "implementation",
        ) from None
    except ValueError:
        pass  # a builtin without a signature; the first call will tell
    return implementation


def _wrong(fusion: RegisteredFusion, text: str, *keys: str | int) -> FusionConfigError:
    place = fusion.origin.at(*keys)
    return FusionConfigError(place.problem(f"fusion {fusion.name!r} {text}"))


def _without_second_judgement(
    implementation: Callable[..., Any], fusion: RegisteredFusion
) -> Callable[..., Any]:
    """What a binding calls: it has judged the declaration itself, so a checked implementation need
    not judge it again, unless it was declared elsewhere with rules other than its own."""
    own: Callable[[], RegisteredFusion] | None = getattr(implementation, "declaration", None)
    if own is None or own().declaration.preconditions != fusion.declaration.preconditions:
        return implementation
    unchecked: Callable[..., Any] = implementation.unchecked  # type: ignore[attr-defined]
    return unchecked


def checked_by_declaration(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a built-in implementation judge its own declaration when it is called directly.

    A direct call has neither config nor layer, so only the rules about its arguments apply. The
    undecorated function stays reachable as `.unchecked`, which a binding calls after it has
    judged the same rules itself, and the declaration as `.declaration()`.

    Args:
        name: the fusion's name in the registry.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        parameters = signature.parameters.values()
        names = frozenset(signature.parameters)
        positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

        @functools.cache
        def rules() -> tuple[RegisteredFusion, StageContract, CompiledRules, tuple[Any, ...]]:
            registry = load_registry(plugins=False)
            fusion = registry.fusion(name)
            contract = registry.stages[fusion.declaration.stage]
            tensors = tuple(
                (item.name, item.kind == "optional_tensor")
                for item in contract.inputs
                if item.is_tensor
            )
            return fusion, contract, CompiledRules(fusion, contract, ("call",)), tensors

        import torch  # here, since a registry without built-in kernels needs none

        def judged(*args: Any, **kwargs: Any) -> Any:
            # `Signature.bind` would cost more than all the rules; it is asked only for its error.
            given = dict(zip(positional, args, strict=False))
            arguments = {**defaults, **given, **kwargs}
            if (
                len(args) > len(positional)
                or arguments.keys() != names
                or not given.keys().isdisjoint(kwargs)
            ):
                signature.bind(*args, **kwargs)
            fusion, contract, compiled, tensors = rules()
            for key, optional in tensors:
                value = arguments[key]
                if not hasattr(value, "stride") and not (value is None and optional):
                    raise TypeError(f"{key} must be a tensor, got {type(value).__name__}")
            reasons = compiled.reasons(arguments, None)
            if reasons:
                candidate = CandidateRefusal(fusion.name, fusion.declaration.option, reasons)
                raise FusionUnsupportedError(Refusal(contract.name, (candidate,)))
            return function(**arguments)

        # A break of the graph: judgement and launch are host code, which a trace fails at.
        outside_graph = torch.compiler.disable(judged)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            # True as well for a plain call while another thread compiles.
            if torch.compiler.is_compiling():
                return outside_graph(*args, **kwargs)
            return judged(*args, **kwargs)

        checked.unchecked = function  # type: ignore[attr-defined]
        checked.declaration = lambda: rules()[0]  # type: ignore[attr-defined]
        return checked

    return decorate
