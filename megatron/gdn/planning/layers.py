# SPDX-License-Identifier: Apache-2.0
"""A Gated DeltaNet layer of planned tensors: shapes, strides, dtypes and devices without memory.

Planned tensors are PyTorch's fake tensors. They stand on a device that this machine need not have,
and a view of one is a view with the strides of the real thing, so what a stage would be handed in
a run can be shown to the rules that judge it there. The layer is the real `GatedDeltaNet`, built by
megatron-core's constructor from the run's own spec, on process groups of which only size and rank
are known.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_registry import Machine
from megatron.gdn.config import TransformerConfig
from megatron.gdn.layer import GatedDeltaNet
from megatron.gdn.megatron_core_0_19 import group_sizes_without_distributed
from megatron.gdn.specs import get_gated_delta_net_module_spec
from megatron.gdn.stages import OPTIONS

FUSION_FIELDS = (*OPTIONS, "gdn_fusions", "gdn_fusion_config")
"""Fields of the configuration that select fusions."""

NO_FUSIONS: dict[str, Any] = {
    **dict.fromkeys(OPTIONS, False),
    "gdn_fusions": (),
    "gdn_fusion_config": None,
}
"""Values of `FUSION_FIELDS` that select nothing."""


@dataclass(frozen=True)
class PlannedCall:
    """What every layer is called with.

    Args:
        batch: sequences a microbatch.
        length: tokens a sequence, on all context-parallel ranks together.
        documents: documents packed into the sequence, or None when it is one.
    """

    batch: int
    length: int
    documents: int | None = None


@dataclass(frozen=True)
class _PlannedGroup:
    """A process group as a constructor sees it; rank 0 stands for all, since all are alike."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


class PlannedLayers:
    """Makes the layers of a run, and the tensors that they are called with, on one machine.

    Args:
        config: the run's configuration.
        machine: where the run is planned.

    Attributes:
        dtype: of the activations.
    """

    def __init__(self, config: TransformerConfig, machine: Machine) -> None:
        self.config = config
        self.device = torch.device("cuda", 0) if machine.device_type == "cuda" else "cpu"
        self.mode = FakeTensorMode()
        half = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None
        self._half = half
        self.dtype = half or config.params_dtype

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """In it, whatever a layer computes is planned and not computed."""
        # megatron-core compiles some methods; tracing them would gain nothing here.
        with self.mode, torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield

    def build(self, layer_number: int) -> GatedDeltaNet:
        """One layer, parameters in the dtypes of training, unfused so far.

        Raises:
            Exception: whatever megatron-core's constructors refuse.
        """
        # Fusions that cannot serve the layer would refuse it here, before their reasons are told.
        quiet = copy.copy(self.config)
        for name, value in NO_FUSIONS.items():
            setattr(quiet, name, value)
        quiet.use_cpu_initialization = True
        quiet.perform_initialization = False
        groups = SimpleNamespace(
            tp=_PlannedGroup(self.config.tensor_model_parallel_size),
            cp=_PlannedGroup(self.config.context_parallel_size),
        )
        with self.planning(), group_sizes_without_distributed():
            layer: GatedDeltaNet = build_module(
                _spec(self.config), config=quiet, layer_number=layer_number, pg_collection=groups
            )
            for module in layer.modules():
                if getattr(module, "config", None) is quiet:
                    setattr(module, "config", self.config)  # noqa: B010  # nn.Module's typing
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        module._parameters[name] = nn.Parameter(
                            torch.empty(
                                parameter.shape,
                                dtype=self._half or parameter.dtype,
                                device=self.device,
                            )
                        )
        return layer

    def projection(self, layer: GatedDeltaNet, call: PlannedCall) -> Tensor:
        """What the stages start from, `[s, b, C]`: the projection, gathered over the ranks."""
        channels = sum(layer.in_proj_split_sections) // layer.cp_size
        return torch.empty(call.length, call.batch, channels, dtype=self.dtype, device=self.device)

    def cu_seqlens(self, layer: GatedDeltaNet, call: PlannedCall) -> tuple[Tensor | None, str]:
        """Cumulative document lengths, and what the layer refuses about them, if anything."""
        if call.documents is None:
            return None, ""
        step = 2 * layer.cp_size
        each = call.length // max(call.documents, 1) // step * step
        ends = [each * index for index in range(1, call.documents)]
        lengths = torch.tensor([0, *ends, call.length][: call.documents + 1], dtype=torch.int32)
        problem = ""
        try:
            layer._packed_lengths(
                PackedSeqParams(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths),
                call.batch,
                call.length,
            )
        except ValueError as error:
            problem = str(error)
        with self.planning():
            return torch.empty(lengths.shape, dtype=torch.int32, device=self.device), problem


def _spec(config: TransformerConfig) -> ModuleSpec:
    if config.transformer_impl != "transformer_engine":
        return get_gated_delta_net_module_spec(config)
    # Transformer Engine's modules want a GPU when they are built, and need not be installed where
    # a run is planned. No stage sees the projections; the norm stands in by name and attributes.
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=IdentityOp,
            out_norm=RMSNorm if config.normalization == "RMSNorm" else LayerNorm,
            out_proj=IdentityOp,
        ),
    )


class _TransformerEngineNorm(nn.Module):
    """A norm of Transformer Engine as rules see it: class name, weight, eps, zero_centered_gamma.

    Args:
        config, hidden_size, eps: as megatron-core passes them.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma


class RMSNorm(_TransformerEngineNorm):
    """Stands for `transformer_engine.pytorch.RMSNorm`."""

    __module__ = "transformer_engine.pytorch.module.rmsnorm"


class LayerNorm(_TransformerEngineNorm):
    """Stands for `transformer_engine.pytorch.LayerNorm`."""

    __module__ = "transformer_engine.pytorch.module.layernorm"
