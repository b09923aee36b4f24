# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet training on megatron-core with fusable stages.

Names are imported when they are first used, so that tools which only read declarations work on a
machine without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.gdn.agreement import agree_on_fusions
    from megatron.gdn.config import TransformerConfig
    from megatron.gdn.layer import GatedDeltaNet
    from megatron.gdn.report import fusion_report
    from megatron.gdn.specs import (
        get_gated_delta_net_module_spec,
        get_gdn_block_spec,
        use_our_layer,
    )

_HOME = {
    "GatedDeltaNet": "megatron.gdn.layer",
    "TransformerConfig": "megatron.gdn.config",
    "agree_on_fusions": "megatron.gdn.agreement",
    "fusion_report": "megatron.gdn.report",
    "get_gated_delta_net_module_spec": "megatron.gdn.specs",
    "get_gdn_block_spec": "megatron.gdn.specs",
    "use_our_layer": "megatron.gdn.specs",
}

__all__ = [
    "GatedDeltaNet",
    "TransformerConfig",
    "agree_on_fusions",
    "fusion_report",
    "get_gated_delta_net_module_spec",
    "get_gdn_block_spec",
    "use_our_layer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
