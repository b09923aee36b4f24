# SPDX-License-Identifier: Apache-2.0
"""Runs the parts of `megatron.gdn.pretrain` on a CPU: flags, model, data, batches, loss, report.

megatron-core's loop itself insists on CUDA (tests/gpu/test_pretrain_gpu.py runs it). Prints one
line of JSON per microbatch, and what the entry point prints.

    python pretrain_on_cpu.py <megatron-core flags>
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.training.arguments import parse_and_validate_args
from megatron.training.models.base import compose_hooks
from torch.utils.data import DataLoader

from megatron.gdn import pretrain
from megatron.gdn.megatron_core_0_19 import compiled_datasets_helpers
from megatron.gdn.triton_3_7 import speed_up_interpreter
from tests.gdn.layer_support import start_one_rank

STEPS = 3


def main() -> None:
    """Three steps of two microbatches, without an optimizer."""
    start_one_rank()
    args = parse_and_validate_args(extra_args_provider=pretrain.add_args)
    model_config = pretrain.model_config_from_args(args)
    builder = model_config.get_builder_cls()(model_config)
    with compiled_datasets_helpers():
        train, _, _ = pretrain.datasets_provider([8 * STEPS, 0, 0])
    # Softmax attention forks the CUDA random state even without dropout; this tracker does not.
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    model = builder.build_model(ProcessGroupCollection.use_mpu_process_groups())
    compose_hooks(model_config.pre_wrap_hooks)([model])
    model.to(model_config.transformer.params_dtype)
    batches = iter(DataLoader(train, batch_size=args.micro_batch_size))
    report = pretrain.FirstStepReport()
    for step in range(STEPS):
        args.curr_iteration = step
        for _ in range(2):
            output, loss_function = pretrain.forward_step(report, batches, model)
            loss, tokens, _ = loss_function(output)
            loss.backward()
            print(
                json.dumps({"step": step, "loss": loss.item() / tokens.item(), "n": tokens.item()})
            )
    grads = [parameter.grad is not None for parameter in model.parameters()]
    print(json.dumps({"parameters": len(grads), "with_gradient": sum(grads)}))


if __name__ == "__main__":
    torch.compiler.set_stance("force_eager")
    speed_up_interpreter()
    with (
        mock.patch.object(torch.Tensor, "cuda", lambda self, *args, **kwargs: self),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
    ):
        sys.exit(main())
