# SPDX-License-Identifier: Apache-2.0
"""The layer as stages: same results as megatron-core's, recomputation, checkpoints, inference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as CoreGatedDeltaNet
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from fusion_registry import FusionConfigError, FusionUnsupportedError
from megatron.gdn import fusion_report, get_gated_delta_net_module_spec, reference
from megatron.gdn.megatron_core_0_19 import eager_without_cuda, parameters_on_cpu_without_cuda
from megatron.gdn.stages import PRE_GATED_DELTA_RULE, STAGES
from tests.gdn.layer_support import DEVICE, make_config, make_input, make_layer

FUSED = {"gdn_gated_output_norm_fusion": True}
PRE = {"gdn_pre_gated_delta_rule_fusion": True}
OPTIONS = {"norm": FUSED, "pre": PRE, "both": {**PRE, **FUSED}}
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["gdn_norm_out"]}


def gradients(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {**found, "input": x.grad}


def run(layer: Any, x: Tensor, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and all gradients for one upstream gradient."""
    out, bias = layer(x, None, **kwargs)
    assert bias is None
    torch.manual_seed(7)
    out.backward(torch.randn_like(out))
    return out, gradients(layer, x)


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def packed(*lengths: int) -> PackedSeqParams:
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0).int()
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens.clone()
    )


