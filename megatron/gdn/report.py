# SPDX-License-Identifier: Apache-2.0
"""What the Gated DeltaNet layers of a model ran, and what they were asked to run and did not."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from torch import nn

from fusion_registry import Binding, FusionReport, report_bindings
from fusion_registry.schema import LayerSet
from megatron.gdn.megatron_core_0_19 import CoreGatedDeltaNet
from megatron.gdn.selection import requests_fusions, select_fusions

logger = logging.getLogger(__name__)

Model = nn.Module | Iterable[nn.Module]
"""A model, wrapped or not (Float16Module, either DDP), or its pipeline chunks."""

_HOW_TO_FIND_OUT = (
    "print(megatron.gdn.fusion_report(model)) shows the calls of every layer, and "
    "`gdn-list-fusions --explain` what this selection runs and why not"
)


def _modules(model: Model) -> Iterator[nn.Module]:
    seen: set[int] = set()
    chunks = [model] if isinstance(model, nn.Module) else model
    for chunk in chunks if isinstance(chunks, Iterable) else [chunks]:
        if not isinstance(chunk, nn.Module):
            raise TypeError(
                "a fusion report requires a torch.nn.Module or a list of them (pipeline chunks), "
                f"got {type(chunk).__name__}; give the model"
            )
        for module in chunk.modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield module


def _binding(module: nn.Module) -> Binding | None:
    binding = getattr(module, "fusion_binding", None)
    return binding if isinstance(binding, Binding) else None


def _bindings(model: Model) -> Iterator[Binding]:
    return (binding for module in _modules(model) if (binding := _binding(module)) is not None)


def fusion_report(model: Model) -> FusionReport:
    """Count, per layer and stage, what ran: fusions by name, unfused code, refusals.

    Args:
        model: a model, wrapped or not (DDP, Float16Module), or its pipeline chunks.

    Returns:
        Data that prints as a table (`print(fusion_report(model))`).

    Raises:
        TypeError: it is no module and holds none.
    """
    return report_bindings(_bindings(model))


def warn_about_idle_fusions(model: Model) -> None:
    """Log a warning for every selected fusion that has not run; call it after the first step.

    One warning names a stage, its fusions and all the layers where none of them ran. Among several
    candidates of a stage, one that ran is enough: the others wait for calls that it cannot serve.
    A layer that is megatron-core's own, built from another spec than ours, cannot run a fusion at
    all and is named too.

    Args:
        model: as in `fusion_report`.
    """
    idle: dict[tuple[str, tuple[str, ...]], list[int | None]] = {}
    for binding in _bindings(model):
        for name, stage in binding.stages.items():
            if stage.candidates and not any(fusion.calls for fusion in stage.candidates):
                names = tuple(fusion.name for fusion in stage.candidates)
                idle.setdefault((name, names), []).append(binding.layer_number)
    for (name, names), layers in idle.items():
        logger.warning(
            "%s: stage %s: fusion %s is selected and has not run; %s",
            _layer_words(layers),
            name,
            " or ".join(names),
            _HOW_TO_FIND_OUT,
        )
    foreign: dict[tuple[str, tuple[str, ...]], list[int | None]] = {}
    for module in _modules(model):
        if not isinstance(module, CoreGatedDeltaNet) or _binding(module) is not None:
            continue
        if requests_fusions(module.config):
            for claim in select_fusions(module.config).for_layer(module.layer_number).values():
                where = foreign.setdefault((claim.stage, claim.candidates), [])
                where.append(module.layer_number)
    for (name, names), layers in foreign.items():
        logger.warning(
            "%s: stage %s: fusion %s is selected and cannot run, since the layer is "
            "megatron-core's own; build the model from megatron.gdn.get_gdn_block_spec or "
            "get_gated_delta_net_module_spec",
            _layer_words(layers),
            name,
            " or ".join(names),
        )


def _layer_words(layers: list[int | None]) -> str:
    """`layers 1-3,5`; a layer without a number has no other name."""
    numbers = sorted({layer for layer in layers if layer is not None})
    if not numbers:
        return "a layer without a number"
    return f"layer{'s' if len(numbers) > 1 else ''} {LayerSet.of(numbers)}"
