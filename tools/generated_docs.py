# SPDX-License-Identifier: Apache-2.0
"""Keeps the generated parts of the documentation current.

    python -m tools.generated_docs --write     rewrite them
    python -m tools.generated_docs --check     exit with 1 when one is out of date

A generated part stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fusion_registry import load_registry
from fusion_registry.registry import precondition_kinds
from fusion_registry.schema import FusionDeclaration, FusionFile, StageSelection
from megatron.gdn.arguments import add_gdn_fusion_args
from megatron.gdn.commands.list_fusions import as_text, describe_registry
from megatron.gdn.commands.list_fusions import main as list_fusions_command
from megatron.gdn.stages import STAGES

ROOT = Path(__file__).resolve().parents[1]
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def list_fusions() -> str:
    """What `list_fusions --declared-only` prints, built-in declarations only."""
    registry = load_registry(plugins=False)
    text = as_text(describe_registry(registry, None), 80)
    return f"```console\n$ ./dev run gdn-list-fusions --declared-only\n{text}\n```\n"


def stages() -> str:
    """The stages of the layer, their inputs and outputs, as a table."""
    lines = ["| stage | inputs | outputs |", "|---|---|---|"]
    for stage in STAGES:
        children = f"<br>made of {', '.join(stage.children)}" if stage.children else ""
        inputs = ", ".join(
            f"`{item.name}`" + (f" [{', '.join(item.dims)}]" if item.dims else "")
            for item in stage.inputs
        )
        outputs = ", ".join(f"`{item.name}` [{', '.join(item.dims)}]" for item in stage.outputs)
        lines.append(f"| `{stage.name}`: {stage.summary}{children} | {inputs} | {outputs} |")
    return "\n".join(lines) + "\n"


def preconditions() -> str:
    """Every kind of precondition with its keys."""
    lines = ["| kind | holds when | keys |", "|---|---|---|"]
    for kind, model in precondition_kinds().items():
        keys = ", ".join(
            f"`{name}`" + ("" if field.is_required() else " (optional)")
            for name, field in model.model_fields.items()
            if name != "kind"
        )
        summary = (model.__doc__ or "").strip().splitlines()[0]
        lines.append(f"| `{kind}` | {summary} | {keys} |")
    return "\n".join(lines) + "\n"


def option_fields() -> dict[str, tuple[str, str, str]]:
    """Type, default and docstring of each field that our `TransformerConfig` adds.

    Read from the source: importing the class takes megatron-core and torch.
    """
    tree = ast.parse((ROOT / "megatron/gdn/config.py").read_text(encoding="utf-8"))
    (config,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "TransformerConfig"
    )
    fields = {}
    for field, text in zip(config.body, config.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or field.value is None:
            continue
        name = ast.unparse(field.target)
        if not isinstance(text, ast.Expr) or not isinstance(text.value, ast.Constant):
            raise ValueError(f"the field {name} has no docstring below it; write one")
        fields[name] = (
            ast.unparse(field.annotation),
            ast.unparse(field.value),
            " ".join(str(text.value.value).split()),
        )
    return fields


def options() -> str:
    """Every field of the configuration with its flag, default and meaning."""
    parser = add_gdn_fusion_args(argparse.ArgumentParser(add_help=False))
    flags = {action.dest: action for action in parser._actions}
    fields = option_fields()
    if set(flags) != set(fields):
        raise ValueError(f"a flag without a field, or a field without: {set(flags) ^ set(fields)}")
    selects: dict[str, list[str]] = {}
    for fusion in load_registry(plugins=False).fusions.values():
        if fusion.declaration.option is not None:
            selects.setdefault(fusion.declaration.option, []).append(f"`{fusion.name}`")
    lines = ["| field | type and default | flag | meaning |", "|---|---|---|---|"]
    for name, (kind, default, meaning) in fields.items():
        action = flags[name]
        values = "" if action.metavar is None else f" {action.metavar}"
        values += " ..." if action.nargs == "+" else ""
        if name in selects:
            meaning += f" Selects {', '.join(selects[name])}."
        kind = kind.replace("|", "or")
        lines.append(
            f"| `{name}` | {kind} = {default} | `{action.option_strings[0]}{values}` | {meaning} |"
        )
    return "\n".join(lines) + "\n"


def declaration_keys() -> str:
    """The keys of a declaration file, level by level."""
    lines = ["| where | key | required | meaning |", "|---|---|---|---|"]
    for where, model in (
        ("file", FusionFile),
        ("`fusions[]`", FusionDeclaration),
        ("`select[]`", StageSelection),
    ):
        for name, field in model.model_fields.items():
            required = "yes" if field.is_required() else "no"
            meaning = " ".join((field.description or "").split())
            lines.append(f"| {where} | `{name}` | {required} | {meaning} |")
    return "\n".join(lines) + "\n"


def explain() -> str:
    """What `list_fusions --explain` prints for shapes of which one is refused."""
    words = (
        "--explain --layers 4 --batch 4 --head-dim 96 "
        "--gdn-pre-gated-delta-rule-fusion --gdn-gated-output-norm-fusion"
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        list_fusions_command(words.split())
    command = words.replace(" --gdn-pre", " \\\n    --gdn-pre")
    return f"```console\n$ ./dev run gdn-list-fusions {command}\n{printed.getvalue()}```\n"


PARTS: dict[str, Callable[[], str]] = {
    "explain": explain,
    "declaration_keys": declaration_keys,
    "list_fusions": list_fusions,
    "options": options,
    "preconditions": preconditions,
    "stages": stages,
}


def regenerate(text: str) -> str:
    """`text` with every generated part made anew.

    Raises:
        KeyError: a part of an unknown name.
    """
    return PART.sub(lambda found: found[1] + PARTS[found[2]]() + found[3], text)


def main(argv: Sequence[str] | None = None) -> int:
    """Check or rewrite README.md and docs/; returns the exit status."""
    parser = argparse.ArgumentParser(prog="generated_docs", description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="report what is out of date")
    mode.add_argument("--write", action="store_true", help="rewrite what is out of date")
    args = parser.parse_args(argv)
    stale = 0
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        old = file.read_text(encoding="utf-8")
        new = regenerate(old)
        if new == old:
            continue
        if args.write:
            file.write_text(new, encoding="utf-8")
            print(f"rewritten: {file.relative_to(ROOT)}")
        else:
            stale += 1
            print(
                f"{file.relative_to(ROOT)}: generated parts are out of date; "
                "run ./dev run python -m tools.generated_docs --write"
            )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
