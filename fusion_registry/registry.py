# SPDX-License-Identifier: Apache-2.0
"""The validated catalogue of stages and fusions, and how declarations get into it.

Three sources, one code path: the built-in files of a catalogue, files that the user names, and
plug-ins (installed packages that announce declaration files under an entry-point group). A file is
validated whole before anything of it is registered, and nothing that it names is imported here.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ValidationError

from fusion_registry.contracts import StageContract
from fusion_registry.errors import ConfigProblem, FusionConfigError
from fusion_registry.import_path import import_object
from fusion_registry.schema import FusionDeclaration, FusionFile, StageSelection
from fusion_registry.schema_problems import (
    PRECONDITION_MODELS,
    schema_problems,
    unknown,
)
from fusion_registry.yaml_source import KeyPath, YamlSource, format_path, read_yaml, short

DEFAULT_CATALOGUE = "megatron.gdn.stages:CATALOGUE"
"""The catalogue that `load_registry` serves when none is given."""

LARGEST_FILE = 1 << 20
"""Bytes; a declaration file has a few kilobytes."""

SourceKind = Literal["built-in", "config file", "plug-in"]


@dataclass(frozen=True)
class Catalogue:
    """What a product brings: its stages and its own declaration files.

    Args:
        stages: contracts, in the order in which a layer runs them.
        builtin_package: package whose `*.yaml` resources are the built-in declarations.
        entry_point_group: group under which plug-ins announce theirs.
        options: names of the boolean config options that a declaration may bind to.
    """

    stages: tuple[StageContract, ...]
    builtin_package: str
    entry_point_group: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Origin:
    """Where a part of a declaration file stands; prints as `file:line`.

    Args:
        kind: of source.
        file, line: line from 1.
        path: key path inside the file.
        source: the file as it was read, which knows the lines of the parts below.
    """

    kind: SourceKind
    file: str
    line: int | None = None
    path: KeyPath = ()
    source: YamlSource | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"

    @property
    def place(self) -> str:
        """File, line and key path: `file:line: select[0]`."""
        path = format_path(self.path)
        return f"{self}: {path}" if path else str(self)

    def at(self, *keys: str | int) -> Origin:
        """The place of a part of what stands here; its line is the nearest one known."""
        path = (*self.path, *keys)
        line = self.line if self.source is None else self.source.line(path)
        return replace(self, path=path, line=line)

    def problem(self, text: str) -> ConfigProblem:
        """A fault of what stands here."""
        return ConfigProblem(text, self.file, self.line, format_path(self.path))


Asker = str | Origin
"""Who asks for a stage or a fusion: an option or a flag by name, or a place in a file."""


def asker_words(asker: Asker) -> str:
    """Who asks, for the middle of a message."""
    return asker.place if isinstance(asker, Origin) else asker


def asker_problem(asker: Asker, text: str) -> ConfigProblem:
    """A fault of what was asked for."""
    return asker.problem(text) if isinstance(asker, Origin) else ConfigProblem(text, asker)


@dataclass(frozen=True)
class RegisteredFusion:
    """A declaration in the registry, with its origin."""

    declaration: FusionDeclaration
    origin: Origin

    @property
    def name(self) -> str:
        return self.declaration.name


@dataclass(frozen=True)
class FileSelection:
    """An entry of a config file's `select` list, with its origin."""

    selection: StageSelection
    origin: Origin


