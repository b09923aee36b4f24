# SPDX-License-Identifier: Apache-2.0
"""A fusion beside the reference of its stage in float64: outputs, gradients, layout, repetition.

Error: norm of the difference over norm of the reference, one tensor at a time.

Tolerance, by the coarsest dtype that a result is rounded to on its way. A rounding to a dtype with
unit roundoff u has a root mean square error of about 0.58 u, and the stages round a value at most
three times: about 1.0 u, against 2 u allowed. FP32 has no such rounding; 32 u are left for sums and
for the last bits of exp. A convolution tap taken from another document, a key head whose gradient
lacks one of its value heads, or a weight gradient without its last token are each wrong by percents
in cases of this size.

The recurrence gets eight times that: its chunked kernels round the products between two chunks, and
its decay gradient is a difference of sums. For FP32 they multiply in TF32, whose unit roundoff is
that of FP16. Triton's interpreter (3.7.1) truncates to BF16, with errors of up to 2 u in one
direction instead of u in both; for BF16 the tolerance is doubled under it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fusion_registry import StageContract
from fusion_registry.binding import BoundStage
from fusion_registry.import_path import import_object
from fusion_registry.machine import triton_interpreter_is_on
from megatron.gdn.conformance.results import Measurement

TOLERANCES = {
    torch.float64: 2.0**-40,
    torch.float32: 2.0**-19,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
}
RECURRENCE = "gated_delta_rule"
RECURRENCE_FACTOR = 8


class ContractBroken(Exception):
    """An implementation does not keep to the contract of its stage; the text says how."""


Tensors = dict[str, Tensor]
Incoming = Callable[[str, Tensor], Tensor | None]
"""From the name of an output and the output to its incoming gradient; None: it is unused."""


def tolerance(contract: StageContract, *dtypes: torch.dtype) -> float:
    """What a result may be off by that was rounded to these dtypes on its way."""
    allowed = max(TOLERANCES[dtype] for dtype in dtypes)
    if contract.name == RECURRENCE:
        if allowed <= TOLERANCES[torch.float32]:
            allowed = TOLERANCES[torch.float16] / RECURRENCE_FACTOR
        allowed *= RECURRENCE_FACTOR
    if torch.bfloat16 in dtypes and triton_interpreter_is_on():
        allowed *= 2
    return allowed


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over norm of `wanted`; NaN where `got` has one."""
    wanted = wanted.double()
    size = wanted.norm().item()
    difference = (got.double() - wanted).norm().item()
    return difference / size if size else difference


def normal_gradient(name: str, output: Tensor) -> Tensor:
    """An incoming gradient of independent normal values, contiguous, the same every time."""
    generator = torch.Generator().manual_seed(30 + sum(map(ord, name)))
    values = torch.randn(output.shape, generator=generator)
    return values.to(output.device, output.dtype)


def expanded_gradient(name: str, output: Tensor) -> Tensor:
    """One number for all elements, with strides 0, as after `sum().backward()`."""
    value = 1.0 + (sum(map(ord, name)) % 7) / 4
    return torch.tensor(value, device=output.device, dtype=output.dtype).expand(output.shape)


def only(wanted: str) -> Incoming:
    """Incoming gradients when one output is used and the others are not."""
    return lambda name, output: normal_gradient(name, output) if name == wanted else None


def differentiable_inputs(inputs: Mapping[str, Any]) -> list[str]:
    """Names of the inputs that may require gradients."""
    return [
        name
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]


def leaves(inputs: Mapping[str, Any], requiring: list[str] | None = None) -> dict[str, Any]:
    """The inputs, those named (default: all that can) as leaves that require gradients."""
    names = differentiable_inputs(inputs) if requiring is None else requiring
    return {
        name: value.detach().requires_grad_(name in names) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


def named_outputs(contract: StageContract, returned: Any) -> Tensors:
    """What an implementation returned, by the names of the contract.

    Raises:
        ContractBroken: not as many tensors as the stage has outputs.
    """
    several = len(contract.outputs) > 1
    values = returned if several else (returned,)
    names = [item.name for item in contract.outputs]
    if not isinstance(values, tuple | list) or len(values) != len(names):
        got = f"{len(values)} values" if isinstance(values, tuple | list) else type(values).__name__
        raise ContractBroken(f"must return {', '.join(names)}, got {got}")
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, Tensor):
            raise ContractBroken(f"must return the tensor {name}, got {type(value).__name__}")
    return dict(zip(names, values, strict=True))


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """New memory holds NaN (77 where it holds integers), so that what nobody writes shows."""

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poisoned(*args: Any, **kwargs: Any) -> Tensor:
            made = make(*args, **kwargs)
            return made.fill_(float("nan") if made.is_floating_point() else 77)

        return poisoned

    with (
        mock.patch.object(torch, "empty", poison(torch.empty)),
        mock.patch.object(torch, "empty_like", poison(torch.empty_like)),
        mock.patch.object(torch, "empty_strided", poison(torch.empty_strided)),
        mock.patch.object(Tensor, "new_empty", poison(Tensor.new_empty)),
    ):
        yield


