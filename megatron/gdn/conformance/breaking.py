# SPDX-License-Identifier: Apache-2.0
"""Breaks one declared rule of an accepted call and leaves the rest alone, as far as that goes.

There is one breaker per kind of precondition. It proposes broken calls; `megatron.gdn.conformance
.refusals` asks the rules which of them breaks the rule in question and the fewest others. Nothing
proposed here is ever run, so contents do not matter and a tensor may pretend to be on a device
that is not there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion_registry.machine
from fusion_registry import StageContract
from fusion_registry.preconditions import Precondition
from megatron.gdn.conformance.fitting import ATTRIBUTE_VALUES
from megatron.gdn.conformance.stand_in import instance_of, read_attribute, with_attribute

OTHER_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16,
)  # fmt: skip
OLDEST_CAPABILITY = (0, 0)
NEWEST_CAPABILITY = (99, 0)
NEW_SIZES = (0, 1, 2, 3, 5, 7, 97)
"""What a dimension becomes, besides its neighbours and the neighbours of the declared bound."""
MOST_PAIRS = 2000
"""Pairs of changes that are tried on a predicate that no single change breaks."""


@contextlib.contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@dataclass(frozen=True)
class Call:
    """A call that a rule can judge, and in what surroundings.

    Args:
        inputs: of the stage, by name.
        layer: the stand-in.
        surroundings: entered while the rules are compiled and judged.
    """

    inputs: Mapping[str, Any]
    layer: Any
    surroundings: Callable[[], contextlib.AbstractContextManager[None]] = _as_it_is

    def with_input(self, name: str, value: Any) -> Call:
        return Call({**self.inputs, name: value}, self.layer, self.surroundings)

    def with_inputs(self, values: Mapping[str, Any]) -> Call:
        return Call({**self.inputs, **values}, self.layer, self.surroundings)

    def pretending(self, values: Mapping[str, Any]) -> Call:
        """Other inputs, and devices new enough for any rule in case some of them pretend."""
        newest = functools.partial(capability, NEWEST_CAPABILITY)
        return Call({**self.inputs, **values}, self.layer, newest)

    def with_attribute(self, path: str, value: Any) -> Call:
        return Call(self.inputs, with_attribute(self.layer, path, value), self.surroundings)

    def tensors(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Those of the named inputs that are given."""
        return {name: self.inputs[name] for name in names if self.inputs[name] is not None}


Breaker = Callable[[Any, Call, StageContract], Iterator[Call]]


