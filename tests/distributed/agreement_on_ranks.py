# SPDX-License-Identifier: Apache-2.0
"""What ranks do to agree on fusions: each with its own configuration, machine or packages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.training.arguments import parse_args, validate_args

from megatron.gdn import agreement, pretrain
from megatron.gdn.agreement import agree_on_fusions
from tests.distributed.ranks import backend
from tests.gdn.layer_support import DEVICE, make_config
from tests.gdn.test_pretrain import GDN, MODEL, NORM

FUSIONS = """
fusions:
  - name: mine
    stage: gated_output_norm
    implementation: tests.fusions.toy_fusions:norm_right
    determinism: unknown
    preconditions: [{rule}]
select:
  - {{stage: gated_output_norm, fusions: [mine], layers: {layers}}}
"""


def write_fusions(folder: str, name: str, rule: str = "", layers: int = 1) -> str:
    file = Path(folder, name)
    file.write_text(FUSIONS.format(rule=rule, layers=layers))
    return str(file)


def settings_by_rank(folder: str) -> dict[str, list[dict[str, Any]]]:
    """For each case, the settings of rank 0 and of rank 1."""
    norm = {"gdn_gated_output_norm_fusion": True}
    mine = {"gdn_fusion_config": write_fusions(folder, "mine.yaml")}
    copied = {"gdn_fusion_config": write_fusions(folder, "copy.yaml")}
    other_layer = {"gdn_fusion_config": write_fusions(folder, "layer.yaml", layers=2)}
    other_rule = {
        "gdn_fusion_config": write_fusions(folder, "rule.yaml", "{kind: nonempty, tensor: x}")
    }
    missing = {"gdn_fusion_config": str(Path(folder, "missing.yaml"))}
    return {
        "nothing": [{}, {}],
        "same": [norm, norm],
        "same_file_elsewhere": [mine, copied],
        "all_refuse": [missing, missing],
        "option": [norm, {}],
        "deterministic": [norm, {**norm, "deterministic_mode": True}],
        "missing_file": [mine, missing],
        "layer": [mine, other_layer],
        "rule": [mine, other_rule],
    }


def agree(config: dict[str, Any], world_size: int | None) -> str:
    """The text of the ValueError, or what was agreed on."""
    try:
        agreed = agree_on_fusions(lambda: make_config(**config), world_size=world_size)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    assert agreed.num_layers == 4
    return "agreed"


def agree_in_every_case(
    settings: dict[str, list[dict[str, Any]]], before_start: bool
) -> dict[str, str]:
    """All cases in turn, then a package that only rank 1 lacks; and ranks still reach each other.

    Args:
        settings: of every case, by rank.
        before_start: torch.distributed is started by this function afterwards.
    """
    import os

    rank, world_size = int(os.environ["RANK"]), 2 if before_start else None
    said = {case: agree(by_rank[rank], world_size) for case, by_rank in settings.items()}
    lacking = mock.patch.object(
        agreement, "unavailable", return_value=["needs triton >=3.4, got 3.1"] * rank
    )
    with lacking:
        said["package"] = agree({"gdn_gated_output_norm_fusion": True}, world_size)
    if before_start:
        torch.distributed.init_process_group(backend())
    total = torch.ones(1, device=DEVICE)
    torch.distributed.all_reduce(total)
    assert total.item() == 2
    return said


def enter_training() -> str:
    """`megatron.gdn.pretrain` up to megatron-core's loop; rank 1 alone is deterministic."""
    import os

    refused = "--deterministic-mode" if os.environ["RANK"] == "1" else ""
    words = ["pretrain", *f"{MODEL} {GDN} {NORM} {refused} --mock-data".split()]

    def parse(extra_args_provider: Any) -> Any:
        args = parse_args(extra_args_provider)
        validate_args(args)
        return args

    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(pretrain, "parse_and_validate_args", parse),
        mock.patch.object(pretrain, "pretrain"),
    ):
        try:
            pretrain.main()
        except ValueError as error:
            return str(error)
    return "trained"
