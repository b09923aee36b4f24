# SPDX-License-Identifier: Apache-2.0
"""From the fusion fields of a configuration to what a layer runs."""

from __future__ import annotations

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
from megatron.gdn.stages import OPTIONS
from megatron.gdn.variant import gdn_layer_numbers


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


def select_fusions(config: Any) -> Selection:
    """The validated selection of a configuration.

    Args:
        config: `megatron.gdn.TransformerConfig`; a megatron-core config selects nothing.

    Raises:
        FusionConfigError: a bad config file, unknown names, contradictions.
    """
    path = getattr(config, "gdn_fusion_config", None)
    registry = load_registry([path] if path else [])
    return select(registry, fusion_requests(config, registry))


def check_fusions(config: Any) -> None:
    """Refuse, when a configuration is built, all that it decides alone.

    Raises:
        FusionConfigError: as `select_fusions`, or a selection that matches no layer.
        FusionUnsupportedError: a selected fusion can never run under this configuration.
    """
    if not requests_fusions(config):
        return
    selection = select_fusions(config)
    layers = gdn_layer_numbers(config)
    check_config(selection, config, layers or (None,))
    if layers is None:
        return
    if not layers and selection.requests:
        raise FusionConfigError(
            "fusions are selected, but this model has no Gated DeltaNet layer: "
            f"experimental_attention_variant={config.experimental_attention_variant!r}, "
            f"linear_attention_freq={config.linear_attention_freq!r}; "
            "set the variant to 'gdn' or remove the selection"
        )
    selection.check(layers)


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
    selection = select_fusions(config)
    claims = selection.for_layer(layer_number)
    return Binding(
        selection.registry,
        claims,
        layer_number,
        _first_selected_in(selection, config, layer_number) if claims else (),
        profiler,
    )


def _first_selected_in(
    selection: Selection, config: Any, layer_number: int | None
) -> set[str] | None:
    """Fusions that no lower layer of the model selects, or None when the layers are not known."""
    layers = gdn_layer_numbers(config)
    if layers is None or layer_number is None:
        return None
    earlier = {
        fusion
        for number in layers
        if number < layer_number
        for claim in selection.for_layer(number).values()
        for fusion in claim.candidates
    }
    mine = selection.for_layer(layer_number).values()
    return {fusion for claim in mine for fusion in claim.candidates} - earlier
