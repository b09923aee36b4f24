# SPDX-License-Identifier: Apache-2.0
"""Hybrid models: layers named by a pattern, in which `G` is a Gated DeltaNet layer.

megatron-core 0.19 specifies its hybrid stack of Transformer Engine's modules only. Here is one of
megatron-core's own modules, for Gated DeltaNet, attention, MLP and mixture-of-experts layers.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, parse_hybrid_pattern
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerConfig as CoreTransformerConfig
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron.gdn.specs import (
    NORM_NAME,
    get_gated_delta_net_module_spec,
    local_backend,
    use_our_layer,
)

LOCAL_LAYERS = {
    Symbols.GDN: "Gated DeltaNet",
    Symbols.ATTENTION: "softmax attention",
    Symbols.MLP: "MLP",
    Symbols.MOE: "mixture of experts",
}
"""Layers that exist without Transformer Engine, by their symbol in a pattern."""


def gdn_layers_of_pattern(pattern: str) -> tuple[int, ...]:
    """Numbers, from 1, of the Gated DeltaNet layers of a hybrid model.

    Args:
        pattern: as `--hybrid-layer-pattern`; `|` ends a pipeline stage, and what follows `/` is
            multi-token prediction, which is not counted.
    """
    symbols = (parse_hybrid_pattern(pattern).main_pattern or "").replace(Symbols.PIPE, "")
    return tuple(n for n, symbol in enumerate(symbols, start=1) if symbol == Symbols.GDN)


def check_pattern(pattern: str, transformer_impl: str, num_experts: int | None = None) -> None:
    """Refuse a pattern that `get_hybrid_stack_spec` cannot serve on this machine.

    Args:
        pattern: as `--hybrid-layer-pattern`.
        transformer_impl: `local` or `transformer_engine`.
        num_experts: of a mixture-of-experts layer.

    Raises:
        ValueError: what is missing, and what to do.
    """
    symbols = set(pattern)
    if Symbols.MAMBA in symbols and importlib.util.find_spec("mamba_ssm") is None:
        raise ValueError(
            "Mamba layers (M) require the package mamba-ssm, which is not installed, and "
            f"transformer_impl 'transformer_engine', got pattern {pattern!r}; install it (pip "
            "install mamba-ssm, on a machine with CUDA) or leave M out of the pattern"
        )
    if Symbols.MOE in symbols and not num_experts:
        raise ValueError(
            f"mixture-of-experts layers (E) require --num-experts, got pattern {pattern!r} and "
            f"{num_experts!r}; set it or leave E out of the pattern"
        )
    if transformer_impl == "transformer_engine":
        if importlib.util.find_spec("transformer_engine") is None:
            raise ValueError(
                "transformer_impl 'transformer_engine' requires Transformer Engine, which is not "
                "installed; install it, or pass --transformer-impl local, with which a pattern "
                f"may have {_local_layers()}"
            )
        return
    if transformer_impl != "local":
        raise ValueError(
            "hybrid stacks exist for transformer_impl 'local' and 'transformer_engine', got "
            f"{transformer_impl!r}; choose one of them"
        )
    foreign = sorted(symbols - set(LOCAL_LAYERS) - {Symbols.PIPE})
    if foreign:
        raise ValueError(
            f"transformer_impl 'local' requires a pattern of {_local_layers()}, got {pattern!r} "
            f"with {', '.join(map(repr, foreign))}, for which megatron-core 0.19 has modules of "
            "Transformer Engine only; leave them out or use --transformer-impl transformer_engine"
        )


def _local_layers() -> str:
    return ", ".join(f"{symbol} ({name})" for symbol, name in LOCAL_LAYERS.items())


def get_hybrid_stack_spec(config: CoreTransformerConfig) -> ModuleSpec:
    """Spec of a hybrid stack with our Gated DeltaNet layer, for megatron-core's `HybridModel`.

    Args:
        config: with `is_hybrid_model=True`. `transformer_impl` chooses the modules around the
            stages: `transformer_engine` for megatron-core's own spec with our layer in it,
            `local` for megatron-core's own modules. The latter has no Mamba layers, no latent
            attention and no multi-token prediction.

    Raises:
        ValueError: another `transformer_impl`.
    """
    if config.transformer_impl == "transformer_engine":
        return use_our_layer(hybrid_stack_spec)
    backend = local_backend(config)
    norm = backend.layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=False)
    layer = _layer_parts(config, None)
    no_mlp: dict[str, Any] = {
        "pre_mlp_layernorm": IdentityOp,
        "mlp": IdentityOp,
        "mlp_bda": IdentityFuncOp,
    }
    submodules = HybridStackSubmodules(
        gdn_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=get_gated_delta_net_module_spec(config, backend),
                self_attn_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map=NORM_NAME,
            ),
        ),
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=replace(layer, **no_mlp)),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=_without_attention(layer)),
    )
    if config.num_moe_experts:
        experts = _without_attention(_layer_parts(config, config.num_moe_experts))
        submodules.moe_layer = ModuleSpec(
            module=MoETransformerLayer,
            submodules=replace(experts, sharded_state_dict_keys_map={}),
        )
    return ModuleSpec(module=LocalHybridStack, submodules=submodules)


def _layer_parts(
    config: CoreTransformerConfig, num_experts: int | None
) -> TransformerLayerSubmodules:
    """megatron-core's local attention and MLP, or mixture of experts."""
    parts: TransformerLayerSubmodules = get_gpt_layer_local_submodules(
        num_experts,
        config.moe_grouped_gemm,
        config.qk_layernorm,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    return parts


def _without_attention(parts: TransformerLayerSubmodules) -> TransformerLayerSubmodules:
    return replace(
        parts,
        input_layernorm=IdentityOp,
        self_attention=IdentityOp,
        self_attn_bda=IdentityFuncOp,
    )


class LocalHybridStack(HybridStack):
    """megatron-core's hybrid stack with a final norm that does not need Transformer Engine.

    Arguments, parameters and checkpoint keys are those of `HybridStack`.
    """

    def __init__(
        self,
        config: CoreTransformerConfig,
        submodules: HybridStackSubmodules,
        *,
        post_layer_norm: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            norm = local_backend(config).layer_norm(
                rms_norm=config.normalization == "RMSNorm", for_qk=False
            )
            self.final_norm = norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