@pytest.mark.parametrize("conv_bias", [False, True], ids=["no_bias", "bias"])
def test_unfused_equals_megatron_core(conv_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In deterministic mode megatron-core's own layer runs on a CPU, but for FLA's L2 norm."""
    from megatron.core.ssm.gated_delta_net import common

    monkeypatch.setattr(common, "l2norm", reference.l2_normalize)
    config = make_config(params_dtype=torch.float32, deterministic_mode=True)
    ours = make_layer(config, conv_bias=conv_bias)
    spec = replace(get_gated_delta_net_module_spec(config), module=CoreGatedDeltaNet)
    config.perform_initialization = False
    with parameters_on_cpu_without_cuda():
        theirs = build_module(
            spec,
            config=config,
            layer_number=1,
            conv_bias=conv_bias,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"]),
        ).to(DEVICE)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x, y = make_input(config), make_input(config)
    out, grads = run(ours, x)
    expected, expected_grads = run(eager_without_cuda_module(theirs), y)
    # Float32; the recurrence is evaluated token by token in one and in chunks in the other. A
    # wrong channel order or a missing transpose is off by order 1.
    assert relative_error(out, expected) < 1e-4
    for name, expected_grad in {**expected_grads, **gradients(theirs, y)}.items():
        if expected_grad is not None:
            assert relative_error(grads[name], expected_grad) < 1e-4, name


def eager_without_cuda_module(module: nn.Module) -> Any:
    call = eager_without_cuda(module.__call__)

    class Eager(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

    return Eager()


def fused_stages(options: dict[str, bool]) -> list[str]:
    return [option.removeprefix("gdn_").removesuffix("_fusion") for option in options]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fused_is_close_to_unfused(options: dict[str, bool]) -> None:
    unfused, fused = make_layer(make_config()), make_layer(make_config(**options))
    out, grads = run(fused, make_input(make_config()))
    expected, expected_grads = run(unfused, make_input(make_config()))
    # FP16; operation order differs, and the unfused path rounds beta to FP16. 16 ulp in norm; a
    # wrong head, channel or decay is off by tens of percent.
    for name in grads:
        assert relative_error(grads[name], expected_grads[name]) < 16 * 2**-11, name
    assert relative_error(out, expected) < 4 * 2**-11
    for stage in fused_stages(options):
        (count,) = fusion_report(fused).stage(stage)
        assert count.fused == {stage: 1}
        assert count.unfused == count.refused == 0
        (count,) = fusion_report(unfused).stage(stage)
        assert (count.fused, count.unfused) == ({}, 1)


@pytest.mark.parametrize(
    ("params", "changes"),
    [
        ({"conv_bias": True}, {}),
        ({"use_qk_l2norm": False}, {}),
        ({}, {"linear_conv_kernel_dim": 3}),
        ({}, {"linear_key_head_dim": 8, "linear_value_head_dim": 24}),
        ({}, {"linear_num_key_heads": 1, "linear_num_value_heads": 3}),
    ],
    ids=["conv_bias", "no_l2norm", "width3", "dk8-dv24", "hk1-hv3"],
)
def test_shapes_of_the_stage_before_the_recurrence(
    params: dict[str, bool], changes: dict[str, int]
) -> None:
    """In float32, which this stage supports and the output norm does not."""
    changes = {"params_dtype": torch.float32, **changes}
    unfused = make_layer(make_config(**changes), **params)
    fused = make_layer(make_config(**PRE, **changes), **params)
    out, grads = run(fused, make_input(make_config(**changes), length=6, batch=1))
    expected, expected_grads = run(unfused, make_input(make_config(**changes), length=6, batch=1))
    assert relative_error(out, expected) < 1e-5
    for name in grads:
        assert relative_error(grads[name], expected_grads[name]) < 1e-5, name


def test_the_norm_keeps_its_own_epsilon() -> None:
    """An epsilon that matters: a default in its place is off by tens of percent."""
    config = make_config(layernorm_epsilon=0.1)
    out, _ = make_layer(make_config(**FUSED, layernorm_epsilon=0.1))(make_input(config), None)
    expected, _ = make_layer(config)(make_input(config), None)
    assert relative_error(out, expected) < 4 * 2**-11


def test_the_norm_says_whether_its_weight_is_zero_centred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's RMSNorm keeps the flag as an attribute."""
    layer, seen = make_layer(make_config(**FUSED)), []
    monkeypatch.setattr(layer, "run_stage", lambda stage, **inputs: seen.append(inputs))
    x = torch.zeros(1, 2, 4, 16)
    for centred in (None, False, True):
        if centred is not None:
            layer.out_norm.zero_centered_gamma = centred
        layer._apply_gated_norm(x, x)
    assert [inputs["zero_centered_gamma"] for inputs in seen] == [False, False, True]
    assert all(inputs["eps"] == layer.config.layernorm_epsilon for inputs in seen)


def test_forward_is_its_two_halves() -> None:
    config = make_config(**FUSED)
    layer, x = make_layer(config), make_input(config)
    norm_out = layer.forward_pre_attn_and_core_attn(x, None)
    assert norm_out.shape == (x.shape[0], x.shape[1], 4 * 16)
    out, _ = layer.forward_post_core_attn(norm_out)
    assert torch.equal(out, layer(x, None)[0])
    assert torch.equal(out, layer.out_proj(norm_out)[0])


@pytest.mark.parametrize("options", [{}, FUSED, OPTIONS["both"]], ids=["unfused", "norm", "both"])
def test_recomputation_changes_no_bit(options: dict[str, bool]) -> None:
    plain = make_layer(make_config(**options))
    recomputing = make_layer(make_config(**options, **RECOMPUTE))
    config = make_config()
    out, grads = run(plain, make_input(config))
    again, grads_again = run(recomputing, make_input(config))
    assert torch.equal(out, again)
    for name in grads:
        assert torch.equal(grads[name], grads_again[name]), name
    (count,) = fusion_report(recomputing).stage("gated_output_norm")
    assert (sum(count.fused.values()) if options else count.unfused) == 2


def test_recomputation_releases_the_norm_output() -> None:
    config = make_config(**FUSED, **RECOMPUTE)
    layer, x = make_layer(config), make_input(config)
    norm_out = layer.forward_pre_attn_and_core_attn(x, None)
    assert norm_out.untyped_storage().nbytes() > 0
    out, _ = layer.forward_post_core_attn(norm_out)
    assert norm_out.untyped_storage().nbytes() == 0
    out.sum().backward()
    assert norm_out.untyped_storage().nbytes() > 0


def test_two_microbatches_between_the_halves() -> None:
    """Microbatch 2 may start before microbatch 1 ends, with recomputation on."""
    config = make_config(**FUSED, **RECOMPUTE)
    layer, alone = make_layer(config), make_layer(config)
    inputs = [make_input(config, seed=seed) for seed in (1, 2)]
    halves = [layer.forward_pre_attn_and_core_attn(x, None) for x in inputs]
    outs = [layer.forward_post_core_attn(half)[0] for half in halves]
    for out in outs:
        out.float().square().sum().backward()
    for seed, (x, out) in enumerate(zip(inputs, outs, strict=True), start=1):
        y = make_input(config, seed=seed)
        expected, _ = alone(y, None)
        expected.float().square().sum().backward()
        assert torch.equal(out, expected)
        assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_recomputation_refuses_second_order(fused: bool) -> None:
    """megatron-core's checkpoint cuts the graph; a gradient of a gradient would be wrong."""
    config = make_config(**(FUSED if fused else {}), **RECOMPUTE)
    layer = make_layer(config)
    out, _ = layer(make_input(config), None)
    with pytest.raises(RuntimeError, match="first-order autograd, got create_graph=True"):
        out.float().square().sum().backward(create_graph=True)


def test_recomputation_refuses_a_second_backward() -> None:
    config = make_config(**FUSED, **RECOMPUTE)
    loss = make_layer(config)(make_input(config), None)[0].float().square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"one backward for each forward, got another \(retain"):
        loss.backward()


