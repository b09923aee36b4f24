# SPDX-License-Identifier: Apache-2.0
"""A third party's fusion of any stage trains by a config file alone; selections do not mix.

Nothing under megatron/gdn knows the functions below. Each is written to a folder of its own as a
module with a declaration file beside it, as a user would.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_registry import FusionReport
from megatron.gdn import fusion_report
from megatron.gdn.stages import OPTIONS, STAGES
from megatron.gdn.tiny_training import main
from megatron.gdn.tiny_training.master_weights import MasterWeightAdamW
from megatron.gdn.tiny_training.model import VOCABULARY, make_config, make_model, one_rank
from megatron.gdn.tiny_training.sizes import CPU, TrainingSize
from megatron.gdn.tiny_training.training import small_tensors_on
from tests.gdn.layer_support import DEVICE, make_input, make_layer
from tests.gdn.layer_support import make_config as make_layer_config

SHORT = ["--steps", "3", "--batch", "2", "--sequence", "16"]
OTHERS_OFF = [f"--no-{option.replace('_', '-')}" for option in OPTIONS]

# FP16 rounds at 5e-4, BF16 at 4e-3.
TOLERANCE = 2e-3 if DEVICE.type == "cpu" else 1.6e-2

IMPORTS = "import torch\nimport torch.nn.functional as F\n\n\n"
CONVOLVE = """
def causal_conv1d(qkv, conv_weight, conv_bias, cu_seqlens):
    width = conv_weight.shape[-1]
    x = F.pad(qkv.float(), (0, 0, width - 1, 0)).unfold(1, width, 1)
    y = (x * conv_weight[:, 0].float()).sum(-1)
    return F.silu(y if conv_bias is None else y + conv_bias.float()).to(qkv.dtype)
"""
PREPARE = """
def prepare_qkv(qkv, num_key_heads, num_value_heads, key_head_dim, value_head_dim, use_qk_l2norm):
    keys = num_key_heads * key_head_dim
    q, k = (x.unflatten(-1, (num_key_heads, -1)) for x in qkv[..., : 2 * keys].chunk(2, dim=-1))
    if use_qk_l2norm:
        q, k = (F.normalize(x.float(), dim=-1, eps=1e-3).to(qkv.dtype) for x in (q, k))
    reads = torch.arange(num_value_heads) // (num_value_heads // num_key_heads)
    v = qkv[..., 2 * keys :].unflatten(-1, (num_value_heads, -1))
    return q[:, :, reads].contiguous(), k[:, :, reads].contiguous(), v.contiguous()
"""
DECAY = """
def decay_and_beta(beta_logits, alpha, A_log, dt_bias):
    softplus = F.softplus(alpha.float() + dt_bias.float())
    return beta_logits.float().sigmoid(), -A_log.float().exp() * softplus
"""
BEFORE_THE_RECURRENCE = f"""
{CONVOLVE}
{PREPARE}
{DECAY}

def pre_gated_delta_rule(qkvzba, conv_weight, conv_bias, A_log, dt_bias, num_key_heads,
                         num_value_heads, key_head_dim, value_head_dim, use_qk_l2norm, cu_seqlens):
    sizes = num_key_heads, num_value_heads, key_head_dim, value_head_dim
    values = num_value_heads * value_head_dim
    qkv, gate, beta_logits, alpha = qkvzba.transpose(0, 1).split(
        [conv_weight.shape[0], values, num_value_heads, num_value_heads], dim=-1
    )
    q, k, v = prepare_qkv(causal_conv1d(qkv, conv_weight, conv_bias, None), *sizes, use_qk_l2norm)
    beta, g = decay_and_beta(beta_logits, alpha, A_log, dt_bias)
    return q, k, v, gate.unflatten(-1, (num_value_heads, -1)), beta, g
