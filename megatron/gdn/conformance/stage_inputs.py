# SPDX-License-Identifier: Apache-2.0
"""Small random inputs for every stage, laid out as the layer lays them out.

What the layer cuts out of the input projection `[s, b, C]` (the convolution's input, the gate,
beta logits, alpha) is a strided view here too, in memory that holds NaN elsewhere: a kernel that
reads past its view shows. On the meta device the same functions make the shapes and strides only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusion_registry import StageContract
from megatron.gdn import reference

PADDING = 8
"""Channels of the projection on either side of a view."""
BASE_LENGTH = 19
"""Tokens: more than a chunk of 16, few enough for a march over tokens in Triton's interpreter."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a case, by the symbols of `megatron.gdn.stages`: Hk, Hv/Hk, Dk, Dv, W."""

    batch: int = 2
    length: int = BASE_LENGTH
    key_heads: int = 2
    group: int = 2
    key_dim: int = 16
    value_dim: int = 16
    width: int = 4

    @property
    def value_heads(self) -> int:
        return self.key_heads * self.group

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return self.conv_channels + self.value_heads * (self.value_dim + 2)


@dataclass(frozen=True)
class Setting:
    """One case of one stage, before any tensor is made.

    Args:
        sizes: see `Sizes`.
        dtype: of the activations, as a word.
        dtypes: of single inputs, where it is another; parameters, decay and beta are float32
            unless they stand here.
        packed: several documents in one row, among them one of a single token and an empty one.
        contiguous: inputs of which the layer passes views are contiguous instead.
        options: scalar inputs that differ from the usual, and optional inputs left out.
        attributes: of the stand-in layer and its configuration, by dotted path.
    """

    sizes: Sizes = field(default_factory=Sizes)
    dtype: str = "float32"
    dtypes: Mapping[str, str] = field(default_factory=dict)
    packed: bool = False
    contiguous: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def dtype_of(self, name: str, otherwise: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtypes.get(name, otherwise))
        return found


Shape = tuple[int, ...]
Draw = Callable[["Source"], Tensor]
"""Makes the values of an input; not called where only its shape is wanted."""


class Source:
    """Makes the inputs of one setting on one device, the same ones every time.

    On the meta device nothing is drawn or computed, so that a search may make thousands.
    """

    def __init__(self, setting: Setting, device: str) -> None:
        self.setting = setting
        self.device = device
        self.generator = torch.Generator().manual_seed(20)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) * (high - low) + low

    def contiguous(
        self, name: str, shape: Shape, draw: Draw, otherwise: str | None = None
    ) -> Tensor:
        """A contiguous input, in the dtype of the setting or in `otherwise`."""
        dtype = self.setting.dtype_of(name, otherwise or self.setting.dtype)
        if self.device == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        return draw(self).to(self.device, dtype).contiguous()

    def parameter(self, name: str, shape: Shape, draw: Draw) -> Tensor:
        """A contiguous parameter: float32 unless the setting says otherwise."""
        return self.contiguous(name, shape, draw, "float32")

    def view(self, name: str, shape: Shape, draw: Draw) -> Tensor:
        """Values `[b, s, ...]` as the view of an input projection `[s, b, C]`."""
        if self.setting.contiguous:
            return self.contiguous(name, shape, draw)
        dtype = self.setting.dtype_of(name, self.setting.dtype)
        batch, length, *inner = shape
        channels = math.prod(inner)
        wide = torch.empty((length, batch, channels + 2 * PADDING), dtype=dtype, device=self.device)
        narrow = wide.transpose(0, 1)[..., PADDING : PADDING + channels].unflatten(-1, inner)
        if self.device != "meta":
            wide.fill_(float("nan"))
            narrow.copy_(draw(self))
        return narrow

    def cu_seqlens(self) -> Tensor | None:
        if not self.setting.packed:
            return None
        return torch.tensor(
            document_ends(self.setting.sizes.length),
            dtype=self.setting.dtype_of("cu_seqlens", "int32"),
            device=self.device,
        )

    def option(self, name: str, otherwise: Any) -> Any:
        return self.setting.options.get(name, otherwise)


def document_ends(length: int) -> list[int]:
    """Cumulative lengths of documents: shorter than a convolution, of one token, empty, a rest."""
    return [0, *(min(end, length) for end in (3, 4, 4)), length]


def _convolution(source: Source) -> dict[str, Tensor | None]:
    sizes = source.setting.sizes
    weight, bias = (sizes.conv_channels, 1, sizes.width), (sizes.conv_channels,)
    return {
        "conv_weight": source.parameter(
            "conv_weight", weight, lambda s: s.normal(*weight) * sizes.width**-0.5
        ),
        "conv_bias": (
            source.parameter("conv_bias", bias, lambda s: s.normal(*bias))
            if source.option("conv_bias", True)
            else None
        ),
    }


