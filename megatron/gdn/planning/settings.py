# SPDX-License-Identifier: Apache-2.0
"""Makes the configuration of a planned run, of training flags or of shapes.

The fusion fields are set after megatron-core's own checks. Set before, the first fusion that cannot
run would end the construction, and its reasons would be the only ones told.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import io
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
import torch.nn.functional as F

from fusion_registry import Machine
from megatron.gdn.config import TransformerConfig
from megatron.gdn.megatron_core_0_19 import flags_checked_for
from megatron.gdn.planning.layers import NO_FUSIONS, PlannedCall
from megatron.gdn.planning.plan import UnplannableError, error_words
from megatron.gdn.variant import VARIANT

ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
}
NORMALIZATIONS = ("RMSNorm", "LayerNorm")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

LARGEST_SIZE = 1 << 40
"""Of anything that is counted: beyond any run, and within the 64 bits of one size in torch."""

Settings = tuple[TransformerConfig, PlannedCall]


def from_flags(words: Sequence[str], machine: Machine) -> Settings:
    """Read training flags as `megatron.gdn.pretrain` does, without starting anything.

    Args:
        words: the command line after the module's name.
        machine: answers megatron-core's questions about the GPU.

    Raises:
        UnplannableError: megatron-core, or our training entry, refuses the flags.
        SystemExit: megatron-core's parser refuses a flag, and has said so on stderr.
    """
    from megatron.training.arguments import parse_args, validate_args

    from megatron.gdn import pretrain

    with mock.patch.object(sys, "argv", ["megatron.gdn.pretrain", *words]):
        args = parse_args(extra_args_provider=pretrain.add_args)
    for flag, value in (
        ("--use-checkpoint-args", args.use_checkpoint_args),
        ("--yaml-cfg", args.yaml_cfg),
    ):
        if value:
            raise UnplannableError(f"a plan requires flags, got {flag}; write the flags out")
    args.world_size, args.rank = _smallest_world(args), 0
    with (
        _refusals_as("these flags"),
        flags_checked_for(machine.capability),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        validate_args(args)
        unfused = copy.copy(args)
        vars(unfused).update(NO_FUSIONS)
        elsewhere = _fields_that_need_transformer_engine(args)
        vars(unfused).update(dict.fromkeys(elsewhere, False))
        config = pretrain.transformer_config_from_args(unfused)
        for name, value in elsewhere.items():
            setattr(config, name, value)
    batch, length = args.micro_batch_size, args.seq_length
    # The loader puts the samples of a microbatch in one row; how many documents each has, only the
    # data know.
    call = (
        PlannedCall(1, batch * length, batch)
        if pretrain.packs_documents(args)
        else PlannedCall(batch, length)
    )
    return _with_fusions(config, args), call


def from_shapes(args: argparse.Namespace) -> Settings:
    """A model of Gated DeltaNet layers only.

    Args:
        args: what `add_shape_args` and `megatron.gdn.arguments.add_gdn_fusion_args` parse.

    Raises:
        UnplannableError: megatron-core refuses the sizes, or no such call can be made.
    """
    _check_tokens(args)
    dtype = DTYPES[args.dtype]
    with _refusals_as("these sizes"):
        config = TransformerConfig(
            num_layers=args.layers,
            hidden_size=args.heads * args.head_dim,
            num_attention_heads=args.tp,
            experimental_attention_variant=VARIANT,
            linear_attention_freq=[1] * args.layers,
            linear_conv_kernel_dim=args.conv_width,
            linear_key_head_dim=args.key_head_dim,
            linear_value_head_dim=args.head_dim,
            linear_num_key_heads=args.key_heads,
            linear_num_value_heads=args.heads,
            normalization=args.normalization,
            activation_func=ACTIVATIONS[args.activation],
            gated_linear_unit=True,
            add_bias_linear=False,
            deterministic_mode=args.deterministic,
            tensor_model_parallel_size=args.tp,
            context_parallel_size=args.cp,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            transformer_impl="local",
            persist_layer_norm=False,
            bias_activation_fusion=False,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
        )
    return _with_fusions(config, args), PlannedCall(args.batch, args.seq, args.documents)


def add_shape_args(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of a layer and of its call; the defaults are Qwen3-Next's."""
    group = parser.add_argument_group("shapes of a model of Gated DeltaNet layers")
    for flag, default, text in (
        ("--batch", 1, "sequences a microbatch"),
        ("--seq", 4096, "tokens a sequence, on all ranks together"),
        ("--documents", None, "documents packed into the sequence (default: not packed)"),
        ("--layers", 1, "layers"),
        ("--key-heads", 16, "key heads, on all ranks together"),
        ("--heads", 32, "value heads, on all ranks together"),
        ("--key-head-dim", 128, "dimension of a key head"),
        ("--head-dim", 128, "dimension of a value head"),
        ("--conv-width", 4, "width of the causal convolution"),
        ("--tp", 1, "tensor-parallel ranks"),
        ("--cp", 1, "context-parallel ranks"),
    ):
        note = "" if default is None else f" (default: {default})"
        group.add_argument(flag, type=_positive, default=default, metavar="N", help=text + note)
    for flag, choices in (
        ("--dtype", DTYPES),
        ("--activation", ACTIVATIONS),
        ("--normalization", NORMALIZATIONS),
    ):
        first = next(iter(choices))
        group.add_argument(flag, choices=list(choices), default=first, help=f"(default: {first})")
    group.add_argument("--deterministic", action="store_true", help="deterministic mode")


