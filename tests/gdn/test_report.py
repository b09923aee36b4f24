# SPDX-License-Identifier: Apache-2.0
"""What a model ran: the report of wrapped models, warnings, log lines, profiler ranges."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as CoreGatedDeltaNet
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import configure_nvtx_profiling
from torch import nn

from fusion_registry import FusionUnsupportedError
from megatron.gdn import GatedDeltaNet, fusion_report, pretrain
from megatron.gdn.megatron_core_0_19 import parameters_on_cpu_without_cuda
from megatron.gdn.report import warn_about_idle_fusions
from tests.gdn.layer_support import make_config, make_input, make_layer

STAGE = "gated_output_norm"
FUSED = {"gdn_gated_output_norm_fusion": True}
UNFUSED_NAMES = (
    "+pre_gated_delta_rule",
    *("+causal_conv1d", "-causal_conv1d"),
    *("+prepare_qkv", "-prepare_qkv"),
    *("+decay_and_beta", "-decay_and_beta"),
    "-pre_gated_delta_rule",
    *("+gated_delta_rule", "-gated_delta_rule"),
)


def in_float16_module(layer: GatedDeltaNet) -> nn.Module:
    return Float16Module(layer.config, layer)


def in_torch_ddp(layer: GatedDeltaNet) -> nn.Module:
    return nn.parallel.DistributedDataParallel(layer, find_unused_parameters=True)


def in_megatron_ddp(layer: GatedDeltaNet) -> nn.Module:
    with parameters_on_cpu_without_cuda():
        return DistributedDataParallel(layer.config, DistributedDataParallelConfig(), layer)


def in_both(layer: GatedDeltaNet) -> nn.Module:
    with parameters_on_cpu_without_cuda():
        return DistributedDataParallel(
            layer.config, DistributedDataParallelConfig(), in_float16_module(layer)
        )


@pytest.mark.parametrize("wrap", [in_float16_module, in_torch_ddp, in_megatron_ddp, in_both])
def test_a_wrapped_model_is_seen_through(wrap: Callable[[GatedDeltaNet], nn.Module]) -> None:
    config = make_config(**FUSED)
    layer = make_layer(config, layer_number=2)
    model = wrap(layer)
    assert model is not layer
    out, _ = model(make_input(config), None)
    out.float().sum().backward()
    (count,) = fusion_report(model).stage(STAGE)
    assert (count.layer, count.fused, count.unfused) == (2, {STAGE: 1}, 0)
    assert fusion_report(model) == fusion_report(layer)


def test_pipeline_chunks_are_reported_in_order() -> None:
    config = make_config(**FUSED)
    layers = [make_layer(config, layer_number=number) for number in (1, 2, 3)]
    chunks = [in_float16_module(layers[0]), nn.ModuleList(layers[1:])]
    for layer in layers[:2]:
        layer(make_input(config), None)
    for model in (chunks, tuple(chunks), iter(chunks)):
        report = fusion_report(model)
        assert [count.layer for count in report.stage(STAGE)] == [1, 2, 3]
    total = next(total for total in report.totals if total.stage == STAGE)
    assert (str(total), total.fused) == ("2/3 layers", {STAGE: 2})
    assert report.as_dict()["totals"][-1]["summary"] == "2/3 layers"


@pytest.mark.parametrize("model", [None, 3, [None], "model"], ids=str)
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(TypeError, match=r"requires a torch\.nn\.Module or a list of them .* got "):
        fusion_report(model)


def test_a_model_given_twice_counts_once() -> None:
    layer = make_layer(make_config(**FUSED))
    assert fusion_report([in_float16_module(layer), layer]) == fusion_report(layer)


def test_a_refused_construction_is_no_refused_call() -> None:
    config = make_config(**FUSED)
    layer = make_layer(config)
    layer.act_fn = torch.nn.functional.gelu
    with pytest.raises(FusionUnsupportedError):
        layer.fusion_binding.check_layer(layer)
    (count,) = fusion_report(layer).stage(STAGE)
    assert count.refused == 0
    with pytest.raises(FusionUnsupportedError):
        layer(make_input(config), None)
    (count,) = fusion_report(layer).stage(STAGE)
    assert count.refused == 1


# --- warnings


def warnings(model: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="megatron.gdn.report"):
        warn_about_idle_fusions(model)
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


def test_fusions_that_ran_and_unfused_layers_give_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fused, plain = make_layer(make_config(**FUSED)), make_layer(make_config())
    fused(make_input(make_config()), None)
    assert warnings(nn.ModuleList([fused, plain]), caplog) == []


def test_an_idle_fusion_is_named_once_with_its_layers(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(**FUSED, num_layers=8)
    layers = [make_layer(config, layer_number=number) for number in (1, 2, 3, 5, 6)]
    layers[1](make_input(config), None)
    (text,) = warnings(nn.ModuleList(layers), caplog)
    assert text.startswith(
        "layers 1,3,5-6: stage gated_output_norm: fusion gated_output_norm is selected and has "
        "not run; "
    )
    assert "fusion_report(model)" in text
    assert "gdn-list-fusions --explain" in text


def test_a_fusion_that_was_refused_has_not_run(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(**FUSED)
    layer = make_layer(config)
    config.deterministic_mode = True
    with pytest.raises(FusionUnsupportedError):
        layer(make_input(config), None)
    (text,) = warnings(layer, caplog)
    assert text.startswith("layer 1: ")


def test_a_candidate_that_waits_is_not_idle(caplog: pytest.LogCaptureFixture, tmp_path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(
        "fusions:\n"
        "- name: never\n"
        "  stage: gated_delta_rule\n"
        "  implementation: megatron.gdn.reference:gated_delta_rule\n"
        "  determinism: unknown\n"
        "  preconditions: [{kind: device_type, tensors: [q], types: [meta]}]\n"
        "- name: always\n"
        "  stage: gated_delta_rule\n"
        "  implementation: megatron.gdn.reference:gated_delta_rule\n"
        "  determinism: unknown\n"
        "  preconditions: []\n"
        "select: [{stage: gated_delta_rule, fusions: [never, always]}]\n"
    )
    config = make_config(gdn_fusion_config=str(file))
    layer = make_layer(config)
    (text,) = warnings(layer, caplog)
    assert "fusion never or always is selected and has not run" in text
    layer(make_input(config), None)
    assert warnings(layer, caplog) == []


def test_layers_of_megatron_core_cannot_run_what_is_selected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A model built from another spec than ours: no binding, so no counter either."""
    ours = make_layer(make_config(**FUSED))

    def foreign(config: Any, number: int) -> CoreGatedDeltaNet:
        spec = {"in_proj": type(ours.in_proj), "out_proj": type(ours.out_proj)}
        spec["out_norm"] = lambda *args, **kwargs: nn.RMSNorm(16)
        config.perform_initialization = False
        with parameters_on_cpu_without_cuda():
            return CoreGatedDeltaNet(
                config,
                SimpleNamespace(**spec),
                layer_number=number,
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"]),
            )

    fused, plain = make_config(**FUSED), make_config()
    model = nn.ModuleList([foreign(fused, 1), foreign(fused, 2), foreign(plain, 3)])
    (text,) = warnings(model, caplog)
    assert text.startswith(
        "layers 1-2: stage gated_output_norm: fusion gated_output_norm is selected and cannot run, "
        "since the layer is megatron-core's own"
    )
    assert fusion_report(model).counts == ()


