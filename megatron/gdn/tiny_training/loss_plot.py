# SPDX-License-Identifier: Apache-2.0
"""A picture of the loss of the fused and the unfused run."""

from __future__ import annotations

from pathlib import Path

from megatron.gdn.tiny_training.training import TrainingRun


def draw_losses(fused: TrainingRun, unfused: TrainingRun, title: str, path: Path) -> None:
    """Write a PNG: training loss as lines, held-out loss as markers, the difference below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    losses, difference = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    # The fused curve lies on the unfused one: wide below, narrow and dashed above.
    for run, name, color, line in (
        (unfused, "unfused", "tab:orange", {"linewidth": 4.0, "alpha": 0.5}),
        (fused, "fused", "tab:blue", {"linewidth": 1.4, "linestyle": "--"}),
    ):
        steps = range(1, len(run.losses) + 1)
        losses.plot(steps, run.losses, color=color, label=f"{name}, training", **line)
        losses.plot(
            [step for step, _ in run.held_out],
            [loss for _, loss in run.held_out],
            color=color,
            linestyle="none",
            marker="s" if name == "unfused" else "x",
            markersize=9 if name == "unfused" else 7,
            label=f"{name}, held-out ({run.held_out_start:.2f} to {run.held_out_end:.2f})",
        )
    losses.set_ylabel("loss (nats per byte)")
    losses.set_title(title)
    losses.legend()
    losses.grid(alpha=0.3)
    gaps = [a - b for a, b in zip(fused.losses, unfused.losses, strict=True)]
    difference.axhline(0.0, color="gray", linewidth=0.8)
    difference.plot(range(1, len(gaps) + 1), gaps, color="tab:blue", linewidth=1.2)
    difference.set_ylabel("fused - unfused")
    difference.set_xlabel("step")
    difference.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