def _check_tokens(args: argparse.Namespace) -> None:
    """Refuse what megatron-core's data loading would not hand to a layer."""
    parts = 2 * args.cp
    if args.cp > 1 and args.seq % parts:
        raise UnplannableError(
            f"context parallelism requires a sequence of a multiple of 2 * cp = {parts} tokens, "
            f"got --seq {args.seq} with --cp {args.cp}; change one of them"
        )
    if args.documents is not None and args.documents > args.seq:
        raise UnplannableError(
            f"packed documents require at least one token each, got --documents {args.documents} "
            f"in --seq {args.seq} tokens; pack fewer"
        )


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    if number > LARGEST_SIZE:
        raise argparse.ArgumentTypeError(f"{text} is larger than {LARGEST_SIZE}; give less")
    return number


def _with_fusions(config: TransformerConfig, args: argparse.Namespace) -> TransformerConfig:
    for name in NO_FUSIONS:
        value = getattr(args, name)
        setattr(config, name, tuple(value) if name == "gdn_fusions" else value)
    return config


def _fields_that_need_transformer_engine(args: argparse.Namespace) -> dict[str, bool]:
    """Fields that megatron-core refuses without Transformer Engine, which is where the run is."""
    if args.transformer_impl != "transformer_engine":
        return {}
    if importlib.util.find_spec("transformer_engine") is not None:
        return {}
    return {"apply_rope_fusion": args.apply_rope_fusion}


@contextlib.contextmanager
def _refusals_as(what: str) -> Iterator[None]:
    """Name megatron-core's refusals, which are asserts and errors of all sorts, by one error."""
    try:
        yield
    except Exception as error:
        raise UnplannableError(f"megatron-core refuses {what}: {error_words(error)}") from error


def _smallest_world(args: argparse.Namespace) -> int:
    """The smallest number of ranks that the parallel sizes allow."""
    pipeline = args.pipeline_model_parallel_size
    tensor = args.tensor_model_parallel_size
    dense = max(tensor, args.tensor_parallel_num_weight_shards or 1) * args.context_parallel_size
    experts = (args.expert_tensor_parallel_size or tensor) * args.expert_model_parallel_size
    return math.lcm(dense * pipeline, experts * pipeline)