"""
RECURRENCE = """
def gated_delta_rule(q, k, v, g, beta, cu_seqlens):
    q, k, w = (x.float().transpose(1, 2) for x in (q, k, v))
    g, beta = (x.float().transpose(1, 2)[..., None] for x in (g, beta))
    past = torch.ones(q.shape[2], q.shape[2], device=q.device).tril()
    total = g.cumsum(2)
    decay = ((total - total.mT) * past).exp() * past
    system = (beta * decay * (k @ k.mT)).tril(-1)
    u = torch.linalg.solve_triangular(system, beta * w, upper=False, unitriangular=True)
    x = (decay * (q @ k.mT)) @ u * q.shape[-1] ** -0.5
    return x.transpose(1, 2).contiguous().to(v.dtype)
"""
OUTPUT_NORM = """
def gated_output_norm(x, gate, weight, eps, zero_centered_gamma):
    scale = weight.float() + zero_centered_gamma
    normed = F.rms_norm(x.float(), x.shape[-1:], scale, eps).to(x.dtype)
    return (normed.float() * F.silu(gate.float())).to(x.dtype).contiguous()
"""
SOURCES = {
    "pre_gated_delta_rule": BEFORE_THE_RECURRENCE,
    "causal_conv1d": CONVOLVE,
    "prepare_qkv": PREPARE,
    "decay_and_beta": DECAY,
    "gated_delta_rule": RECURRENCE,
    "gated_output_norm": OUTPUT_NORM,
}
ThirdParty = Callable[..., str]


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ThirdParty:
    """Writes a module and the config file that registers and selects it; returns the file."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(stage: str, layers: str | None = None) -> str:
        # A name for each test: modules stay imported.
        module = f"third_party_{stage}_{tmp_path.name}"
        (tmp_path / f"{module}.py").write_text(IMPORTS + SOURCES[stage])
        file = tmp_path / f"{stage}.yaml"
        where = "" if layers is None else f", layers: {layers}"
        file.write_text(
            f"fusions:\n"
            f"  - name: their_{stage}\n"
            f"    stage: {stage}\n"
            f"    implementation: {module}:{stage}\n"
            f"    determinism: unknown\n"
            f"    preconditions: []\n"
            f"select:\n"
            f"  - {{stage: {stage}, fusions: [their_{stage}]{where}}}\n"
        )
        return str(file)

    return write


def train_by_command(*flags: str, result: Path) -> dict[str, Any]:
    """`gdn-tiny-training` as a user runs it: it fails unless the loss falls."""
    assert main([*SHORT, *OTHERS_OFF, *flags, "--json", str(result)]) == 0
    data: dict[str, Any] = json.loads(result.read_text())
    return data


@pytest.fixture(scope="module")
def unfused_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses: list[float] = train_by_command(
        result=tmp_path_factory.mktemp("unfused") / "result.json"
    )["losses"]
    return losses


def test_every_stage_has_a_third_party() -> None:
    assert list(SOURCES) == [stage.name for stage in STAGES]


@pytest.mark.parametrize("stage", SOURCES)
def test_their_function_computes_the_stage(stage: str, third_party: ThirdParty) -> None:
    """The loss of a few steps would hide a wrong head order; outputs and gradients do not."""
    plain, theirs = (
        make_layer(make_layer_config(params_dtype=torch.float32, gdn_fusion_config=file))
        for file in (None, third_party(stage))
    )
    found = []
    for layer in (plain, theirs):
        x = make_input(layer.config, length=20)
        out, _ = layer(x, None)
        out.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
        found.append({"output": out.detach(), "input": x.grad, **gradients})
    expected, got = found
    for name, value in expected.items():
        # Another order of operations; log decays summed over 20 tokens cost the most, 3e-5.
        assert (got[name] - value).norm() / value.norm() < 2e-4, name
    assert fusion_report(theirs).fused_layers(stage) == 1


