# SPDX-License-Identifier: Apache-2.0
"""Distributed checkpoints of a layer, saved in one layout and loaded in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron.gdn import GatedDeltaNet
from tests.distributed.cpu_in_place_of_cuda import cpu_in_place_of_cuda
from tests.distributed.layer_on_ranks import (
    NORM,
    PRE,
    Case,
    build,
    distinct_weights,
    shard,
    start_layout,
)

FUSED = Case("fused", torch.float16, {**PRE, **NORM})
UNFUSED = Case("unfused", torch.float16, {})


def sharded(layer: GatedDeltaNet) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state: dict[str, Any] = layer.sharded_state_dict("layer.", (), {"dp_cp_group": group})
    return state


def start(case: Case, tp: int) -> GatedDeltaNet:
    start_layout(tp, 1)
    layer = build(
        case,
        ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"]),
        sequence_parallel=False,
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float("nan"))
    return layer


def load(layer: GatedDeltaNet, folder: Path) -> None:
    state = dist_checkpointing.load(sharded(layer), str(folder))
    layer.load_state_dict({name.removeprefix("layer."): value for name, value in state.items()})


def save(layer: GatedDeltaNet, folder: Path) -> None:
    if torch.distributed.get_rank() == 0:
        folder.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(sharded(layer), str(folder))


def differing(layer: GatedDeltaNet, whole: dict[str, Tensor]) -> list[str]:
    """Parameters that are not, bit for bit, this rank's part of the whole ones."""
    return [
        name
        for name, parameter in layer.named_parameters()
        if not torch.equal(parameter, shard(layer, name, whole[name]))
    ]


def there_and_back(folder: str) -> dict[str, list[str]]:
    """TP 1 fused, TP 2 unfused, TP 1 fused: what differs after each load."""
    with cpu_in_place_of_cuda():
        first = start(FUSED, tp=1)
        distinct_weights(first)
        whole = {name: parameter.detach().clone() for name, parameter in first.named_parameters()}
        save(first, Path(folder, "first"))
        found = {}
        second = start(UNFUSED, tp=2)
        load(second, Path(folder, "first"))
        found["tp2_unfused"] = differing(second, whole)
        save(second, Path(folder, "second"))
        third = start(FUSED, tp=1)
        load(third, Path(folder, "second"))
        found["tp1_fused"] = differing(third, whole)
    return found
