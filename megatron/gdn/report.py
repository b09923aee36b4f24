# SPDX-License-Identifier: Apache-2.0
"""What the Gated DeltaNet layers of a model ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from fusion_registry import Binding, FusionReport, report_bindings


def _bindings(model: nn.Module | Iterable[nn.Module]) -> Iterator[Binding]:
    for chunk in [model] if isinstance(model, nn.Module) else model:
        for module in chunk.modules():
            binding = getattr(module, "fusion_binding", None)
            if isinstance(binding, Binding):
                yield binding


def fusion_report(model: nn.Module | Iterable[nn.Module]) -> FusionReport:
    """Count, per layer and stage, what ran: fusions by name, unfused code, refusals.

    Args:
        model: a model, wrapped or not (DDP, Float16Module), or its pipeline chunks.

    Returns:
        Data that prints as a table (`print(fusion_report(model))`).
    """
    return report_bindings(_bindings(model))
