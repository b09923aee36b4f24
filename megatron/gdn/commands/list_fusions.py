# SPDX-License-Identifier: Apache-2.0
"""Shows the stages of a Gated DeltaNet layer and the fusions registered for them.

Works on a machine without torch, triton or a GPU. To say what is available here it imports every
implementation whose packages and devices are there, as a run that selects it would do, since only
that tells a broken one; with --declared-only it reads declarations and imports nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fusion_registry import (
    FusionConfigError,
    Machine,
    Registry,
    load_registry,
    select,
    unavailable,
)
from fusion_registry.contracts import StageContract
from fusion_registry.json_schema import declaration_file_schema
from fusion_registry.registry import RegisteredFusion, default_catalogue
from megatron.gdn.commands.terminal import (
    ends_quietly_without_reader,
    printed_text,
    without_package_noise,
)


def enabled_by(fusion: RegisteredFusion) -> str:
    """How a user turns the fusion on."""
    option = fusion.declaration.option
    if option is None:
        return f"--gdn-fusions {fusion.name}"
    return f"{option} (--{option.replace('_', '-')})"


def _dims(names: Sequence[str]) -> str:
    return f"[{', '.join(names)}]"


def describe_stage(stage: StageContract, registry: Registry) -> dict[str, Any]:
    """A stage as plain data."""
    return {
        "name": stage.name,
        "summary": stage.summary,
        "parent": registry.parents.get(stage.name),
        "children": list(stage.children),
        "inputs": [
            {"name": item.name, "kind": item.kind, "dims": list(item.dims)} for item in stage.inputs
        ],
        "outputs": [
            {"name": item.name, "dims": list(item.dims), "note": item.note}
            for item in stage.outputs
        ],
        "unfused": stage.unfused,
        "fusions": [fusion.name for fusion in registry.fusions_of(stage.name)],
    }


def describe_fusion(
    fusion: RegisteredFusion, registry: Registry, machine: Machine | None
) -> dict[str, Any]:
    """A fusion as plain data; `unavailable` is None when no machine was looked at."""
    declared = fusion.declaration
    contract = registry.stages[declared.stage]
    return {
        "name": fusion.name,
        "stage": declared.stage,
        "description": declared.description,
        "enabled_by": enabled_by(fusion),
        "option": declared.option,
        "implementation": declared.implementation,
        "determinism": declared.determinism,
        "packages": dict(declared.packages),
        "preconditions": [
            {"code": rule.code, "phase": rule.phase, "requires": rule.describe()}
            for rule in declared.preconditions
        ],
        "source": declared.source,
        "origin": str(fusion.origin),
        "origin_kind": fusion.origin.kind,
        "unavailable": None
        if machine is None
        else [*unavailable(fusion, contract, machine), *_misspelt_attributes(fusion, machine)],
    }


def _misspelt_attributes(fusion: RegisteredFusion, machine: Machine) -> list[str]:
    """Attributes that its rules read and that do not exist, where megatron-core can tell.

    The built-in fusions are spared: their tests know, and importing megatron-core takes seconds.
    """
    if machine.packages is not None or fusion.origin.kind == "built-in":
        return []
    from megatron.gdn.subjects import config_attributes, reads_attributes, unknown_attributes

    if not reads_attributes(fusion):
        return []
    try:
        names = config_attributes()
    except ImportError:
        return []
    return [problem.text for problem in unknown_attributes(fusion, names)]


def describe_registry(
    registry: Registry, machine: Machine | None, stage: str | None = None
) -> dict[str, Any]:
    """Everything that the command shows, as plain data.

    Args:
        registry: what to describe.
        machine: judge availability there, or not at all when None.
        stage: only this stage and its children.

    Raises:
        FusionConfigError: no such stage.
    """
    names = list(registry.stages)
    if stage is not None:
        wanted = {stage, *registry.stage(stage, "--stage").children}
        names = [name for name in names if name in wanted]
    return {
        "machine": None if machine is None else machine.name,
        "stages": [describe_stage(registry.stages[name], registry) for name in names],
        "fusions": [
            describe_fusion(fusion, registry, machine)
            for name in names
            for fusion in registry.fusions_of(name)
        ],
        "broken_plugins": [
            {"name": plugin.name, "origin": plugin.origin, "error": plugin.error}
            for plugin in registry.broken_plugins
        ],
    }


def _stage_table(stages: Iterable[dict[str, Any]]) -> Table:
    table = Table(title="Stages", title_justify="left", box=None, pad_edge=False)
    for column in ("stage", "what it does", "fusions"):
        table.add_column(column, overflow="fold")
    for stage in stages:
        indent = "  " if stage["parent"] else ""
        table.add_row(
            indent + stage["name"], stage["summary"], ", ".join(stage["fusions"]) or "none"
        )
    return table


def _fusion_block(fusion: dict[str, Any]) -> Group:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("stage", fusion["stage"])
    table.add_row("enabled by", fusion["enabled_by"])
    table.add_row("implementation", fusion["implementation"])
    table.add_row("determinism", fusion["determinism"])
    packages = [f"{name} {versions}" for name, versions in fusion["packages"].items()]
    table.add_row("packages", ", ".join(packages) or "none")
    rules = [rule["requires"] for rule in fusion["preconditions"]] or ["nothing"]
    for index, rule in enumerate(rules):
        table.add_row("" if index else "requires", rule)
    table.add_row("declared in", f"{fusion['origin']} ({fusion['origin_kind']})")
    if fusion["unavailable"] is not None:
        here = "yes" if not fusion["unavailable"] else "no: " + "; ".join(fusion["unavailable"])
        table.add_row("available here", here)
    title = Text(fusion["name"], style="bold")
    if fusion["description"]:
        title.append(f"  {fusion['description']}", style="not bold")
    return Group(title, Padding(table, (0, 0, 0, 2)))


def as_text(described: dict[str, Any], width: int | None) -> str:
    """The tables as text.

    Args:
        described: see `describe_registry`.
        width: columns; None takes the terminal's, with its colours.
    """
    return printed_text(partial(_print, described), width)


def _print(described: dict[str, Any], console: Console) -> None:
    console.print(_stage_table(described["stages"]))
    if described["machine"] is not None:
        console.print(Text(f"\nAvailability is judged for: {described['machine']}"))
    for fusion in described["fusions"]:
        console.print()
        console.print(_fusion_block(fusion))
    if not described["fusions"]:
        console.print("\nno fusion is registered for these stages")
    for plugin in described["broken_plugins"]:
        console.print(
            Text(
                f"\nplug-in {plugin['name']} ({plugin['origin']}) failed to load: "
                f"{plugin['error']}",
                style="red",
            )
        )


@ends_quietly_without_reader
def main(argv: Sequence[str] | None = None) -> int:
    """List stages and fusions.

    Returns:
        Exit status: 0, or 2 when a file or a name is wrong; with `--explain`, see
        `megatron.gdn.commands.explain`.
    """
    parser = argparse.ArgumentParser(prog="list_fusions", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print plain data")
    parser.add_argument("--stage", metavar="S", help="only this stage and its children")
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="also register the fusions of this file and judge its selections; may be repeated",
    )
    parser.add_argument(
        "--declared-only",
        action="store_true",
        help="import nothing, and leave out whether the fusions can run on this machine",
    )
    parser.add_argument(
        "--schema",
        action="store_true",
        help="print the JSON Schema of declaration files, for editors, and nothing else",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="say what a run would do, before it runs; --explain --help tells how",
    )
    words = list(sys.argv[1:] if argv is None else argv)
    if "--explain" in words[: words.index("--")] if "--" in words else "--explain" in words:
        # Needs torch and megatron-core, which the rest of this command does without.
        from megatron.gdn.commands.explain import main as explain

        words.remove("--explain")
        return explain(words)
    args = parser.parse_args(words)
    if args.schema:
        print(json.dumps(declaration_file_schema(default_catalogue()), indent=2))
        return 0
    try:
        registry = load_registry(args.config)
        select(registry, ()).check_without_model()
        with without_package_noise():
            machine = None if args.declared_only else Machine.here()
            described = describe_registry(registry, machine, args.stage)
    except FusionConfigError as error:
        print(f"list_fusions: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(described, indent=2))
    else:
        print(as_text(described, None if sys.stdout.isatty() else 80))
    return 0


if __name__ == "__main__":
    sys.exit(main())
