# SPDX-License-Identifier: Apache-2.0
"""Every house rule, by the name that messages and `--rule` use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from house_rules import python_rules, text_rules
from house_rules.source_file import Finding, SourceFile

Rule = Callable[[SourceFile], Iterator[Finding]]

RULES: dict[str, Rule] = {
    "header": text_rules.header,
    "vague-name": text_rules.vague_name,
    "machine-path": text_rules.machine_path,
    "end-of-file": text_rules.end_of_file,
    "trailing-whitespace": text_rules.trailing_whitespace,
    "large-file": text_rules.large_file,
    "no-assert": python_rules.no_assert,
    "environment": python_rules.environment,
    "import-direction": python_rules.import_direction,
    "light-import": python_rules.light_import,
    "private-megatron": python_rules.private_megatron,
}


def findings(file: SourceFile, rules: Iterable[str] = RULES) -> list[Finding]:
    """What the named rules (default: all) find in a file, by line.

    Raises:
        KeyError: a name is no rule.
    """
    found = [finding for name in rules for finding in RULES[name](file)]
    return sorted(found, key=lambda finding: (finding.line, finding.rule))
