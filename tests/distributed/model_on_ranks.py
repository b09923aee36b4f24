# SPDX-License-Identifier: Apache-2.0
"""A GPT model of Gated DeltaNet layers split in every way, beside the same model whole.

Split models train as megatron-core trains them: its schedules, gradient buffers and reductions, and
its distributed optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from megatron.gdn import fusion_report, get_gdn_block_spec
from megatron.gdn.pretrain import token_loss
from tests.distributed.cpu_in_place_of_cuda import cpu_in_place_of_cuda
from tests.distributed.layer_on_ranks import (
    SIZES,
    Case,
    distinct_weights,
    pack,
    shard,
    stand_ins,
    start_layout,
    tokens_of_rank,
)
from tests.gdn.layer_support import DEVICE, make_config

VOCABULARY = 32
LEARNING_RATE, ADAM_EPS = 1.0, 0.1
"""So large an epsilon that the first step of Adam grows with the gradient, and shows its faults;
with a usual one it is the gradient's sign."""

Batch = tuple[Tensor, Tensor]
"""Tokens and labels of a microbatch, `[b, s]`."""


@dataclass(frozen=True)
class Layout:
    """How a model is split, and its size; with `distributed_optimizer` it takes a step too.

    Attributes:
        chunks: of a pipeline rank; with several the schedule is the interleaved one.
        heads: key heads, half the value heads, of the whole model.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    chunks: int = 1
    dp: int = 1
    layers: int = 2
    heads: int = 2
    microbatches: int = 2
    distributed_optimizer: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


def lengths(case: Case) -> tuple[int, ...]:
    """Of the documents: short, since the interpreter takes its time for every token."""
    return (4, 4) if case.packed else (4,)


def build(case: Case, layout: Layout, chunk: int, groups: ProcessGroupCollection) -> GPTModel:
    """One pipeline rank's chunk of the model."""
    interleaved = layout.chunks if layout.chunks > 1 else None
    heads = {
        "linear_num_key_heads": layout.heads,
        "linear_num_value_heads": 2 * layout.heads,
    }
    config = make_config(
        **(SIZES | heads),
        num_layers=layout.layers,
        linear_attention_freq=[1] * layout.layers,
        ffn_hidden_size=16,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=interleaved,
        pipeline_dtype=case.dtype,
        # Two ranks are each other's next and previous: one batch would mix both up.
        overlap_p2p_comm=interleaved is not None,
        batch_p2p_comm=interleaved is None,
        params_dtype=case.dtype,
        **({"fp16": True} if case.dtype == torch.float16 else {}),
        **case.options,
        **stand_ins(case.options),
    )
    vp_stage = chunk if interleaved else None
    last = layout.chunks - 1
    model = GPTModel(
        config,
        get_gdn_block_spec(config, vp_stage=vp_stage, pp_rank=groups.pp.rank()),
        VOCABULARY,
        sum(lengths(case)),
        pre_process=chunk == 0 and groups.pp.rank() == 0,
        post_process=chunk == last and groups.pp.rank() == layout.pp - 1,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
        pg_collection=groups,
        vp_stage=vp_stage,
    )
    return model.to(device=DEVICE, dtype=case.dtype)


def packing(case: Case) -> PackedSeqParams | None:
    return pack(lengths(case), lengths(case)) if case.packed else None


def microbatches(case: Case, layout: Layout) -> list[Batch]:
    torch.manual_seed(1)
    shape = (layout.microbatches, 2, 1, sum(lengths(case)))
    return [(pair[0], pair[1]) for pair in torch.randint(VOCABULARY, shape).to(DEVICE)]


@dataclass(frozen=True)
class Expected:
    """Of the whole model: the mean loss, and by parameter its value, the gradient of the loss in
    float32, and the value after a step of Adam."""

    loss: Tensor
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    after_adam: dict[str, Tensor]


def run_whole(case: Case, layout: Layout) -> Expected:
    """Every rank alone, one microbatch after another."""
    alone = start_layout(1, 1).tp
    groups = ProcessGroupCollection.use_mpu_process_groups()
    for name in ("tp", "cp", "pp", "embd"):
        setattr(groups, name, alone)
    with cpu_in_place_of_cuda():
        model = build(case, Layout(layers=layout.layers, heads=layout.heads), 0, groups)
        fill(model)
        names = dict(model.named_parameters())
        gradients = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in names.items()}
        total = torch.zeros((), device=DEVICE)
        for tokens, labels in microbatches(case, layout):
            loss = model(tokens, None, None, labels=labels, packed_seq_params=packing(case)).mean()
            (loss / layout.microbatches).backward()
            total += loss.detach() / layout.microbatches
            for name, parameter in names.items():
                gradients[name] += parameter.grad.float()
                parameter.grad = None
    parameters = {name: parameter.detach() for name, parameter in names.items()}
    stepped = {name: adam_step(parameters[name], gradients[name]) for name in names}
    return Expected(total, parameters, gradients, stepped)


