# SPDX-License-Identifier: Apache-2.0
"""Says what a run would do at every stage of every layer, before it runs.

    gdn-list-fusions --explain -- --num-layers 48 --bf16 ... --gdn-gated-output-norm-fusion
    gdn-list-fusions --explain --batch 4 --head-dim 96 --gdn-gated-output-norm-fusion

Give the flags of the training run after `--`, or shapes and fusion flags. Needs no GPU and starts
nothing. The exit status is 0 when every request would be honoured, 1 when the run would be refused,
2 when the flags or a file are wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fusion_registry import Machine
from fusion_registry.machine import FIXTURE_MACHINES
from fusion_registry.schema import LayerSet
from megatron.gdn.arguments import add_gdn_fusion_args
from megatron.gdn.commands.terminal import printed_text, without_package_noise
from megatron.gdn.planning.plan import RunPlan

_MOMENTS = {
    "config": "when the configuration is built",
    "layer": "when the layer is built",
    "call": "when the layer is called",
}


def describe_plan(plan: RunPlan) -> dict[str, Any]:
    """A `RunPlan` as plain data, layers with the same outcome taken together."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for layer in plan.layers:
        groups.setdefault((layer.stages, layer.problem), []).append(layer.layer)
    machine = plan.machine
    return {
        "machine": {
            "name": machine.name,
            "device_type": machine.device_type,
            "capability": machine.capability,
            "interpreter": machine.interpreter,
            "packages": None if machine.packages is None else dict(machine.packages),
        },
        "sizes": dict(plan.sizes),
        "refused": plan.stops,
        "layers": [
            {
                "layers": numbers,
                "problem": problem,
                "stages": [asdict(stage) for stage in stages],
            }
            for (stages, problem), numbers in groups.items()
        ],
        "layers_without_stages": list(plan.others),
        "hybrid": plan.hybrid,
    }


def _heading(described: dict[str, Any]) -> Text:
    machine, sizes = described["machine"], described["sizes"]
    where = machine["name"]
    if machine["capability"] is not None:
        major, minor = machine["capability"]
        where += f" (compute capability {major}.{minor})"
    packages = "the packages of this Python" if machine["packages"] is None else "its packages"
    packed = "" if sizes["documents"] is None else f" in {sizes['documents']} documents"
    tensor, context = sizes["tensor_parallel"], sizes["context_parallel"]
    share = f", on each of {tensor} x {context} tensor x context parallel ranks"
    return Text(
        f"Planned for {where}, with {packages}.\n"
        f"A call: batch {sizes['batch']}, {sizes['length']} tokens{packed}, {sizes['dtype']}"
        f"{', deterministic mode' if sizes['deterministic_mode'] else ''}.\n"
        f"A layer: Hk {sizes['num_key_heads']}, Hv {sizes['num_value_heads']}, "
        f"Dk {sizes['key_head_dim']}, Dv {sizes['value_head_dim']}, "
        f"convolution width {sizes['conv_width']}{share if tensor * context > 1 else ''}."
    )


def _reason_lines(candidate: dict[str, Any]) -> list[str]:
    title = candidate["option"] or f"fusion {candidate['fusion']}"
    return [
        reason["text"]
        if reason["code"] == "implementation"
        else f"{title} requires {reason['text']}"
        for reason in candidate["reasons"]
    ]


def _outcome(stage: dict[str, Any]) -> Text:
    outcome, candidates = stage["outcome"], stage["candidates"]
    if outcome == "unfused":
        return Text("unfused", style="dim")
    if outcome == "inside":
        return Text(f"inside {stage['parent']}", style="dim")
    if outcome == "fails":
        return Text(f"the unfused code raises: {stage['problem']}", style="red")
    lines = []
    if outcome == "fused":
        text = Text(f"fusion {stage['fusion']}", style="green")
        candidates = candidates[: [c["fusion"] for c in candidates].index(stage["fusion"])]
    else:
        text = Text(f"refused {_MOMENTS[stage['refused_at']]}", style="red")
    for candidate in candidates:
        if outcome == "fused":
            lines.append(f"not {candidate['fusion']}, which comes first:")
        elif not candidate["reasons"]:
            lines.append(f"fusion {candidate['fusion']} could run, but comes later")
        lines += _reason_lines(candidate)
    if outcome == "refused":
        lines.append(f"asked for by {stage['origin']}; deselect it to run unfused")
    for line in lines:
        text.append(f"\n{line}", style="not green not red")
    return text


