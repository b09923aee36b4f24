# SPDX-License-Identifier: Apache-2.0
"""A catalogue of toy stages, one of them composite, and plain-Python code that serves them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fusion_registry import (
    Binding,
    Catalogue,
    StageContract,
    StageInput,
    StageOutput,
    checked_by_declaration,
)

HERE = "tests.fusion_registry.toy_stages"
ENTRY_POINT_GROUP = "toy.fusions"


def _stage(name: str, inputs: tuple[StageInput, ...], children: tuple[str, ...] = ()):
    return StageContract(
        name=name,
        summary=f"the stage {name}",
        inputs=inputs,
        outputs=(StageOutput("out", ("rows",)),),
        unfused=f"{HERE}:unfused_{name}",
        reference=f"{HERE}:fused_{name}",
        children=children,
    )


LONE = _stage(
    "lone",
    (
        StageInput("x", "tensor", ("rows", "columns")),
        StageInput("y", "tensor", ("rows", "columns")),
        StageInput("w", "optional_tensor", ("columns",)),
        StageInput("n", "int"),
        StageInput("eps", "float"),
        StageInput("flag", "bool"),
    ),
)
_ONE = (StageInput("value", "int"),)
WHOLE = _stage("whole", _ONE, ("first", "second"))

CATALOGUE = Catalogue(
    stages=(WHOLE, _stage("first", _ONE), _stage("second", _ONE), LONE),
    builtin_package="tests.fusion_registry.toy_builtin",
    entry_point_group=ENTRY_POINT_GROUP,
    options=("use_lone", "use_other"),
)


class ToyLayer:
    """Has what preconditions of the tests read, and asks its binding like a real layer."""

    def __init__(self, binding: Binding | None = None, **config: Any) -> None:
        self.binding = binding
        self.config = SimpleNamespace(**{"deterministic_mode": False, **config})
        self.activation = "silu"

    def run_stage(self, stage: str, **inputs: Any) -> Any:
        return self.binding.run(stage, self, inputs)


def lone_inputs(columns: int = 4, device: str = "cpu", **changes: Any) -> dict[str, Any]:
    shape = (3, columns)
    return {
        "x": torch.empty(shape, device=device),
        "y": torch.empty(shape, device=device),
        "w": torch.empty(columns, device=device),
        "n": 8,
        "eps": 1e-6,
        "flag": True,
    } | changes


def unfused_lone(layer, x, y, w, n, eps, flag):
    return "unfused lone"


def unfused_whole(layer, value):
    return layer.run_stage("second", value=layer.run_stage("first", value=value))


def unfused_first(layer, value):
    return value + 1


def unfused_second(layer, value):
    return value * 10


def fused_lone(x, y, w, n, eps, flag):
    return "fused lone"


def other_lone(x, y, w, n, eps, flag):
    return "other lone"


def fused_first(value):
    return value + 1000


def fused_second(value):
    return value * -1


def fused_whole(value):
    return "fused whole"


def without_flag(x, y, w, n, eps):
    return "never"


def with_required_extra(x, y, w, n, eps, flag, extra):
    return "never"


def positional_only(x, y, w, n, eps, flag, /):
    return "never"


def with_optional_extra(x, y, w, n, eps, flag, extra=None):
    return "optional extra"


NOT_CALLABLE = "a text"


@checked_by_declaration("built_in_lone")
def checked_lone(x, y, w=None, n=8, eps=1e-6, flag=True):
    return "checked lone"


def accepts(**values: Any) -> list[str]:
    return []


def refuses(**values: Any) -> list[str]:
    return ["first reason", "second reason"]


def echoes(**values: Any) -> list[str]:
    return [f"{name}={value!r}" for name, value in sorted(values.items())]


def answers_false(**values: Any) -> bool:
    return False
