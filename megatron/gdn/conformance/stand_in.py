# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a layer and its configuration, whose attributes a check can set one by one.

Rules read attributes by dotted path and nothing else of a layer, so an object with the attributes
of a Gated DeltaNet layer is enough. It starts with the defaults of `TransformerConfig`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from megatron.gdn.config import TransformerConfig
from megatron.gdn.conformance.stage_inputs import Sizes
from megatron.gdn.variant import MEGATRON_CORE_VARIANT


class Overlay:
    """Some attributes of its own, all others of the object below."""

    def __init__(self, below: Any) -> None:
        self._below = below

    def __getattr__(self, name: str) -> Any:
        if name == "_below":
            raise AttributeError(name)
        return getattr(self._below, name)


@functools.cache
def _config_defaults() -> Mapping[str, Any]:
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(TransformerConfig):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
        else:
            defaults[field.name] = None
    return defaults


_norm = functools.cache(torch.nn.RMSNorm)


def stand_in_layer(sizes: Sizes, use_qk_l2norm: bool = True) -> SimpleNamespace:
    """A layer in its usual state: the gdn variant, SiLU, RMSNorm, not deterministic mode."""
    config = dict(_config_defaults())
    config |= {
        "experimental_attention_variant": MEGATRON_CORE_VARIANT,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "deterministic_mode": False,
        "linear_conv_kernel_dim": sizes.width,
        "linear_key_head_dim": sizes.key_dim,
        "linear_value_head_dim": sizes.value_dim,
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
    }
    return SimpleNamespace(
        config=SimpleNamespace(**config),
        activation="silu",
        act_fn=F.silu,
        use_qk_l2norm=use_qk_l2norm,
        out_norm=_norm(sizes.value_dim),
        layer_number=1,
        num_key_heads=sizes.key_heads,
        num_value_heads=sizes.value_heads,
        key_head_dim=sizes.key_dim,
        value_head_dim=sizes.value_dim,
        conv_kernel_dim=sizes.width,
        tp_size=1,
        cp_size=1,
        sp_size=1,
        training=True,
    )


def with_attribute(layer: Any, path: str, value: Any) -> Any:
    """A copy of the layer with another value at a dotted path; the layer itself is not changed."""
    return _with(layer, path.removeprefix("layer.").split("."), value)


def with_attributes(layer: Any, values: Mapping[str, Any]) -> Any:
    """As `with_attribute`, for several paths."""
    for path, value in values.items():
        layer = with_attribute(layer, path, value)
    return layer


def read_attribute(layer: Any, path: str) -> Any:
    """The value at a dotted path, None where there is none."""
    for name in path.removeprefix("layer.").split("."):
        layer = getattr(layer, name, None)
    return layer


def instance_of(name: str) -> Any:
    """An object of a new class with a simple or dotted name."""
    module, _, simple = name.rpartition(".")
    return type(simple, (), {"__module__": module or __name__})()


def _with(owner: Any, names: list[str], value: Any) -> Any:
    name, *rest = names
    if isinstance(owner, SimpleNamespace):
        changed = copy.copy(owner)
    else:
        # An overlay passes for its original by the name of its class.
        kind = type(owner)
        changed = type(kind.__name__, (Overlay,), {"__module__": kind.__module__})(owner)
    changed.__dict__[name] = (
        _with(getattr(owner, name, SimpleNamespace()), rest, value) if rest else value
    )
    return changed
