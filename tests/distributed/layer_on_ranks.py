# SPDX-License-Identifier: Apache-2.0
"""One Gated DeltaNet layer split over ranks, beside the same layer whole on every rank."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from megatron.gdn import GatedDeltaNet, fusion_report, get_gated_delta_net_module_spec
from megatron.gdn.megatron_core_0_19 import parameters_on_cpu_without_cuda
from megatron.gdn.norm_gradient import sum_norm_gradient
from tests.gdn.layer_support import DEVICE, make_config

PRE = {"gdn_pre_gated_delta_rule_fusion": True}
NORM = {"gdn_gated_output_norm_fusion": True}
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["gdn_norm_out"]}

SIZES = {
    "hidden_size": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
}
"""Two key heads to four tensor- and context-parallel ranks each; Hk != Hv, Dk != Dv."""

DOCUMENTS = (8, 4)
"""Lengths of packed documents: under context parallelism, multiples of twice the CP size."""

PADDED_DOCUMENTS = (5, 1)
"""Their lengths without the padding that makes them `DOCUMENTS`."""


REFERENCE_KERNELS = Path(__file__).with_name("reference_kernels.yaml")


def stand_ins(options: dict[str, Any]) -> dict[str, Any]:
    """Options that put the plain-torch reference where a GPU would run FLA's kernels.

    Without CUDA it stands there anyway. FLA's kernels take minutes to tune for shapes like these,
    multiply in TF32, and are as local to a rank as their stand-ins.
    """
    if DEVICE.type == "cpu":
        return {}
    names = ["reference_gated_delta_rule"]
    if "gdn_pre_gated_delta_rule_fusion" not in options:
        names += ["reference_causal_conv1d", "reference_prepare_qkv"]
    return {"gdn_fusions": tuple(names), "gdn_fusion_config": str(REFERENCE_KERNELS)}


@dataclass(frozen=True)
class Case:
    """What a layer is configured and called with."""

    name: str
    dtype: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    sequence_parallel: bool = False
    padded: bool = False

    def __str__(self) -> str:
        layout = "padded" if self.padded else "packed" if self.packed else "dense"
        precision = str(self.dtype).removeprefix("torch.")
        suffix = "-sequence_parallel" if self.sequence_parallel else ""
        return f"{self.name}-{precision}-{layout}{suffix}"


EVERY_CASE = [
    Case(f"{name}{'_recomputed' if more else ''}", dtype, {**fusions, **more}, packed)
    for name, dtype, fusions in [
        ("unfused", torch.float32, {}),
        ("both", torch.float16, {**PRE, **NORM}),
    ]
    for packed in (False, True)
    for more in ({}, RECOMPUTE)
]
"""Both fusions or none, dense or packed, with recomputation or without."""


class MarkedNorm:
    """torch's RMSNorm for sequence parallelism, where megatron-core's own builder refuses it.

    As Transformer Engine's norm, it marks its weight for megatron-core's reduction.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float) -> nn.RMSNorm:  # type: ignore[misc]
        norm = nn.RMSNorm(hidden_size, eps, dtype=config.params_dtype, device=DEVICE)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