@pytest.mark.parametrize("trained", ["out_proj.weight", "out_norm.weight"])
def test_recomputation_with_frozen_parameters(trained: str) -> None:
    plain, recomputing = (
        make_layer(make_config(**FUSED)),
        make_layer(make_config(**FUSED, **RECOMPUTE)),
    )
    grads = []
    for layer in (plain, recomputing):
        layer.requires_grad_(False)
        parameter = layer.get_parameter(trained).requires_grad_()
        out, _ = layer(make_input(make_config()).detach(), None)
        out.float().square().sum().backward()
        grads.append(parameter.grad)
    assert torch.equal(*grads)


def test_recomputation_needs_backward() -> None:
    config = make_config(**FUSED, **RECOMPUTE)
    layer, x = make_layer(config), make_input(config)
    out, _ = layer(x, None)
    with pytest.raises(RuntimeError, match=r"autograd\.grad|\.grad\(\)"):
        torch.autograd.grad(out.float().sum(), x)


def test_another_tensor_cannot_be_recomputed() -> None:
    config = make_config(**FUSED, **RECOMPUTE)
    layer = make_layer(config)
    norm_out = layer.forward_pre_attn_and_core_attn(make_input(config), None)
    with pytest.raises(ValueError, match="requires the tensor that forward_pre_attn_and_core_attn"):
        layer.forward_post_core_attn(norm_out * 1)


def test_evaluation_with_recomputation_configured() -> None:
    plain, recomputing = (
        make_layer(make_config(**FUSED)),
        make_layer(make_config(**FUSED, **RECOMPUTE)),
    )
    x = make_input(make_config())
    with torch.no_grad():
        assert torch.equal(plain(x, None)[0], recomputing(x, None)[0])
    (count,) = fusion_report(recomputing).stage("gated_output_norm")
    assert count.fused == {"gated_output_norm": 1}


def test_only_the_second_half_without_gradients() -> None:
    """Nothing is discarded, and the second half may still run for training."""
    config = make_config(**FUSED, **RECOMPUTE)
    layer, x = make_layer(config), make_input(config)
    norm_out = layer.forward_pre_attn_and_core_attn(x, None)
    with torch.no_grad():
        without, _ = layer.forward_post_core_attn(norm_out)
    out, _ = layer.forward_post_core_attn(norm_out)
    assert torch.equal(out, without)
    assert norm_out.untyped_storage().nbytes() == 0
    out.float().sum().backward()
    assert torch.isfinite(x.grad).all()


