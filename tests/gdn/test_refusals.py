# SPDX-License-Identifier: Apache-2.0
"""With `gdn_gated_output_norm_fusion` on, what is not supported raises, and says why."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_registry.preconditions as preconditions
from fusion_registry import FusionUnsupportedError
from megatron.gdn.fusions.gated_output_norm import fused_gated_output_norm
from tests.gdn.layer_support import DEVICE, make_config, make_input, make_layer

OPTION = "gdn_gated_output_norm_fusion"
FUSED = {OPTION: True}


def expect(found: pytest.ExceptionInfo[FusionUnsupportedError], rule: str, value: str) -> None:
    """A ValueError whose text names the option, the rule and the value, and how to go on."""
    assert isinstance(found.value, ValueError)
    text = str(found.value)
    assert re.search(rf"{OPTION} requires {re.escape(rule)}, got {re.escape(value)}", text), text
    assert "disable the option to run unfused" in text
    assert "stage gated_output_norm" in text


def test_deterministic_mode_when_the_config_is_built() -> None:
    with pytest.raises(FusionUnsupportedError) as found:
        make_config(**FUSED, deterministic_mode=True)
    expect(found, "deterministic_mode=False", "True")


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"experimental_attention_variant": None, "linear_attention_freq": None}, "None"),
        (
            {"experimental_attention_variant": "dsa", "linear_attention_freq": None},
            "'dsa'",
        ),
    ],
    ids=["none", "dsa"],
)
def test_variant_not_gdn(changes: dict[str, Any], value: str) -> None:
    with pytest.raises(FusionUnsupportedError) as found:
        make_config(**FUSED, **changes)
    expect(found, "experimental_attention_variant to be gdn, or a hybrid model", value)


def test_gelu_when_the_layer_is_built() -> None:
    with pytest.raises(FusionUnsupportedError) as found:
        make_layer(make_config(**FUSED, activation_func=F.gelu))
    expect(found, "activation to be silu or swish", "'gelu'")


@pytest.mark.parametrize(
    ("build", "changes", "message"),
    [
        (make_config, {"deterministic_mode": True}, "deterministic_mode=False, got True"),
        (
            make_config,
            {"linear_conv_kernel_dim": 9},
            "linear_conv_kernel_dim to be 2, 3, 4, 5, 6, 7 or 8, got 9",
        ),
        (
            lambda **options: make_layer(make_config(**options)),
            {"activation_func": F.gelu},
            "activation to be silu or swish, got 'gelu'",
        ),
    ],
    ids=["deterministic", "width9", "gelu"],
)
def test_the_stage_before_the_recurrence(
    build: Callable[..., object], changes: dict[str, Any], message: str
) -> None:
    option = "gdn_pre_gated_delta_rule_fusion"
    with pytest.raises(FusionUnsupportedError) as found:
        build(**{option: True}, **changes)
    assert f"{option} requires {message}" in str(found.value)
    assert "disable the option to run unfused" in str(found.value)


def test_layer_norm_when_the_layer_is_built() -> None:
    with pytest.raises(FusionUnsupportedError) as found:
        make_layer(make_config(**FUSED, normalization="LayerNorm"))
    expect(found, "the output normalization module to be RMSNorm", "LayerNorm")


Change = Callable[[Any], None]


def _replace_norm(module: nn.Module) -> Change:
    def change(layer: Any) -> None:
        layer.out_norm = module.to(DEVICE)

    return change


def _remove_norm(layer: Any) -> None:
    del layer.out_norm


def _set(path: str, value: Any) -> Change:
    def change(layer: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            layer = getattr(layer, parent)
        setattr(layer, name, value)

    return change


class ShiftedNorm(nn.RMSNorm):
    """Stores its weight minus one, as some models do, without the attribute that says so."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


NORM = "the output normalization module to be RMSNorm"