def _decay(source: Source) -> dict[str, Tensor]:
    heads = (source.setting.sizes.value_heads,)
    # The range in which megatron-core draws the decay of a new layer.
    return {
        "A_log": source.parameter("A_log", heads, lambda s: s.uniform(1.0, 16.0, *heads).log()),
        "dt_bias": source.parameter("dt_bias", heads, lambda s: s.uniform(-1.0, 1.0, *heads)),
    }


def _heads(source: Source) -> dict[str, Any]:
    sizes = source.setting.sizes
    return {
        "num_key_heads": sizes.key_heads,
        "num_value_heads": sizes.value_heads,
        "key_head_dim": sizes.key_dim,
        "value_head_dim": sizes.value_dim,
        "use_qk_l2norm": source.option("use_qk_l2norm", True),
    }


def _pre_gated_delta_rule(source: Source) -> dict[str, Any]:
    sizes = source.setting.sizes
    shape = (sizes.length, sizes.batch, sizes.channels)
    return {
        "qkvzba": source.contiguous("qkvzba", shape, lambda s: s.normal(*shape)),
        **_convolution(source),
        **_decay(source),
        **_heads(source),
        "cu_seqlens": source.cu_seqlens(),
    }


def _causal_conv1d(source: Source) -> dict[str, Any]:
    sizes = source.setting.sizes
    shape = (sizes.batch, sizes.length, sizes.conv_channels)
    return {
        "qkv": source.view("qkv", shape, lambda s: s.normal(*shape)),
        **_convolution(source),
        "cu_seqlens": source.cu_seqlens(),
    }


def _prepare_qkv(source: Source) -> dict[str, Any]:
    sizes = source.setting.sizes
    # The convolution may keep the strides of its own input, which is a view.
    shape = (sizes.batch, sizes.length, sizes.conv_channels)
    return {"qkv": source.view("qkv", shape, lambda s: s.normal(*shape)), **_heads(source)}


def _decay_and_beta(source: Source) -> dict[str, Any]:
    sizes = source.setting.sizes
    shape = (sizes.batch, sizes.length, sizes.value_heads)
    # Wide enough for both tails of the sigmoid and of softplus.
    return {
        "beta_logits": source.view("beta_logits", shape, lambda s: 3 * s.normal(*shape)),
        "alpha": source.view("alpha", shape, lambda s: 3 * s.normal(*shape)),
        **_decay(source),
    }


def _gated_delta_rule(source: Source) -> dict[str, Any]:
    sizes = source.setting.sizes
    rows = (sizes.batch, sizes.length, sizes.value_heads)
    keys, values = (*rows, sizes.key_dim), (*rows, sizes.value_dim)
    decay = source.contiguous("g", rows, lambda s: -s.uniform(0.0, 1.5, *rows), "float32")
    return {
        "q": source.contiguous("q", keys, lambda s: reference.l2_normalize(s.normal(*keys))),
        "k": source.contiguous("k", keys, lambda s: reference.l2_normalize(s.normal(*keys))),
        "v": source.contiguous("v", values, lambda s: s.normal(*values)),
        "g": decay,
        "beta": source.contiguous("beta", rows, lambda s: s.normal(*rows).sigmoid(), "float32"),
        "cu_seqlens": source.cu_seqlens(),
    }


def _gated_output_norm(source: Source) -> dict[str, Any]:
    sizes = source.setting.sizes
    rows, dim = (sizes.batch, sizes.length, sizes.value_heads), sizes.value_dim
    shape = (*rows, dim)
    zero_centered = source.option("zero_centered_gamma", False)
    center = 0 if zero_centered else 1
    return {
        "x": source.contiguous(
            "x", shape, lambda s: s.normal(*shape) * s.uniform(0.2, 3.0, *rows, 1)
        ),
        "gate": source.view("gate", shape, lambda s: 3 * s.normal(*shape)),
        "weight": source.parameter("weight", (dim,), lambda s: s.normal(dim) * 0.5 + center),
        "eps": source.option("eps", 1e-6),
        "zero_centered_gamma": zero_centered,
    }


BUILDERS: Mapping[str, Callable[[Source], dict[str, Any]]] = {
    "pre_gated_delta_rule": _pre_gated_delta_rule,
    "causal_conv1d": _causal_conv1d,
    "prepare_qkv": _prepare_qkv,
    "decay_and_beta": _decay_and_beta,
    "gated_delta_rule": _gated_delta_rule,
    "gated_output_norm": _gated_output_norm,
}
"""By stage name. A stage without one cannot be checked."""


def make_inputs(contract: StageContract, setting: Setting, device: str) -> dict[str, Any]:
    """Inputs of a stage, in the order of its contract.

    Args:
        contract: of one of the stages in `BUILDERS`.
        setting: the case.
        device: where to make them; `meta` makes shapes and strides only.
    """
    made = BUILDERS[contract.name](Source(setting, device))
    return {item.name: made[item.name] for item in contract.inputs}