def test_refusal_by_the_recomputed_call() -> None:
    """The configuration changes between forward and backward: backward raises the same error."""
    config = make_config(**FUSED, **RECOMPUTE)
    layer, x = make_layer(config), make_input(config)
    out, _ = layer(x, None)
    config.deterministic_mode = True
    with pytest.raises(FusionUnsupportedError, match="deterministic_mode=False, got True"):
        out.sum().backward()
    (count,) = fusion_report(layer).stage("gated_output_norm")
    assert (count.fused, count.refused) == ({"gated_output_norm": 1}, 1)


def test_checkpoints_are_interchangeable() -> None:
    fused, unfused = make_layer(make_config(**FUSED), seed=1), make_layer(make_config(), seed=2)
    assert list(fused.state_dict()) == list(unfused.state_dict())
    assert sorted(fused.sharded_state_dict()) == sorted(unfused.sharded_state_dict())
    x = make_input(make_config())
    unfused.load_state_dict(fused.state_dict())
    out, expected = fused(x, None)[0], unfused(x, None)[0]
    assert relative_error(out, expected) < 4 * 2**-11
    other = make_layer(make_config(), seed=3)
    fused.load_state_dict(other.state_dict())
    assert relative_error(fused(x, None)[0], other(x, None)[0]) < 4 * 2**-11


def test_inference_goes_to_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def core_forward(self: Any, hidden_states: Tensor, mask: Any, context: Any, *rest: Any) -> Any:
        seen.append(context)
        return hidden_states, None

    monkeypatch.setattr(CoreGatedDeltaNet, "forward", core_forward)
    config = make_config(**FUSED)
    layer, x, context = make_layer(config), make_input(config), object()
    out, _ = layer(x, None, inference_context=context)
    assert out is x
    assert seen == [context]
    assert not any(count.engaged for count in fusion_report(layer).counts)


@pytest.mark.parametrize("value", ["0", "1"])
def test_environment_variable_selects_nothing(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCORE_GDN_FUSION", value)
    config = make_config()
    layer = make_layer(config)
    layer(make_input(config), None)
    (count,) = fusion_report(layer).stage("gated_output_norm")
    assert (count.fused, count.unfused) == ({}, 1)


def test_packed_documents_equal_single_ones() -> None:
    config = make_config(params_dtype=torch.float32)
    layer, lengths = make_layer(config), (5, 1, 9)
    x = make_input(config, length=sum(lengths), batch=1)
    out, _ = layer(x, None, packed_seq_params=packed(*lengths))
    start = 0
    for length in lengths:
        alone, _ = layer(x[start : start + length], None)
        torch.testing.assert_close(out[start : start + length], alone, rtol=1e-4, atol=1e-6)
        start += length


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed_documents_with_fusions(options: dict[str, bool]) -> None:
    fused, unfused = make_layer(make_config(**options)), make_layer(make_config())
    x = make_input(make_config(), length=15, batch=1)
    params = packed(5, 1, 9)
    out, expected = (layer(x, None, packed_seq_params=params)[0] for layer in (fused, unfused))
    assert relative_error(out, expected) < 4 * 2**-11
    for stage in fused_stages(options):
        assert fusion_report(fused).fused_layers(stage) == 1


@pytest.mark.parametrize(
    ("batch", "lengths", "message"),
    [
        (2, {}, "batch 1, got 2"),
        (1, {"q": [5, 6], "kv": [5, 6]}, "does not match"),
        (1, {"kv": None}, "require cu_seqlens_kv, got None"),
        (1, {"q": None}, "require cu_seqlens_q, got None"),
        (1, {"kv": [4, 8]}, "require equal cu_seqlens_q and cu_seqlens_kv"),
    ],
    ids=["batch_2", "wrong_total", "no_kv", "no_q", "unequal"],
)
def test_bad_packing_is_refused(
    batch: int, lengths: dict[str, list[int] | None], message: str
) -> None:
    config = make_config()
    layer, x = make_layer(config), make_input(config, length=12, batch=batch)
    params = packed(5, 7)
    for name, documents in lengths.items():
        value = None if documents is None else packed(*documents).cu_seqlens_q
        setattr(params, f"cu_seqlens_{name}", value)
    with pytest.raises(ValueError, match=message):
        layer(x, None, packed_seq_params=params)


def test_padded_lengths_alone_are_enough() -> None:
    config = make_config()
    layer, x = make_layer(config), make_input(config, length=12, batch=1)
    exact = packed(5, 7)
    padded = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q_padded=exact.cu_seqlens_q,
        cu_seqlens_kv_padded=exact.cu_seqlens_kv,
    )
    outs = [layer(x, None, packed_seq_params=params)[0] for params in (exact, padded)]
    assert torch.equal(*outs)


