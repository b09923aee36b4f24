# SPDX-License-Identifier: Apache-2.0
"""Command line of the house rules: prints one line per finding, exits with 1 if there is any."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from house_rules.catalogue import RULES, findings
from house_rules.source_file import SourceFile
from house_rules.text_rules import repaired


def main(argv: Sequence[str] | None = None) -> int:
    """Check (and with `--fix` first repair) files; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m house_rules", description=main.__doc__)
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        help="files, or folders for all in them that git does not ignore (default: the repository)",
    )
    parser.add_argument("--fix", action="store_true", help="repair headers, blanks and file ends")
    parser.add_argument("--rule", action="append", choices=list(RULES), help="may be repeated")
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).resolve().parents[1],
        help="the repository whose paths the rules speak of (default: this one)",
    )
    arguments = parser.parse_args(argv)
    root = arguments.root.resolve()
    broken = 0
    for path in _files_of(arguments.paths or [root]):
        file = _read(path, root)
        if arguments.fix:
            content = repaired(file)
            if content != file.data:
                path.write_bytes(content)
                file = SourceFile(file.path, content)
        for finding in findings(file, arguments.rule or RULES):
            print(finding)
            broken += 1
    return 1 if broken else 0


def _files_of(paths: Sequence[Path]) -> Iterator[Path]:
    """Regular files among the paths and, for a folder, those in it that git does not ignore."""
    for path in paths:
        candidates = _unignored_files(path) if path.is_dir() else [path]
        yield from (file for file in candidates if file.is_file() and not file.is_symlink())


def _unignored_files(folder: Path) -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return [folder / name for name in dict.fromkeys(listing.stdout.split("\0")) if name]


def _read(path: Path, root: Path) -> SourceFile:
    place = path.resolve().relative_to(root)
    return SourceFile(PurePosixPath(place.as_posix()), path.read_bytes())


if __name__ == "__main__":
    sys.exit(main())
