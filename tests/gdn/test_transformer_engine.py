# SPDX-License-Identifier: Apache-2.0
"""A layer of Transformer Engine's modules: fused norm and projection, zero-centred output norm.

Transformer Engine needs a GPU to be built. Stand-ins have the module path, name and attributes that
megatron-core 0.19 gives its modules (`weight`, `eps`, `zero_centered_gamma`) and plain-torch
numerics; rules and layer cannot tell them from the real ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from fusion_registry import FusionUnsupportedError
from megatron.gdn import GatedDeltaNet, TransformerConfig, get_gated_delta_net_module_spec
from tests.gdn.layer_support import DEVICE, make_config, make_input, make_layer, start_one_rank

BOTH = {"gdn_pre_gated_delta_rule_fusion": True, "gdn_gated_output_norm_fusion": True}


class RMSNormOfOps(nn.Module):
    """Stands for `transformer_engine.pytorch.ops.RMSNorm`; keeps weight - 1 when zero-centred."""

    def __init__(self, normalized_shape: int, eps: float, zero_centered_gamma: bool) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.weight = nn.Parameter(torch.zeros(normalized_shape))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + self.zero_centered_gamma
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self.eps).to(x.dtype)


class RMSNorm(RMSNormOfOps):
    """Stands for `transformer_engine.pytorch.RMSNorm`, which newer versions build on the other."""


class LayerNorm(nn.LayerNorm):
    """Stands for `transformer_engine.pytorch.LayerNorm`, which no fusion computes."""

    def __init__(self, normalized_shape: int, eps: float, zero_centered_gamma: bool) -> None:
        super().__init__(normalized_shape, eps)
        self.zero_centered_gamma = zero_centered_gamma


RMSNorm.__module__ = "transformer_engine.pytorch.module.rmsnorm"
RMSNormOfOps.__module__ = "transformer_engine.pytorch.ops.basic.rmsnorm"
RMSNormOfOps.__qualname__ = RMSNormOfOps.__name__ = "RMSNorm"
LayerNorm.__module__ = "transformer_engine.pytorch.module.layernorm"


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """Norm and projection in one module, as in megatron-core's wrapper."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.layer_norm_weight = nn.Parameter(torch.zeros(input_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        weight = self.layer_norm_weight.float() + self.config.layernorm_zero_centered_gamma
        eps = self.config.layernorm_epsilon
        out, bias = super().forward(F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype))
        return out, bias


TELayerNormColumnParallelLinear.__module__ = "megatron.core.extensions.transformer_engine"


class Backend(LocalSpecProvider):
    """Gives megatron-core's Transformer Engine modules, as stand-ins."""

    def __init__(self, norm: type[nn.Module]) -> None:
        self.norm = norm

    def column_parallel_layer_norm_linear(self) -> type:
        return TELayerNormColumnParallelLinear

    def layer_norm(self, *_: Any, **__: Any) -> Any:
        def build(config: TransformerConfig, hidden_size: int, eps: float) -> nn.Module:
            return self.norm(hidden_size, eps, config.layernorm_zero_centered_gamma)

        # A function in a spec is taken as it is; megatron-core's `TENorm` is a class.
        return type("TENorm", (), {"__new__": lambda cls, **kwargs: build(**kwargs)})


def layer_of_stand_ins(config: TransformerConfig, norm: type[nn.Module] = RMSNorm) -> GatedDeltaNet:
    start_one_rank()
    spec = get_gated_delta_net_module_spec(config, Backend(norm))
    assert spec.metainfo == {"fuse_input_layernorm": True}
    torch.manual_seed(0)
    layer: GatedDeltaNet = build_module(
        spec,
        config=config,
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"]),
    ).to(device=DEVICE, dtype=config.params_dtype)
    with torch.no_grad():
        # Small where 1 is added: a fusion that forgets it would scale by a tenth.
        low = -0.1 if config.layernorm_zero_centered_gamma else 0.9
        for weight in (layer.out_norm.weight, layer.in_proj.layer_norm_weight):
            weight.uniform_(low, low + 0.2)
        layer.dt_bias.uniform_(-1.0, 1.0)
    return layer


def run(layer: GatedDeltaNet) -> dict[str, Tensor]:
    """Output and every gradient."""
    x = make_input(layer.config)
    out, _ = layer(x, None)
    torch.manual_seed(7)
    out.backward(torch.randn_like(out))
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"out": out, "x": x.grad, **grads}


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("norm", [RMSNorm, RMSNormOfOps], ids=["module", "ops"])
@pytest.mark.parametrize("centred", [False, True], ids=["weight", "weight_minus_one"])
def test_fused_is_close_to_unfused(centred: bool, norm: type[nn.Module]) -> None:
    changes = {"layernorm_zero_centered_gamma": centred}
    fused = layer_of_stand_ins(make_config(**BOTH, **changes), norm)
    found, expected = run(fused), run(layer_of_stand_ins(make_config(**changes), norm))
    for name, value in expected.items():
        # FP16, as in test_layer.py: 16 ulp in norm, since the order of operations differs.
        assert relative_error(found[name], value) < 16 * 2**-11, name
    stages = fused.fusion_binding.stages
    for stage in ("pre_gated_delta_rule", "gated_output_norm"):
        assert stages[stage].candidates[0].calls == 1


def test_zero_centred_means_one_is_added() -> None:
    """The same layer with weights that are one larger and not zero-centred."""
    centred = layer_of_stand_ins(make_config(**BOTH, layernorm_zero_centered_gamma=True))
    plain = layer_of_stand_ins(make_config(**BOTH))
    with torch.no_grad():
        for ours, theirs in zip(plain.parameters(), centred.parameters(), strict=True):
            ours.copy_(theirs)
        plain.out_norm.weight += 1
        plain.in_proj.layer_norm_weight += 1
    x = make_input(make_config())
    assert relative_error(centred(x, None)[0], plain(x, None)[0]) < 4 * 2**-11


def test_the_other_norm_is_refused_when_the_layer_is_built() -> None:
    config = make_config(gdn_gated_output_norm_fusion=True, normalization="LayerNorm")
    with pytest.raises(FusionUnsupportedError) as found:
        layer_of_stand_ins(config, LayerNorm)
    assert "requires the output normalization module to be RMSNorm" in str(found.value)
    assert "got LayerNorm" in str(found.value)


def test_no_stage_sees_the_fused_projection() -> None:
    """Its input is normalised inside; the stages get the projection, as with local modules."""
    names = {name for name, _ in layer_of_stand_ins(make_config(**BOTH)).named_parameters()}
    local = {name for name, _ in make_layer(make_config(**BOTH)).named_parameters()}
    assert names - local == {"in_proj.layer_norm_weight"}
    assert local <= names
