# SPDX-License-Identifier: Apache-2.0
"""Hypothesis profiles, and declaration files on disk.

`pytest tests/fusion_registry/test_malformed_files.py --hypothesis-profile=many` runs 2,500 examples
of each property, new ones each time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("few", max_examples=300, derandomize=True, deadline=None, database=None)
settings.register_profile("many", max_examples=2500, deadline=None, database=None)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a declaration file and returns its path."""

    def write_file(text: str, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file
