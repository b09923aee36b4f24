# SPDX-License-Identifier: Apache-2.0
"""Forward pre-hooks run before a parameter is read, fused or not: parameters may come late.

megatron-core's distributed optimizer with `overlap_param_gather` waits for them in such hooks.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor, nn

from megatron.gdn import GatedDeltaNet
from tests.gdn.layer_support import DEVICE, make_config, make_input, make_layer

OPTIONS: dict[str, dict[str, Any]] = {
    "unfused": {},
    "norm": {"gdn_gated_output_norm_fusion": True},
    "pre": {"gdn_pre_gated_delta_rule_fusion": True},
    "both": {"gdn_pre_gated_delta_rule_fusion": True, "gdn_gated_output_norm_fusion": True},
}
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["gdn_norm_out"]}


def late_parameters(layer: GatedDeltaNet) -> Counter[str]:
    """Poison every parameter until a pre-hook of its module puts the values back; count hooks."""
    calls: Counter[str] = Counter()
    for name, module in layer.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        values = {key: parameter.detach().clone() for key, parameter in own.items()}

        def arrive(
            module: nn.Module,
            args: Any,
            name: str = name,
            own: dict[str, nn.Parameter] = own,
            values: dict[str, Tensor] = values,
        ) -> None:
            calls[name] += 1
            for key, parameter in own.items():
                parameter.data.copy_(values[key])

        module.register_forward_pre_hook(arrive)
        for parameter in own.values():
            parameter.data.fill_(float("nan"))
    return calls


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_hooks_run_before_weights_are_read(options: dict[str, Any], recompute: bool) -> None:
    changes = {**options, **(RECOMPUTE if recompute else {})}
    plain, late = make_layer(make_config(**changes)), make_layer(make_config(**changes))
    calls = late_parameters(late)
    outs = []
    for layer in (plain, late):
        x = make_input(make_config(), length=4, batch=1)
        out, _ = layer(x, None)
        out.float().square().sum().backward()
        outs.append((out, x.grad))
    for ours, theirs in zip(*outs, strict=True):
        assert torch.equal(ours, theirs)
    # As often as if every module were called; the recomputed norm is called once more.
    once = dict.fromkeys(["", "in_proj", "conv1d", "out_norm", "out_proj"], 1)
    assert calls == once | {"out_norm": 2 if recompute else 1}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_overlapped_parameter_gather(options: dict[str, Any]) -> None:
    """megatron-core's own hooks, each parameter in a bucket of its own: all are waited for."""
    config = make_config(**options)
    expected, _ = make_layer(config)(make_input(config, length=4, batch=1), None)
    layer = make_layer(config)
    with mock.patch.object(torch.cuda, "current_device", return_value=DEVICE):
        wrapped = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                overlap_grad_reduce=True,
                overlap_param_gather=True,
                bucket_size=1,
            ),
            layer,
        )
    names = {parameter: name for name, parameter in layer.named_parameters()}
    waited = []
    for group in wrapped.bucket_groups:
        parameters = [p for bucket in group.buckets for p in bucket.params_list]
        values = [parameter.detach().clone() for parameter in parameters]

        def finish(
            skip_next_bucket_dispatch: bool = False,
            parameters: list[nn.Parameter] = parameters,
            values: list[Tensor] = values,
        ) -> None:
            waited.extend(names[parameter] for parameter in parameters)
            for parameter, value in zip(parameters, values, strict=True):
                parameter.data.copy_(value)

        group.finish_param_sync = finish
        for parameter in parameters:
            parameter.data.fill_(float("nan"))
    out, _ = wrapped(make_input(config, length=4, batch=1), None)
    assert sorted(waited) == sorted(names.values())
    assert torch.equal(out, expected)


def test_a_hook_may_replace_the_input_of_the_norm() -> None:
    """As `nn.Module` allows: the fused norm then works on what the hook returned."""
    outs = []
    for options in (OPTIONS["unfused"], OPTIONS["norm"]):
        layer = make_layer(make_config(**options))
        layer.out_norm.register_forward_pre_hook(lambda module, args: (args[0].flip(-1),))
        layer.out_norm.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs), with_kwargs=True
        )
        outs.append(layer(make_input(make_config()), None)[0])
    assert torch.allclose(*outs, rtol=0, atol=4e-3 * outs[0].abs().max().item())
    plain = make_layer(make_config())(make_input(make_config()), None)[0]
    assert not torch.allclose(outs[0], plain, rtol=0, atol=0.1 * plain.abs().max().item())


def test_refused_hooks() -> None:
    layer = make_layer(make_config(**OPTIONS["both"]))
    x = make_input(make_config())
    handle = layer.conv1d.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with pytest.raises(ValueError, match="pre-hook of conv1d must leave its input as it is"):
        layer(x, None)
    handle.remove()
    layer.out_norm.register_forward_pre_hook(lambda module, args: (args[0], args[0]))
    with pytest.raises(ValueError, match="RMSNorm must return one tensor or None"):
        layer(x, None)


def test_hooks_of_all_modules_are_run_too() -> None:
    layer, seen = make_layer(make_config(**OPTIONS["both"])), []
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: seen.append(module)
    )
    try:
        layer(make_input(make_config(), length=4, batch=1), None)
    finally:
        handle.remove()
    for module in (layer, layer.in_proj, layer.conv1d, layer.out_norm, layer.out_proj):
        assert sum(other is module for other in seen) == 1
