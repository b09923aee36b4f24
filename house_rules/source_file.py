# SPDX-License-Identifier: Apache-2.0
"""What a rule is given (a file) and what it hands back (findings)."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Finding:
    """One broken rule at one line.

    Args:
        rule: name of the rule, as `--rule` takes it.
        path: path from the repository's root.
        line: 1-based line number.
        problem: what is there.
        remedy: what to do instead.
    """

    rule: str
    path: PurePosixPath
    line: int
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.problem}; {self.remedy}"


@dataclass(frozen=True)
class SourceFile:
    """A file of the repository, read once and judged by every rule.

    Args:
        path: path from the repository's root.
        data: its content.
    """

    path: PurePosixPath
    data: bytes

    @cached_property
    def text(self) -> str | None:
        """The content as text; None for a binary file."""
        if b"\0" in self.data:
            return None
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError:
            return None

    @cached_property
    def lines(self) -> list[str]:
        """Lines of text without their newline; empty for a binary file."""
        return [] if self.text is None else self.text.split("\n")

    @property
    def is_python(self) -> bool:
        """Whether the file is Python source."""
        return self.path.suffix == ".py"

    @cached_property
    def tree(self) -> ast.Module | None:
        """The syntax tree; None if this is no Python, or Python that ruff will refuse anyway."""
        if not self.is_python or self.text is None:
            return None
        try:
            return ast.parse(self.text)
        except SyntaxError:
            return None

    def is_below(self, *folders: str) -> bool:
        """Whether the file lies in one of the folders, given from the root."""
        return any(self.path.is_relative_to(folder) for folder in folders)
