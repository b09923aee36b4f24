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
        refused: calls that ended in FusionUnsupportedError. A layer that is refused when it is
            built makes no call and stands in no report.
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
class StageTotal:
    """The counts of one stage over all layers of a report; prints like `24/24 layers`.

    Args:
        stage: stage name.
        layers: layers that have the stage.
        fused_layers: those in which a fusion, and only a fusion, served it.
        fused: calls by fusion name; unfused, refused: calls.
    """

    stage: str
    layers: int
    fused_layers: int
    fused: dict[str, int]
    unfused: int
    refused: int

    def __str__(self) -> str:
        return f"{self.fused_layers}/{self.layers} layers"


@dataclass(frozen=True)
class FusionReport:
    """Counts of every stage of every layer of a model; prints as a table."""

    counts: tuple[StageCount, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "totals": [{**asdict(total), "summary": str(total)} for total in self.totals],
            "counts": [asdict(count) for count in self.counts],
        }

    def stage(self, name: str) -> tuple[StageCount, ...]:
        """The counts of one stage, layer by layer."""
        return tuple(count for count in self.counts if count.stage == name)

    def fused_layers(self, stage: str) -> int:
        """Layers in which a fusion, and only a fusion, served `stage`."""
        return sum(count.engaged for count in self.stage(stage))

    @property
    def totals(self) -> tuple[StageTotal, ...]:
        """One total for each stage, in the order of the layers' stages."""
        totals = []
        for name in dict.fromkeys(count.stage for count in self.counts):
            mine = self.stage(name)
            fused: dict[str, int] = {}
            for count in mine:
                for fusion, calls in count.fused.items():
                    fused[fusion] = fused.get(fusion, 0) + calls
            totals.append(
                StageTotal(
                    name,
                    len(mine),
                    self.fused_layers(name),
                    fused,
                    sum(count.unfused for count in mine),
                    sum(count.refused for count in mine),
                )
            )
        return tuple(totals)

    def __str__(self) -> str:
        if not self.counts:
            return "fusion report: no layer with stages in this model"
        rows = [("stage", "fused layers", "fusions (calls)", "unfused", "refused")]
        for total in self.totals:
            calls = ", ".join(f"{fusion} ({number})" for fusion, number in total.fused.items())
            rows.append(
                (
                    total.stage,
                    f"{total.fused_layers}/{total.layers}",
                    calls or "-",
                    str(total.unfused),
                    str(total.refused),
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
