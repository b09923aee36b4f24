# SPDX-License-Identifier: Apache-2.0
"""Rules on names, sizes and lines of any file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from house_rules.source_file import Finding, SourceFile

LICENCE_LINE = "# SPDX-License-Identifier: Apache-2.0"
LARGEST_FILE = 500 * 1024
VAGUE_WORDS = frozenset({"helper", "helpers", "manager", "misc", "util", "utils"})

# Spelt with groups and escapes so that this file does not match itself.
_MACHINE_PATH = re.compile(r"(?<![\w.~}*-])/(?:work|root|home)/[\w.-]*")
_REGISTRY_HOST = re.compile(
    r"\b(?:(?:[\w-]+\.)*pypi\.org|(?:[\w-]+\.)*pythonhosted\.org|registry\.npmjs\.org"
    r"|(?:deb|security)\.debian\.org|proxy\.golang\.org|download\.pytorch\.org)\b"
)
_LOCAL_URL = re.compile(r"\bfile:/{2}/[\w./-]*")


def header(file: SourceFile) -> Iterator[Finding]:
    """A .py file starts with the licence line (after a shebang), then a module docstring."""
    if not file.is_python:
        return
    place = header_line_index(file)
    if file.lines[place : place + 1] != [LICENCE_LINE]:
        yield Finding(
            "header",
            file.path,
            place + 1,
            "the licence line is missing",
            f"put `{LICENCE_LINE}` there, or run ./dev fix on it",
        )
    if file.tree is not None and not ast.get_docstring(file.tree):
        yield Finding(
            "header",
            file.path,
            place + 2,
            "the module docstring is missing",
            "say below the licence line what the module is for",
        )


def header_line_index(file: SourceFile) -> int:
    """0-based index of the line that has to be the licence line."""
    return 1 if file.lines and file.lines[0].startswith("#!") else 0


def vague_name(file: SourceFile) -> Iterator[Finding]:
    """No module, and no folder of modules, has a name that says nothing."""
    if not file.is_python:
        return
    for name in (*file.path.parts[:-1], file.path.stem):
        vague = VAGUE_WORDS.intersection(name.lower().split("_"))
        if vague:
            yield Finding(
                "vague-name",
                file.path,
                1,
                f"the name {name!r} has the word {min(vague)!r}",
                "name what is in it, in the words of the field",
            )


def machine_path(file: SourceFile) -> Iterator[Finding]:
    """No path of one machine, no local URL and no host of a package registry is committed."""
    kinds = (
        (_MACHINE_PATH, "absolute path of one machine", "use a path from the root, or ~"),
        (_LOCAL_URL, "local URL", "name the package and its version only"),
        (_REGISTRY_HOST, "host of a package registry", "name the package; pip knows its index"),
    )
    for number, line in enumerate(file.lines, start=1):
        for pattern, problem, remedy in kinds:
            found = pattern.search(line)
            if found:
                yield Finding("machine-path", file.path, number, f"{problem} {found[0]!r}", remedy)


def end_of_file(file: SourceFile) -> Iterator[Finding]:
    """A text file ends with exactly one newline; lines end with LF."""
    if not file.text:
        return
    last = len(file.text.rstrip("\n").split("\n"))
    if not file.text.endswith("\n"):
        yield Finding(
            "end-of-file",
            file.path,
            last,
            "no newline at the end",
            "add one, or run ./dev fix on it",
        )
    elif file.text.endswith("\n\n") or file.text == "\n":
        yield Finding(
            "end-of-file",
            file.path,
            last + 1,
            "blank lines at the end",
            "remove them, or run ./dev fix on it",
        )
    if "\r\n" in file.text:
        number = file.text[: file.text.index("\r\n")].count("\n") + 1
        yield Finding(
            "end-of-file", file.path, number, "CRLF line end", "use LF, or run ./dev fix on it"
        )


def trailing_whitespace(file: SourceFile) -> Iterator[Finding]:
    """No line ends in blanks."""
    for number, line in enumerate(file.lines, start=1):
        if line.removesuffix("\r") != line.removesuffix("\r").rstrip(" \t"):
            yield Finding(
                "trailing-whitespace",
                file.path,
                number,
                "blanks at the end of the line",
                "remove them, or run ./dev fix on it",
            )


def large_file(file: SourceFile) -> Iterator[Finding]:
    """No file is larger than 500 KB."""
    if len(file.data) > LARGEST_FILE:
        yield Finding(
            "large-file",
            file.path,
            1,
            f"{len(file.data) / 1024:.0f} KB, the limit is {LARGEST_FILE // 1024} KB",
            "make it at run time, or commit a smaller one",
        )


def repaired(file: SourceFile) -> bytes:
    """Content with the licence line, LF line ends, no trailing blanks and one final newline.

    Docstrings are left to the author. A binary or empty file comes back as it is.
    """
    if not file.text:
        return file.data
    lines = [line.rstrip(" \t\r") for line in file.lines]
    place = header_line_index(file)
    if file.is_python and lines[place : place + 1] != [LICENCE_LINE]:
        lines.insert(place, LICENCE_LINE)
    text = "\n".join(lines).rstrip("\n")
    return (text + "\n").encode() if text else b""
