# SPDX-License-Identifier: Apache-2.0
"""Refuses a model whose layers cannot run the fusions that were asked for.

A spec of a user's own may build a layer of another class than ours, which knows no stages. An
explicit request runs or raises, so such a model must not start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from fusion_registry import Binding, FusionConfigError
from megatron.gdn.megatron_core_0_19 import CoreGatedDeltaNet
from megatron.gdn.selection import requests_fusions, select_fusions
from megatron.gdn.variant import gdn_layer_numbers


def check_built_model(chunks: Iterable[nn.Module]) -> None:
    """Check each layer of the decoder for which a fusion is selected; layers without one pass.

    Args:
        chunks: the model's chunks on this pipeline rank, not wrapped: GPT or hybrid models.

    Raises:
        FusionConfigError: a ValueError: such a layer has no stages.
    """
    for chunk in chunks:
        config: Any = getattr(chunk, "config", None)
        decoder: Any = getattr(chunk, "decoder", None)
        if decoder is None or not requests_fusions(config):
            continue
        numbers, selection = gdn_layer_numbers(config), select_fusions(config)
        for layer in decoder.layers:
            number = layer.layer_number
            modules = list(layer.modules())
            if numbers is None:
                wanted = any(isinstance(module, CoreGatedDeltaNet) for module in modules)
            else:
                wanted = number in numbers
            if not wanted or any(
                isinstance(vars(module).get("fusion_binding"), Binding) for module in modules
            ):
                continue
            for claim in selection.for_layer(number).values():
                built = type(getattr(layer, "self_attention", layer))
                raise FusionConfigError(
                    f"layer {number} cannot run fusion {' or '.join(claim.candidates)} of stage "
                    f"{claim.stage}, asked for by {claim.origin}: its spec builds "
                    f"{built.__module__}.{built.__qualname__}, which has no stages; name "
                    "megatron.gdn.GatedDeltaNet or megatron-core's GatedDeltaNet there, make "
                    "--linear-attention-freq say which layers are Gated DeltaNet layers, or "
                    "deselect the fusion"
                )
