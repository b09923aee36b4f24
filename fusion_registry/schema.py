# SPDX-License-Identifier: Apache-2.0
"""The format in which fusions are declared and selected, as pydantic models.

    fusions:                       # what exists
      - name: my_convolution
        stage: causal_conv1d
        implementation: my_package.kernels:convolution
        determinism: deterministic
        preconditions:
          - {kind: dtype_in, tensor: qkv, dtypes: [bfloat16]}
    select:                        # what a run uses
      - {stage: causal_conv1d, fusions: [my_convolution], layers: 1-4}

Built-in fusions are declared in the same format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
)

from fusion_registry.import_path import ImportPath
from fusion_registry.preconditions import AnyPrecondition, Name
from fusion_registry.version_range import PackageName, VersionRange
from fusion_registry.yaml_source import cut, short

FusionName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=100)
]


def _in_one_line(text: str) -> str:
    """Folded as YAML folds a block, since tables and terminals show it."""
    folded = " ".join(text.split())
    # Joiners of letters, in Persian for one, and of emoji.
    joined = folded.replace("\u200c", "").replace("\u200d", "")
    bad = next((character for character in joined if not character.isprintable()), None)
    if bad is not None:
        raise ValueError(f"must be printable text, got {bad!r} in it; remove the character")
    return folded


Line = Annotated[str, AfterValidator(_in_one_line)]
Determinism = Literal["deterministic", "nondeterministic", "unknown"]

LARGEST_LAYER_NUMBER = 100_000
LAYER_NUMBER = "(?:100000|[1-9][0-9]{0,4})"
LAYER_RANGES = (
    rf" *{LAYER_NUMBER}( *- *{LAYER_NUMBER})?( *, *{LAYER_NUMBER}( *- *{LAYER_NUMBER})?)* *"
)
"""Pattern of layer numbers as a text, in the digits 0 to 9 only."""

WORDS_OF_YAML = ("off", "on", "no", "yes", "false", "true", "null")
"""A bare word of these is no text in YAML, however its letters are cased."""


class LayerSet(BaseModel):
    """Layer numbers, from 1, as inclusive ranges. Written `3`, `1-4,7` or `[1-4, 7]`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    ranges: tuple[tuple[int, int], ...]

    def __contains__(self, layer: int) -> bool:
        return any(first <= layer <= last for first, last in self.ranges)

    def __str__(self) -> str:
        return ",".join(
            str(first) if first == last else f"{first}-{last}" for first, last in self.ranges
        )

    @classmethod
    def of(cls, numbers: Iterable[int]) -> LayerSet:
        """The set of some layer numbers; neighbours become one range."""
        ranges: list[tuple[int, int]] = []
        for number in sorted(set(numbers)):
            if ranges and ranges[-1][1] == number - 1:
                ranges[-1] = (ranges[-1][0], number)
            else:
                ranges.append((number, number))
        return cls(ranges=tuple(ranges))

    @classmethod
    def parse(cls, value: Any) -> LayerSet:
        """Read a number, a text such as `1-4,7`, or a list of those.

        Raises:
            ValueError: it is none of them, a range runs backwards, or a number is no layer.
        """
        items = value if isinstance(value, list | tuple) else [value]
        ranges = []
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int | str):
                raise ValueError(f"not layer numbers: {short(item)}; write them like 3 or 1-4,7")
            for part in str(item).split(","):
                first, dash, last = part.strip(" ").partition("-")
                numbers = (first.strip(" "), last.strip(" ") if dash else first.strip(" "))
                if not all(re.fullmatch("0|[1-9][0-9]{0,99}", number) for number in numbers):
                    raise ValueError(f"not layer numbers: {part!r}; write them like 3 or 1-4,7")
                low, high = (int(number) for number in numbers)
                if not 1 <= low <= high <= LARGEST_LAYER_NUMBER:
                    raise ValueError(
                        f"layers {part.strip(' ')!r} must count up from 1 to at most "
                        f"{LARGEST_LAYER_NUMBER}"
                    )
                ranges.append((low, high))
        if not ranges:
            raise ValueError("no layer numbers given; leave `layers` out to mean every layer")
        return cls(ranges=tuple(ranges))


class FusionDeclaration(BaseModel):
    """One fusion: an implementation of one stage, and when it may run."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: FusionName
    """What selections, reports and messages call it; no other fusion may have this name."""

    stage: Name
    """The stage that it implements."""

    implementation: ImportPath
    """`package.module:callable`. It takes the inputs of the stage by keyword and returns its
    outputs in order. A run imports it when it is selected; list_fusions imports it to say whether
    it is available, check_fusions to check it."""

    determinism: Determinism
    """Whether two runs on equal inputs give equal bits."""

    preconditions: tuple[AnyPrecondition, ...]
    """Rules that a call must meet; all are judged on every call. Write [] if there are none."""

    description: Line = ""
    """One line for tables."""

    option: Name | None = None
    """The boolean option of the configuration that selects it; without one, by name only."""

    packages: Mapping[PackageName, VersionRange] = Field(default_factory=dict)
    """Distributions that it needs, with version ranges such as ">=3.4,<4"."""

    source: Line = ""
    """Where the code or the formula comes from."""

    @field_validator("name")
    @classmethod
    def _is_no_word_of_yaml(cls, value: str) -> str:
        if value.casefold() in WORDS_OF_YAML:
            raise ValueError(
                f"a fusion cannot be called {value!r}, which YAML reads as something else than a "
                "text; choose another name"
            )
        return value


class StageSelection(BaseModel):
    """Which fusions serve a stage, best first, or `off`; for all layers or for some."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, arbitrary_types_allowed=True, use_attribute_docstrings=True
    )

    stage: Name
    """The stage to serve."""

    fusions: tuple[FusionName, ...] | Literal["off"]
    """Names of fusions, best first: the first one whose preconditions hold runs, and when none
    holds the call raises. `off` means unfused."""

    layers: LayerSet | None = None
    """Layer numbers, from 1: a number, a text such as "1-4,7", or a list of those. Without them
    the entry means every layer, and an entry that names layers beats it."""

    @field_validator("fusions", mode="before")
    @classmethod
    def _read_off(cls, value: Any) -> Any:
        # YAML 1.1 reads a bare `off` as False.
        if value is False or value == "off":
            return "off"
        if not isinstance(value, list | tuple):
            one = f"; write [{cut(value)}]" if isinstance(value, str) else ""
            raise ValueError(f"must be a list of fusion names, or off, got {short(value)}{one}")
        if not value:
            raise ValueError("an empty list selects nothing; write `off`")
        if any(item is False or item == "off" for item in value):
            raise ValueError("off may not stand in a list; write `fusions: off` or names alone")
        if len({str(item) for item in value}) < len(value):
            raise ValueError(f"a fusion is listed twice: {short(value)}; list it once")
        return value

    @field_validator("layers", mode="before")
    @classmethod
    def _read_layers(cls, value: Any) -> Any:
        return value if value is None or isinstance(value, LayerSet) else LayerSet.parse(value)

    @property
    def candidates(self) -> tuple[str, ...]:
        """Fusion names, best first; empty for `off`."""
        return () if self.fusions == "off" else self.fusions


class FusionFile(BaseModel):
    """A declaration file: fusions to register, stages to select them for, or both."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    fusions: tuple[FusionDeclaration, ...] = ()
    """Fusions to register."""

    select: tuple[StageSelection, ...] = ()
    """What a run uses: fusions for stages, in all layers or in some."""
