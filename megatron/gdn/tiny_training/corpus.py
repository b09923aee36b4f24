# SPDX-License-Identifier: Apache-2.0
"""Bytes to train on and bytes held out. Imports no torch."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LARGEST_CORPUS = 4 << 20
"""Bytes; a tiny training sees a few hundred thousand of them at most."""

HELD_OUT_PART = 10
"""One file in so many is held out, or one byte in so many at the end of a single file."""

# Tests, tables of character codes and installed packages: not the prose of the library.
_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)


@dataclass(frozen=True)
class Corpus:
    """Text as bytes.

    Args:
        source: where it comes from, for messages.
        train: bytes to train on; held_out: bytes that training never sees.
    """

    source: str
    train: bytes
    held_out: bytes

    def require(self, sequence: int) -> None:
        """Refuse a corpus that has no window of `sequence` bytes and the byte after it.

        Raises:
            ValueError: with the size that is needed.
        """
        if min(len(self.train), len(self.held_out)) > sequence:
            return
        raise ValueError(
            f"{self.source} is too small: a sequence of {sequence} bytes requires about "
            f"{HELD_OUT_PART * (sequence + 1)} bytes, got {len(self.train) + len(self.held_out)}; "
            "pass a larger file or a smaller --sequence"
        )


def read_file(path: Path) -> Corpus:
    """Read one file, of any bytes; its last tenth is held out. Of a large file, the first bytes.

    Raises:
        ValueError: it cannot be read, or is empty.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_CORPUS)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror or error}; pass a file of text"
        ) from None
    if not data:
        raise ValueError(f"{path} is empty; pass a file of text")
    cut = len(data) - len(data) // HELD_OUT_PART
    return Corpus(str(path), data[:cut], data[cut:])


def read_standard_library() -> Corpus:
    """Read the source files of the running Python's standard library, in alphabetical order.

    Raises:
        ValueError: this Python comes without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    train, held_out = bytearray(), bytearray()
    for index, path in enumerate(_sources(root)):
        data = path.read_bytes()
        if len(train) + len(held_out) + len(data) > LARGEST_CORPUS:
            break
        part = held_out if index % HELD_OUT_PART == HELD_OUT_PART - 1 else train
        part += data
    if not held_out:
        raise ValueError(f"this Python has no library sources in {root}; pass --data FILE")
    return Corpus("the standard library's sources", bytes(train), bytes(held_out))


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))
