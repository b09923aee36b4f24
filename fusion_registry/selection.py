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
from fusion_registry.registry import Registry
from fusion_registry.schema import LayerSet


@dataclass(frozen=True)
class Request:
    """One wish of the user.

    Args:
        stage: stage to serve.
        candidates: fusion names, best first; empty means unfused.
        layers: layer numbers from 1, or None for every layer.
        origin: option, flag or file and line, for messages.
        by_option: an option asked, and so for the very declaration that is bound to it. Otherwise
            the user said a name, which must not be claimed by a broken plug-in as well.
    """

    stage: str
    candidates: tuple[str, ...]
    layers: LayerSet | None
    origin: str
    by_option: bool = False


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
        claims: dict[str, Claim] = {}
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
                claims[stage] = Claim(stage, chosen[0].candidates, chosen[0].origin)
        for child, parent in self.registry.parents.items():
            if child in claims and parent in claims:
                mine_, theirs = claims[child], claims[parent]
                raise FusionConfigError(
                    f"stage {parent} and its child {child} are both claimed"
                    f"{_in_layer(layer)}: {', '.join(theirs.candidates)} by {theirs.origin} and "
                    f"{', '.join(mine_.candidates)} by {mine_.origin}; select one of them"
                )
        return claims

    def check(self, layers: Sequence[int]) -> None:
        """Judge the whole selection against the layers of a model.

        Raises:
            FusionConfigError: as `for_layer`, or a request matches none of `layers`.
        """
        for request in self.requests:
            if request.layers is not None and not any(n in request.layers for n in layers):
                raise FusionConfigError(
                    ConfigProblem(
                        f"stage {request.stage}: layers {request.layers} match no layer of this "
                        f"model; it has {LayerSet.parse(list(layers)) if layers else 'none'}",
                        request.origin,
                    )
                )
        for layer in layers:
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
            str(item.origin),
        )
        for item in registry.selections
    ]
    problems = []
    for request in everything:
        registry.stage(request.stage, request.origin)
        find = registry.fusion if request.by_option else registry.uncontested_fusion
        for name in request.candidates:
            stage = find(name, request.origin).declaration.stage
            if stage != request.stage:
                problems.append(
                    ConfigProblem(
                        f"fusion {name!r} serves stage {stage}, not {request.stage}; fusions of "
                        f"{request.stage}: "
                        + (
                            ", ".join(item.name for item in registry.fusions_of(request.stage))
                            or "none"
                        ),
                        request.origin,
                    )
                )
    if problems:
        raise FusionConfigError(*problems)
    return Selection(registry, tuple(everything))


def _in_layer(layer: int | None) -> str:
    return "" if layer is None else f" in layer {layer}"


def _contradiction(first: Request, second: Request, layer: int | None) -> ConfigProblem:
    def words(request: Request) -> str:
        return f"{', '.join(request.candidates) or 'off'} ({request.origin})"

    return ConfigProblem(
        f"stage {first.stage} is claimed twice{_in_layer(layer)}: {words(first)} and "
        f"{words(second)}; keep one"
    )