def fill(model: GPTModel) -> None:
    """Weights of which no two heads, channels or norm weights are alike."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.dim() == 1))
        for number, layer in enumerate(model.decoder.layers):
            distinct_weights(layer.self_attention, seed=number)


def split_like(model: GPTModel, name: str, whole: dict[str, Tensor]) -> Tensor:
    """This rank's part of a whole parameter or gradient that the chunk calls `name`."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    prefix, _, rest = name.partition("decoder.layers.")
    if rest:
        # Layers are numbered from 0 in each chunk.
        local, _, rest = rest.partition(".")
        layer = model.decoder.layers[int(local)]
        value = whole[f"{prefix}decoder.layers.{layer.layer_number - 1}.{rest}"]
        if rest.startswith("self_attention."):
            return shard(layer.self_attention, rest.removeprefix("self_attention."), value)
    else:
        value = whole[name]
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(size)[rank] for half in value.chunk(2)])
    if name.endswith("linear_fc2.weight"):
        return value.chunk(size, dim=1)[rank]
    if name.endswith(("word_embeddings.weight", "output_layer.weight")):
        return value.chunk(size)[rank]
    return value


def forward_step(
    case: Case, batches: Iterator[Batch], model: DistributedDataParallel
) -> tuple[Tensor, Any]:
    """For megatron-core's schedules: this rank's tokens of the next microbatch."""
    mine = tokens_of_rank(
        lengths(case),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_context_parallel_rank(),
    )
    tokens, labels = (tensor[:, mine] for tensor in next(batches))
    out = model(tokens, None, None, labels=labels, packed_seq_params=packing(case))
    return out, functools.partial(token_loss, torch.ones_like(labels))


def start_split(case: Case, layout: Layout) -> list[DistributedDataParallel]:
    """This rank's chunks, with megatron-core's gradient buffers around them."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.chunks if layout.chunks > 1 else None,
        context_parallel_size=layout.cp,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks = []
    for number in range(layout.chunks):
        model = build(case, layout, number, groups)
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=layout.distributed_optimizer
        )
        chunks.append(DistributedDataParallel(model.config, settings, model))
    return chunks


def compare_model(case: Case, layout: Layout) -> dict[str, float]:
    """Errors of this rank's loss and gradients against the whole model's.

    With the distributed optimizer no rank has a whole gradient: what one step of Adam changes is
    compared, with torch's own Adam.

    Returns:
        By name, the largest difference relative to the largest value.
    """
    expected = run_whole(case, layout)
    with cpu_in_place_of_cuda():
        chunks = start_split(case, layout)
        for chunk in chunks:
            with torch.no_grad():
                for name, parameter in chunk.module.named_parameters():
                    parameter.copy_(split_like(chunk.module, name, expected.parameters))
        config = chunks[0].config
        config.finalize_model_grads_func = finalize_model_grads
        mine = microbatches(case, layout)[
            parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()
        ]
        said = get_forward_backward_func()(
            forward_step_func=functools.partial(forward_step, case),
            data_iterator=[iter(mine) for _ in chunks] if layout.chunks > 1 else iter(mine),
            model=chunks if layout.chunks > 1 else chunks[0],
            num_microbatches=len(mine),
            seq_length=sum(lengths(case)),
            micro_batch_size=1,
            forward_only=False,
        )
        if layout.distributed_optimizer:
            start_adam(case, chunks).step()
    errors = {}
    if said:
        loss = torch.stack([log["lm loss"] for log in said]).sum(0)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        torch.distributed.all_reduce(loss, group=group)
        errors["loss"] = error(loss[0] / loss[1], expected.loss)
    for number, chunk in enumerate(chunks):
        check_report(chunk, case)
        for name, parameter in chunk.module.named_parameters():
            got, wanted = parameter.main_grad, split_like(chunk.module, name, expected.gradients)
            if layout.distributed_optimizer:
                before = split_like(chunk.module, name, expected.parameters)
                got = parameter.detach() - before
                wanted = split_like(chunk.module, name, expected.after_adam) - before
            errors[f"{number}.{name}"] = error(got, wanted)
    return errors


def start_adam(case: Case, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    settings = OptimizerConfig(
        use_distributed_optimizer=True,
        params_dtype=case.dtype,
        fp16=case.dtype == torch.float16,
        loss_scale=1.0,
        clip_grad=0.0,
        weight_decay=0.0,
        lr=LEARNING_RATE,
        adam_eps=ADAM_EPS,
    )
    return get_megatron_optimizer(settings, chunks)


def adam_step(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The parameter after a step of torch's own Adam, in float32."""
    master = nn.Parameter(parameter.float().clone())
    master.grad = gradient.clone()
    torch.optim.Adam([master], lr=LEARNING_RATE, eps=ADAM_EPS).step()
    return master.detach().to(parameter.dtype)


def error(got: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the largest value."""
    assert got.shape == wanted.shape
    difference = (got.double() - wanted.double()).abs().max()
    return (difference / wanted.double().abs().max()).item()


def check_report(chunk: nn.Module, case: Case) -> None:
    for stage in ("pre_gated_delta_rule", "gated_output_norm"):
        rows = fusion_report(chunk).stage(stage)
        assert rows
        assert all(bool(row.fused) == (f"gdn_{stage}_fusion" in case.options) for row in rows)


def compare_models(cases: list[Case], layout: Layout) -> list[dict[str, float]]:
    """What every rank runs: the errors of every case."""
    return [compare_model(case, layout) for case in cases]
