# SPDX-License-Identifier: Apache-2.0
"""Walks through the layers of a model and plans each of their stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fusion_registry import FusionUnsupportedError, Machine
from fusion_registry.selection import Selection
from megatron.gdn.config import TransformerConfig
from megatron.gdn.planning.binding import Judges, PlannedBinding
from megatron.gdn.planning.layers import PlannedCall, PlannedLayers
from megatron.gdn.planning.plan import (
    PlannedLayer,
    PlannedStage,
    RunPlan,
    UnplannableError,
    error_words,
)
from megatron.gdn.selection import check_fusions, select_fusions
from megatron.gdn.variant import gdn_layer_numbers


def plan_run(config: TransformerConfig, call: PlannedCall, machine: Machine) -> RunPlan:
    """Say what every stage would do in a run of `config` on `machine`.

    Args:
        config: with its fusion fields set after it was built, so that nothing is refused yet.
        call: what the layers are called with.
        machine: where the run is planned.

    Raises:
        FusionConfigError: a bad file, name or selection.
        UnplannableError: the model has no Gated DeltaNet layer, or megatron-core refuses to build
            it for a reason that has nothing to do with fusions.
    """
    try:
        check_fusions(config)
    except FusionUnsupportedError:
        pass  # told below, with the reasons that a run would come to later
    layers = gdn_layer_numbers(config)
    if not layers:
        raise UnplannableError(
            "a plan requires a model with Gated DeltaNet layers, got "
            f"experimental_attention_variant={config.experimental_attention_variant!r} and "
            f"linear_attention_freq={config.linear_attention_freq!r}"
        )
    selection = select_fusions(config)
    selection.check(layers)
    planned = PlannedLayers(config, machine)
    judges = Judges(selection.registry, machine)
    found = tuple(_plan_layer(number, planned, call, selection, judges) for number in layers)
    return RunPlan(
        machine,
        _sizes(planned, call),
        found,
        tuple(n for n in range(1, config.num_layers + 1) if n not in layers),
        config.is_hybrid_model,
    )


def _plan_layer(
    number: int, planned: PlannedLayers, call: PlannedCall, selection: Selection, judges: Judges
) -> PlannedLayer:
    try:
        layer: Any = planned.build(number)
    except Exception as error:  # megatron-core asserts and raises all sorts
        raise UnplannableError(
            f"megatron-core refuses to build layer {number}: {error_words(error)}"
        ) from error
    claims = selection.for_layer(number)
    layer.fusion_binding = binding = PlannedBinding(claims, judges)
    try:
        cu_seqlens, problem = planned.cu_seqlens(layer, call)
        with planned.planning():
            x, gate = layer._run_stages_to_recurrence(planned.projection(layer, call), cu_seqlens)
            layer._apply_gated_norm(x, gate)
    except (OverflowError, RuntimeError) as error:  # sizes that torch cannot count
        raise UnplannableError(
            f"torch cannot plan a call of batch {call.batch} and {call.length} tokens in layer "
            f"{number}: {error_words(error)}; make it smaller"
        ) from error
    registry = selection.registry
    stages = [
        replace(
            binding.found.get(name, PlannedStage(name, "inside")),
            parent=registry.parents.get(name),
        )
        for name in registry.stages
    ]
    return PlannedLayer(number, tuple(stages), problem)


def _sizes(planned: PlannedLayers, call: PlannedCall) -> dict[str, Any]:
    config = planned.config
    ranks = config.tensor_model_parallel_size * config.context_parallel_size
    return {
        "batch": call.batch,
        "length": call.length,
        "documents": call.documents,
        "num_key_heads": config.linear_num_key_heads // ranks,
        "num_value_heads": config.linear_num_value_heads // ranks,
        "key_head_dim": config.linear_key_head_dim,
        "value_head_dim": config.linear_value_head_dim,
        "conv_width": config.linear_conv_kernel_dim,
        "dtype": str(planned.dtype).removeprefix("torch."),
        "tensor_parallel": config.tensor_model_parallel_size,
        "context_parallel": config.context_parallel_size,
        "deterministic_mode": config.deterministic_mode,
    }
