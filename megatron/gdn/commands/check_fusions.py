# SPDX-License-Identifier: Apache-2.0
"""Checks registered fusions against their declarations and the float64 reference of their stages.

On a machine without a GPU, Triton kernels run in Triton's interpreter. torch, triton and
megatron-core are imported inside functions: the interpreter has to be switched on before them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusion_registry import FusionConfigError, Machine, Registry, load_registry, select
from megatron.gdn.commands.terminal import ends_quietly_without_reader, without_package_noise
from megatron.gdn.environment import use_triton_interpreter

if TYPE_CHECKING:
    from megatron.gdn.conformance import Result

PASSED, FAILED, MISTAKE, UNCHECKED = 0, 1, 2, 3
"""Exit statuses; `main` says what they mean."""

_STYLES = {"failed": "bold red", "not checked": "yellow", "not generated": "yellow"}


@dataclass(frozen=True)
class CheckedFusion:
    """A fusion and the result of each of its checks, by name."""

    name: str
    stage: str
    origin: str
    results: Mapping[str, Result]

    def counts(self) -> dict[str, int]:
        """Number of checks by verdict."""
        found: dict[str, int] = {}
        for result in self.results.values():
            found[str(result.verdict)] = found.get(str(result.verdict), 0) + 1
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "name": self.name,
            "stage": self.stage,
            "origin": self.origin,
            "counts": self.counts(),
            "checks": [{"name": name} | result.as_dict() for name, result in self.results.items()],
        }


def check(registry: Registry, name: str) -> CheckedFusion:
    """Run every check of one fusion.

    Raises:
        FusionConfigError: no such fusion.
    """
    from megatron.gdn.conformance import checks_of

    fusion = registry.fusion(name)
    return CheckedFusion(
        name,
        fusion.declaration.stage,
        str(fusion.origin),
        {item.name: item.run() for item in checks_of(fusion, registry)},
    )


def exit_status(checked: Sequence[CheckedFusion]) -> int:
    """0, 1 or 3; see `main`."""
    verdicts = {verdict for fusion in checked for verdict in fusion.counts()}
    if "failed" in verdicts:
        return FAILED
    return UNCHECKED if "not checked" in verdicts else PASSED


def _table(fusion: CheckedFusion) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("check", overflow="fold", ratio=1)
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("tolerance", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name, result in fusion.results.items():
        verdict = str(result.verdict)
        worst = result.measurements[0] if result.measurements else None
        table.add_row(
            Text(f"{name}  {worst.name}" if worst is not None else name),
            "" if worst is None else f"{worst.error:.1e}",
            "" if worst is None else f"{worst.tolerance:.1e}",
            Text(verdict, style=_STYLES.get(verdict, "")),
        )
    return table


def _print(fusion: CheckedFusion, console: Console) -> None:
    with console.capture() as captured:
        _print_all(fusion, console)
    # Tables are padded; a line that ends in blanks is a nuisance where it is quoted.
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def _print_all(fusion: CheckedFusion, console: Console) -> None:
    console.print(Text(fusion.name, style="bold") + f"  stage {fusion.stage}")
    console.print(f"declared in {fusion.origin}", soft_wrap=True)
    console.print(_table(fusion))
    said = set()
    for name, result in fusion.results.items():
        verdict = str(result.verdict)
        if verdict in ("passed", "outside") or not result.detail:
            continue
        # One cause, such as a GPU that is not there, is told once.
        line = f"{verdict}: {result.detail}"
        if line not in said or verdict == "failed":
            console.print(Text(f"{name} {line}", style=_STYLES.get(verdict, "")), soft_wrap=True)
        said.add(line)
    counts = ", ".join(f"{number} {verdict}" for verdict, number in fusion.counts().items())
    console.print(f"{fusion.name}: {counts}\n")


def _prepare_machine() -> str:
    """Switch the interpreter on where there is no CUDA; returns the name of the machine."""
    import torch

    if not torch.cuda.is_available():
        use_triton_interpreter()
    here = Machine.here()
    interpreter = ", Triton kernels in its interpreter" if here.interpreter else ""
    return f"{here.name}{interpreter}"


@ends_quietly_without_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Check fusions: declaration, layout, parity, gradients, determinism, one refusal a rule.

    Returns:
        Exit status: 0 when every check passed (or had nothing to judge), 1 when one failed, 2 when
        a name or a file is wrong, 3 when none failed and some could not be made on this machine.
    """
    parser = argparse.ArgumentParser(
        prog="check_fusions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 all passed, 1 something failed, 2 a name or file is wrong,\n"
        "3 nothing failed and something cannot be checked on this machine",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="fusions (default: all)")
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="also register the fusions of this file and judge its selections; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print plain data")
    args = parser.parse_args(argv)
    with without_package_noise():
        try:
            # Before the registry: a plug-in may import triton while it is registered.
            machine = _prepare_machine()
            registry = load_registry(args.config)
            select(registry, ()).check_without_model()
            names = list(dict.fromkeys(args.names)) or list(registry.fusions)
            for name in names:
                registry.fusion(name)
        except (FusionConfigError, RuntimeError) as error:
            print(f"check_fusions: {error}", file=sys.stderr)
            return MISTAKE
        return _check_all(registry, names, machine, as_json=args.json)


def _check_all(registry: Registry, names: Sequence[str], machine: str, *, as_json: bool) -> int:
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 80)
    if not as_json:
        console.print(f"checked on {machine}\n")
    checked = []
    for name in names:
        checked.append(check(registry, name))
        if not as_json:
            _print(checked[-1], console)
    status = exit_status(checked)
    broken = [
        {"name": plugin.name, "origin": plugin.origin, "error": plugin.error}
        for plugin in registry.broken_plugins
    ]
    if as_json:
        data = {
            "machine": machine,
            "status": status,
            "fusions": [fusion.as_dict() for fusion in checked],
            "broken_plugins": broken,
        }
        print(json.dumps(data, indent=2))
        return status
    for plugin in broken:
        console.print(
            "plug-in {name} ({origin}) failed to load, so it was not checked: {error}".format(
                **plugin
            )
        )
    print(
        {
            PASSED: "all checks passed",
            FAILED: "some checks FAILED",
            UNCHECKED: "no check failed, but some could not be made on this machine",
        }[status]
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