@pytest.mark.parametrize("stage", SOURCES)
def test_a_fusion_of_the_stage_trains_by_a_config_file_alone(
    stage: str, third_party: ThirdParty, tmp_path: Path, unfused_losses: list[float]
) -> None:
    run = train_by_command(
        "--gdn-fusion-config", third_party(stage), result=tmp_path / "result.json"
    )
    totals = {total["stage"]: total for total in run["fusion_report"]["totals"]}
    layers = totals[stage]["layers"]
    assert totals[stage]["summary"] == f"{layers}/{layers} layers"
    assert totals[stage]["fused"] == {f"their_{stage}": layers * run["forward_passes"]}
    assert totals[stage]["unfused"] == totals[stage]["refused"] == 0
    assert all(not total["fused"] for name, total in totals.items() if name != stage)
    assert run["losses"] == pytest.approx(unfused_losses, rel=TOLERANCE)


# --- two models in one process

SIZE = TrainingSize(**{**vars(CPU), "hidden_size": 32, "batch": 2, "sequence": 16})
STEPS = 3


class Training:
    """A model that trains step by step, on batches of its own seed."""

    def __init__(self, **fusion_fields: Any) -> None:
        config = make_config(SIZE, DEVICE, fusion_fields)
        self.model = make_model(config, SIZE.sequence, 5, DEVICE)
        self.optimizer = MasterWeightAdamW(self.model.parameters(), scales_loss=config.fp16)
        self.draw = torch.Generator().manual_seed(9)
        self.losses: list[float] = []

    def step(self) -> None:
        shape = (SIZE.batch, SIZE.sequence + 1)
        rows = torch.randint(VOCABULARY, shape, generator=self.draw).to(DEVICE)
        positions = torch.arange(SIZE.sequence, device=DEVICE).expand(SIZE.batch, -1)
        hidden = torch.ones(SIZE.sequence, SIZE.sequence, dtype=torch.bool, device=DEVICE).triu(1)
        loss = self.model(rows[:, :-1], positions, hidden[None, None], labels=rows[:, 1:])
        loss = loss.float().mean()
        self.optimizer.backward(loss)
        self.optimizer.step(1e-3)
        self.losses.append(loss.item())

    @property
    def report(self) -> FusionReport:
        return fusion_report(self.model)


def fused_calls(training: Training) -> dict[tuple[int | None, str], dict[str, int]]:
    return {
        (count.layer, count.stage): count.fused for count in training.report.counts if count.fused
    }


def test_two_models_with_different_selections_train_in_one_process(
    third_party: ThirdParty,
) -> None:
    """Step by step in turns: each loses what it loses alone, and counts its own calls."""
    selections: list[dict[str, Any]] = [
        {"gdn_fusion_config": third_party("causal_conv1d", layers="1-2")},
        {"gdn_fusion_config": third_party("gated_delta_rule"), OPTIONS[1]: True},
        {},
    ]
    with one_rank(DEVICE), small_tensors_on(DEVICE):
        alone = [Training(**selection) for selection in selections]
        for training in alone:
            for _ in range(STEPS):
                training.step()
        together = [Training(**selection) for selection in selections]
        for _ in range(STEPS):
            for training in together:
                training.step()
    for training, expected in zip(together, alone, strict=True):
        # To the bit on a CPU; a GPU may sum gradients in any order.
        assert training.losses == pytest.approx(
            expected.losses, rel=0.0 if DEVICE.type == "cpu" else TOLERANCE, abs=0.0
        )
        assert training.report == expected.report
    first, second, unfused = together
    assert fused_calls(first) == {
        (layer, "causal_conv1d"): {"their_causal_conv1d": STEPS} for layer in (1, 2)
    }
    assert fused_calls(second) == {
        (layer, stage): {fusion: STEPS}
        for layer in (1, 2, 3)
        for stage, fusion in (
            ("gated_delta_rule", "their_gated_delta_rule"),
            ("gated_output_norm", "gated_output_norm"),
        )
    }
    assert fused_calls(unfused) == {}
    assert unfused.losses == pytest.approx(second.losses, rel=TOLERANCE)
