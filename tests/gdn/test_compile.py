# SPDX-License-Identifier: Apache-2.0
"""`torch.compile` around a layer: fused stages run as they do without it, between the graphs."""

from __future__ import annotations

import pytest
import torch

from fusion_registry import FusionUnsupportedError
from megatron.gdn import fusion_report
from tests.gdn.layer_support import make_config, make_input, make_layer

BOTH = {"gdn_pre_gated_delta_rule_fusion": True, "gdn_gated_output_norm_fusion": True}


def test_a_compiled_layer_runs_its_fusions() -> None:
    config = make_config(**BOTH)
    plain, layer = make_layer(config), make_layer(config)
    # The compiler's front end, where it would fail; what a back end makes of the rest is torch's.
    compiled = torch.compile(layer, backend="eager")
    outs = []
    for call in (plain, compiled):
        x = make_input(config, length=4, batch=1)
        out, _ = call(x, None)
        out.float().square().sum().backward()
        outs.append((out, x.grad))
    for ours, theirs in zip(*outs, strict=True):
        assert torch.equal(ours, theirs)
    for stage in ("pre_gated_delta_rule", "gated_output_norm"):
        (count,) = fusion_report(layer).stage(stage)
        assert (count.fused, count.unfused) == ({stage: 1}, 0)
    config.deterministic_mode = True
    with pytest.raises(FusionUnsupportedError, match="deterministic_mode=False, got True"):
        compiled(make_input(config, length=4, batch=1), None)
