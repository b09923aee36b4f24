# SPDX-License-Identifier: Apache-2.0
"""Command line of the tiny training.

torch, triton and megatron-core are imported inside functions: whether Triton's interpreter is
needed has to be settled before anything imports triton.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_registry import FusionUnsupportedError, Registry, load_registry
from megatron.gdn.commands.terminal import without_package_noise
from megatron.gdn.environment import use_triton_interpreter
from megatron.gdn.stages import OPTIONS
from megatron.gdn.tiny_training.corpus import Corpus, read_file, read_standard_library
from megatron.gdn.tiny_training.sizes import TrainingSize, default_size

if TYPE_CHECKING:
    import torch

    from megatron.gdn.config import TransformerConfig
    from megatron.gdn.tiny_training.training import OnStep, TrainingRun

LEAST_FALL = 0.25
"""Nats per byte by which the held-out loss has to fall."""

LARGEST_DIFFERENCE = 0.1
"""Relative difference of fused and unfused loss at a step. Differences of rounding grow with the
steps: the largest of fifty FP16 steps on a CPU was 0.023."""

PLOT = "tiny_training_loss.png"
_TOKEN_BY_TOKEN_OPTION = "gdn_pre_gated_delta_rule_fusion"


@dataclass(frozen=True)
class Setting:
    """What to train, on what, from what."""

    device: torch.device
    size: TrainingSize
    corpus: Corpus
    options: dict[str, bool]
    config: TransformerConfig

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "device": str(self.device),
            "dtype": str(self.config.params_dtype).removeprefix("torch."),
            "size": asdict(self.size),
            "data": {
                "source": self.corpus.source,
                "train_bytes": len(self.corpus.train),
                "held_out_bytes": len(self.corpus.held_out),
            },
            "options": self.options,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Train a byte-level Gated DeltaNet language model for about a minute.

    Returns:
        0 when the held-out loss fell and every enabled fusion ran at every step; 1 when not;
        2 when the command line cannot be served.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    with without_package_noise():
        try:
            setting = _setting(arguments)
        except ValueError as error:
            # What a user can get wrong, FusionConfigError and FusionUnsupportedError among it.
            print(f"{parser.prog}: error: {error}", file=sys.stderr)
            return 2
        _print_setting(setting)
        try:
            run, unfused = _train(setting, arguments.seed, arguments.compare)
        except FusionUnsupportedError as error:
            print(f"{parser.prog}: error: {error}", file=sys.stderr)
            return 2
        return _report(setting, arguments, run, unfused)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gdn-tiny-training", description=_summary(main))
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="text to train on (default: the sources of this Python's standard library)",
    )
    run = parser.add_argument_group("run (defaults depend on the device)")
    run.add_argument("--steps", type=_positive(int), help="optimiser steps")
    run.add_argument("--batch", type=_positive(int), help="rows per step")
    run.add_argument("--sequence", type=_positive(int), help="bytes per row")
    run.add_argument("--learning-rate", type=_positive(float), help="highest learning rate")
    run.add_argument("--seed", type=int, default=1234, help="of weights and batches (%(default)s)")
    fusions = parser.add_argument_group("fusions")
    for option in OPTIONS:
        fusions.add_argument(
            f"--{option.replace('_', '-')}",
            action=argparse.BooleanOptionalAction,
            help="default: on, if a fusion is registered for it and nothing below claims its stage",
        )
    fusions.add_argument(
        "--gdn-fusions", nargs="+", default=(), metavar="NAME", help="further registered fusions"
    )
    fusions.add_argument(
        "--gdn-fusion-config",
        metavar="FILE",
        help="YAML file that registers and selects fusions",
    )
    results = parser.add_argument_group("results")
    results.add_argument(
        "--compare",
        action="store_true",
        help=f"train the unfused model from the same seed too and write {PLOT}",
    )
    results.add_argument(
        "--output", type=Path, default=Path("runs"), metavar="DIR", help="for the picture (runs)"
    )
    results.add_argument("--json", type=Path, metavar="FILE", help="write everything measured here")
    return parser


def _summary(function: Any) -> str:
    return str(function.__doc__).partition("\n")[0]


def _positive(kind: type[int] | type[float]) -> Any:
    def convert(text: str) -> int | float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ValueError(text)
        return value

    convert.__name__ = f"positive {kind.__name__}"
    return convert


def _options(arguments: argparse.Namespace, registry: Registry) -> dict[str, bool]:
    """The fusion options: as given, else on if they have a fusion and its stage is free."""
    claimed = {item.selection.stage for item in registry.selections}
    claimed |= {registry.fusion(name).declaration.stage for name in arguments.gdn_fusions}
    claimed |= {registry.parents[stage] for stage in claimed if stage in registry.parents}
    claimed |= {child for child, parent in registry.parents.items() if parent in claimed}
    stages = {
        item.declaration.option: item.declaration.stage
        for item in registry.fusions.values()
        if item.declaration.option is not None
    }
    options = {}
    for option in OPTIONS:
        given = getattr(arguments, option)
        by_default = option in stages and stages[option] not in claimed
        if given and option not in stages:
            raise ValueError(f"{option} requires a registered fusion, and there is none; drop it")
        options[option] = by_default if given is None else given
    return options


def _check_comparison(
    arguments: argparse.Namespace, options: dict[str, bool], registry: Registry
) -> None:
    if not arguments.compare:
        return
    if not (any(options.values()) or arguments.gdn_fusions or registry.selections):
        raise ValueError("--compare requires an enabled fusion, got none; enable one or drop it")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--compare requires matplotlib, which is not installed; pip install it")


def _size(
    arguments: argparse.Namespace, device: torch.device, options: dict[str, bool]
) -> TrainingSize:
    size = default_size(device.type, options[_TOKEN_BY_TOKEN_OPTION])
    given = {
        name: getattr(arguments, name)
        for name in ("steps", "batch", "sequence", "learning_rate")
        if getattr(arguments, name) is not None
    }
    return replace(size, **given)


def _device() -> torch.device:
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    use_triton_interpreter()
    return torch.device("cpu")


def _setting(arguments: argparse.Namespace) -> Setting:
    """All that the command line decides.

    Raises:
        ValueError: it cannot be served.
    """
    paths = [arguments.gdn_fusion_config] if arguments.gdn_fusion_config else []
    registry = load_registry(paths)
    options = _options(arguments, registry)
    _check_comparison(arguments, options, registry)
    corpus = read_standard_library() if arguments.data is None else read_file(arguments.data)
    device = _device()
    size = _size(arguments, device, options)
    corpus.require(size.sequence)

    from megatron.gdn.tiny_training.model import make_config

    fields = {
        **options,
        "gdn_fusions": tuple(arguments.gdn_fusions),
        "gdn_fusion_config": arguments.gdn_fusion_config,
    }
    return Setting(device, size, corpus, options, make_config(size, device, fields))


def _train(setting: Setting, seed: int, compare: bool) -> tuple[TrainingRun, TrainingRun | None]:
    """Train as set, and for a comparison the unfused model too."""
    from megatron.gdn.tiny_training.model import make_config, one_rank
    from megatron.gdn.tiny_training.training import train

    configs = {"training": setting.config}
    if compare:
        configs["unfused "] = make_config(setting.size, setting.device, {})
    runs = []
    with one_rank(setting.device):
        for name, config in configs.items():
            with _progress(name, setting.size.steps) as on_step:
                runs.append(
                    train(config, setting.size, setting.corpus, seed, setting.device, on_step)
                )
    return runs[0], runs[1] if compare else None


def _report(
    setting: Setting,
    arguments: argparse.Namespace,
    run: TrainingRun,
    unfused: TrainingRun | None,
) -> int:
    """Print, draw and write what was measured; returns the exit status."""
    from megatron.gdn.tiny_training.fusion_check import fusion_problems, fusion_summary

    problems = fusion_problems(setting.config, run.report, run.forward_passes)
    print(f"\n{run.report}\n")
    if not problems:
        lines = fusion_summary(setting.config, run.forward_passes)
        print("\n".join(lines or ["no fusion is enabled"]))
    print(f"{run.tokens_per_second:.0f} tokens/s, {run.seconds:.0f} s")
    if run.skipped_steps:
        print(f"{run.skipped_steps} steps skipped, since a gradient overflowed")
    print(f"held-out loss: {run.held_out_start:.2f} -> {run.held_out_end:.2f}")
    # Written so that NaN is a failure too.
    if not run.held_out_start - run.held_out_end >= LEAST_FALL:
        problems.append(
            f"the held-out loss has to fall by {LEAST_FALL}, got "
            f"{run.held_out_start:.3f} -> {run.held_out_end:.3f}; train longer (--steps)"
        )
    result = setting.as_dict() | {"seed": arguments.seed} | run.as_dict()
    if unfused is not None:
        result |= _compare(run, unfused, arguments.output / PLOT, problems)
    result["problems"] = problems
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _compare(
    run: TrainingRun, unfused: TrainingRun, path: Path, problems: list[str]
) -> dict[str, Any]:
    """Draw both runs, print how far they lie apart, add a problem if that is too far."""
    from megatron.gdn.tiny_training.loss_plot import draw_losses

    pairs = list(zip(run.losses, unfused.losses, strict=True))
    step, difference = max(
        ((index, abs(a - b) / abs(b)) for index, (a, b) in enumerate(pairs, start=1)),
        key=lambda item: item[1],
    )
    draw_losses(run, unfused, "Tiny training: fused and unfused from the same seed", path)
    print(
        f"unfused held-out loss: {unfused.held_out_start:.2f} -> {unfused.held_out_end:.2f}; "
        f"largest relative difference of a step's loss: {difference:.1e} (step {step})"
    )
    print(f"picture: {path}")
    if not difference <= LARGEST_DIFFERENCE:
        problems.append(
            f"fused and unfused losses may differ by {LARGEST_DIFFERENCE} relative, got "
            f"{difference:.3f} at step {step}"
        )
    return {
        "unfused": unfused.as_dict(),
        "largest_relative_difference": difference,
        "plot": str(path),
    }


def _print_setting(setting: Setting) -> None:
    import torch

    from megatron.gdn.variant import gdn_layer_numbers

    size, corpus = setting.size, setting.corpus
    where = (
        torch.cuda.get_device_name(setting.device)
        if setting.device.type == "cuda"
        else "CPU, Triton kernels in its interpreter"
    )
    linear = len(gdn_layer_numbers(setting.config) or ())
    print(f"device: {where}; {str(setting.config.params_dtype).removeprefix('torch.')}")
    print(
        f"model: {linear} GDN and {size.layers - linear} softmax attention layers, hidden size "
        f"{size.hidden_size}, {size.value_heads} heads of {size.head_dim}"
    )
    print(
        f"data: {corpus.source}, {len(corpus.train)} bytes to train on, "
        f"{len(corpus.held_out)} held out"
    )
    print(f"run: {size.steps} steps of {size.batch} rows of {size.sequence} bytes\n", flush=True)


@contextlib.contextmanager
def _progress(name: str, steps: int) -> Iterator[OnStep]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeRemainingColumn(),
    ) as progress:
        task = progress.add_task(name, total=steps, loss=float("nan"), rate=0.0)

        def on_step(step: int, loss: float, rate: float) -> None:
            progress.update(task, completed=step, loss=loss, rate=rate)

        yield on_step