@dataclass(frozen=True)
class BrokenPlugin:
    """A plug-in that could not be registered; fatal only for a run that selects it.

    Args:
        name: of the entry point; origin: its distribution or value.
        error: what went wrong; fusions: names that it would have declared, as far as known.
    """

    name: str
    origin: str
    error: str
    fusions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Registry:
    """Stages and fusions by name. Immutable; several may live in one process."""

    stages: Mapping[str, StageContract]
    fusions: Mapping[str, RegisteredFusion]
    options: tuple[str, ...] = ()
    selections: tuple[FileSelection, ...] = ()
    broken_plugins: tuple[BrokenPlugin, ...] = ()
    parents: Mapping[str, str] = field(default_factory=dict)

    def stage(self, name: str, asker: Asker = "") -> StageContract:
        """The contract called `name`.

        Raises:
            FusionConfigError: no such stage; the message lists those that exist.
        """
        if name not in self.stages:
            raise FusionConfigError(asker_problem(asker, unknown("stage", name, self.stages)))
        return self.stages[name]

    def fusion(self, name: str, asker: Asker = "") -> RegisteredFusion:
        """The registered fusion called `name`.

        Raises:
            FusionConfigError: no such fusion, or only a broken plug-in declares it; the message
                lists what exists and names the broken plug-ins.
        """
        if name in self.fusions:
            return self.fusions[name]
        for plugin in self.broken_plugins:
            if name in plugin.fusions:
                raise FusionConfigError(
                    asker_problem(asker, f"fusion {name!r} is declared by {_failed(plugin)}")
                )
        text = unknown("fusion", name, self.fusions)
        for plugin in self.broken_plugins:
            text += (
                f"\n  plug-in {plugin.name!r} ({plugin.origin}) failed to load and may have "
                f"declared it: {plugin.error}"
            )
        raise FusionConfigError(asker_problem(asker, text))

    def uncontested_fusion(self, name: str, asker: Asker = "") -> RegisteredFusion:
        """The registered fusion called `name`, if nobody else claims that name.

        For a user who says the name: a plug-in that declares it too may be what was meant. An
        option means the one declaration that is bound to it, and `fusion` will do.

        Raises:
            FusionConfigError: as `fusion`, or a broken plug-in declares `name` as well; the message
                names both.
        """
        registered = self.fusion(name, asker)
        for plugin in self.broken_plugins:
            if name in plugin.fusions:
                option = registered.declaration.option
                by_option = "" if option is None else f", or enable the former by {option}"
                raise FusionConfigError(
                    asker_problem(
                        asker,
                        f"fusion {name!r} is declared in {registered.origin.place} and by "
                        f"{_failed(plugin)}; remove the plug-in{by_option}",
                    )
                )
        return registered

    def fusions_of(self, stage: str) -> tuple[RegisteredFusion, ...]:
        """Fusions registered for `stage`, in order of registration."""
        return tuple(item for item in self.fusions.values() if item.declaration.stage == stage)


def _failed(plugin: BrokenPlugin) -> str:
    return f"the plug-in {plugin.name!r} ({plugin.origin}), which failed to load: {plugin.error}"


def default_catalogue() -> Catalogue:
    """The catalogue named by `DEFAULT_CATALOGUE`."""
    catalogue: Catalogue = import_object(DEFAULT_CATALOGUE)
    return catalogue


def load_registry(
    config_files: Sequence[str | Path] = (),
    *,
    catalogue: Catalogue | None = None,
    plugins: bool = True,
) -> Registry:
    """Read every declaration and build the registry.

    Args:
        config_files: files that the user named, in order.
        catalogue: stages and built-in declarations; the GDN catalogue by default.
        plugins: whether installed plug-ins are read.

    Raises:
        FusionConfigError: a file cannot be read, breaks the schema, speaks of unknown stages,
            inputs or options, or declares a name that exists. All faults of a file are listed.
    """
    catalogue = default_catalogue() if catalogue is None else catalogue
    fusions: dict[str, RegisteredFusion] = {}
    for declared, _ in _builtin_files(catalogue):
        _register(fusions, declared)
    broken: list[BrokenPlugin] = []
    if plugins:
        for plugin in importlib.metadata.entry_points(group=catalogue.entry_point_group):
            _register_plugin(plugin, catalogue, fusions, broken)
    selections: list[FileSelection] = []
    read: set[str] = set()
    for path in config_files:
        # A file that is named twice is meant once.
        if (identity := _identity(path)) in read:
            continue
        read.add(identity)
        declared, selected = parse_declarations(
            _read_file(Path(path)), str(path), catalogue, "config file"
        )
        _register(fusions, declared)
        selections.extend(selected)
    return Registry(
        stages=MappingProxyType({stage.name: stage for stage in catalogue.stages}),
        fusions=MappingProxyType(fusions),
        options=catalogue.options,
        selections=tuple(selections),
        broken_plugins=tuple(broken),
        parents=MappingProxyType(
            {child: stage.name for stage in catalogue.stages for child in stage.children}
        ),
    )


