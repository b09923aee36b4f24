# SPDX-License-Identifier: Apache-2.0
"""Do the attributes exist that the preconditions of a fusion read?

A rule names them by dotted path (`config.deterministic_mode`, `layer.out_norm`). The registry
imports no torch and cannot know them; a misspelt one would refuse every call, or hand a predicate
None for ever. Judged is the first name of a path: what lies behind depends on the run.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Collection, Iterator

from fusion_registry.errors import ConfigProblem
from fusion_registry.registry import RegisteredFusion

CONFIG, LAYER = "config", "layer"


def reads_attributes(fusion: RegisteredFusion) -> bool:
    """Whether a precondition of the fusion reads the configuration or the layer."""
    return any(True for _ in _attributes(fusion))


def unknown_attributes(
    fusion: RegisteredFusion,
    config: Collection[str] | None = None,
    layer: Collection[str] | None = None,
) -> list[ConfigProblem]:
    """Every rule that reads an attribute that does not exist, with file, line and key path.

    Args:
        fusion: whose preconditions.
        config: names that a configuration has; None judges no path from `config`.
        layer: names that a layer has; None judges no path from `layer`.
    """
    known = {CONFIG: config, LAYER: layer}
    problems = []
    for index, path, root, name in _attributes(fusion):
        names = known[root]
        if names is None or name in names:
            continue
        close = difflib.get_close_matches(name, names, n=3)
        remedy = f"did you mean {' or '.join(close)}?" if close else "correct or remove the rule"
        owner = "the transformer configuration" if root == CONFIG else "a GatedDeltaNet layer"
        problems.append(
            fusion.origin.at("preconditions", index).problem(
                f"fusion {fusion.name!r} reads {path}, but {owner} has no {name!r}; {remedy}"
            )
        )
    return problems


def _attributes(fusion: RegisteredFusion) -> Iterator[tuple[int, str, str, str]]:
    """Number of the rule, path, whose attribute, and its name."""
    for index, rule in enumerate(fusion.declaration.preconditions):
        for path in rule.subjects() if rule.reads_attributes else ():
            root, *names = path.split(".")
            if root == LAYER and names[:1] == [CONFIG] and names[1:]:
                root, names = CONFIG, names[1:]
            if root in (CONFIG, LAYER) and names:
                yield index, path, root, names[0]


@functools.cache
def config_attributes() -> frozenset[str]:
    """What a transformer configuration has, of any kind that megatron-core builds layers from."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from megatron.gdn.config import TransformerConfig

    kinds = (TransformerConfig, MLATransformerConfig)
    fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    return frozenset(fields.union(*(dir(kind) for kind in kinds)))


@functools.cache
def layer_attributes() -> frozenset[str]:
    """What a layer has, read off one that is built of tensors without memory."""
    import argparse

    from fusion_registry.machine import HOPPER
    from megatron.gdn.arguments import add_gdn_fusion_args
    from megatron.gdn.planning.layers import PlannedLayers
    from megatron.gdn.planning.settings import add_shape_args, from_shapes

    parser = argparse.ArgumentParser()
    add_shape_args(parser)
    add_gdn_fusion_args(parser)
    config, _ = from_shapes(parser.parse_args([]))
    return frozenset(dir(PlannedLayers(config, HOPPER).build(1)))
