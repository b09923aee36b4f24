# SPDX-License-Identifier: Apache-2.0
"""Pretraining of models with Gated DeltaNet layers, on megatron-core's own training loop.

    torchrun --nproc-per-node 1 -m megatron.gdn.pretrain <megatron-core flags> \
        --experimental-attention-variant gdn --linear-attention-freq 4 \
        --gdn-pre-gated-delta-rule-fusion --gdn-gated-output-norm-fusion

Trains GPT models (as above), hybrid models (`--hybrid-layer-pattern`, in which `G` is a Gated
DeltaNet layer) and models of your own spec (`--spec MODULE NAME`): see `model_from_flags`.
Parallelism, optimizer, checkpoints and data loading are megatron-core's. This module supplies the
batch and the loss, and logs the fusion report once after the first step.
"""

from __future__ import annotations

import functools
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_tokenizer, pretrain, print_rank_0
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor

from megatron.gdn.agreement import agree_on_fusions
from megatron.gdn.arguments import add_gdn_fusion_args
from megatron.gdn.config import TransformerConfig
from megatron.gdn.megatron_core_0_19 import (
    compiled_datasets_helpers,
    printable_help,
    rewritten_command_line,
)
from megatron.gdn.model_from_flags import model_config_from_args, transformer_config_from_args
from megatron.gdn.report import fusion_report, warn_about_idle_fusions
from megatron.gdn.variant import MEGATRON_CORE_VARIANT, VARIANT

__all__ = ["main", "model_config_from_args", "transformer_config_from_args"]

Batch = dict[str, Any]
_BATCH_KEYS = (
    *("tokens", "labels", "loss_mask", "position_ids", "attention_mask"),
    *("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group"),
)


def datasets_provider(
    sample_counts: list[int], vp_stage: int | None = None
) -> tuple[Any, Any, Any]:
    """Training, validation and test sets: indexed data sets, or mock data with `--mock-data`.

    Args:
        sample_counts: samples wanted of each.
        vp_stage: virtual pipeline stage that asks.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        inter_document_masking=packs_documents(args),
    )

    def built_here() -> bool:
        return _reads_batches(vp_stage) and parallel_state.get_tensor_model_parallel_rank() == 0

    kind = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0(f"> building {kind.__name__} for training, validation and test")
    train, valid, test = BlendedMegatronDatasetBuilder(
        kind, sample_counts, built_here, config
    ).build()
    return train, valid, test


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # megatron-core reads it


def packs_documents(args: Namespace) -> bool:
    """Whether samples are documents packed in a row, none of which sees another."""
    return bool(args.dataloader_inter_document_masking)


def _reads_batches(vp_stage: int | None) -> bool:
    """Whether this pipeline stage needs tokens, labels or document lengths."""
    return (
        packs_documents(get_args())
        or parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        or parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    )


def next_batch(
    data_iterator: Iterator[Batch] | None, config: TransformerConfig, vp_stage: int | None
) -> tuple[Batch, PackedSeqParams | None]:
    """The next microbatch, on this rank's device and cut to its share of the sequence.

    Returns:
        tokens, labels, loss_mask, position_ids `[b, s]` and attention_mask, each None where the
        pipeline stage does not need it; and the packing of documents, if any.
    """
    args = get_args()
    if not _reads_batches(vp_stage):
        return {}, None
    batch: Batch = dict.fromkeys(_BATCH_KEYS)
    if data_iterator is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
        for name, value in next(data_iterator).items():
            batch[name] = value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packs_documents(args),
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp_on_this_rank(
            layout=config.pipeline_model_parallel_layout,
            mtp_num_layers=config.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=vp_stage,
        ),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(
            ignore_virtual=False, vp_stage=vp_stage
        ),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(
            ignore_virtual=False, vp_stage=vp_stage
        ),
    )
    packing = None
    if batch["cu_seqlens"] is not None:
        batch = flatten_batch_for_packed_sequences(batch)
        lengths, longest = batch["cu_seqlens"][0], int(batch["max_seqlen"].max())
        padded = batch["cu_seqlens_padded"]
        packing = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=lengths,
            cu_seqlens_kv=lengths,
            cu_seqlens_q_padded=None if padded is None else padded[0],
            cu_seqlens_kv_padded=None if padded is None else padded[0],
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    batch = get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
    )
    return batch, packing


def token_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the losses of unmasked tokens.

    Args:
        loss_mask, losses: `[b, s]`.

    Returns:
        The sum, the number of tokens, and both for megatron-core's averaging and log.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(losses.reshape(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


class FirstStepReport:
    """Logs the fusion report of this rank's model chunks once, when the first step is over.

    Of the ranks that hold the same layers one speaks, so that with pipeline parallelism each
    pipeline rank reports its own layers. Nothing is communicated: ranks of a pipeline come here at
    different times.
    """

    def __init__(self) -> None:
        self.chunks: list[torch.nn.Module] = []
        self.first_iteration: int | None = None
        self.logged = False

    def before_forward(self, model: torch.nn.Module) -> None:
        """Note the chunk that is about to run; log once its step is not the first any more."""
        if self.logged:
            return
        iteration = get_args().curr_iteration
        if self.first_iteration is None:
            self.first_iteration = iteration
        if iteration != self.first_iteration or not model.training:
            self.log()
        elif all(chunk is not model for chunk in self.chunks):
            self.chunks.append(model)

    def log(self) -> None:
        """Print the report and warn of fusions that did not run, once and if anything ran."""
        if self.logged or not self.chunks:
            return
        self.logged = True
        if not _speaks_for_its_layers():
            return
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        where = f"pipeline rank {parallel_state.get_pipeline_model_parallel_rank()} of {ranks}, "
        print(f"{where if ranks > 1 else ''}{fusion_report(self.chunks)}", flush=True)
        warn_about_idle_fusions(self.chunks)


def _speaks_for_its_layers() -> bool:
    """Whether this rank is the first of those that hold parts or copies of the same layers."""
    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )


def forward_step(
    report: FirstStepReport,
    data_iterator: Iterator[Batch] | None,
    model: torch.nn.Module,
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """One microbatch forward, for megatron-core's schedules.

    Returns:
        The model's output and the loss function of that output.
    """
    report.before_forward(model)
    config = get_attr_wrapped_model(model, "config")
    batch, packing = next_batch(data_iterator, config, get_attr_wrapped_model(model, "vp_stage"))
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        packed_seq_params=packing,
    )
    return output, functools.partial(token_loss, batch.get("loss_mask"))  # type: ignore[arg-type]


def add_args(parser: ArgumentParser) -> ArgumentParser:
    """Add our flags to megatron-core's parser, and repair its `--help`."""
    printable_help(parser)
    return add_gdn_fusion_args(parser)


def main() -> None:
    """Parse megatron-core's flags and ours, and train."""
    args = parse_and_validate_args(extra_args_provider=add_args)
    model_config = agree_on_fusions(
        lambda: model_config_from_args(args),
        lambda built: built.transformer,
        args.world_size,
    )
    report = FirstStepReport()
    variant = ("--experimental-attention-variant", VARIANT, MEGATRON_CORE_VARIANT)
    with compiled_datasets_helpers(), rewritten_command_line(*variant):
        pretrain(
            pretrain_cfg_container_from_args(args, model_config),
            datasets_provider,
            ModelType.encoder_or_decoder,
            functools.partial(forward_step, report),
        )
    report.log()


if __name__ == "__main__":
    main()