def start_layout(tp: int, cp: int) -> ProcessGroupCollection:
    """Start megatron-core's parallel state; returns groups in which this rank is alone."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, context_parallel_size=cp
    )
    if DEVICE.type == "cuda":
        model_parallel_cuda_manual_seed(1234)
    ranks = range(torch.distributed.get_world_size())
    mine = [torch.distributed.new_group([rank]) for rank in ranks][torch.distributed.get_rank()]
    return ProcessGroupCollection(tp=mine, cp=mine)


def build(case: Case, groups: ProcessGroupCollection, sequence_parallel: bool) -> GatedDeltaNet:
    """The layer of a case on the given groups; weights are filled in afterwards."""
    tp, cp = groups.tp.size(), groups.cp.size()
    config = make_config(
        **SIZES,
        params_dtype=case.dtype,
        **({"fp16": True} if case.dtype == torch.float16 else {}),
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        sequence_parallel=sequence_parallel,
        **case.options,
        **stand_ins(case.options),
    )
    spec = get_gated_delta_net_module_spec(config)
    if case.sequence_parallel:
        spec = replace(spec, submodules=replace(spec.submodules, out_norm=MarkedNorm))
    layer: GatedDeltaNet = build_module(
        spec, config=config, layer_number=1, pg_collection=groups, conv_bias=True
    )
    return layer.to(device=DEVICE, dtype=case.dtype)


def shard(layer: GatedDeltaNet, name: str, whole: Tensor) -> Tensor:
    """This tensor-parallel rank's part of a parameter or gradient, cut as megatron-core does."""
    size, rank = layer.tp_size, layer.tp_group.rank()
    qkv = [layer.qk_dim, layer.qk_dim, layer.v_dim]
    heads = layer.num_value_heads
    if name == "out_norm.weight":
        return whole
    if name == "out_proj.weight":
        return whole.chunk(size, dim=1)[rank]
    sections = {
        "in_proj.weight": [*qkv, layer.v_dim, heads, heads],
        "conv1d.weight": qkv,
        "conv1d.bias": qkv,
    }.get(name, [heads])
    return torch.cat([part.chunk(size)[rank] for part in whole.split(sections)])


def tokens_of_rank(lengths: tuple[int, ...], cp: int, rank: int) -> Tensor:
    """Positions of a context-parallel rank: chunks `rank` and `2*cp-1-rank` of each document."""
    mine, start = [], 0
    for length in lengths:
        chunks = torch.arange(start, start + length).chunk(2 * cp)
        mine += [chunks[rank], chunks[2 * cp - 1 - rank]]
        start += length
    return torch.cat(mine)


def distinct_weights(layer: GatedDeltaNet, seed: int = 3) -> None:
    """Fill a whole layer so that no two heads, channels or norm weights are alike."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
        layer.A_log.copy_(torch.linspace(-2.0, 1.0, len(layer.A_log)))
        layer.dt_bias.copy_(torch.linspace(1.5, -1.0, len(layer.dt_bias)))
        layer.out_norm.weight.copy_(torch.linspace(0.5, 1.5, len(layer.out_norm.weight)))


def finalize_gradients(layer: GatedDeltaNet) -> None:
    """megatron-core's own reduction over tensor-parallel ranks, and over context-parallel ones.

    The latter is part of its data-parallel reduction (the group "dp_cp").
    """
    layer.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    _allreduce_non_tensor_model_parallel_grads([layer], layer.config, layer.tp_group)
    for parameter in layer.parameters():
        torch.distributed.all_reduce(parameter.grad, group=layer.pg_collection.cp)


def pack(exact: tuple[int, ...], padded: tuple[int, ...]) -> PackedSeqParams:
    """Documents of `exact` lengths, each with padding up to its `padded` length."""
    ends, padded_ends = (
        torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int() for lengths in (exact, padded)
    )
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends.clone(),
        cu_seqlens_q_padded=None if exact == padded else padded_ends,
        cu_seqlens_kv_padded=None if exact == padded else padded_ends.clone(),
    )


def compare(case: Case, alone: ProcessGroupCollection) -> dict[str, float]:
    """Errors of the split layer's output and gradients against the whole layer's.

    Returns:
        By tensor, the largest difference relative to the largest value; and as `replicas`, how
        far the gradients of the output norm differ between ranks.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    tp, cp = groups.tp.size(), groups.cp.size()
    whole = build(case, alone, sequence_parallel=False)
    distinct_weights(whole)
    split = build(case, groups, sequence_parallel=case.sequence_parallel)
    with torch.no_grad():
        parameters = dict(split.named_parameters())
        for name, parameter in whole.named_parameters():
            parameters[name].copy_(shard(split, name, parameter))

    lengths = DOCUMENTS if case.packed else (8,)
    batch = 1 if case.packed else 2
    exact = PADDED_DOCUMENTS if case.padded else lengths
    real = torch.cat(
        [torch.arange(length) < kept for length, kept in zip(lengths, exact, strict=True)]
    )
    torch.manual_seed(5)
    shape = (sum(lengths), batch, SIZES["hidden_size"])
    hidden, upstream = torch.randn(2, *shape).to(device=DEVICE, dtype=case.dtype)
    # Nothing that a training step computes depends on padding: its loss is masked.
    upstream[~real] = 0
    mine = tokens_of_rank(lengths, cp, groups.cp.rank())
    if case.sequence_parallel:
        mine = mine.chunk(tp)[groups.tp.rank()]

    # The whole layer never sees the padding.
    x = hidden[real].clone().requires_grad_()
    packing = pack(exact, exact) if case.packed else None
    got, _ = whole(x, None, packed_seq_params=packing)
    got.backward(upstream[real])
    expected, input_gradient = torch.zeros_like(hidden), torch.zeros_like(hidden)
    expected[real], input_gradient[real] = got.detach(), x.grad
    y = hidden[mine].clone().requires_grad_()
    packing = pack(exact, lengths) if case.packed else None
    out, _ = split(y, None, packed_seq_params=packing)
    out.backward(upstream[mine])
    finalize_gradients(split)

    def error(got: Tensor, wanted: Tensor) -> float:
        assert got.shape == wanted.shape
        difference = (got.double() - wanted.double()).abs().max()
        return (difference / wanted.double().abs().max()).item()

    out = out.detach() * real[mine].to(out)[:, None, None]
    errors = {"output": error(out, expected[mine]), "input": error(y.grad, input_gradient[mine])}
    for name, parameter in whole.named_parameters():
        errors[name] = error(parameters[name].grad, shard(split, name, parameter.grad))
    replicas = [torch.empty_like(split.out_norm.weight.grad) for _ in range(tp * cp)]
    torch.distributed.all_gather(replicas, split.out_norm.weight.grad)
    errors["replicas"] = max(error(replica, replicas[0]) for replica in replicas)
    ran = {
        name
        for stage in ("pre_gated_delta_rule", "gated_output_norm")
        for count in fusion_report(split).stage(stage)
        for name in count.fused
    }
    assert ran == {
        option.removeprefix("gdn_").removesuffix("_fusion")
        for option in case.options
        if option.startswith("gdn_")
    }
    return errors


