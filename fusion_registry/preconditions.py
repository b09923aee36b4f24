# SPDX-License-Identifier: Apache-2.0
"""Preconditions: the declared rules that a call must meet before a fusion may serve it.

Each kind is a frozen pydantic model. `describe` says the rule in plain words, for tables and for
messages alike. `compile` turns it into a judge, a plain closure `judge(inputs, layer)` that
returns None when the rule holds and what was found instead when it does not. That closure is the
only place where the rule is judged: the error of a refused call, `list_fusions --explain`, the
counters and the tests all read it.

Subjects are inputs of the stage by name (`x`), their dimensions (`x.head_dim`, named by the stage
contract), and attributes by dotted path (`config.deterministic_mode`, `layer.out_norm`). Judges
read metadata only, never the contents of a tensor, so they cause no device synchronisation and
work on meta tensors. An optional tensor that is None meets every rule but `tensor_present`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StringConstraints,
    model_validator,
)

from fusion_registry.contracts import StageContract
from fusion_registry.import_path import ImportPath, import_object
from fusion_registry.machine import Machine, triton_interpreter_is_on
from fusion_registry.version_range import PackageName, VersionRange, version_in_range

Inputs = Mapping[str, Any]
Judge = Callable[[Inputs, Any], str | None]
Phase = Literal["config", "layer", "call"]

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=100)]
AttributePath = Annotated[
    str,
    StringConstraints(pattern=r"^(config|layer)(\.[A-Za-z_][A-Za-z0-9_]*)+$", max_length=200),
]
DimPath = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*$")
]
CapabilityText = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,3}\.[0-9]{1,2}$")]
DtypeName = Literal[
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "bool",
]  # fmt: skip
Scalar = bool | int | float | str | None

_MISSING = object()


def join_words(words: tuple[Any, ...] | list[Any], last: str = "or") -> str:
    """`["a", "b", "c"]` as `a, b or c`."""
    texts = [str(word) for word in words]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {last} {texts[-1]}"


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _dtype_word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _shape_words(tensor: Any) -> str:
    return "[" + ", ".join(str(size) for size in tensor.shape) + "]"


def _attribute_reader(path: str, missing: Any = _MISSING) -> Callable[[Any], Any]:
    get = operator.attrgetter(path.removeprefix("layer."))

    def read(layer: Any) -> Any:
        try:
            return get(layer)
        except AttributeError:
            return missing

    return read


def _value_words(value: Any) -> str:
    return "nothing of that name" if value is _MISSING else repr(value)


class Precondition(BaseModel):
    """One declared rule. Subclasses add a `kind` and their parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str

    def describe(self) -> str:
        """What must hold, in words that read well after "requires"."""
        raise NotImplementedError

    def compile(self, contract: StageContract) -> Judge:
        """The closure that judges a call of the stage `contract`."""
        raise NotImplementedError

    def compile_for(self, contract: StageContract, machine: Machine) -> Judge:
        """The closure of `compile`, to judge calls planned for `machine`.

        What a judge would ask this machine (Triton's interpreter, compute capability, packages),
        it asks `machine` instead. Kinds that ask nothing are the same either way.
        """
        del machine
        return self.compile(contract)

    def subjects(self) -> tuple[str, ...]:
        """Everything that the rule reads: input names, dimension paths, attribute paths."""
        raise NotImplementedError

    @property
    def code(self) -> str:
        """Stable name of the rule for programs."""
        return f"{self.kind}:{','.join(self.subjects())}"

    @property
    def phase(self) -> Phase:
        """Earliest moment at which the rule can be judged."""
        roots = {subject.split(".")[0] for subject in self.subjects()}
        if roots <= {"config"}:
            return "config"
        return "layer" if roots <= {"config", "layer"} else "call"

    def problems(self, contract: StageContract) -> list[str]:
        """What is wrong with the rule itself, judged against the stage that it speaks of."""
        found = []
        for subject in self.subjects():
            root, _, dim = subject.partition(".")
            if dim and root in ("config", "layer") and self.reads_attributes:
                continue
            item = contract.input(root)
            names = ", ".join(known.name for known in contract.inputs)
            if item is None:
                found.append(f"stage {contract.name} has no input {root!r}; it has {names}")
            elif dim and dim not in item.dims:
                found.append(
                    f"input {root!r} of stage {contract.name} has no dimension {dim!r}; "
                    f"it has {', '.join(item.dims) or 'none'}"
                )
            elif not dim and not item.is_tensor and self.reads_tensors:
                found.append(f"input {root!r} of stage {contract.name} is no tensor")
        return found

    reads_tensors: ClassVar[bool] = True
    """Whether the plain names among the subjects must be tensors."""

    reads_attributes: ClassVar[bool] = False
    """Whether dotted paths from `config` or `layer` are among the subjects."""

    def machine_problem(self, machine: Machine) -> str | None:
        """What a machine lacks for this rule, None when it lacks nothing."""
        del machine
        return None


