# SPDX-License-Identifier: Apache-2.0
"""Did every selected fusion run, in every layer that it was selected for, at every step?"""

from __future__ import annotations

from fusion_registry import FusionReport
from megatron.gdn.config import TransformerConfig
from megatron.gdn.selection import select_fusions
from megatron.gdn.variant import gdn_layer_numbers


def selected_fusions(config: TransformerConfig) -> dict[int, dict[str, tuple[str, ...]]]:
    """Fusions that a configuration selects: by layer number, then by stage, best first."""
    selection = select_fusions(config)
    return {
        layer: {stage: claim.candidates for stage, claim in selection.for_layer(layer).items()}
        for layer in gdn_layer_numbers(config) or ()
    }


def fusion_problems(
    config: TransformerConfig, report: FusionReport, forward_passes: int
) -> list[str]:
    """One line for each stage of a layer that its fusions did not serve at every forward pass."""
    counts = {(count.layer, count.stage): count for count in report.counts}
    problems = []
    for layer, stages in selected_fusions(config).items():
        for stage, names in stages.items():
            count = counts.get((layer, stage))
            calls = 0 if count is None else sum(count.fused.get(name, 0) for name in names)
            unfused = 0 if count is None else count.unfused
            refused = 0 if count is None else count.refused
            if calls != forward_passes or unfused or refused:
                problems.append(
                    f"layer {layer}, stage {stage}: {' or '.join(names)} ran {calls} times in "
                    f"{forward_passes} forward passes ({unfused} unfused, {refused} refused)"
                )
    return problems


def fusion_summary(config: TransformerConfig, forward_passes: int) -> list[str]:
    """One line for each stage with a selected fusion, for a run without problems."""
    selected = selected_fusions(config)
    layers: dict[tuple[str, tuple[str, ...]], int] = {}
    for stages in selected.values():
        for claim in stages.items():
            layers[claim] = layers.get(claim, 0) + 1
    return [
        f"{' or '.join(names)} ran in {number}/{len(selected)} GDN layers at each of the "
        f"{forward_passes} forward passes"
        for (_, names), number in layers.items()
    ]
