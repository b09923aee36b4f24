# SPDX-License-Identifier: Apache-2.0
"""What the bindings of a model have counted, as data and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fusion_registry.binding import Binding


@dataclass(frozen=True)
class StageCount:
    """Calls of one stage of one layer since the layer was built.

    Args:
        layer: layer number from 1, or None.
        stage: stage name.
        fused: calls by fusion name; a bound fusion that never ran stands there with 0.
        unfused: calls of the unfused code.
        refused: calls (or early judgements) that ended in FusionUnsupportedError.
    """

    layer: int | None
    stage: str
    fused: dict[str, int]
    unfused: int
    refused: int

    @property
    def engaged(self) -> bool:
        """Whether a fusion has run and nothing else has."""
        return sum(self.fused.values()) > 0 and not self.unfused and not self.refused


@dataclass(frozen=True)
class FusionReport:
    """Counts of every stage of every layer of a model; prints as a table."""

    counts: tuple[StageCount, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"counts": [asdict(count) for count in self.counts]}

    def stage(self, name: str) -> tuple[StageCount, ...]:
        """The counts of one stage, layer by layer."""
        return tuple(count for count in self.counts if count.stage == name)

    def fused_layers(self, stage: str) -> int:
        """Layers in which a fusion, and only a fusion, served `stage`."""
        return sum(count.engaged for count in self.stage(stage))

    def __str__(self) -> str:
        if not self.counts:
            return "fusion report: no layer with stages in this model"
        rows = [("stage", "fused layers", "fusions (calls)", "unfused", "refused")]
        for name in dict.fromkeys(count.stage for count in self.counts):
            mine = self.stage(name)
            calls: dict[str, int] = {}
            for count in mine:
                for fusion, number in count.fused.items():
                    calls[fusion] = calls.get(fusion, 0) + number
            rows.append(
                (
                    name,
                    f"{self.fused_layers(name)}/{len(mine)}",
                    ", ".join(f"{fusion} ({number})" for fusion, number in calls.items()) or "-",
                    str(sum(count.unfused for count in mine)),
                    str(sum(count.refused for count in mine)),
                )
            )
        return "fusion report\n" + "\n".join(_align(rows))


def report_bindings(bindings: Iterable[Binding]) -> FusionReport:
    """Read the counters of bindings, in order."""
    return FusionReport(
        tuple(
            StageCount(
                binding.layer_number,
                name,
                {fusion.name: fusion.calls for fusion in stage.candidates},
                stage.unfused_calls,
                stage.refused_calls,
            )
            for binding in bindings
            for name, stage in binding.stages.items()
        )
    )


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return ["  " + "  ".join(cells).rstrip() for cells in padded]