# --- one log line a fusion


def test_each_fusion_is_announced_once_a_model(caplog: pytest.LogCaptureFixture) -> None:
    """By the lowest layer that selects it; two models of one process are announced each."""
    lines = []
    for _ in range(2):
        config = make_config(**FUSED)
        layers = [make_layer(config, layer_number=number) for number in (1, 2, 3)]
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="fusion_registry"):
            for layer in layers + layers:
                layer(make_input(config), None)
        lines.append([(record.levelname, record.getMessage()) for record in caplog.records])
    text = "layer {}: stage gated_output_norm runs fusion gated_output_norm"
    assert lines[0] == [
        ("INFO", text.format(1)),
        ("DEBUG", text.format(2)),
        ("DEBUG", text.format(3)),
    ]
    assert lines[1] == lines[0]


def test_a_fusion_of_some_layers_is_announced_by_the_first_of_them(
    caplog: pytest.LogCaptureFixture, tmp_path
) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("select: [{stage: gated_output_norm, fusions: off, layers: 1}]")
    config = make_config(**FUSED, gdn_fusion_config=str(file))
    layers = [make_layer(config, layer_number=number) for number in (1, 2, 3)]
    with caplog.at_level(logging.INFO, logger="fusion_registry"):
        for layer in layers:
            layer(make_input(config), None)
    (record,) = caplog.records
    assert record.getMessage().startswith("layer 2: stage gated_output_norm runs")