@pytest.mark.parametrize(
    ("change", "rule", "value"),
    [
        (_replace_norm(nn.LayerNorm(16)), NORM, "LayerNorm"),
        (_replace_norm(nn.Identity()), NORM, "Identity"),
        (_set("out_norm", None), NORM, "NoneType"),
        (_remove_norm, NORM, "nothing of that name"),
        (_set("act_fn", F.gelu), "activation to be silu or swish", "'gelu'"),
        (_set("config.deterministic_mode", True), "deterministic_mode=False", "True"),
        (
            _set("config.experimental_attention_variant", "dsa"),
            "experimental_attention_variant to be gdn, or a hybrid model",
            "'dsa'",
        ),
        (
            _replace_norm(nn.RMSNorm(16, eps=1e-5, elementwise_affine=False)),
            "weight to be given",
            "None",
        ),
        (
            _replace_norm(nn.RMSNorm(16)),
            "eps to be a finite number of at least 0",
            "None",
        ),
        (
            _replace_norm(type("RMSNorm", (nn.Identity,), {})()),
            NORM,
            f"{__name__}.RMSNorm, another class of that name",
        ),
        (_replace_norm(ShiftedNorm(16)), NORM, "ShiftedNorm with a forward of its own"),
        (
            _replace_norm(nn.RMSNorm(8, eps=1e-5)),
            "head_dim of weight to be equal to head_dim of x",
            "8 beside 16",
        ),
        (
            _replace_norm(nn.RMSNorm(16, eps=1e-5).double()),
            "weight in bfloat16, float16 or float32",
            "float64",
        ),
    ],
    ids=[
        "layer_norm",
        "identity",
        "none",
        "deleted",
        "gelu",
        "deterministic",
        "variant",
        "no_weight",
        "no_eps",
        "another_class",
        "own_forward",
        "weight_length",
        "weight_float64",
    ],
)
def test_changes_after_construction(change: Change, rule: str, value: str) -> None:
    config = make_config(**FUSED)
    layer, x = make_layer(config), make_input(config)
    layer(x, None)
    change(layer)
    with pytest.raises(FusionUnsupportedError) as found:
        layer(x, None)
    expect(found, rule, value)
    assert ", layer 1)" in str(found.value)


def test_float32_recurrence_output() -> None:
    config = make_config(**FUSED, params_dtype=torch.float32)
    layer = make_layer(config)
    with pytest.raises(FusionUnsupportedError) as found:
        layer(make_input(config), None)
    expect(found, "x in bfloat16 or float16", "float32")


def test_head_dim_96() -> None:
    config = make_config(**FUSED, linear_value_head_dim=96)
    layer = make_layer(config)
    with pytest.raises(FusionUnsupportedError) as found:
        layer(make_input(config), None)
    expect(found, "a power-of-two head dimension", "96")


def test_empty_batch() -> None:
    config = make_config(**FUSED)
    layer = make_layer(config)
    with pytest.raises(FusionUnsupportedError) as found:
        layer._apply_gated_norm(*(torch.empty(0, 3, 4, 16).half().to(DEVICE) for _ in range(2)))
    expect(found, "x to be nonempty", "shape [0, 3, 4, 16]")


def norm_inputs(**changes: Any) -> dict[str, Any]:
    inputs = {
        "x": torch.randn(2, 3, 4, 16, dtype=torch.float16),
        "gate": torch.randn(2, 3, 4, 16, dtype=torch.float16),
        "weight": torch.ones(16),
        "eps": 1e-5,
        "zero_centered_gamma": False,
    }
    inputs.update(changes)
    return {
        name: value.to(DEVICE) if isinstance(value, Tensor) and not value.is_meta else value
        for name, value in inputs.items()
    }


