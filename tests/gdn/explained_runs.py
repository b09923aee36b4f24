# SPDX-License-Identifier: Apache-2.0
"""Tiny runs by training flags: planned, and really made on this machine."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from megatron.training.arguments import parse_args, validate_args

from fusion_registry.machine import INTERPRETER, Machine
from megatron.gdn import fusion_report, get_gdn_block_spec, pretrain
from megatron.gdn.planning.plan import RunPlan
from megatron.gdn.planning.run import plan_run
from megatron.gdn.planning.settings import from_flags
from megatron.gdn.variant import gdn_layer_numbers
from tests.gdn.layer_support import start_one_rank

BATCH, LENGTH = 2, 8

TINY = {
    "--num-layers": "2",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": str(LENGTH),
    "--max-position-embeddings": str(LENGTH),
    "--position-embedding-type": "rope",
    "--experimental-attention-variant": "gdn",
    "--linear-attention-freq": "[1,1]",
    "--linear-conv-kernel-dim": "4",
    "--linear-key-head-dim": "16",
    "--linear-value-head-dim": "16",
    "--linear-num-key-heads": "2",
    "--linear-num-value-heads": "4",
    "--normalization": "RMSNorm",
    "--swiglu": "",
    "--fp16": "",
    "--disable-bias-linear": "",
    "--transformer-impl": "local",
    "--no-persist-layer-norm": "",
    "--no-rope-fusion": "",
    "--no-gradient-accumulation-fusion": "",
    "--no-masked-softmax-fusion": "",
    "--use-cpu-initialization": "",
    "--attention-dropout": "0",
    "--hidden-dropout": "0",
    "--micro-batch-size": str(BATCH),
    "--lr": "1e-3",
    "--train-iters": "1",
    "--mock-data": "",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "63",
}
"""A model of two Gated DeltaNet layers; "" marks a switch."""


def words(changes: dict[str, str | None]) -> list[str]:
    """The command line of the tiny run with some flags changed, or left out where None."""
    flags = {**TINY, **changes}
    return [
        word
        for flag, value in flags.items()
        if value is not None
        for word in (flag, *value.split())
    ]


def planned(line: list[str], machine: Machine = INTERPRETER) -> RunPlan:
    """What `--explain` says of this command line."""
    config, call = from_flags(line, machine)
    return plan_run(config, call, machine)


@dataclass
class StageCall:
    """The inputs of one call of a stage."""

    stage: str
    inputs: dict[str, Any]


@dataclass
class Run:
    """What a run did before it ended or raised.

    Attributes:
        moment: what was going on last: `config`, `layer`, `call` or `done`.
        ran: by layer and stage, the fusion that ran, or None for the unfused code.
        calls: of the first layer.
        error: what it raised.
    """

    moment: str = "config"
    ran: dict[int, dict[str, str | None]] = field(default_factory=dict)
    calls: list[StageCall] = field(default_factory=list)
    error: Exception | None = None


def run(line: list[str]) -> Run:
    """Build the configuration and its Gated DeltaNet layers and run each forward once."""
    found = Run()
    try:
        _run(line, found)
    except Exception as error:
        found.error = error
    return found


def _run(line: list[str], found: Run) -> None:
    start_one_rank()
    with mock.patch.object(sys, "argv", ["pretrain", *line]):
        args = parse_args(extra_args_provider=pretrain.add_args)
    with contextlib.redirect_stdout(io.StringIO()):
        validate_args(args)
    config = pretrain.transformer_config_from_args(args)
    found.moment = "layer"
    block = get_gdn_block_spec(config, pp_rank=0)
    layers = {
        number: build_module(
            block.layer_specs[number - 1].submodules.self_attention,
            config=config,
            layer_number=number,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"]),
        )
        for number in gdn_layer_numbers(config) or ()
    }
    found.moment = "call"
    for number, layer in layers.items():
        layer.to(config.params_dtype)  # as Float16Module does
        if not found.ran:
            _record_calls(layer, found)
        _forward(layer, args)
        found.ran[number] = {
            count.stage: next((name for name, calls in count.fused.items() if calls), None)
            for count in fusion_report(layer).counts
            if count.unfused or sum(count.fused.values())
        }
    found.moment = "done"


def _forward(layer: Any, args: Any) -> None:
    batch, packing = BATCH, None
    if pretrain.packs_documents(args):
        batch = 1
        lengths = torch.arange(0, BATCH * LENGTH + 1, LENGTH, dtype=torch.int32)
        packing = PackedSeqParams("thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    hidden = torch.randn(
        BATCH * LENGTH // batch,
        batch,
        layer.hidden_size,
        dtype=layer.config.params_dtype,
        requires_grad=True,
    )
    layer(hidden, None, packed_seq_params=packing)


def _record_calls(layer: Any, found: Run) -> None:
    inner = layer.run_stage

    def recording(stage: str, **inputs: Any) -> Any:
        found.calls.append(StageCall(stage, inputs))
        return inner(stage, **inputs)

    layer.run_stage = recording
