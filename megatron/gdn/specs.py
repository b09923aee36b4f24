# SPDX-License-Identifier: Apache-2.0
"""Module specs that put our Gated DeltaNet layer into megatron-core's models."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_gated_delta_net_module_spec as get_core_module_spec,
)
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as CoreGatedDeltaNet
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer import TransformerConfig as CoreTransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron.gdn.layer import GatedDeltaNet
from megatron.gdn.variant import gdn_layer_numbers

_LOCATIONS = tuple(
    (module, CoreGatedDeltaNet.__name__)
    for module in ("megatron.core.ssm.gated_delta_net", CoreGatedDeltaNet.__module__)
)
"""How a spec may name megatron-core's layer without importing it."""


NORM_NAME = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
"""The name in checkpoints of a norm beside our layer: that of Transformer Engine's fused norm and
projection, so that either implementation loads what the other saved."""


def get_gated_delta_net_module_spec(
    config: CoreTransformerConfig, backend: Any | None = None
) -> ModuleSpec:
    """Spec of one Gated DeltaNet layer.

    Args:
        config: `transformer_impl` chooses the modules around the stages: `local` for
            megatron-core's own, `transformer_engine` for Transformer Engine's.
        backend: a megatron-core `BackendSpecProvider` to use instead.

    Raises:
        ValueError: another `transformer_impl`.
    """
    if backend is None:
        if config.transformer_impl == "transformer_engine":
            return replace(get_core_module_spec(config), module=GatedDeltaNet)
        backend = local_backend(config)
    fused_norm_linear = backend.column_parallel_layer_norm_linear()
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=fused_norm_linear or backend.column_parallel_linear(),
            out_norm=backend.layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=False),
            out_proj=backend.row_parallel_linear(),
        ),
        metainfo={"fuse_input_layernorm": fused_norm_linear is not None},
    )


def get_gdn_block_spec(
    config: CoreTransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Block spec of a GPT model that mixes Gated DeltaNet and softmax attention layers.

    Args:
        config: with `experimental_attention_variant="gdn"`; `linear_attention_freq` says which
            layers are Gated DeltaNet layers. Or megatron-core's `GPTModelConfig` around it, which
            `--spec megatron.gdn get_gdn_block_spec` gets.
        vp_stage, pp_rank: pipeline stage to build, as in megatron-core.

    Returns:
        Specs of the layers that this pipeline stage builds, and of the final norm.

    Raises:
        ValueError: the variant is not gdn, or `transformer_impl` is neither `local` nor
            `transformer_engine`.
    """
    # A GPTModelConfig hands what is set on it on to this one, also what is set on its copy.
    config = getattr(config, "transformer", config)
    numbers = gdn_layer_numbers(config)
    if not numbers:
        raise ValueError(
            "a GDN block spec requires experimental_attention_variant='gdn' and at least one "
            f"linear layer, got {config.experimental_attention_variant!r} with "
            f"linear_attention_freq={config.linear_attention_freq!r}"
        )
    if config.transformer_impl == "transformer_engine":
        block = get_transformer_block_with_experimental_attention_variant_spec(
            config, vp_stage=vp_stage, pp_rank=pp_rank
        )
        return use_our_layer(block)
    backend = local_backend(config)
    attention = get_gated_delta_net_module_spec(config, backend)
    # megatron-core's function refuses a variant: it knows none for local modules. We put ours in.
    softmax_only = copy.copy(config)
    softmax_only.experimental_attention_variant = None
    layers = get_gpt_decoder_layer_specs(
        softmax_only,
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    for number in numbers:
        layers[number - 1] = _with_attention(layers[number - 1], attention)
    return TransformerBlockSubmodules(
        layer_specs=[layers[index] for index in _local_layers(config, vp_stage, pp_rank)],
        layer_norm=backend.layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=False),
    )


def use_our_layer[Spec](spec: Spec) -> Spec:
    """Put our Gated DeltaNet layer in place of megatron-core's, wherever it is in a spec.

    Nothing but the class is replaced: submodules, parameters and metainfo stay. A user's own
    subclass of megatron-core's layer is left as it is.

    Args:
        spec: of a layer, a block or a hybrid stack; any nesting of `ModuleSpec`, dataclasses of
            submodules, lists, tuples and dictionaries, and classes given bare, by location
            (`(module, name)`) or in a `functools.partial`.

    Returns:
        A copy that shares all parts without a Gated DeltaNet layer with `spec`; `spec` itself if
        it has none, as a pipeline stage or a layer of softmax attention may have.
    """
    swapped: Spec = _swapped(spec)
    return swapped


def _swapped(part: Any) -> Any:
    if part is CoreGatedDeltaNet or (isinstance(part, tuple) and part in _LOCATIONS):
        return GatedDeltaNet
    if isinstance(part, functools.partial):
        inside = [_swapped(part.func), _swapped(part.args), _swapped(part.keywords)]
        if _same(inside, [part.func, part.args, part.keywords]):
            return part
        return functools.partial(inside[0], *inside[1], **inside[2])
    if isinstance(part, dict):
        values = [_swapped(value) for value in part.values()]
        same = _same(values, part.values())
        return part if same else dict(zip(part, values, strict=True))
    if type(part) in (list, tuple):
        items = [_swapped(item) for item in part]
        return part if _same(items, part) else type(part)(items)
    if is_dataclass(part) and not isinstance(part, type):
        changed = {
            field.name: new
            for field in fields(part)
            if (new := _swapped(old := getattr(part, field.name))) is not old
        }
        if not changed:
            return part
        # Not `replace`: it would leave out what a subclass's `__init__` does not take.
        swapped = copy.copy(part)
        for name, value in changed.items():
            object.__setattr__(swapped, name, value)
        return swapped
    return part


def _same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(one is other for one, other in zip(new, old, strict=True))


def _with_attention(spec: ModuleSpec, attention: ModuleSpec) -> ModuleSpec:
    names = {**spec.submodules.sharded_state_dict_keys_map, **NORM_NAME}
    return replace(
        spec,
        submodules=replace(
            spec.submodules, self_attention=attention, sharded_state_dict_keys_map=names
        ),
    )


def local_backend(config: CoreTransformerConfig) -> LocalSpecProvider:
    """megatron-core's own modules.

    Raises:
        ValueError: `config.transformer_impl` is not `local`.
    """
    if config.transformer_impl != "local":
        raise ValueError(
            "Gated DeltaNet specs exist for transformer_impl 'local' and 'transformer_engine', "
            f"got {config.transformer_impl!r}; choose one of them or pass a backend"
        )
    return LocalSpecProvider()


def _local_layers(
    config: CoreTransformerConfig, vp_stage: int | None, pp_rank: int | None
) -> list[int]:
    """Indices, from 0, of the layers that a pipeline stage builds."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        indices: list[int] = layout.get_layer_id_list(
            layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank
        )
        return indices
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return list(range(offset, offset + count))