def _identity(path: str | Path) -> str:
    """The same for all names of a file. Whether it can be read is seen when it is."""
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):
        return str(path)


Parsed = tuple[tuple[RegisteredFusion, ...], tuple[FileSelection, ...]]


def parse_declarations(text: str, file: str, catalogue: Catalogue, kind: SourceKind) -> Parsed:
    """Validate a declaration file whole.

    Returns:
        Its fusions and its selections, each with file and line.

    Raises:
        FusionConfigError: with every fault of the file.
    """
    source = read_yaml(text, file)
    if source.data is None:
        return (), ()
    if not isinstance(source.data, dict):
        raise FusionConfigError(
            source.problem(
                (), f"a mapping with the keys fusions and select, got {short(source.data)}"
            )
        )
    try:
        parsed = FusionFile.model_validate(source.data)
    except ValidationError as error:
        raise FusionConfigError(*schema_problems(error, source)) from None
    problems = list(_contract_problems(parsed, source, catalogue))
    if kind == "plug-in":
        # What is installed must never change what a flag of the run means.
        problems += [
            source.problem(
                ("fusions", index, "option"),
                f"a plug-in may not bind {item.name!r} to the option {item.option}; leave `option` "
                "out, and users select it by name",
            )
            for index, item in enumerate(parsed.fusions)
            if item.option is not None
        ]
    if problems:
        raise FusionConfigError(*problems)
    whole = Origin(kind, file, source=source)
    return (
        tuple(
            RegisteredFusion(item, whole.at("fusions", index))
            for index, item in enumerate(parsed.fusions)
        ),
        tuple(
            FileSelection(item, whole.at("select", index))
            for index, item in enumerate(parsed.select)
        ),
    )


def _read_file(path: Path) -> str:
    try:
        found = path.stat()
        # A pipe is empty when it is read again, and a run would then select nothing.
        rereads = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
        fits = found.st_size <= LARGEST_FILE
        text = path.read_text(encoding="utf-8") if rereads and fits else ""
    except OSError as error:
        raise FusionConfigError(
            ConfigProblem(f"cannot be read: {error.strerror or error}", str(path))
        ) from error
    except ValueError as error:  # not UTF-8, or a path with a null character
        raise FusionConfigError(
            ConfigProblem(f"cannot be read as UTF-8 text: {error}", str(path))
        ) from error
    if not rereads:
        raise FusionConfigError(
            ConfigProblem(
                "must be a file, since a run reads it more than once, got a pipe or a device; "
                "write it to a file",
                str(path),
            )
        )
    if not fits:
        raise FusionConfigError(
            ConfigProblem(f"larger than {LARGEST_FILE} bytes; split it", str(path))
        )
    return text


@functools.lru_cache(maxsize=8)
def _builtin_files(catalogue: Catalogue) -> tuple[Parsed, ...]:
    # Immutable data of an installed package, so it is read once per process.
    root = importlib.resources.files(catalogue.builtin_package)
    files = sorted(
        (item for item in root.iterdir() if item.name.endswith(".yaml")), key=lambda f: f.name
    )
    return tuple(
        parse_declarations(
            item.read_text(encoding="utf-8"),
            f"{catalogue.builtin_package.replace('.', '/')}/{item.name}",
            catalogue,
            "built-in",
        )
        for item in files
    )


def _register(fusions: dict[str, RegisteredFusion], declared: Sequence[RegisteredFusion]) -> None:
    selected_by = {
        (item.declaration.option, item.declaration.stage): item for item in fusions.values()
    }
    problems = []
    for item in declared:
        option, stage = item.declaration.option, item.declaration.stage
        other = None if option is None else selected_by.setdefault((option, stage), item)
        if item.name in fusions:
            place = item.origin.at("name")
            text = (
                f"fusion {item.name!r} is declared already, in {fusions[item.name].origin.place}; "
                "choose another name"
            )
        elif other is not None and other is not item:
            # Else setting the option would be a contradiction in itself.
            place = item.origin.at("option")
            text = (
                f"option {option} selects fusion {other.name!r} of stage {stage} already, declared "
                f"in {other.origin.place}; leave `option` out and select {item.name!r} by name"
            )
        else:
            continue
        problems.append(place.problem(text))
    if problems:
        raise FusionConfigError(*problems)
    fusions.update((item.name, item) for item in declared)


