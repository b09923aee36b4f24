# SPDX-License-Identifier: Apache-2.0
"""A benchmark case: a stage at one shape, its traffic, its oracle and its implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Inputs = Mapping[str, Tensor]
Stage = Callable[[Inputs], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Implementation:
    """One way to run the stage.

    `build` prepares what is made once (a compiled function, a module) and returns the call that is
    timed. It raises ImportError when the package that it needs is absent.
    """

    name: str
    build: Callable[[Inputs], Stage]
    is_ours: bool = False


@dataclass(frozen=True)
class BenchCase:
    """A stage at one shape.

    Attributes:
        stage: name of the stage.
        label: shape, dtype and layout, as printed.
        forward_bytes: bytes that a forward must move: inputs read once, outputs written once.
        backward_bytes: the same for a backward that recomputes instead of reading saved results.
        make_inputs: random inputs on the current CUDA device, by name; gradients are taken with
            respect to those that require them.
        make_output_gradients: random incoming gradients, one per output.
        errors: given inputs, outputs, output gradients and input gradients by name, the relative
            error of each tensor against the float64 reference, in the Frobenius norm.
        tolerance: largest error that counts as parity.
        implementations: ours first, then the peers.
        consult: given inputs, the call by which a layer asks its binding whether the fusion may
            serve them, and counts it, without running it.
    """

    stage: str
    label: str
    forward_bytes: int
    backward_bytes: int
    make_inputs: Callable[[], Inputs]
    make_output_gradients: Callable[[], tuple[Tensor, ...]]
    errors: Callable[
        [Inputs, tuple[Tensor, ...], tuple[Tensor, ...], Mapping[str, Tensor]], Mapping[str, float]
    ]
    tolerance: float
    implementations: tuple[Implementation, ...]
    consult: Callable[[Inputs], Callable[[], object]]
