# SPDX-License-Identifier: Apache-2.0
"""The name of the attention variant, and which layers of a model are Gated DeltaNet layers.

Imports no torch: preconditions and tools read it.
"""

from __future__ import annotations

import warnings
from typing import Any

VARIANT = "gdn"
"""What users write."""

MEGATRON_CORE_VARIANT = "gated_delta_net"
"""What megatron-core 0.19 calls it inside; from users it is accepted as a deprecated alias."""


_HYBRID_LAYERS = "_gdn_hybrid_layers"
"""Attribute of a hybrid model's configuration; no field, as it is no setting."""


class TranslatedVariant(str):
    """megatron-core's name as this project stores it. A user's own text is a plain str, so that a
    configuration made from another (`dataclasses.replace`, `asdict`) is not told off for it."""

    __slots__ = ()


def to_megatron_core_variant(
    variant: str | None,
    category: type[Warning] = DeprecationWarning,
    stacklevel: int = 2,
) -> str | None:
    """Translate a user's variant name to megatron-core's; other names pass through.

    Args:
        variant: `gdn`, the deprecated alias `gated_delta_net`, or another variant.
        category, stacklevel: of the warning about the alias.
    """
    if variant not in (VARIANT, MEGATRON_CORE_VARIANT):
        return variant
    if variant == MEGATRON_CORE_VARIANT and not isinstance(variant, TranslatedVariant):
        warnings.warn(
            f"experimental_attention_variant={MEGATRON_CORE_VARIANT!r} is deprecated; "
            f"write {VARIANT!r}",
            category,
            stacklevel=stacklevel,
        )
    return TranslatedVariant(MEGATRON_CORE_VARIANT)


def variant_problems(
    config_experimental_attention_variant: str | None, config_is_hybrid_model: bool | None
) -> list[str]:
    """Predicate of the built-in fusions: does the model have Gated DeltaNet layers at all?

    A hybrid model names its layers in a pattern and sets no variant.
    """
    if config_is_hybrid_model and config_experimental_attention_variant is None:
        return []
    if config_experimental_attention_variant in (VARIANT, MEGATRON_CORE_VARIANT):
        return []
    return [repr(config_experimental_attention_variant)]


def note_hybrid_layers(config: Any, numbers: tuple[int, ...]) -> None:
    """Tell a hybrid model's configuration which of its layers are Gated DeltaNet layers.

    Its pattern is no part of a transformer configuration. Without this the layers count as
    unknown: a selection for layers that do not exist is then not noticed.

    Args:
        config: with `is_hybrid_model=True`.
        numbers: from 1 (`megatron.gdn.hybrid.gdn_layers_of_pattern`).
    """
    setattr(config, _HYBRID_LAYERS, numbers)


def gdn_layer_numbers(config: Any) -> tuple[int, ...] | None:
    """Numbers, from 1, of the Gated DeltaNet layers of a model.

    Args:
        config: a transformer configuration. In a GPT model `linear_attention_freq` N makes every
            Nth layer softmax attention; a list has 1 for each Gated DeltaNet layer. A hybrid
            model's pattern decides, whatever variant and frequency say.

    Returns:
        Layer numbers, or None for a hybrid model whose layers nobody noted (`note_hybrid_layers`).

    Raises:
        ValueError: `linear_attention_freq` is neither, or the list has another length.
    """
    if config.is_hybrid_model:
        noted: tuple[int, ...] | None = getattr(config, _HYBRID_LAYERS, None)
        return noted
    if config.experimental_attention_variant not in (VARIANT, MEGATRON_CORE_VARIANT):
        return ()
    frequency = config.linear_attention_freq
    numbers = range(1, config.num_layers + 1)
    if isinstance(frequency, int) and frequency > 0:
        return tuple(number for number in numbers if number % frequency)
    if isinstance(frequency, list | tuple) and len(frequency) == config.num_layers:
        return tuple(number for number, linear in zip(numbers, frequency, strict=True) if linear)
    raise ValueError(
        f"linear_attention_freq must be a number from 1 or a list of {config.num_layers} ones and "
        f"zeros, one per layer, got {frequency!r}"
    )