def _register_plugin(
    plugin: importlib.metadata.EntryPoint,
    catalogue: Catalogue,
    fusions: dict[str, RegisteredFusion],
    broken: list[BrokenPlugin],
) -> None:
    distribution = plugin.value
    names: tuple[str, ...] = ()
    try:
        if plugin.dist is not None:
            # An installation without metadata has no name, or raises when asked for it.
            distribution = plugin.dist.name or distribution
        declared: list[RegisteredFusion] = []
        for file, text in _plugin_files(plugin):
            parsed, selected = parse_declarations(text, file, catalogue, "plug-in")
            if selected:
                raise FusionConfigError(
                    selected[0].origin.problem(
                        "a plug-in registers fusions and may not select them; remove `select`"
                    )
                )
            declared.extend(parsed)
        names = tuple(item.name for item in declared)
        _refuse_names_twice(declared)
        _register(fusions, declared)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in may raise anything while it is imported, exits too
        broken.append(
            BrokenPlugin(plugin.name, distribution, f"{type(error).__name__}: {error}", names)
        )


def _refuse_names_twice(declared: Sequence[RegisteredFusion]) -> None:
    first: dict[str, RegisteredFusion] = {}
    for item in declared:
        other = first.setdefault(item.name, item)
        if other is not item:
            raise FusionConfigError(
                item.origin.at("name").problem(
                    f"fusion {item.name!r} is declared already, in {other.origin.place}; choose "
                    "another name"
                )
            )


def _plugin_files(plugin: importlib.metadata.EntryPoint) -> Iterator[tuple[str, str]]:
    """Files that a plug-in names: the entry point's object is a path, a resource, or a list of
    them; a text without a folder is a resource of the plug-in's own package."""
    named = plugin.load()
    items = [named] if isinstance(named, str | Path) or hasattr(named, "read_text") else named
    for item in items:
        resource = (
            importlib.resources.files(plugin.module.partition(".")[0]) / item
            if isinstance(item, str) and not Path(item).is_absolute()
            else Path(item)
            if isinstance(item, str)
            else item
        )
        yield f"{plugin.value} ({resource})", resource.read_text(encoding="utf-8")


def precondition_kinds() -> Mapping[str, type[BaseModel]]:
    """Every kind of precondition and its model, in order."""
    return MappingProxyType(PRECONDITION_MODELS)


def _contract_problems(
    parsed: FusionFile, source: YamlSource, catalogue: Catalogue
) -> Iterator[ConfigProblem]:
    stages = {stage.name: stage for stage in catalogue.stages}
    first: dict[str, int] = {}
    for index, item in enumerate(parsed.fusions):
        path: KeyPath = ("fusions", index)
        if item.name in first:
            yield source.problem(
                (*path, "name"),
                f"fusion {item.name!r} is declared already, in {source.origin}:"
                f"{source.line(('fusions', first[item.name]))}: fusions[{first[item.name]}]; "
                "choose another name",
            )
        first.setdefault(item.name, index)
        if item.option is not None and item.option not in catalogue.options:
            yield source.problem(
                (*path, "option"), unknown("option", item.option, catalogue.options)
            )
        contract = stages.get(item.stage)
        if contract is None:
            yield source.problem((*path, "stage"), unknown("stage", item.stage, stages))
            continue
        for place, rule in enumerate(item.preconditions):
            for text in rule.problems(contract):
                yield source.problem((*path, "preconditions", place), text)
    for index, choice in enumerate(parsed.select):
        if choice.stage not in stages:
            yield source.problem(("select", index, "stage"), unknown("stage", choice.stage, stages))