class Comparison:
    """One case of a bound fusion, run as a layer runs it, beside the reference.

    Args:
        stage: with the fusion as its only candidate.
        layer: the stand-in.
        inputs: accepted by the declaration.

    Attributes:
        given: copies of the tensors among the inputs, made before anything ran.
    """

    def __init__(self, stage: BoundStage, layer: Any, inputs: Mapping[str, Any]) -> None:
        self.stage = stage
        self.contract = stage.contract
        self.layer = layer
        self.inputs = inputs
        first = inputs[self.contract.inputs[0].name]
        self.activation_dtype: torch.dtype = first.dtype
        self.given = {
            name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)
        }
        self.reference = import_object(self.contract.reference)

    def run(self, inputs: Mapping[str, Any]) -> Tensors:
        """Outputs of the fusion, through the call path of a layer."""
        with poisoned_memory():
            return named_outputs(self.contract, self.stage.run(self.layer, dict(inputs)))

    def run_reference(self, inputs: Mapping[str, Any], dtype: torch.dtype | None) -> Tensors:
        """Outputs of the reference; floating inputs are converted to `dtype` when it is given."""
        return named_outputs(self.contract, self.reference(**_converted(inputs, dtype)))

    @functools.cached_property
    def forward(self) -> Tensors:
        """Outputs without gradients; each case makes them once."""
        with torch.no_grad():
            return self.run(self.inputs)

    @functools.cached_property
    def expected(self) -> Tensors:
        """Outputs of the reference in the dtypes of the case."""
        with torch.no_grad():
            return self.run_reference(self.inputs, None)

    def outputs(self) -> list[Measurement]:
        """Every output against the reference."""
        got, dtypes = self.forward, {name: value.dtype for name, value in self.expected.items()}
        with torch.no_grad():
            wanted = self.run_reference(self.inputs, torch.float64)
        return [
            Measurement(
                name,
                relative_error(got[name], wanted[name]),
                tolerance(self.contract, dtypes[name]),
            )
            for name in wanted
        ]

    def gradients(
        self, incoming: Incoming = normal_gradient, requiring: list[str] | None = None
    ) -> list[Measurement]:
        """The gradient of every input, or of those in `requiring`, against the reference.

        Raises:
            ContractBroken: an input has no gradient at all, and the reference's is not zero.
        """
        names = differentiable_inputs(self.inputs) if requiring is None else requiring
        inputs = leaves(self.inputs, names)
        outputs = self.run(inputs)
        given = {name: incoming(name, value.detach()) for name, value in outputs.items()}
        with poisoned_memory():
            got = _gradients(outputs, given, inputs, names)
        exact = leaves(_converted(self.inputs, torch.float64), names)
        wanted = _gradients(self.run_reference(exact, None), given, exact, names)
        measured = []
        for name in names:
            reference, found = wanted[name], got[name]
            if reference is None:
                reference = torch.zeros_like(exact[name])
            if found is None:
                if reference.count_nonzero():
                    raise ContractBroken(f"must be differentiable by {name}, got no gradient")
                continue
            problem = gradient_problem(name, found, inputs[name])
            if problem is not None:
                raise ContractBroken(problem)
            measured.append(
                Measurement(
                    f"gradient of {name}",
                    relative_error(found, reference),
                    tolerance(self.contract, self.activation_dtype, inputs[name].dtype),
                )
            )
        return measured

    def results(self) -> Tensors:
        """Outputs and gradients together, by name."""
        inputs = leaves(self.inputs)
        outputs = self.run(inputs)
        given = {name: normal_gradient(name, value.detach()) for name, value in outputs.items()}
        with poisoned_memory():
            gradients = _gradients(outputs, given, inputs, differentiable_inputs(inputs))
        return {name: value.detach() for name, value in outputs.items()} | {
            f"gradient of {name}": value for name, value in gradients.items() if value is not None
        }


def gradient_problem(name: str, gradient: Tensor, value: Tensor) -> str | None:
    """What is wrong with a gradient besides its numbers."""
    if gradient.shape != value.shape or gradient.dtype != value.dtype:
        return (
            f"the gradient of {name} must have its shape and dtype, {tuple(value.shape)} "
            f"{value.dtype}, got {tuple(gradient.shape)} {gradient.dtype}"
        )
    return None


def bitwise_equal(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same bits; equal NaNs are equal, and 0 is not -0."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(
        first.contiguous().view(-1).view(torch.uint8),
        second.contiguous().view(-1).view(torch.uint8),
    )


def _converted(inputs: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    if dtype is None:
        return dict(inputs)
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def _gradients(
    outputs: Tensors,
    incoming: Mapping[str, Tensor | None],
    inputs: Mapping[str, Any],
    names: list[str],
) -> dict[str, Tensor | None]:
    """Gradients by input name; None for an input that no used output depends on."""
    used = [
        (output, gradient.to(output.dtype))
        for name, output in outputs.items()
        if (gradient := incoming[name]) is not None and output.requires_grad
    ]
    if not used:
        return dict.fromkeys(names)
    found = torch.autograd.grad(
        [output for output, _ in used],
        [inputs[name] for name in names],
        [gradient for _, gradient in used],
        allow_unused=True,
    )
    return dict(zip(names, found, strict=True))
