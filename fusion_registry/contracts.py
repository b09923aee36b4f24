# SPDX-License-Identifier: Apache-2.0
"""Stage contracts: what a named step of a layer takes in and hands back.

A contract is plain data. Dimensions carry names, so that a precondition can speak of
`x.head_dim` and a message can say which dimension was wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

InputKind = Literal["tensor", "optional_tensor", "int", "float", "bool"]


@dataclass(frozen=True)
class StageInput:
    """One named input of a stage.

    Args:
        name: keyword under which the layer passes it and an implementation receives it.
        kind: `tensor`, `optional_tensor` (may be None) or a Python scalar kind.
        dims: names of the dimensions, outermost first; empty for scalars.
    """

    name: str
    kind: InputKind = "tensor"
    dims: tuple[str, ...] = ()

    @property
    def is_tensor(self) -> bool:
        return self.kind in ("tensor", "optional_tensor")


@dataclass(frozen=True)
class StageOutput:
    """One named output of a stage, with the names of its dimensions."""

    name: str
    dims: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class StageContract:
    """A stage: its inputs, its outputs, its children and what runs when nothing is fused.

    Args:
        name: the word used for it everywhere.
        summary: one line for tables.
        inputs: in the order of an implementation's positional parameters.
        outputs: one output is returned bare, several as a tuple in this order.
        unfused: `module:callable`, called as `unfused(layer, **inputs)`.
        reference: `module:callable`, the plain-torch definition, called as `reference(**inputs)`.
        children: names of the stages that this one is made of; empty for a leaf.
    """

    name: str
    summary: str
    inputs: tuple[StageInput, ...]
    outputs: tuple[StageOutput, ...]
    unfused: str
    reference: str
    children: tuple[str, ...] = field(default=())

    def input(self, name: str) -> StageInput | None:
        """The input called `name`, or None when the stage has none of that name."""
        return next((item for item in self.inputs if item.name == name), None)
