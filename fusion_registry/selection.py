# SPDX-License-Identifier: Apache-2.0
"""Which fusions a user enabled, for which layers.

The rule by which requests merge, stage by stage and layer by layer: a request that names layers
beats one that means every layer; requests of equal rank must agree, else it is an error that shows
both places. After that, a stage and one of its children may not both be claimed in one layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusion_registry.errors import ConfigProblem, FusionConfigError
from fusion_registry.registry import Asker, Origin, Registry, asker_problem, asker_words
from fusion_registry.schema import LayerSet


@dataclass(frozen=True)
class Request:
    """One wish of the user.

    Args:
        stage: stage to serve.
        candidates: fusion names, best first; empty means unfused.
        layers: layer numbers from 1, or None for every layer.
        origin: option or flag, or a place in a file, for messages.
        by_option: an option asked, and so for the very declaration that is bound to it. Otherwise
            the user said a name, which must not be claimed by a broken plug-in as well.
    """

    stage: str
    candidates: tuple[str, ...]
    layers: LayerSet | None
    origin: Asker
    by_option: bool = False

    def asker(self, *keys: str | int) -> Asker:
        """Who asks for a part of this request."""
        return self.origin.at(*keys) if isinstance(self.origin, Origin) else self.origin


@dataclass(frozen=True)
class Claim:
    """What is decided for one stage of one layer: candidates, best first, and who asked."""

    stage: str
    candidates: tuple[str, ...]
    origin: str


@dataclass(frozen=True)
class Selection:
    """Validated requests. `for_layer` says what they mean for one layer."""

    registry: Registry
    requests: tuple[Request, ...]

    def for_layer(self, layer: int | None) -> Mapping[str, Claim]:
        """Claims by stage for a layer number (None: a layer that has no number).

        Raises:
            FusionConfigError: two requests contradict each other, or a stage and one of its
                children are both claimed.
        """
        deciding: dict[str, Request] = {}
        for stage in self.registry.stages:
            mine = [request for request in self.requests if request.stage == stage]
            special = [
                request
                for request in mine
                if request.layers is not None and layer is not None and layer in request.layers
            ]
            chosen = special or [request for request in mine if request.layers is None]
            for other in chosen[1:]:
                if other.candidates != chosen[0].candidates:
                    raise FusionConfigError(_contradiction(chosen[0], other, layer))
            if chosen and chosen[0].candidates:
                deciding[stage] = chosen[0]
        for child, parent in self.registry.parents.items():
            if child in deciding and parent in deciding:
                raise FusionConfigError(_both_claimed(deciding[parent], deciding[child], layer))
        return {
            stage: Claim(stage, request.candidates, asker_words(request.origin))
            for stage, request in deciding.items()
        }

    def check(self, layers: Sequence[int]) -> None:
        """Judge the whole selection against the layers of a model.

        Raises:
            FusionConfigError: as `for_layer`, or requests match none of `layers`.
        """
        there_are = LayerSet.of(layers) if layers else "none"
        problems = [
            asker_problem(
                request.asker("layers"),
                f"stage {request.stage}: layers {request.layers} match no layer of this model; "
                f"it has {there_are}",
            )
            for request in self.requests
            if request.layers is not None and not any(n in request.layers for n in layers)
        ]
        if problems:
            raise FusionConfigError(*problems)
        for layer in layers:
            self.for_layer(layer)

    def check_without_model(self) -> None:
        """Judge what needs no model: contradictions, in whatever layers they lie.

        Raises:
            FusionConfigError: as `for_layer`.
        """
        # What is claimed changes only where a range begins or has ended, and two ranges that meet
        # do so where one of them begins.
        first = {
            low
            for request in self.requests
            if request.layers is not None
            for low, _ in request.layers.ranges
        }
        for layer in (None, *sorted(first)):
            self.for_layer(layer)


def select(registry: Registry, requests: Iterable[Request]) -> Selection:
    """Validate requests against the registry, adding those of its config files.

    Raises:
        FusionConfigError: an unknown fusion, one that belongs to another stage, or a name that a
            broken plug-in claims too.
    """
    everything = list(requests)
    everything += [
        Request(
            item.selection.stage,
            item.selection.candidates,
            item.selection.layers,
            item.origin,
        )
        for item in registry.selections
    ]
    problems: list[ConfigProblem] = []
    for request in everything:
        try:
            registry.stage(request.stage, request.asker("stage"))
        except FusionConfigError as error:
            problems += error.problems
            continue
        find = registry.fusion if request.by_option else registry.uncontested_fusion
        for index, name in enumerate(request.candidates):
            asker = request.asker("fusions", index)
            try:
                stage = find(name, asker).declaration.stage
            except FusionConfigError as error:
                problems += error.problems
                continue
            if stage != request.stage:
                names = [item.name for item in registry.fusions_of(request.stage)]
                problems.append(
                    asker_problem(
                        asker,
                        f"fusion {name!r} serves stage {stage}, not {request.stage}; fusions of "
                        f"{request.stage}: {', '.join(names) or 'none'}",
                    )
                )
    if problems:
        raise FusionConfigError(*problems)
    return Selection(registry, tuple(everything))


def _in_layer(layer: int | None) -> str:
    return "" if layer is None else f" in layer {layer}"


def _contradiction(first: Request, second: Request, layer: int | None) -> ConfigProblem:
    def words(request: Request) -> str:
        return f"{', '.join(request.candidates) or 'off'} ({asker_words(request.origin)})"

    return _of_two(
        first,
        second,
        f"stage {first.stage} is claimed twice{_in_layer(layer)}: {words(first)} and "
        f"{words(second)}; keep one",
    )


def _both_claimed(parent: Request, child: Request, layer: int | None) -> ConfigProblem:
    def words(request: Request) -> str:
        return f"{', '.join(request.candidates)} by {asker_words(request.origin)}"

    return _of_two(
        parent,
        child,
        f"stage {parent.stage} and its child {child.stage} are both claimed{_in_layer(layer)}: "
        f"{words(parent)} and {words(child)}; select one of them",
    )


def _of_two(first: Request, second: Request, text: str) -> ConfigProblem:
    """A fault of two requests, whose text shows both, at the later one that stands in a file."""
    in_files = [request for request in (first, second) if isinstance(request.origin, Origin)]
    return asker_problem(in_files[-1].asker(), text) if in_files else ConfigProblem(text)