class ValueEquals(Precondition):
    """An attribute has one value."""

    kind: Literal["value_equals"]
    subject: AttributePath

    value: Scalar
    called: str | None = None

    reads_attributes: ClassVar[bool] = True

    def describe(self) -> str:
        return f"{self.called or self.subject}={self.value}"

    def subjects(self) -> tuple[str, ...]:
        return (self.subject,)

    def compile(self, contract: StageContract) -> Judge:
        read, expected = _attribute_reader(self.subject), self.value
        kind = type(expected)

        def judge(inputs: Inputs, layer: Any) -> str | None:
            value = read(layer)
            # The type first: comparing a tensor would read its contents.
            if value is expected or (type(value) is kind and value == expected):
                return None
            return _value_words(value)

        return judge


class ValueIn(Precondition):
    """An attribute has one of several values."""

    kind: Literal["value_in"]
    subject: AttributePath

    values: tuple[Scalar, ...] = Field(min_length=1)
    called: str | None = None

    reads_attributes: ClassVar[bool] = True

    def describe(self) -> str:
        return f"{self.called or self.subject} to be {join_words(self.values)}"

    def subjects(self) -> tuple[str, ...]:
        return (self.subject,)

    def compile(self, contract: StageContract) -> Judge:
        read = _attribute_reader(self.subject)
        # With the type, since Python takes True for 1.
        allowed = frozenset((type(value), value) for value in self.values)

        def judge(inputs: Inputs, layer: Any) -> str | None:
            value = read(layer)
            try:
                if (type(value), value) in allowed:
                    return None
            except TypeError:  # a value that cannot be hashed
                pass
            return _value_words(value)

        return judge


class ModuleType(Precondition):
    """An attribute is an instance of a class, matched by simple or by dotted name.

    Names and not classes, because the class may come from a package that is not installed.
    Subclasses match too, unless they override `forward`: they may compute something else.
    """

    kind: Literal["module_type"]
    subject: AttributePath

    names: tuple[str, ...] = Field(min_length=1)
    called: str | None = None

    reads_attributes: ClassVar[bool] = True

    def describe(self) -> str:
        return f"{self.called or self.subject} to be {join_words(self._classes())}"

    def _classes(self) -> list[str]:
        return list(dict.fromkeys(name.rpartition(".")[2] for name in self.names))

    def subjects(self) -> tuple[str, ...]:
        return (self.subject,)

    def compile(self, contract: StageContract) -> Judge:
        read, names = _attribute_reader(self.subject), frozenset(self.names)
        classes = frozenset(self._classes())
        # The verdict depends on the class alone, so it is remembered by class.
        accepted: set[type] = set()

        def judge(inputs: Inputs, layer: Any) -> str | None:
            value = read(layer)
            kind = type(value)
            if kind in accepted:
                return None
            if value is _MISSING:
                return _value_words(value)
            for base in kind.__mro__:
                if base.__name__ in names or f"{base.__module__}.{base.__qualname__}" in names:
                    if getattr(kind, "forward", None) is not getattr(base, "forward", None):
                        return f"{kind.__qualname__} with a forward of its own"
                    accepted.add(kind)
                    return None
            if kind.__name__ in classes:
                return f"{kind.__module__}.{kind.__qualname__}, another class of that name"
            return kind.__qualname__

        return judge


class TensorPresent(Precondition):
    """An optional input is given."""

    kind: Literal["tensor_present"]
    tensor: Name

    def describe(self) -> str:
        return f"{self.tensor} to be given"

    def subjects(self) -> tuple[str, ...]:
        return (self.tensor,)

    def compile(self, contract: StageContract) -> Judge:
        name = self.tensor
        return lambda inputs, layer: "None" if inputs[name] is None else None


