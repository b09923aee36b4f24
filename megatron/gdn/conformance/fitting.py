# SPDX-License-Identifier: Apache-2.0
"""Finds a case that a declaration accepts, by asking the declaration itself.

Rules are judged as a binding judges them. The search starts from the usual case and changes what
lowers the number of rules that refuse: sizes, dtypes of single inputs, contiguity, attributes of
the layer. It works on the meta device, so rules about devices and packages are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fusion_registry import StageContract
from fusion_registry.preconditions import (
    DeviceCapability,
    DeviceType,
    DimRelation,
    DtypeIn,
    DtypeLike,
    ModuleType,
    PackageVersion,
    Precondition,
    Predicate,
    SameDevice,
    ValueEquals,
    ValueIn,
)
from megatron.gdn.conformance.stage_inputs import Setting, Sizes, make_inputs
from megatron.gdn.conformance.stand_in import instance_of, stand_in_layer, with_attributes

MACHINE_RULES = (DeviceType, SameDevice, DeviceCapability, PackageVersion)
USUAL_SIZES = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
LARGEST_SIZE = 4096
MOST_ELEMENTS = 1 << 24
"""Of the input projection; a case beyond takes minutes rather than seconds on a CPU."""
MOST_TRIES = 3000
"""Settings that are judged before the search gives up."""
SIZES_OF: Mapping[str, tuple[str, ...]] = {
    "batch": ("batch",),
    "sequence_length": ("length",),
    "num_key_heads": ("key_heads", "group"),
    "num_value_heads": ("key_heads", "group"),
    "value_heads": ("key_heads", "group"),
    "local_heads": ("key_heads", "group"),
    "key_head_dim": ("key_dim",),
    "value_head_dim": ("value_dim",),
    "head_dim": ("value_dim",),
    "conv_width": ("width",),
    "conv_channels": ("key_heads", "group", "key_dim", "value_dim"),
    "channels": ("key_heads", "group", "key_dim", "value_dim"),
}
"""Which sizes decide a dimension or a scalar input of that name."""
ATTRIBUTE_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, -1, 0.5, 1 << 20, "", "an unheard-of value", "silu", "gdn",
    "RMSNorm", (), ("an unheard-of value",),
)  # fmt: skip
"""What is tried for an attribute that a predicate reads."""


class NoCase(ValueError):
    """No case was found that the declaration accepts; the text says which rules refused."""


@dataclass(frozen=True)
class JudgedRule:
    """A precondition with its judge, compiled once."""

    rule: Precondition
    judge: Any

    def judged(self, inputs: Any, layer: Any) -> tuple[str | None, bool]:
        """What refuses, None when the rule holds; and whether that is a crash of a predicate."""
        try:
            return self.judge(inputs, layer), False
        except (Exception, SystemExit) as error:  # a predicate may raise anything
            return f"{type(error).__name__}: {error}", True


def judged_rules(rules: Iterable[Precondition], contract: StageContract) -> tuple[JudgedRule, ...]:
    """The rules with their judges.

    Raises:
        ImportError, AttributeError, or whatever the module of a predicate raises.
    """
    return tuple(JudgedRule(rule, rule.compile(contract)) for rule in rules)


def layer_for(setting: Setting) -> Any:
    """The stand-in layer of a setting."""
    layer = stand_in_layer(setting.sizes, setting.options.get("use_qk_l2norm", True))
    return with_attributes(layer, setting.attributes)


class Fitter:
    """Fits settings to the declaration of one fusion.

    Args:
        contract: the stage.
        rules: every precondition of the fusion.
    """

    def __init__(self, contract: StageContract, rules: tuple[Precondition, ...]) -> None:
        self.contract = contract
        self.searches_pairs = True
        self.crashing: set[str] = set()
        """Codes of rules that crash on meta tensors and on real ones."""
        self.rules = judged_rules(
            (rule for rule in rules if not isinstance(rule, MACHINE_RULES)), contract
        )
        constants = {
            rule.of
            for rule in rules
            if isinstance(rule, DimRelation) and isinstance(rule.of, int) and rule.of > 0
        }
        sizes = {*USUAL_SIZES, *constants, *(2 * size for size in constants)}
        self.sizes = tuple(sorted(size for size in sizes if size <= LARGEST_SIZE))
        self.dtypes = tuple(
            dict.fromkeys(
                word
                for rule in rules
                for word in (
                    rule.dtypes
                    if isinstance(rule, DtypeIn)
                    else rule.or_in
                    if isinstance(rule, DtypeLike)
                    else ()
                )
            )
        )

    def refusing(self, setting: Setting) -> list[tuple[Precondition, str]]:
        """The rules that refuse a setting, and what each found."""
        inputs, layer = make_inputs(self.contract, setting, "meta"), layer_for(setting)
        refusals = []
        for item in self.rules:
            found, crashed = item.judged(inputs, layer)
            # A predicate that wrongly reads contents, which another check will tell, or one that
            # crashes on such a call. Real tensors are slow to make, and of no use to one that
            # crashed on them as well.
            if crashed and item.rule.code not in self.crashing:
                real = make_inputs(self.contract, setting, "cpu")
                found, crashed = item.judged(real, layer)
                if crashed:
                    self.crashing.add(item.rule.code)
            if found is not None:
                refusals.append((item.rule, found))
        return refusals

    def fit(self, wanted: Setting, keep: Iterable[str] = ()) -> Setting:
        """The accepted setting nearest to the wanted one.

        Args:
            wanted: where to start; its dtype, packing and options are kept.
            keep: names of sizes, and of inputs whose dtype, must not change.

        Raises:
            NoCase: none was found.
        """
        kept = {*keep, *(("batch",) if wanted.packed else ())}
        setting, refusals = wanted, self.refusing(wanted)
        while refusals:
            moves = list(self._moves([rule for rule, _ in refusals], setting, kept))
            better = self._best(moves, setting, len(refusals), 1)
            if better is None and self.searches_pairs and not self.crashing:
                better = self._best(moves, setting, len(refusals), 2)
            if better is None:
                raise NoCase(
                    "no case that the declaration accepts was found; still refused: "
                    + "; ".join(f"{rule.describe()}, got {found}" for rule, found in refusals)
                )
            setting = better
            refusals = self.refusing(setting)
        return setting

    def _best(
        self, moves: list[dict[str, Any]], setting: Setting, most: int, together: int
    ) -> Setting | None:
        """The setting with fewest refusals among those that `together` moves lead to."""
        best, fewest = None, most
        for several in itertools.islice(itertools.combinations(moves, together), MOST_TRIES):
            moved = setting
            for move in several:
                moved = _moved(moved, move)
            sizes = moved.sizes
            if sizes.batch * sizes.length * sizes.channels > MOST_ELEMENTS:
                continue
            count = len(self.refusing(moved))
            if count < fewest:
                best, fewest = moved, count
                if count == 0:
                    break
        return best

    def _moves(
        self, refusing: list[Precondition], setting: Setting, kept: set[str]
    ) -> Iterator[dict[str, Any]]:
        """Single changes that might satisfy one of the refusing rules."""
        sizes: set[str] = set()
        for rule in refusing:
            if isinstance(rule, ValueEquals):
                yield {"attributes": {rule.subject: rule.value}}
            elif isinstance(rule, ValueIn):
                yield {"attributes": {rule.subject: rule.values[0]}}
            elif isinstance(rule, ModuleType):
                yield {"attributes": {rule.subject: instance_of(rule.names[0])}}
            elif isinstance(rule, DtypeIn | DtypeLike) and rule.tensor not in kept:
                words = self.dtypes or (setting.dtype,)
                for word in dict.fromkeys((setting.dtype, *words)):
                    yield {"dtypes": {rule.tensor: word}}
            elif isinstance(rule, DimRelation):
                for subject in rule.subjects():
                    sizes.update(SIZES_OF.get(subject.rpartition(".")[2], ()))
            elif isinstance(rule, Predicate):
                sizes.update(field.name for field in fields(Sizes))
                for path in rule.reads:
                    if "." in path:
                        yield from ({"attributes": {path: value}} for value in ATTRIBUTE_VALUES)
        if not setting.contiguous:
            yield {"contiguous": True}
        for name in sorted(sizes - kept):
            yield from ({"sizes": {name: size}} for size in self.sizes)


def _moved(setting: Setting, move: dict[str, Any]) -> Setting:
    changes: dict[str, Any] = {}
    for name, value in move.items():
        if name == "sizes":
            changes[name] = replace(setting.sizes, **value)
        elif isinstance(value, dict):
            changes[name] = {**getattr(setting, name), **value}
        else:
            changes[name] = value
    return replace(setting, **changes)