def _layer_title(numbers: Sequence[int]) -> str:
    return f"{'Layer' if len(numbers) == 1 else 'Layers'} {LayerSet.of(numbers)}"


def _verdict(described: dict[str, Any]) -> str:
    stages = [stage for group in described["layers"] for stage in group["stages"]]
    if described["refused"]:
        moments = [stage["refused_at"] or "call" for stage in stages if _stops(stage)]
        first = min(moments, key=list(_MOMENTS).index, default="call")
        return f"This run would be refused {_MOMENTS[first]}."
    if any(stage["candidates"] for stage in stages):
        return "Every request would be honoured."
    return "No fusion is asked for."


def _stops(stage: dict[str, Any]) -> bool:
    return stage["outcome"] in ("refused", "fails")


def _print(described: dict[str, Any], console: Console) -> None:
    console.print(_heading(described))
    for group in described["layers"]:
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for stage in group["stages"]:
            table.add_row("  " * bool(stage["parent"]) + stage["stage"], _outcome(stage))
        console.print(Text(f"\n{_layer_title(group['layers'])}", style="bold"))
        if group["problem"]:
            raised = Text(f"the layer raises: {group['problem']}", style="red")
            console.print(Padding(raised, (0, 0, 0, 2)))
        console.print(Padding(table, (0, 0, 0, 2)))
    others = described["layers_without_stages"]
    if others:
        kind = "of other kinds" if described["hybrid"] else "softmax attention"
        console.print(Text(f"\n{_layer_title(others)}: {kind}, no stages"))
    console.print(Text(f"\n{_verdict(described)}", style="bold"))


def as_text(described: dict[str, Any], width: int | None) -> str:
    """The plan as text.

    Args:
        described: see `describe_plan`.
        width: columns; None takes the terminal's, with its colours.
    """
    return printed_text(partial(_print, described), width)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="list_fusions --explain",
        usage="%(prog)s [--json] [--machine M] (-- TRAINING FLAGS | [shapes] [fusion flags])",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print plain data")
    parser.add_argument(
        "--machine",
        choices=["here", *FIXTURE_MACHINES],
        default="hopper",
        help="plan for this machine, whatever runs the command (default: hopper); all take the "
        "package versions of this Python",
    )
    return parser


def _arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str] | None]:
    """The parsed words before `--`, and the training flags after it, if there is one."""
    words, flags = list(argv), None
    if "--" in words:
        cut = words.index("--")
        words, flags = words[:cut], words[cut + 1 :]
    parser = _parser()
    if flags is None or {"-h", "--help"} & set(words):
        from megatron.gdn.planning.settings import add_shape_args

        add_shape_args(parser)
        add_gdn_fusion_args(parser)
    args, rest = parser.parse_known_args(words)
    if rest and flags is not None:
        parser.error(
            f"before `--` only --json and --machine may stand, got {' '.join(rest)}; give shapes "
            "and fusion flags, or all flags of the training run after `--`, not both"
        )
    if rest:
        parser.error(
            f"unrecognized arguments: {' '.join(rest)}; flags of a training run go after `--`"
        )
    return args, flags


def _plan(args: argparse.Namespace, flags: list[str] | None) -> RunPlan:
    from megatron.gdn.planning.run import plan_run
    from megatron.gdn.planning.settings import from_flags, from_shapes

    machine = Machine.here() if args.machine == "here" else FIXTURE_MACHINES[args.machine]
    config, call = from_shapes(args) if flags is None else from_flags(flags, machine)
    return plan_run(config, call, machine)


def main(argv: Sequence[str]) -> int:
    """Explain a run.

    Args:
        argv: the words after `--explain`.

    Returns:
        Exit status: 0, 1 when the run would be refused, 2 when flags or a file are wrong.
    """
    try:
        # megatron-core also warns of what it would not do on this machine; the run is elsewhere.
        with without_package_noise():
            args, flags = _arguments(argv)
            described = describe_plan(_plan(args, flags))
    except (ImportError, ValueError) as error:
        print(f"list_fusions --explain: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(described, indent=2))
    else:
        print(as_text(described, None if sys.stdout.isatty() else 80))
    return 1 if described["refused"] else 0
