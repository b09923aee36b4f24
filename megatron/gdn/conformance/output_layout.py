# SPDX-License-Identifier: Apache-2.0
"""Do the outputs of a fusion have the shapes, dtypes and memory that the stage promises?

Shapes and dtypes are those of the reference on the same inputs. What a contract says beyond that,
in the note of an output, is judged by its words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.gdn.conformance.parity import Comparison, bitwise_equal

CONTIGUOUS = "contiguous"
VIEW = "a view of "
SAME_DTYPE = "dtype of "

Phrase = Callable[[str, Tensor, Mapping[str, Any]], str | None]
"""From the words of a phrase, the output and the inputs to what is wrong, or None."""


def _contiguous(words: str, output: Tensor, inputs: Mapping[str, Any]) -> str | None:
    if output.is_contiguous():
        return None
    return f"must be contiguous, got strides {list(output.stride())}"


def _view(words: str, output: Tensor, inputs: Mapping[str, Any]) -> str | None:
    name = words.removeprefix(VIEW)
    if output.untyped_storage().data_ptr() == inputs[name].untyped_storage().data_ptr():
        return None
    return f"must be a view of {name}, got memory of its own"


def _same_dtype(words: str, output: Tensor, inputs: Mapping[str, Any]) -> str | None:
    name = words.removeprefix(SAME_DTYPE)
    if output.dtype == inputs[name].dtype:
        return None
    return f"must have the dtype of {name}, {inputs[name].dtype}, got {output.dtype}"


def _dtype(words: str, output: Tensor, inputs: Mapping[str, Any]) -> str | None:
    if output.dtype == getattr(torch, words):
        return None
    return f"must be {words}, got {output.dtype}"


def _no_promise(words: str, output: Tensor, inputs: Mapping[str, Any]) -> str | None:
    return None


EXACT_PHRASES: Mapping[str, Phrase] = {
    CONTIGUOUS: _contiguous,
    "float32": _dtype,
    "log decay": _no_promise,
}
PHRASE_STARTS: Mapping[str, Phrase] = {VIEW: _view, SAME_DTYPE: _same_dtype}


def phrases(note: str) -> list[tuple[str, Phrase]]:
    """The phrases of a note and what each promises.

    Raises:
        ValueError: nobody knows what a phrase promises.
    """
    found = []
    for words in filter(None, (part.strip() for part in note.split(","))):
        phrase = EXACT_PHRASES.get(words) or next(
            (item for start, item in PHRASE_STARTS.items() if words.startswith(start)), None
        )
        if phrase is None:
            raise ValueError(
                f"no check knows what {words!r} promises in the note of an output; known: "
                + ", ".join((*EXACT_PHRASES, *(f"{start}INPUT" for start in PHRASE_STARTS)))
            )
        found.append((words, phrase))
    return found


def layout_problems(comparison: Comparison) -> list[str]:
    """What is wrong with the outputs of one case, and with the inputs afterwards."""
    contract, inputs = comparison.contract, comparison.inputs
    outputs, expected = comparison.forward, comparison.expected
    problems = []
    for item in contract.outputs:
        got, like = outputs[item.name], expected[item.name]
        if got.shape != like.shape:
            problems.append(f"{item.name} must be {list(like.shape)}, got {list(got.shape)}")
        if got.dtype != like.dtype:
            problems.append(f"{item.name} must be {like.dtype}, got {got.dtype}")
        if got.device != like.device:
            problems.append(f"{item.name} must be on {like.device}, got {got.device}")
        for words, phrase in phrases(item.note):
            problem = phrase(words, got, inputs)
            if problem is not None:
                problems.append(f"{item.name} {problem}")
    problems += [
        f"the input {name} was modified"
        for name, value in comparison.given.items()
        if not bitwise_equal(value, inputs[name])
    ]
    return problems
