# SPDX-License-Identifier: Apache-2.0
"""Runs layers with fusions of an installed plug-in beside unfused ones; prints one JSON object.

    python plugin_run.py NAME...      each name alone in `gdn_fusions`

In a process of its own: entry points are found on the path that Python started with.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from fusion_registry import FusionConfigError
from megatron.gdn import GatedDeltaNet, fusion_report
from tests.gdn.layer_support import make_config, make_input, make_layer

FLOAT32 = {"params_dtype": torch.float32}


def forward_and_backward(layer: GatedDeltaNet) -> dict[str, Tensor]:
    """Output and every gradient, by name."""
    x = make_input(layer.config, length=20)
    out, _ = layer(x, None)
    torch.manual_seed(7)
    out.backward(torch.randn_like(out))
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {**found, "input": x.grad, "output": out.detach()}


def compare(**fusions: Any) -> dict[str, Any]:
    """Relative errors against the unfused layer, or why the selection is refused."""
    try:
        layer = make_layer(make_config(**FLOAT32, **fusions))
    except FusionConfigError as error:
        return {"refused": str(error)}
    mine, expected = (
        forward_and_backward(item) for item in (layer, make_layer(make_config(**FLOAT32)))
    )
    return {
        "errors": {
            name: ((mine[name] - expected[name]).norm() / expected[name].norm()).item()
            for name in expected
        },
        "report": fusion_report(layer).as_dict()["totals"],
    }


def main(names: list[str]) -> None:
    """Print what each selection does."""
    results = {name: compare(gdn_fusions=(name,)) for name in names}
    results["nothing selected"] = compare()
    # A built-in fusion by its own option, whatever a plug-in declares under its name.
    half = {"params_dtype": torch.float16}
    layer = make_layer(make_config(**half, gdn_gated_output_norm_fusion=True))
    layer(make_input(layer.config), None)
    results["by option"] = {"report": fusion_report(layer).as_dict()["totals"]}
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