CALLS: dict[str, tuple[dict[str, Any], str, str]] = {
    "x_3d": (
        {"x": torch.ones(2, 3, 16).half(), "gate": torch.ones(2, 3, 16).half()},
        "x of shape [batch, sequence_length, local_heads, head_dim]",
        "3 dimensions [2, 3, 16]",
    ),
    "gate_shape": (
        {"gate": torch.ones(2, 3, 4, 8).half()},
        "x and gate of one shape",
        "x [2, 3, 4, 16] and gate [2, 3, 4, 8]",
    ),
    "empty": (
        {"x": torch.ones(2, 0, 4, 16).half(), "gate": torch.ones(2, 0, 4, 16).half()},
        "x to be nonempty",
        "shape [2, 0, 4, 16]",
    ),
    "head_dim_96": (
        {
            "x": torch.ones(2, 3, 4, 96).half(),
            "gate": torch.ones(2, 3, 4, 96).half(),
            "weight": torch.ones(96),
        },
        "a power-of-two head dimension",
        "96",
    ),
    "x_float32": (
        {"x": torch.ones(2, 3, 4, 16)},
        "x in bfloat16 or float16",
        "float32",
    ),
    "gate_float64": (
        {"gate": torch.ones(2, 3, 4, 16).double()},
        "gate in the dtype of x or float32",
        "float64 beside float16",
    ),
    "gate_bfloat16_beside_float16": (
        {"gate": torch.ones(2, 3, 4, 16).bfloat16()},
        "gate in the dtype of x or float32",
        "bfloat16 beside float16",
    ),
    "weight_length": (
        {"weight": torch.ones(8)},
        "head_dim of weight to be equal to head_dim of x",
        "8 beside 16",
    ),
    "weight_2d": (
        {"weight": torch.ones(1, 16)},
        "weight of shape [head_dim]",
        "2 dimensions [1, 16]",
    ),
    "weight_strided": (
        {"weight": torch.ones(32)[::2]},
        "weight to be contiguous",
        "shape [16] with strides [2]",
    ),
    "weight_float64": (
        {"weight": torch.ones(16).double()},
        "weight in bfloat16, float16 or float32",
        "float64",
    ),
    "weight_on_another_device": (
        {"weight": torch.ones(16, device="meta")},
        "x, gate and weight on one device",
        f"x on {torch.ones(1, device=DEVICE).device} and weight on meta",
    ),
    "no_weight": ({"weight": None}, "weight to be given", "None"),
    **{
        f"eps_{eps}": ({"eps": eps}, "eps to be a finite number of at least 0", repr(eps))
        for eps in (None, True, "a", -1.0, float("nan"), float("inf"))
    },
}


@pytest.mark.parametrize("through", ["layer", "direct"])
@pytest.mark.parametrize("case", CALLS)
def test_calls(case: str, through: str) -> None:
    """Through the layer's stage, and by a direct call of the public function."""
    changes, rule, value = CALLS[case]
    inputs = norm_inputs(**changes)
    layer = make_layer(make_config(**FUSED))
    call = fused_gated_output_norm
    if through == "layer":
        call = partial(layer.run_stage, "gated_output_norm")
    with pytest.raises(FusionUnsupportedError) as found:
        call(**inputs)
    expect(found, rule, value)
    assert found.value.fusion == "gated_output_norm"
    assert found.value.layer == (1 if through == "layer" else None)


@pytest.mark.parametrize("through", ["layer", "direct"])
def test_cpu_tensors_without_the_interpreter(through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(make_config(**FUSED))
    monkeypatch.setattr(preconditions, "triton_interpreter_is_on", lambda: False)
    inputs = {
        name: value.cpu() if isinstance(value, Tensor) else value
        for name, value in norm_inputs().items()
    }
    call = fused_gated_output_norm
    if through == "layer":
        call = partial(layer.run_stage, "gated_output_norm")
    with pytest.raises(FusionUnsupportedError) as found:
        call(**inputs)
    expect(
        found,
        "x, gate and weight on CUDA (or CPU tensors under Triton's interpreter)",
        "x on cpu",
    )


def test_a_call_lists_all_its_reasons() -> None:
    inputs = norm_inputs(
        x=torch.ones(2, 3, 4, 96), gate=torch.ones(2, 3, 4, 96), weight=torch.ones(32)[::2]
    )
    with pytest.raises(FusionUnsupportedError) as found:
        fused_gated_output_norm(**inputs)
    assert [reason.code for reason in found.value.reasons] == [
        "dim_relation:x.head_dim",
        "dtype_in:x",
        "dim_relation:weight.head_dim,x.head_dim",
        "contiguous:weight",
    ]


def test_a_direct_call_needs_tensors() -> None:
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        fused_gated_output_norm(**norm_inputs(x=[1.0]))