def test_documents_that_context_parallel_ranks_cannot_share() -> None:
    """megatron-core lets multiples of CP pass, and reads tokens that do not exist."""
    config = make_config()
    layer, x = make_layer(config), make_input(config, length=6, batch=1)
    layer.cp_size = 2
    message = r"multiples of 2 \* context_parallel_size = 4, got \[4, 6, 2\]; pad the documents"
    with pytest.raises(ValueError, match=message):
        layer(x, None, packed_seq_params=packed(4, 6, 2))


def test_initialisation_on_a_cpu_covers_the_declared_range() -> None:
    if DEVICE.type != "cpu":
        pytest.skip("needs a machine without CUDA, where our own initialisation runs")
    config = make_config(linear_num_value_heads=64, linear_num_key_heads=64)
    layer = make_layer(config, A_init_range=(2, 3))
    decay = layer.A_log.float().exp()
    assert decay.min() >= 2 - 1e-2
    assert decay.max() <= 3 + 1e-2
    assert decay.unique().numel() > 32


def third_party_file(folder: Path, stage: str) -> str:
    """Declares the reference of a stage as a third party's fusion and selects it in two layers."""
    file = folder / f"{stage}.yaml"
    file.write_text(
        f"fusions:\n"
        f"  - name: third_party_{stage}\n"
        f"    stage: {stage}\n"
        f"    implementation: megatron.gdn.reference:{stage}\n"
        f"    determinism: deterministic\n"
        f"    preconditions: []\n"
        f"select:\n"
        f"  - {{stage: {stage}, fusions: [third_party_{stage}], layers: 1-2}}\n"
    )
    return str(file)


@pytest.mark.parametrize("stage", [stage.name for stage in STAGES])
def test_a_third_party_fusion_by_a_config_file_alone(stage: str, tmp_path: Path) -> None:
    """Nothing under megatron/gdn knows these fusions."""
    config = make_config(gdn_fusion_config=third_party_file(tmp_path, stage))
    x = make_input(config)
    plain = make_layer(make_config())
    for number, used in ((1, True), (3, False)):
        layer = make_layer(config, layer_number=number)
        out, _ = layer(x, None)
        (count,) = fusion_report(layer).stage(stage)
        assert count.fused == ({f"third_party_{stage}": 1} if used else {})
        assert count.unfused == (0 if used else 1)
        assert relative_error(out, plain(x, None)[0]) < 1e-2


@pytest.mark.parametrize("child", PRE_GATED_DELTA_RULE.children)
def test_a_stage_and_its_child_cannot_both_be_claimed(child: str, tmp_path: Path) -> None:
    with pytest.raises(FusionConfigError, match="both claimed") as found:
        make_config(**PRE, gdn_fusion_config=third_party_file(tmp_path, child))
    assert "gdn_pre_gated_delta_rule_fusion=True" in str(found.value)
    assert f"{child}.yaml:8" in str(found.value)
