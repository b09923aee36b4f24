# SPDX-License-Identifier: Apache-2.0
"""The model that training flags describe: GPT, hybrid, or from a user's own spec.

Wherever one of them names megatron-core's Gated DeltaNet layer, ours is built in its place.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
from argparse import Namespace
from typing import Any

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    hybrid_config_from_args,
)
from megatron.training.models.gpt import GPTModelConfig
from megatron.training.models.hybrid import HybridModelConfig
from torch import nn

from megatron.gdn.built_model import check_built_model
from megatron.gdn.config import TransformerConfig
from megatron.gdn.hybrid import check_pattern, gdn_layers_of_pattern, get_hybrid_stack_spec
from megatron.gdn.selection import check_fusions
from megatron.gdn.specs import get_gdn_block_spec, use_our_layer
from megatron.gdn.variant import MEGATRON_CORE_VARIANT, note_hybrid_layers


def transformer_config_from_args(args: Namespace) -> TransformerConfig:
    """Build our configuration from parsed training flags.

    Raises:
        ValueError: flags ask for a model family that this entry point does not build, or for a
            fusion that the configuration refuses.
    """
    pattern = args.hybrid_layer_pattern
    variants = (None, MEGATRON_CORE_VARIANT) if pattern else (MEGATRON_CORE_VARIANT,)
    if args.experimental_attention_variant not in variants and (pattern or args.spec is None):
        raise ValueError(
            "megatron.gdn.pretrain requires --experimental-attention-variant gdn, a "
            "--hybrid-layer-pattern without another variant, or a --spec of yours, got "
            f"{args.experimental_attention_variant!r}"
            f"{f' with the pattern {pattern!r}' if pattern else ''}; pass one of them"
        )
    latent = sorted(set(pattern or "") & {Symbols.MLA, Symbols.DS_ATTENTION})
    if latent:
        raise ValueError(
            "megatron.gdn.pretrain builds hybrid models without latent attention, got the layers "
            f"{', '.join(latent)} in the pattern {pattern!r}; its configuration class would lose "
            "the fusion flags. Leave them out"
        )
    for flag, value in (
        ("--multi-latent-attention", args.multi_latent_attention),
        ("--heterogeneous-layers-config-path", args.heterogeneous_layers_config_path),
    ):
        if value:
            raise ValueError(
                f"megatron.gdn.pretrain builds models without {flag}, got {value!r}; its "
                "configuration class would lose the fusion flags. Drop the flag"
            )
    if args.mtp_num_layers and not pattern and args.experimental_attention_variant is not None:
        raise ValueError(
            "--mtp-num-layers requires a GPT model without an attention variant, since "
            "megatron-core 0.19 specifies no other multi-token prediction, got "
            f"{args.mtp_num_layers} with {args.experimental_attention_variant!r}; drop the flag"
        )
    if args.dataloader_inter_document_masking and args.context_parallel_size > 1:
        # megatron-core calls it where the batch is cut, and then fails with an AttributeError.
        if importlib.util.find_spec("transformer_engine") is None:
            raise ValueError(
                "--dataloader-inter-document-masking with --context-parallel-size "
                f"{args.context_parallel_size} requires Transformer Engine, which cuts documents "
                "over ranks, and it is not installed; install it or drop one of the flags"
            )
    ours = copy.copy(args)
    ours.gdn_fusions = tuple(args.gdn_fusions)
    config: TransformerConfig = core_transformer_config_from_args(ours, TransformerConfig)
    if pattern:
        note_hybrid_layers(config, gdn_layers_of_pattern(pattern))
        check_fusions(config)
    return config


def block_spec(
    model_config: GPTModelConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of a pipeline stage; megatron-core's model builder calls this."""
    return get_gdn_block_spec(model_config.transformer, vp_stage=vp_stage)


def spec_from_args(args: Namespace) -> Any:
    """The user's own spec, with our layer wherever it names megatron-core's; None without one.

    Raises:
        ValueError: `--spec` is not a module and the name of a spec in it, or a hybrid model's is
            no `ModuleSpec`.
    """
    if args.spec is None:
        return None
    if len(args.spec) != 2:
        raise ValueError(
            "--spec requires a module and the name of a spec in it, got "
            f"{' '.join(args.spec)!r}; write --spec package.module name"
        )
    module, name = args.spec
    try:
        spec = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"--spec {module} {name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if args.hybrid_layer_pattern:
        if not isinstance(spec, ModuleSpec):
            raise ValueError(
                "--spec of a hybrid model requires a ModuleSpec, got "
                f"{module}.{name} of type {type(spec).__name__}; name the spec of a HybridStack"
            )
    elif not isinstance(spec, ModuleSpec | TransformerBlockSubmodules):
        if isinstance(spec, type) or not callable(spec):
            raise ValueError(
                "--spec requires a ModuleSpec, TransformerBlockSubmodules or a function of the "
                f"model's configuration, got {module}.{name}, "
                f"{'a class' if isinstance(spec, type) else f'a {type(spec).__name__}'}; name one "
                "of these"
            )
        # Wrapped, so that megatron-core still sees which arguments it takes.
        return functools.wraps(spec)(lambda *args, **kwargs: use_our_layer(spec(*args, **kwargs)))
    return use_our_layer(spec)


def model_config_from_args(args: Namespace) -> GPTModelConfig | HybridModelConfig:
    """The model that the flags describe: GPT or hybrid, of our layers or those of `--spec`.

    Raises:
        ValueError: as `transformer_config_from_args` and `spec_from_args`, or a hybrid model has a
            layer that cannot be built on this machine.
    """
    transformer = transformer_config_from_args(args)
    spec = spec_from_args(args)
    # megatron-core's own import of a spec goes on without it when it fails.
    without_spec = copy.copy(args)
    without_spec.spec = None
    config: GPTModelConfig | HybridModelConfig
    if args.hybrid_layer_pattern:
        if spec is None:
            check_pattern(
                args.hybrid_layer_pattern, transformer.transformer_impl, transformer.num_moe_experts
            )
            spec = get_hybrid_stack_spec(transformer)
        config = hybrid_config_from_args(without_spec, config=transformer)
        config.hybrid_stack_spec = spec
    else:
        config = gpt_config_from_args(without_spec, config=transformer)
        config.transformer_layer_spec = block_spec if spec is None else spec
    config.pre_wrap_hooks.append(_checked)
    return config


def _checked(chunks: list[nn.Module]) -> list[nn.Module]:
    check_built_model(chunks)
    return chunks