class DeviceType(Precondition):
    """Tensors stand on devices of a type. `interpreter` lets Triton's interpreter stand in."""

    kind: Literal["device_type"]
    tensors: tuple[Name, ...] = Field(min_length=1)
    types: tuple[Literal["cuda", "cpu", "meta"], ...] = Field(min_length=1)
    interpreter: StrictBool = False

    def describe(self) -> str:
        types = join_words([name.upper() for name in self.types])
        stand_in = " (or CPU tensors under Triton's interpreter)" if self.interpreter else ""
        return f"{join_words(self.tensors, 'and')} on {types}{stand_in}"

    def subjects(self) -> tuple[str, ...]:
        return self.tensors

    def compile(self, contract: StageContract) -> Judge:
        return self._judge(None)

    def compile_for(self, contract: StageContract, machine: Machine) -> Judge:
        return self._judge(machine)

    def _judge(self, machine: Machine | None) -> Judge:
        names, types, interpreter = self.tensors, frozenset(self.types), self.interpreter
        # Asking a device for its type costs more than looking the device up.
        accepted: set[Any] = set()

        def judge(inputs: Inputs, layer: Any) -> str | None:
            stand_in: bool | None = None
            for name in names:
                tensor = inputs[name]
                if tensor is None:
                    continue
                device = tensor.device
                if device in accepted:
                    continue
                if device.type in types:
                    accepted.add(device)
                    continue
                if interpreter and device.type == "cpu":
                    # Asked anew on every call, for it can be switched, but once a call.
                    if stand_in is None:
                        stand_in = (
                            triton_interpreter_is_on() if machine is None else machine.interpreter
                        )
                    if stand_in:
                        continue
                return f"{name} on {device}"
            return None

        return judge

    def machine_problem(self, machine: Machine) -> str | None:
        if machine.device_type in self.types:
            return None
        if self.interpreter and machine.device_type == "cpu" and machine.interpreter:
            return None
        hint = "; set TRITON_INTERPRET=1 to run on the CPU" if self.interpreter else ""
        return f"needs {join_words([name.upper() for name in self.types])}{hint}"


class SameDevice(Precondition):
    """All given tensors stand on one device."""

    kind: Literal["same_device"]
    tensors: tuple[Name, ...] = Field(min_length=2)

    def describe(self) -> str:
        return f"{join_words(self.tensors, 'and')} on one device"

    def subjects(self) -> tuple[str, ...]:
        return self.tensors

    def compile(self, contract: StageContract) -> Judge:
        names = self.tensors

        def judge(inputs: Inputs, layer: Any) -> str | None:
            first, device = "", None
            for name in names:
                tensor = inputs[name]
                if tensor is None:
                    continue
                if device is None:
                    first, device = name, tensor.device
                elif tensor.device != device:
                    return f"{first} on {device} and {name} on {tensor.device}"
            return None

        return judge


class DtypeIn(Precondition):
    """A tensor has one of several dtypes."""

    kind: Literal["dtype_in"]
    tensor: Name
    dtypes: tuple[DtypeName, ...] = Field(min_length=1)

    def describe(self) -> str:
        return f"{self.tensor} in {join_words(self.dtypes)}"

    def subjects(self) -> tuple[str, ...]:
        return (self.tensor,)

    def compile(self, contract: StageContract) -> Judge:
        name, allowed = self.tensor, frozenset(_dtype(word) for word in self.dtypes)

        def judge(inputs: Inputs, layer: Any) -> str | None:
            tensor = inputs[name]
            if tensor is None or tensor.dtype in allowed:
                return None
            return _dtype_word(tensor.dtype)

        return judge


class DtypeLike(Precondition):
    """A tensor has the dtype of another, or one of several."""

    kind: Literal["dtype_like"]
    tensor: Name
    like: Name
    or_in: tuple[DtypeName, ...] = ()

    def describe(self) -> str:
        others = f" or {join_words(self.or_in)}" if self.or_in else ""
        return f"{self.tensor} in the dtype of {self.like}{others}"

    def subjects(self) -> tuple[str, ...]:
        return (self.tensor, self.like)

    def compile(self, contract: StageContract) -> Judge:
        name, like = self.tensor, self.like
        allowed = frozenset(_dtype(word) for word in self.or_in)

        def judge(inputs: Inputs, layer: Any) -> str | None:
            tensor, other = inputs[name], inputs[like]
            if tensor is None or other is None:
                return None
            dtype = tensor.dtype
            if dtype == other.dtype or dtype in allowed:
                return None
            return f"{_dtype_word(dtype)} beside {_dtype_word(other.dtype)}"

        return judge


