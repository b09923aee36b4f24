# SPDX-License-Identifier: Apache-2.0
"""The stages of a Gated DeltaNet layer, in the order in which its forward runs them.

Sizes are local to the rank: after tensor parallelism and after the head redistribution of context
parallelism. Hk and Hv are the numbers of key and value heads, Dk and Dv their dimensions, W the
width of the convolution, Cc = 2*Hk*Dk + Hv*Dv its channels and C = Cc + Hv*Dv + 2*Hv those of the
input projection, ordered q, k, v, z (gate), beta, alpha.

This module imports no torch: `tools/list_fusions` reads it on machines that have none.
"""

from __future__ import annotations

from fusion_registry.contracts import StageContract, StageInput, StageOutput
from fusion_registry.registry import Catalogue

_HEAD_COUNTS_AND_DIMS = (
    StageInput("num_key_heads", "int"),
    StageInput("num_value_heads", "int"),
    StageInput("key_head_dim", "int"),
    StageInput("value_head_dim", "int"),
    StageInput("use_qk_l2norm", "bool"),
)
_CONVOLUTION_PARAMETERS = (
    StageInput("conv_weight", "tensor", ("conv_channels", "one", "conv_width")),
    StageInput("conv_bias", "optional_tensor", ("conv_channels",)),
)
_DECAY_PARAMETERS = (
    StageInput("A_log", "tensor", ("value_heads",)),
    StageInput("dt_bias", "tensor", ("value_heads",)),
)
_CU_SEQLENS = StageInput("cu_seqlens", "optional_tensor", ("documents_plus_one",))
_QUERY_KEY_VALUE = (
    StageOutput("q", ("batch", "sequence_length", "value_heads", "key_head_dim")),
    StageOutput("k", ("batch", "sequence_length", "value_heads", "key_head_dim")),
    StageOutput("v", ("batch", "sequence_length", "value_heads", "value_head_dim")),
)
_BETA = StageOutput("beta", ("batch", "sequence_length", "value_heads"))
_DECAY = StageOutput("g", ("batch", "sequence_length", "value_heads"), "log decay, float32")

PRE_GATED_DELTA_RULE = StageContract(
    name="pre_gated_delta_rule",
    summary="from the input projection to the inputs of the recurrence",
    inputs=(
        StageInput("qkvzba", "tensor", ("sequence_length", "batch", "channels")),
        *_CONVOLUTION_PARAMETERS,
        *_DECAY_PARAMETERS,
        *_HEAD_COUNTS_AND_DIMS,
        _CU_SEQLENS,
    ),
    outputs=(
        *_QUERY_KEY_VALUE,
        StageOutput(
            "gate",
            ("batch", "sequence_length", "value_heads", "value_head_dim"),
            "a view of qkvzba",
        ),
        _BETA,
        _DECAY,
    ),
    unfused="megatron.gdn.unfused:pre_gated_delta_rule",
    reference="megatron.gdn.reference:pre_gated_delta_rule",
    children=("causal_conv1d", "prepare_qkv", "decay_and_beta"),
)
CAUSAL_CONV1D = StageContract(
    name="causal_conv1d",
    summary="causal depthwise convolution and SiLU over q, k, v",
    inputs=(
        StageInput("qkv", "tensor", ("batch", "sequence_length", "conv_channels")),
        *_CONVOLUTION_PARAMETERS,
        _CU_SEQLENS,
    ),
    outputs=(StageOutput("qkv", ("batch", "sequence_length", "conv_channels")),),
    unfused="megatron.gdn.unfused:causal_conv1d",
    reference="megatron.gdn.reference:causal_conv1d",
)
PREPARE_QKV = StageContract(
    name="prepare_qkv",
    summary="split, Q/K L2 normalisation, head expansion, contiguous layout",
    inputs=(
        StageInput("qkv", "tensor", ("batch", "sequence_length", "conv_channels")),
        *_HEAD_COUNTS_AND_DIMS,
    ),
    outputs=_QUERY_KEY_VALUE,
    unfused="megatron.gdn.unfused:prepare_qkv",
    reference="megatron.gdn.reference:prepare_qkv",
)
DECAY_AND_BETA = StageContract(
    name="decay_and_beta",
    summary="beta = sigmoid, g = -exp(A_log) * softplus(alpha + dt_bias)",
    inputs=(
        StageInput("beta_logits", "tensor", ("batch", "sequence_length", "value_heads")),
        StageInput("alpha", "tensor", ("batch", "sequence_length", "value_heads")),
        *_DECAY_PARAMETERS,
    ),
    outputs=(_BETA, _DECAY),
    unfused="megatron.gdn.unfused:decay_and_beta",
    reference="megatron.gdn.reference:decay_and_beta",
)
GATED_DELTA_RULE = StageContract(
    name="gated_delta_rule",
    summary="the linear-attention recurrence",
    inputs=(
        StageInput("q", "tensor", ("batch", "sequence_length", "value_heads", "key_head_dim")),
        StageInput("k", "tensor", ("batch", "sequence_length", "value_heads", "key_head_dim")),
        StageInput("v", "tensor", ("batch", "sequence_length", "value_heads", "value_head_dim")),
        StageInput("g", "tensor", ("batch", "sequence_length", "value_heads")),
        StageInput("beta", "tensor", ("batch", "sequence_length", "value_heads")),
        _CU_SEQLENS,
    ),
    outputs=(StageOutput("x", ("batch", "sequence_length", "value_heads", "value_head_dim")),),
    unfused="megatron.gdn.unfused:gated_delta_rule",
    reference="megatron.gdn.reference:gated_delta_rule",
)
GATED_OUTPUT_NORM = StageContract(
    name="gated_output_norm",
    summary="RMSNorm of the recurrence output, times SiLU of the gate",
    inputs=(
        StageInput("x", "tensor", ("batch", "sequence_length", "local_heads", "head_dim")),
        StageInput("gate", "tensor", ("batch", "sequence_length", "local_heads", "head_dim")),
        StageInput("weight", "optional_tensor", ("head_dim",)),
        StageInput("eps", "float"),
        StageInput("zero_centered_gamma", "bool"),
    ),
    outputs=(
        StageOutput(
            "out",
            ("batch", "sequence_length", "local_heads", "head_dim"),
            "contiguous, dtype of x",
        ),
    ),
    unfused="megatron.gdn.unfused:gated_output_norm",
    reference="megatron.gdn.reference:gated_output_norm",
)

STAGES: tuple[StageContract, ...] = (
    PRE_GATED_DELTA_RULE,
    CAUSAL_CONV1D,
    PREPARE_QKV,
    DECAY_AND_BETA,
    GATED_DELTA_RULE,
    GATED_OUTPUT_NORM,
)

OPTIONS: tuple[str, ...] = ("gdn_pre_gated_delta_rule_fusion", "gdn_gated_output_norm_fusion")
"""Boolean fields of `megatron.gdn.TransformerConfig` that a declaration may bind to."""

CATALOGUE = Catalogue(
    stages=STAGES,
    builtin_package="megatron.gdn.fusions",
    entry_point_group="megatron.gdn.fusions",
    options=OPTIONS,
)
