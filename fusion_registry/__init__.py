# SPDX-License-Identifier: Apache-2.0
"""A registry of fused implementations for the named stages of a layer.

Declarations are data (`schema`), their preconditions are rules (`preconditions`), a `Registry`
holds them, a `Selection` says what the user enabled, a `Binding` is what one layer runs. Importing
this package imports neither torch nor triton.
"""

from fusion_registry.binding import (
    Binding,
    ProfilerRange,
    check_config,
    checked_by_declaration,
    unavailable,
)
from fusion_registry.contracts import StageContract, StageInput, StageOutput
from fusion_registry.errors import FusionConfigError, FusionUnsupportedError, Reason
from fusion_registry.machine import Machine
from fusion_registry.registry import Catalogue, Registry, load_registry
from fusion_registry.report import FusionReport, report_bindings
from fusion_registry.selection import Request, Selection, select

__all__ = [
    "Binding",
    "Catalogue",
    "FusionConfigError",
    "FusionReport",
    "FusionUnsupportedError",
    "Machine",
    "ProfilerRange",
    "Reason",
    "Registry",
    "Request",
    "Selection",
    "StageContract",
    "StageInput",
    "StageOutput",
    "check_config",
    "checked_by_declaration",
    "load_registry",
    "report_bindings",
    "select",
    "unavailable",
]
