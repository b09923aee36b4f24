# SPDX-License-Identifier: Apache-2.0
"""megatron-core's transformer configuration with the fusion fields of Gated DeltaNet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.transformer import TransformerConfig as CoreTransformerConfig

from fusion_registry import FusionConfigError
from megatron.gdn.selection import check_fusions
from megatron.gdn.stages import OPTIONS
from megatron.gdn.variant import to_megatron_core_variant


@dataclass
class TransformerConfig(CoreTransformerConfig):
    """A megatron-core `TransformerConfig` that can enable fusions of the GDN stages.

    `experimental_attention_variant` takes `gdn`, and the deprecated alias `gated_delta_net`; it
    is stored under megatron-core's own name, `gated_delta_net`.

    Raises:
        FusionConfigError: a bad fusion name, file or selection.
        FusionUnsupportedError: a selected fusion can never run under this configuration, for
            example in deterministic mode. Both are ValueErrors.
    """

    gdn_pre_gated_delta_rule_fusion: bool = False
    """Fuse causal convolution, SiLU, layout, Q/K L2 normalisation, head expansion, beta, decay."""

    gdn_gated_output_norm_fusion: bool = False
    """Fuse the output RMSNorm and the SiLU gate after the gated delta rule."""

    gdn_fusions: tuple[str, ...] = ()
    """Names of further registered fusions to use in every layer."""

    gdn_fusion_config: str | None = None
    """A YAML file that registers fusions and selects them, per stage and per layer."""

    def __post_init__(self) -> None:
        given: Any = self
        # The warning about the alias points at the caller of the generated `__init__`.
        given.experimental_attention_variant = to_megatron_core_variant(
            given.experimental_attention_variant, stacklevel=4
        )
        self._check_fusion_fields()
        super().__post_init__()
        check_fusions(self)

    def _check_fusion_fields(self) -> None:
        for option in OPTIONS:
            value = getattr(self, option)
            if not isinstance(value, bool):
                raise FusionConfigError(f"{option} must be True or False, got {value!r}")
        if self.gdn_fusions is None:
            self.gdn_fusions = ()
        names = self.gdn_fusions
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
            raise FusionConfigError(
                f"gdn_fusions must be a tuple of fusion names, got {names!r}; "
                "write ('name',) for one"
            )
        self.gdn_fusions = tuple(names)
        file = self.gdn_fusion_config
        if file is not None:
            if not isinstance(file, str | os.PathLike) or not str(file):
                raise FusionConfigError(
                    f"gdn_fusion_config must name a YAML file, got {file!r}; leave it out for none"
                )
            # Read again after a change of the fields, perhaps from another working directory.
            self.gdn_fusion_config = str(Path(file).absolute())
