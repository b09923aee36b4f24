# SPDX-License-Identifier: Apache-2.0
"""Flags of the examples are those that megatron-core and this project accept."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fusion_registry.machine import HOPPER
from megatron.gdn.commands.list_fusions import main
from megatron.gdn.planning.settings import from_flags
from megatron.gdn.variant import gdn_layer_numbers

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/qwen3_next_80b_a3b.sh"
PAGE = ROOT / "docs/real_size_model.md"


@pytest.fixture(scope="module")
def flags() -> list[str]:
    done = subprocess.run(["bash", SCRIPT, "flags"], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_every_request_would_be_honoured(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--explain", "--json", "--", *flags]) == 0
    described = json.loads(capsys.readouterr().out)
    assert not described["refused"]
    assert sum(len(group["layers"]) for group in described["layers"]) == 36
    assert described["sizes"]["length"] == 4096
    for group in described["layers"]:
        fused = {stage["stage"] for stage in group["stages"] if stage["outcome"] == "fused"}
        assert fused == {"pre_gated_delta_rule", "gated_output_norm"}


def parameters(config: Any, vocabulary: int) -> dict[str, float]:
    """Billions of parameters by part, norms left out."""
    hidden, layers = config.hidden_size, config.num_layers
    gdn_layers = len(gdn_layer_numbers(config) or ())
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    heads = config.linear_num_value_heads
    gdn = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
    gdn += (2 * keys + values) * config.linear_conv_kernel_dim
    query = config.num_attention_heads * config.kv_channels
    key_value = 2 * config.num_query_groups * config.kv_channels
    attention = hidden * ((1 + config.attention_output_gate) * query + key_value) + query * hidden
    expert = 3 * hidden * config.moe_ffn_hidden_size
    shared = 3 * hidden * config.moe_shared_expert_intermediate_size + hidden
    router = hidden * config.num_moe_experts
    other = layers * (shared + router) + gdn * gdn_layers + attention * (layers - gdn_layers)
    table = vocabulary * hidden
    return {
        "all": (layers * config.num_moe_experts * expert + other + 2 * table) / 1e9,
        "experts": layers * config.num_moe_experts * expert / 1e9,
        "active": (layers * config.moe_router_topk * expert + other + table) / 1e9,
    }


def test_parameters_are_those_of_the_page(flags: list[str]) -> None:
    config, _ = from_flags(flags, HOPPER)
    found = parameters(config, 151936)
    page = PAGE.read_text(encoding="utf-8")
    assert f"{found['all']:.2f} billion parameters" in page
    assert f"{found['experts']:.2f} of them in experts" in page
    assert f"{found['active']:.2f} billion are active" in page


def test_an_unknown_command_says_what_there_is() -> None:
    done = subprocess.run(["bash", SCRIPT, "nothing"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "explain" in done.stderr