class Rank(Precondition):
    """A tensor has exactly the dimensions that the stage contract names."""

    kind: Literal["rank"]
    tensor: Name
    dims: tuple[Name, ...] = Field(min_length=1)

    def describe(self) -> str:
        return f"{self.tensor} of shape [{', '.join(self.dims)}]"

    def subjects(self) -> tuple[str, ...]:
        return (self.tensor,)

    def problems(self, contract: StageContract) -> list[str]:
        found = super().problems(contract)
        item = contract.input(self.tensor)
        if item is not None and item.dims != self.dims:
            found.append(
                f"stage {contract.name} gives {self.tensor} the dimensions "
                f"[{', '.join(item.dims)}], not [{', '.join(self.dims)}]"
            )
        return found

    def compile(self, contract: StageContract) -> Judge:
        name, rank = self.tensor, len(self.dims)

        def judge(inputs: Inputs, layer: Any) -> str | None:
            tensor = inputs[name]
            if tensor is None or tensor.ndim == rank:
                return None
            return f"{tensor.ndim} dimensions {_shape_words(tensor)}"

        return judge


class SameShape(Precondition):
    """All given tensors have one shape."""

    kind: Literal["same_shape"]
    tensors: tuple[Name, ...] = Field(min_length=2)

    def describe(self) -> str:
        return f"{join_words(self.tensors, 'and')} of one shape"

    def subjects(self) -> tuple[str, ...]:
        return self.tensors

    def compile(self, contract: StageContract) -> Judge:
        names = self.tensors

        def judge(inputs: Inputs, layer: Any) -> str | None:
            first, shape = "", None
            for name in names:
                tensor = inputs[name]
                if tensor is None:
                    continue
                if shape is None:
                    first, shape = name, tensor.shape
                elif tensor.shape != shape:
                    return (
                        f"{first} {_shape_words(inputs[first])} and {name} {_shape_words(tensor)}"
                    )
            return None

        return judge


DimOperand = StrictInt | DimPath | Name


class DimRelation(Precondition):
    """A dimension is a power of two, or stands in a relation to a number, a dimension or a scalar.

    `of` is an integer, a dimension such as `gate.head_dim`, or an integer input such as
    `num_key_heads`. `dim` may be an integer input too.
    """

    kind: Literal["dim_relation"]
    dim: DimPath | Name
    relation: Literal["power_of_two", "multiple_of", "equal_to", "at_least", "at_most"]
    of: DimOperand | None = None
    called: str | None = None

    reads_tensors: ClassVar[bool] = False

    @model_validator(mode="after")
    def _operand_fits(self) -> DimRelation:
        if (self.of is None) != (self.relation == "power_of_two"):
            raise ValueError(
                "`of` is needed for every relation but power_of_two, which takes none; "
                f"got relation {self.relation} with of={self.of}"
            )
        if self.relation == "multiple_of" and isinstance(self.of, int) and self.of < 1:
            raise ValueError(f"`of` must be at least 1 for multiple_of, got {self.of}; correct it")
        return self

    def problems(self, contract: StageContract) -> list[str]:
        found = super().problems(contract)
        for subject in self.subjects():
            item = contract.input(subject)
            if item is not None and item.kind != "int":
                found.append(
                    f"input {subject!r} of stage {contract.name} is no integer"
                    + "".join(f"; or mean {subject}.{dim}?" for dim in item.dims[:1])
                )
        return found

    def _words(self, operand: DimOperand | None) -> str:
        name, _, dim = str(operand).partition(".")
        return f"{dim} of {name}" if dim else name

    def describe(self) -> str:
        dim = self.called or self._words(self.dim)
        if self.relation == "power_of_two":
            return f"a power-of-two {dim}"
        relation = self.relation.replace("_", " ")
        return f"{dim} to be {'a ' if 'multiple' in relation else ''}{relation} " + self._words(
            self.of
        )

    def subjects(self) -> tuple[str, ...]:
        return (self.dim, self.of) if isinstance(self.of, str) else (self.dim,)

    def compile(self, contract: StageContract) -> Judge:
        left = _size_reader(self.dim, contract)
        if self.of is None:

            def judge_alone(inputs: Inputs, layer: Any) -> str | None:
                size = left(inputs)
                if size is None or isinstance(size, str):
                    return size
                return None if size > 0 and size & (size - 1) == 0 else str(size)

            return judge_alone
        right, holds = _size_reader(self.of, contract), _RELATIONS[self.relation]

        def judge(inputs: Inputs, layer: Any) -> str | None:
            size = left(inputs)
            if size is None or isinstance(size, str):
                return size
            other = right(inputs)
            if other is None or isinstance(other, str):
                return other
            return None if holds(size, other) else f"{size} beside {other}"

        return judge


_RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "multiple_of": lambda size, other: other != 0 and size % other == 0,
    "equal_to": operator.eq,
    "at_least": operator.ge,
    "at_most": operator.le,
}


def _size_reader(
    operand: DimOperand, contract: StageContract
) -> Callable[[Inputs], int | str | None]:
    """Reads a size: a constant, a scalar input, or a dimension (None when its tensor is None)."""
    if isinstance(operand, int):
        return lambda inputs: operand
    name, _, dim = operand.partition(".")
    if not dim:
        return lambda inputs: inputs[name]
    item = contract.input(name)
    index = item.dims.index(dim) if item is not None and dim in item.dims else -1

    def read(inputs: Inputs) -> int | str | None:
        tensor = inputs[name]
        if tensor is None:
            return None
        try:
            size: int = tensor.shape[index]
        except IndexError:
            return f"{name} without it: {_shape_words(tensor)}"
        return size

    return read


class Nonempty(Precondition):
    """A tensor has at least one element."""

    kind: Literal["nonempty"]
    tensor: Name

    def describe(self) -> str:
        return f"{self.tensor} to be nonempty"

    def subjects(self) -> tuple[str, ...]:
        return (self.tensor,)

    def compile(self, contract: StageContract) -> Judge:
        name = self.tensor

        def judge(inputs: Inputs, layer: Any) -> str | None:
            tensor = inputs[name]
            if tensor is None or tensor.numel():
                return None
            return f"shape {_shape_words(tensor)}"

        return judge


class Contiguous(Precondition):
    """A tensor is contiguous."""

    kind: Literal["contiguous"]
    tensor: Name

    def describe(self) -> str:
        return f"{self.tensor} to be contiguous"

    def subjects(self) -> tuple[str, ...]:
        return (self.tensor,)

    def compile(self, contract: StageContract) -> Judge:
        name = self.tensor

        def judge(inputs: Inputs, layer: Any) -> str | None:
            tensor = inputs[name]
            if tensor is None or tensor.is_contiguous():
                return None
            return f"shape {_shape_words(tensor)} with strides {list(tensor.stride())}"

        return judge


class LastDimContiguous(Precondition):
    """The elements of a tensor's last dimension are neighbours in memory."""

    kind: Literal["last_dim_contiguous"]
    tensor: Name

    def describe(self) -> str:
        return f"stride 1 in the last dimension of {self.tensor}"

    def subjects(self) -> tuple[str, ...]:
        return (self.tensor,)

    def compile(self, contract: StageContract) -> Judge:
        name = self.tensor

        def judge(inputs: Inputs, layer: Any) -> str | None:
            tensor = inputs[name]
            if tensor is None or tensor.dim() == 0:
                return None
            if tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
                return None
            return f"strides {list(tensor.stride())}"

        return judge


