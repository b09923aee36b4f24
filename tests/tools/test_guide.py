# SPDX-License-Identifier: Apache-2.0
"""Executes docs/add_your_own_fusion.md as written: saves its files, runs its commands in order.

A block whose first line is `# NAME` is that file. A console block holds commands after `$ ` and,
below each, what it prints; `...` stands for anything, as in a doctest.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs/add_your_own_fusion.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"# ([\w.]+\.(?:py|yaml))\n")
SET_UP = "./dev setup"
"""The block with this command is not run: the tests run in the environment that it makes."""

pytestmark = pytest.mark.slow


@dataclass
class Step:
    """One command and the lines that it is said to print."""

    command: str
    promised: list[str] = field(default_factory=list)


def console_steps(text: str) -> list[Step]:
    steps: list[Step] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            steps.append(Step(line.removeprefix("$ ")))
        else:
            steps[-1].promised.append(line)
    return steps


def read_guide(text: str) -> list[Step | tuple[str, str]]:
    """Files (name, text) and commands, in the order of the page."""
    parts: list[Step | tuple[str, str]] = []
    for language, block in BLOCK.findall(text):
        if language == "console":
            steps = console_steps(block)
            if all(step.command != SET_UP for step in steps):
                parts.extend(steps)
        else:
            name = FILE_NAME.match(block)
            assert name is not None, f"no file name in the first line of:\n{block}"
            parts.append((name[1], block))
    return parts


def run(command: str, folder: Path) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET",)
    }
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_guide_does_what_it_says(tmp_path: Path) -> None:
    parts = read_guide(GUIDE.read_text(encoding="utf-8"))
    commands = []
    for part in parts:
        if isinstance(part, tuple):
            name, text = part
            (tmp_path / name).write_text(text, encoding="utf-8")
            continue
        printed = run(part.command, tmp_path)
        commands.append(part.command)
        promised = "\n".join([*part.promised, ""])
        kept = doctest.OutputChecker().check_output(promised, printed, doctest.ELLIPSIS)
        assert kept, f"{part.command}\nprinted\n{printed}\nbut the guide says\n{promised}"
    assert any("check_fusions" in command for command in commands)
    assert any("tiny_training" in command for command in commands)


def test_the_guide_promises_a_passing_check_and_a_line_in_the_report() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert "\nall checks passed\n" in text
    assert re.search(r"^  decay_and_beta .*my_decay \(.*0 +0$", text, re.MULTILINE)
    files = [part[0] for part in read_guide(text) if isinstance(part, tuple)]
    assert files == ["my_decay.py", "my_decay.yaml"]