# --- NVTX


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the ranges of stages, opened (+) and closed (-), with profiling on."""
    opened: list[str] = []
    seen: list[str] = []

    def push(name: str) -> None:
        opened.append(name)
        seen.append(f"+{name}")

    def pop() -> None:
        seen.append(f"-{opened.pop()}")

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", pop)
    configure_nvtx_profiling(True)
    try:
        yield seen
    finally:
        configure_nvtx_profiling(False)
    assert opened == []


def stages_only(seen: list[str]) -> tuple[str, ...]:
    """megatron-core pushes ranges of its own, for the projections and around the norm."""
    return tuple(name for name in seen if name[1:].split(":")[0] in STAGES)


STAGES = {name[1:] for name in UNFUSED_NAMES} | {STAGE}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_ranges_are_named_after_stage_and_fusion(fused: bool, nvtx: list[str]) -> None:
    config = make_config(**FUSED) if fused else make_config()
    make_layer(config)(make_input(config), None)
    last = f"{STAGE}:{STAGE}" if fused else STAGE
    assert stages_only(nvtx) == (*UNFUSED_NAMES, f"+{last}", f"-{last}")


def test_ranges_are_closed_when_a_stage_raises(nvtx: list[str], tmp_path, monkeypatch) -> None:
    (tmp_path / "raising_fusion.py").write_text(
        "def convolve(qkv, conv_weight, conv_bias, cu_seqlens):\n    raise OSError('no luck')\n"
    )
    file = tmp_path / "raising.yaml"
    file.write_text(
        "fusions:\n"
        "- {name: raising, stage: causal_conv1d, determinism: unknown, preconditions: [],\n"
        "   implementation: 'raising_fusion:convolve'}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = make_config(gdn_fusion_config=str(file), gdn_fusions=("raising",))
    layer = make_layer(config)
    with pytest.raises(OSError, match="no luck"):
        layer(make_input(config), None)
    assert stages_only(nvtx) == (
        "+pre_gated_delta_rule",
        "+causal_conv1d:raising",
        "-causal_conv1d:raising",
        "-pre_gated_delta_rule",
    )


def test_without_profiling_no_range_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", never)
    config = make_config(**FUSED)
    make_layer(config)(make_input(config), None)


# --- after the first step of training


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for megatron-core's arguments; `curr_iteration` is what its loop counts."""
    arguments = SimpleNamespace(curr_iteration=0)
    monkeypatch.setattr(pretrain, "get_args", lambda: arguments)
    return arguments


def two_chunks(config: Any) -> list[GatedDeltaNet]:
    return [make_layer(config, layer_number=number) for number in (1, 2)]


def test_the_first_step_is_reported_once_and_idle_fusions_are_warned_of(
    training: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = make_config(**FUSED)
    first, second = two_chunks(config)
    report = pretrain.FirstStepReport()
    for step in range(3):
        training.curr_iteration = step
        for chunk in (first, second, first, second):
            report.before_forward(chunk)
            if chunk is first:
                chunk(make_input(config), None)
        assert ("fusion report\n" in capsys.readouterr().out) == (step == 1)
    report.log()
    assert capsys.readouterr().out == ""
    (text,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert text.startswith("layer 2: stage gated_output_norm: fusion gated_output_norm is selected")


@pytest.mark.parametrize("other", ["tensor", "data"])
def test_one_rank_speaks_for_its_layers(
    other: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    training: SimpleNamespace,
) -> None:
    name = "get_tensor_model_parallel_rank" if other == "tensor" else "get_data_parallel_rank"
    monkeypatch.setattr(parallel_state, name, lambda **kwargs: 1)
    report = pretrain.FirstStepReport()
    report.before_forward(make_layer(make_config(**FUSED)))
    report.log()
    assert capsys.readouterr().out == ""
    assert caplog.records == []


def test_each_pipeline_rank_reports_its_own_layers(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    training: SimpleNamespace,
) -> None:
    layer = make_layer(make_config(**FUSED))
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 1)
    report = pretrain.FirstStepReport()
    report.before_forward(layer)
    report.log()
    assert capsys.readouterr().out.startswith("pipeline rank 1 of 2, fusion report\n")