def pretend(tensor: Tensor, device: str, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the same shape, strides and dtype on a device that need not exist."""
    with FakeTensorMode():
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=device
        )


@contextlib.contextmanager
def capability(major_and_minor: tuple[int, int]) -> Iterator[None]:
    """Every CUDA device has this compute capability."""
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=major_and_minor):
        yield


@contextlib.contextmanager
def without_package(name: str) -> Iterator[None]:
    """The distribution is not installed."""
    installed = fusion_registry.machine.installed_version

    def version(package: str) -> str | None:
        return None if package == name else installed(package)

    with mock.patch.object(fusion_registry.machine, "installed_version", version):
        yield


def _reshaped(tensor: Tensor, index: int, size: int) -> Tensor:
    """The tensor with another size in one dimension; contiguous if it was, else like a slice."""
    shape = [*tensor.shape]
    shape[index] = size
    if tensor.is_contiguous():
        return tensor.new_empty(shape)
    order = sorted(range(tensor.ndim), key=lambda dim: (-tensor.stride()[dim], dim))
    wide = tensor.new_empty([shape[dim] for dim in order[:-1]] + [shape[order[-1]] + 16])
    back = [order.index(dim) for dim in range(tensor.ndim)]
    return wide[..., : shape[order[-1]]].permute(back)


def _attribute_values(rule: Any, call: Call, contract: StageContract) -> Iterator[Call]:
    value = read_attribute(call.layer, rule.subject)
    numbers = (value + 1,) if isinstance(value, int | float) else ()
    for other in (*(() if not isinstance(value, bool) else (not value,)), *numbers):
        yield call.with_attribute(rule.subject, other)
    for other in ATTRIBUTE_VALUES:
        yield call.with_attribute(rule.subject, other)


def _module_type(rule: Any, call: Call, contract: StageContract) -> Iterator[Call]:
    for name in ("LayerNorm", "SomeOtherModule"):
        yield call.with_attribute(rule.subject, instance_of(name))


def _tensor_present(rule: Any, call: Call, contract: StageContract) -> Iterator[Call]:
    yield call.with_input(rule.tensor, None)


def _device_type(rule: Any, call: Call, contract: StageContract) -> Iterator[Call]:
    given = call.tensors(rule.tensors)
    for device in ("cpu", "cuda:0", "meta"):
        # All of them, so that a rule about the same device still holds, then each alone.
        moved = {name: pretend(item, device) for name, item in given.items()}
        yield call.pretending(moved)
        for name, item in moved.items():
            yield call.pretending({name: item})


def _same_device(rule: Any, call: Call, contract: StageContract) -> Iterator[Call]:
    given = call.tensors(rule.tensors)
    everything = {name: value for name, value in call.inputs.items() if isinstance(value, Tensor)}
    # A second device can be pretended where there is none at all; beside a real one, torch asks it.
    if torch.cuda.device_count() != 1:
        on_cuda = call.pretending({n: pretend(item, "cuda:0") for n, item in everything.items()})
        for name, item in given.items():
            yield on_cuda.with_input(name, pretend(item, "cuda:1"))
    for name, item in given.items():
        yield call.with_input(name, pretend(item, "meta"))


def _dtype(rule: Any, call: Call, contract: StageContract) -> Iterator[Call]:
    for name, item in call.tensors((rule.tensor,)).items():
        for dtype in OTHER_DTYPES:
            yield call.with_input(name, pretend(item, str(item.device), dtype))


def _rank(rule: Any, call: Call, contract: StageContract) -> Iterator[Call]:
    for name, item in call.tensors((rule.tensor,)).items():
        yield call.with_input(name, item.unsqueeze(0))
        if item.ndim > 1 and item.shape[0]:
            yield call.with_input(name, item[0])
        yield call.with_input(name, item.reshape(-1))


def _sizes_around(*sizes: Any) -> tuple[int, ...]:
    near = [
        size + step
        for size in sizes
        if isinstance(size, int)
        for step in (1, -1, 2, size)
        if size + step >= 0
    ]
    return tuple(dict.fromkeys((*near, *NEW_SIZES)))


def _resized(call: Call, contract: StageContract, subject: str, size: int) -> Iterator[Call]:
    """Another size for a dimension: wherever the contract has it, then in this tensor only."""
    name, _, dim = subject.partition(".")
    if not dim:
        yield call.with_input(name, size)
        return
    everywhere: dict[str, Tensor] = {}
    for item in contract.inputs:
        value = call.inputs.get(item.name)
        if dim in item.dims and isinstance(value, Tensor) and value.ndim == len(item.dims):
            everywhere[item.name] = _reshaped(value, item.dims.index(dim), size)
    yield call.with_inputs(everywhere)
    if name in everywhere:
        yield call.with_input(name, everywhere[name])


def _same_shape(rule: Any, call: Call, contract: StageContract) -> Iterator[Call]:
    for name, item in call.tensors(rule.tensors).items():
        for index, size in enumerate(item.shape):
            yield call.with_input(name, _reshaped(item, index, size + 1))


def _dim_relation(rule: Any, call: Call, contract: StageContract) -> Iterator[Call]:
    sizes: list[Any] = [rule.of]
    for subject in rule.subjects():
        name, _, dim = subject.partition(".")
        value, item = call.inputs[name], contract.input(name)
        if dim and value is not None and item is not None:
            value = value.shape[item.dims.index(dim)]
        sizes.append(value)
    for size in _sizes_around(*sizes):
        for subject in rule.subjects():
            if call.inputs[subject.partition(".")[0]] is not None:
                yield from _resized(call, contract, subject, size)


def _nonempty(rule: Any, call: Call, contract: StageContract) -> Iterator[Call]:
    item = contract.input(rule.tensor)
    for dim in item.dims if item is not None else ():
        yield from _resized(call, contract, f"{rule.tensor}.{dim}", 0)


def _strided(rule: Any, call: Call, contract: StageContract) -> Iterator[Call]:
    for name, item in call.tensors((rule.tensor,)).items():
        wide = item.new_empty([*item.shape[:-1], 2 * item.shape[-1]])
        yield call.with_input(name, wide[..., : item.shape[-1]])
        yield call.with_input(name, wide[..., ::2])
        # A single element is contiguous whatever its strides; two are not.
        longer = item.new_empty([*item.shape[:-1], 4])
        yield call.with_input(name, longer[..., ::2])


def _device_capability(rule: Any, call: Call, contract: StageContract) -> Iterator[Call]:
    everything = {
        name: pretend(value, "cuda:0")
        for name, value in call.inputs.items()
        if isinstance(value, Tensor)
    }
    old = functools.partial(capability, OLDEST_CAPABILITY)
    yield Call({**call.inputs, **everything}, call.layer, old)


def _package_version(rule: Any, call: Call, contract: StageContract) -> Iterator[Call]:
    absent = functools.partial(without_package, rule.package)
    yield Call(call.inputs, call.layer, absent)


def _changes(name: str, call: Call, contract: StageContract) -> Iterator[Callable[[Call], Call]]:
    """Small changes of one thing that a predicate reads."""

    def attribute(value: Any) -> Callable[[Call], Call]:
        return lambda changed: changed.with_attribute(name, value)

    def replaced(value: Any) -> Callable[[Call], Call]:
        return lambda changed: changed.with_input(name, value)

    if "." in name:
        yield from (attribute(value) for value in ATTRIBUTE_VALUES)
        return
    value, item = call.inputs[name], contract.input(name)
    if isinstance(value, bool):
        yield replaced(not value)
        yield replaced(int(value))
    elif isinstance(value, int | float):
        yield from (replaced(type(value)(size)) for size in _sizes_around(value))
        yield replaced(-value)
        yield from (replaced(float(word)) for word in ("nan", "inf") if isinstance(value, float))
    elif isinstance(value, Tensor):
        for index, size in enumerate(value.shape):
            for other in _sizes_around(size):
                yield replaced(_reshaped(value, index, other))
        yield from (
            replaced(pretend(value, str(value.device), dtype))
            for dtype in OTHER_DTYPES
            if dtype != value.dtype
        )
        yield replaced(value.unsqueeze(0))
        yield from (replaced(broken.inputs[name]) for broken in _strided(_Of(name), call, contract))
        if item is not None and item.kind == "optional_tensor":
            yield replaced(None)
    elif value is None and item is not None:
        device = next(v.device for v in call.inputs.values() if isinstance(v, Tensor))
        for dtype in (torch.int32, torch.float32):
            for size in (4, 1):
                made = torch.empty([size] * len(item.dims), dtype=dtype, device="meta")
                yield replaced(pretend(made, str(device)))


@dataclass(frozen=True)
class _Of:
    tensor: str


def _predicate(rule: Any, call: Call, contract: StageContract) -> Iterator[Call]:
    changes = [[*_changes(name, call, contract)] for name in rule.reads]
    for change in itertools.chain(*changes):
        yield change(call)
    pairs = (
        pair
        for first, second in itertools.combinations(changes, 2)
        for pair in itertools.product(first, second)
    )
    for one, other in itertools.islice(pairs, MOST_PAIRS):
        yield other(one(call))


BREAKERS: Mapping[str, Breaker] = {
    "value_equals": _attribute_values,
    "value_in": _attribute_values,
    "module_type": _module_type,
    "tensor_present": _tensor_present,
    "device_type": _device_type,
    "same_device": _same_device,
    "dtype_in": _dtype,
    "dtype_like": _dtype,
    "rank": _rank,
    "same_shape": _same_shape,
    "dim_relation": _dim_relation,
    "nonempty": _nonempty,
    "contiguous": _strided,
    "last_dim_contiguous": _strided,
    "device_capability": _device_capability,
    "package_version": _package_version,
    "predicate": _predicate,
}
"""By kind of precondition."""


def broken_calls(rule: Precondition, call: Call, contract: StageContract) -> Iterator[Call]:
    """Calls that may break a rule, the likeliest first."""
    yield from BREAKERS[rule.kind](rule, call, contract)
