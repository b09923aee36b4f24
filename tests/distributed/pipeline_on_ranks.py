# SPDX-License-Identifier: Apache-2.0
"""A GPT model of Gated DeltaNet layers cut in two pipeline stages, beside the whole model."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.gdn import fusion_report, get_gdn_block_spec
from megatron.gdn.megatron_core_0_19 import parameters_on_cpu_without_cuda
from tests.distributed.layer_on_ranks import stand_ins, start_layout
from tests.gdn.layer_support import DEVICE, make_config

LENGTH, BATCH, VOCABULARY, LAYERS = 8, 2, 32, 4


def build(options: dict[str, Any], stages: int, stage: int, groups: Any) -> GPTModel:
    """One pipeline stage of the model."""
    config = make_config(
        num_layers=LAYERS,
        hidden_size=32,
        linear_attention_freq=[1] * LAYERS,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        **options,
        **stand_ins(options),
    )
    model = GPTModel(
        config,
        get_gdn_block_spec(config, pp_rank=stage),
        VOCABULARY,
        LENGTH,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
        pg_collection=groups,
    )
    return model.to(DEVICE)


def compare_stages(options: dict[str, Any]) -> dict[str, float]:
    """Errors, relative to the largest value, of this stage's gradients and of the loss."""
    alone = start_layout(1, 1).tp
    stage = torch.distributed.get_rank()
    with parameters_on_cpu_without_cuda():
        groups = ProcessGroupCollection.use_mpu_process_groups()
        for name in ("tp", "cp", "pp", "embd"):
            setattr(groups, name, alone)
        torch.manual_seed(0)
        whole = build(options, 1, 0, groups)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        mine = build(options, 2, stage, ProcessGroupCollection.use_mpu_process_groups())
        parameters = {
            name: dict(whole.named_parameters())[_in_whole(name, stage)]
            for name, _ in mine.named_parameters()
        }
        with torch.no_grad():
            for name, parameter in mine.named_parameters():
                parameter.copy_(parameters[name])
        torch.manual_seed(1)
        tokens, labels = torch.randint(VOCABULARY, (2, BATCH, LENGTH)).to(DEVICE)
        expected = whole(tokens, None, None, labels=labels).mean()
        expected.backward()
        loss = _run(mine, stage, tokens, labels)
    errors = {name: _error(p.grad, parameters[name].grad) for name, p in mine.named_parameters()}
    assert any(row.fused for row in fusion_report(mine).stage("pre_gated_delta_rule")) == bool(
        options
    )
    return errors | ({} if loss is None else {"loss": _error(loss, expected)})


def _in_whole(name: str, stage: int) -> str:
    """A parameter's name in the whole model: layers are numbered from 0 in each stage."""
    parts = name.split(".")
    if "layers" in parts:
        place = parts.index("layers") + 1
        parts[place] = str(int(parts[place]) + stage * LAYERS // 2)
    return ".".join(parts)


def _run(model: GPTModel, stage: int, tokens: Any, labels: Any) -> torch.Tensor | None:
    """One microbatch over both stages; the last one returns the loss."""
    if stage == 0:
        hidden = model(tokens, None, None)
        torch.distributed.send(hidden.detach().contiguous(), 1)
        gradient = torch.empty_like(hidden)
        torch.distributed.recv(gradient, 1)
        hidden.backward(gradient)
        return None
    received = torch.empty(LENGTH, BATCH, model.config.hidden_size, device=DEVICE)
    torch.distributed.recv(received, 0)
    model.set_input_tensor(received.requires_grad_())
    loss: torch.Tensor = model(tokens, None, None, labels=labels).mean()
    loss.backward()
    torch.distributed.send(received.grad, 0)
    return loss


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12)).item()
