# SPDX-License-Identifier: Apache-2.0
"""From the fusion fields of a configuration to what a layer runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusion_registry import (
    Binding,
    FusionConfigError,
    ProfilerRange,
    Registry,
    Request,
    Selection,
    check_config,
    load_registry,
    select,
)
from fusion_registry.selection import Claim
from megatron.gdn.stages import OPTIONS
from megatron.gdn.subjects import unknown_attributes
from megatron.gdn.variant import gdn_layer_numbers

_RESOLVED = "_gdn_resolved_fusions"
"""Attribute of a configuration that keeps its `_Resolved`; no field, so that `replace`, `asdict`
and comparisons do not see it."""


def requests_fusions(config: Any) -> bool:
    """Whether the configuration asks for any fusion at all."""
    return bool(
        any(getattr(config, option, False) for option in OPTIONS)
        or getattr(config, "gdn_fusions", ())
        or getattr(config, "gdn_fusion_config", None)
    )


def fusion_requests(config: Any, registry: Registry) -> list[Request]:
    """What the fields of a configuration ask for, the config file's own entries excepted."""
    requests = [
        Request(fusion.declaration.stage, (fusion.name,), None, f"{option}=True", by_option=True)
        for fusion in registry.fusions.values()
        if (option := fusion.declaration.option) is not None and getattr(config, option, False)
    ]
    requests += [
        Request(
            registry.fusion(name, "gdn_fusions").declaration.stage, (name,), None, "gdn_fusions"
        )
        for name in getattr(config, "gdn_fusions", ())
    ]
    return requests


class _Resolved:
    """What the fusion fields of one configuration mean, found once for all its layers.

    It is kept on the configuration, and used only while the fields still have the values that it
    was found for: no state is shared by two configurations.

    Args:
        fields: values of the fusion fields.
        selection: what they select.
    """

    def __init__(self, fields: tuple[Any, ...], selection: Selection) -> None:
        self.fields = fields
        self.selection = selection
        self._claims: dict[int | None, Mapping[str, Claim]] = {}
        self._first: dict[tuple[int, ...], dict[str, int]] = {}

    def __deepcopy__(self, _: Any) -> _Resolved:
        # Immutable but for what it remembers, and megatron-core copies configurations deeply.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process may have other packages: it resolves for itself.
        return type(None), ()

    def claims(self, layer: int | None) -> Mapping[str, Claim]:
        """As `Selection.for_layer`."""
        if layer not in self._claims:
            self._claims[layer] = self.selection.for_layer(layer)
        return self._claims[layer]

    def first_layer(self, layers: tuple[int, ...]) -> Mapping[str, int]:
        """For each fusion that one of `layers` selects, the lowest such layer."""
        if layers not in self._first:
            self._first[layers] = first = {}
            for number in sorted(layers, reverse=True):
                for claim in self.claims(number).values():
                    first.update(dict.fromkeys(claim.candidates, number))
        return self._first[layers]


def _resolved(config: Any) -> _Resolved:
    path = getattr(config, "gdn_fusion_config", None)
    fields = (
        *(bool(getattr(config, option, False)) for option in OPTIONS),
        tuple(getattr(config, "gdn_fusions", ())),
        path,
    )
    known = vars(config).get(_RESOLVED)
    if isinstance(known, _Resolved) and known.fields == fields:
        return known
    registry = load_registry([path] if path else [])
    resolved = _Resolved(fields, select(registry, fusion_requests(config, registry)))
    setattr(config, _RESOLVED, resolved)
    return resolved


def select_fusions(config: Any) -> Selection:
    """The validated selection of a configuration.

    Declarations and the config file are read once, when the configuration is built, and again only
    when a fusion field has changed since.

    Args:
        config: `megatron.gdn.TransformerConfig`; a megatron-core config selects nothing.

    Raises:
        FusionConfigError: a bad config file, unknown names, contradictions.
    """
    return _resolved(config).selection


def check_fusions(config: Any) -> None:
    """Refuse, when a configuration is built, all that it decides alone.

    To be called again when `note_hybrid_layers` has told a hybrid model's layers.

    Raises:
        FusionConfigError: as `select_fusions`, a selection that matches no layer, or a rule that
            reads what the configuration does not have.
        FusionUnsupportedError: a selected fusion can never run under this configuration.
    """
    if not requests_fusions(config):
        return
    selection = select_fusions(config)
    _check_attributes(selection, config)
    layers = gdn_layer_numbers(config)
    check_config(selection, config, layers or (None,))
    if layers is None:
        return
    if not layers and selection.requests:
        raise FusionConfigError(
            "fusions are selected, but this model has no Gated DeltaNet layer: "
            + (
                "its hybrid layer pattern has no G; put one in or remove the selection"
                if config.is_hybrid_model
                else f"experimental_attention_variant={config.experimental_attention_variant!r}, "
                f"linear_attention_freq={config.linear_attention_freq!r}; "
                "set the variant to 'gdn' or remove the selection"
            )
        )
    selection.check(layers)


def _check_attributes(selection: Selection, config: Any) -> None:
    """Refuse misspelt rules: one would refuse every call, or hand a predicate None for ever."""
    names = {name for request in selection.requests for name in request.candidates}
    there = frozenset(dir(config))
    problems = [
        problem
        for name in sorted(names)
        for problem in unknown_attributes(selection.registry.fusion(name), config=there)
    ]
    if problems:
        raise FusionConfigError(*problems)


def bind_layer(
    config: Any, layer_number: int | None, profiler: ProfilerRange | None = None
) -> Binding:
    """Resolve the selection of `config` for one layer.

    Args:
        config: as in `select_fusions`.
        layer_number: from 1, or None for a layer that has no number.
        profiler: told about every stage that runs.

    Raises:
        FusionConfigError: as `select_fusions`, or an implementation that cannot be imported or
            does not fit its stage.
    """
    resolved = _resolved(config)
    claims = resolved.claims(layer_number)
    return Binding(
        resolved.selection.registry,
        claims,
        layer_number,
        _first_selected_in(resolved, config, layer_number) if claims else (),
        profiler,
    )


def _first_selected_in(
    resolved: _Resolved, config: Any, layer_number: int | None
) -> set[str] | None:
    """Fusions that no lower layer of the model selects, or None when the layers are not known."""
    layers = gdn_layer_numbers(config)
    if layers is None or layer_number is None:
        return None
    first = resolved.first_layer(layers)
    mine = resolved.claims(layer_number).values()
    return {
        fusion
        for claim in mine
        for fusion in claim.candidates
        if first.get(fusion, layer_number) >= layer_number
    }