class DeviceCapability(Precondition):
    """The tensor's CUDA device has at least a compute capability. CPU tensors pass."""

    kind: Literal["device_capability"]
    tensor: Name
    at_least: CapabilityText

    def _wanted(self) -> tuple[int, int]:
        major, minor = self.at_least.split(".")
        return int(major), int(minor)

    def describe(self) -> str:
        return f"a device of compute capability {self.at_least} or later for {self.tensor}"

    def subjects(self) -> tuple[str, ...]:
        return (self.tensor,)

    def compile(self, contract: StageContract) -> Judge:
        return self._judge(None)

    def compile_for(self, contract: StageContract, machine: Machine) -> Judge:
        return self._judge(machine)

    def _judge(self, machine: Machine | None) -> Judge:
        name, wanted = self.tensor, self._wanted()
        # A device keeps its capability, so one question per device is enough.
        known: dict[Any, tuple[int, int]] = {}

        def judge(inputs: Inputs, layer: Any) -> str | None:
            tensor = inputs[name]
            if tensor is None or not tensor.is_cuda:
                return None
            device = tensor.device
            if device not in known:
                if machine is None:
                    import torch

                    known[device] = torch.cuda.get_device_capability(device)
                else:
                    known[device] = machine.capability or (0, 0)
            got = known[device]
            return None if got >= wanted else f"{got[0]}.{got[1]} on {device}"

        return judge

    def machine_problem(self, machine: Machine) -> str | None:
        if machine.capability is None or machine.capability >= self._wanted():
            return None
        major, minor = machine.capability
        return (
            f"needs compute capability {self.at_least} or later, {machine.name} has {major}.{minor}"
        )


class PackageVersion(Precondition):
    """A distribution is installed in a version range."""

    kind: Literal["package_version"]
    package: PackageName
    versions: VersionRange

    def describe(self) -> str:
        return f"{self.package} {self.versions}"

    def subjects(self) -> tuple[str, ...]:
        return ()

    @property
    def code(self) -> str:
        return f"{self.kind}:{self.package}"

    def compile(self, contract: StageContract) -> Judge:
        return self.compile_for(contract, Machine("this machine", "cpu"))

    def compile_for(self, contract: StageContract, machine: Machine) -> Judge:
        # What is installed does not change under a running process.
        verdict = version_problem(self.package, self.versions, machine)
        return lambda inputs, layer: verdict

    def machine_problem(self, machine: Machine) -> str | None:
        verdict = version_problem(self.package, self.versions, machine)
        return None if verdict is None else f"needs {self.describe()}, got {verdict}"


def version_problem(package: str, versions: str, machine: Machine) -> str | None:
    """None when `machine` has `package` within `versions`, else what it has."""
    got = machine.version(package)
    if got is None:
        return "nothing: it is not installed"
    return None if version_in_range(got, versions) else got


class Predicate(Precondition):
    """A named callable judges: `reasons(**values) -> list[str]`, empty when the rule holds.

    It receives the values of `reads` by keyword (dots become underscores), must read metadata
    only, and its strings say what was found.
    """

    kind: Literal["predicate"]
    callable: ImportPath
    reads: tuple[AttributePath | Name, ...] = Field(min_length=1)
    says: str = Field(min_length=1)

    reads_tensors: ClassVar[bool] = False
    reads_attributes: ClassVar[bool] = True

    def describe(self) -> str:
        return self.says

    def subjects(self) -> tuple[str, ...]:
        return self.reads

    @property
    def code(self) -> str:
        return f"{self.kind}:{self.callable}"

    def compile(self, contract: StageContract) -> Judge:
        path, function = self.callable, import_object(self.callable)
        if not callable(function):
            raise TypeError(f"{path} is not callable, got {type(function).__name__}")
        inputs_read = tuple(name for name in self.reads if "." not in name)
        attributes = tuple(
            (name.replace(".", "_"), _attribute_reader(name, None))
            for name in self.reads
            if "." in name
        )

        def judge(inputs: Inputs, layer: Any) -> str | None:
            values = {keyword: read(layer) for keyword, read in attributes}
            for name in inputs_read:
                values[name] = inputs[name]
            found = function(**values)
            if not isinstance(found, (list, tuple)):
                raise TypeError(f"{path} must return a list of reasons, got {found!r}")
            return "; ".join(found) if found else None

        return judge


AnyPrecondition = Annotated[
    ValueEquals
    | ValueIn
    | ModuleType
    | TensorPresent
    | DeviceType
    | SameDevice
    | DtypeIn
    | DtypeLike
    | Rank
    | SameShape
    | DimRelation
    | Nonempty
    | Contiguous
    | LastDimContiguous
    | DeviceCapability
    | PackageVersion
    | Predicate,
    Field(discriminator="kind"),
]
"""Every kind of precondition, told apart by `kind`."""