def compare_all(cases: list[Case], tp: int, cp: int) -> dict[str, dict[str, float]]:
    """What every rank runs: the errors of every case."""
    alone = start_layout(tp, cp)
    # Where megatron-core gathers the sequence, it asks for a CUDA device.
    with parameters_on_cpu_without_cuda():
        return {str(case): compare(case, alone) for case in cases}


def norm_gradient_of_one_rank_each() -> dict[str, list[float]]:
    """The gradient of a norm weight to which rank r contributes r + 1 in each of two backwards."""
    start_layout(torch.distributed.get_world_size(), 1)
    group = parallel_state.get_tensor_model_parallel_group()
    mine = float(torch.distributed.get_rank() + 1)
    config = SimpleNamespace(sequence_parallel=False)

    def accumulated(weight: nn.Parameter) -> list[float]:
        for _ in range(2):
            sum_norm_gradient([weight], config, group)
            # Used twice in one backward, as by a layer that is called twice.
            (weight * mine / 4 + weight * mine * 3 / 4).sum().backward()
        return weight.grad.tolist()

    first = nn.Parameter(torch.ones(2, device=DEVICE))
    found = {"two_backwards": accumulated(first)}
    # Copied, as a module is: hooks are not copied along.
    found["copied_parameter"] = accumulated(copy.deepcopy(first))
    marked = nn.Parameter(torch.ones(2, device=DEVICE))
    marked.sequence_parallel = True
    found["marked_but_off"] = accumulated(marked)
    marked = nn.Parameter(torch.ones(2, device=DEVICE))
    marked.sequence_parallel = True
    config.sequence_parallel = True
    found["left_to_megatron_core"] = accumulated(marked)
    found["unmarked"] = accumulated(nn.Parameter(torch.ones(2, device=DEVICE)))
    frozen = nn.Parameter(torch.ones(2, device=DEVICE), requires_grad=False)
    sum_norm_gradient([frozen], config, group)
    return found
