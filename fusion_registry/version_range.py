# SPDX-License-Identifier: Apache-2.0
"""Version ranges of packages, in the notation of PEP 440 (`>=3.4,<4`)."""

from __future__ import annotations

from typing import Annotated

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, StringConstraints

PackageName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
]
"""Name of a distribution, as `pip install` takes it."""


def _is_range(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ValueError(f"not a version range: {text!r}; write it like '>=3.4,<4'") from error
    return text


VersionRange = Annotated[str, AfterValidator(_is_range)]


def version_in_range(version: str, versions: str) -> bool:
    """Whether `version` lies in the range; pre-releases and local versions count."""
    return SpecifierSet(versions).contains(version, prereleases=True)
