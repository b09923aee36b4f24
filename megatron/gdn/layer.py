# SPDX-License-Identifier: Apache-2.0
"""megatron-core's Gated DeltaNet layer, its forward expressed as stages.

The layer asks its binding at every stage, on every forward, and again when the output norm is
recomputed. Which stages exist is said in `stages`, what runs unfused in `unfused`; communication
(projections, head redistribution of context parallelism) stays megatron-core's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import (
    GatedDeltaNetSubmodules,
    get_parameter_local_cp,
    tensor_a2a_cp2hp,
)
from megatron.core.transformer import TransformerConfig as CoreTransformerConfig
from megatron.core.utils import deprecate_inference_params, nvtx_range_pop, nvtx_range_push
from torch import Tensor

from fusion_registry import ProfilerRange
from megatron.gdn.forward_pre_hooks import has_forward_pre_hooks, run_forward_pre_hooks
from megatron.gdn.megatron_core_0_19 import (
    CoreGatedDeltaNet,
    head_permutation_for_context_parallel,
    norm_out_checkpoint,
    parameters_on_cpu_without_cuda,
    token_permutation_for_packed_context_parallel,
)
from megatron.gdn.norm_gradient import sum_norm_gradient
from megatron.gdn.selection import bind_layer

_CHECKPOINT = "_gdn_norm_out_checkpoint"


class _OneBackward:
    """Hook on an output whose norm is recomputed, before megatron-core's own.

    megatron-core's checkpoint cuts the graph there, so that a gradient of the gradient would
    silently lack that part; and it lets go of its inputs after one backward.
    """

    def __init__(self) -> None:
        self.ran = False

    def __call__(self, _: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "recomputation of gdn_norm_out requires first-order autograd, got "
                "create_graph=True; take gdn_norm_out from recompute_modules"
            )
        if self.ran:
            raise RuntimeError(
                "recomputation of gdn_norm_out requires one backward for each forward, got another "
                "(retain_graph=True); take gdn_norm_out from recompute_modules"
            )
        self.ran = True


_NVTX = ProfilerRange(nvtx_range_push, nvtx_range_pop)


def _stores_weight_minus_one(norm: Any) -> bool:
    """Transformer Engine's RMSNorm says so in an attribute; other norms have none."""
    own = getattr(norm, "__dict__", ())  # a norm that was taken away has none
    if "zero_centered_gamma" in own or hasattr(type(norm), "zero_centered_gamma"):
        return bool(norm.zero_centered_gamma)
    return False


@torch.compiler.disable
def _run_outside_graph(layer: GatedDeltaNet, stage: str, inputs: dict[str, Any]) -> Any:
    """A fused stage in a forward that `torch.compile` traces: a break of the graph.

    Its judgement and launch are host code, which the compiler would trace into and fail at.
    """
    return layer.fusion_binding.run(stage, layer, inputs)


class GatedDeltaNet(CoreGatedDeltaNet):
    """A Gated DeltaNet layer whose stages can be fused.

    Constructor, parameters, initialisation and checkpoint keys are those of
    `megatron.core.ssm.gated_delta_net.GatedDeltaNet`. Which fusions it runs follows from the
    fusion fields of `megatron.gdn.TransformerConfig`; with a plain megatron-core configuration it
    runs unfused. Runs on a CPU as well, with `use_cpu_initialization=True`.

    Attributes:
        fusion_binding: what each stage runs, and how often it did.

    Raises:
        FusionConfigError: a bad selection, or an implementation that cannot be used.
        FusionUnsupportedError: a selected fusion can never serve this layer.
    """

    def __init__(
        self,
        config: CoreTransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int | None = None,
        bias: bool = False,
        conv_bias: bool = False,
        conv_init: float | None = None,
        use_qk_l2norm: bool = True,
        A_init_range: tuple[float, float] = (1, 16),
        pg_collection: ProcessGroupCollection | None = None,
        *,
        name: str | None = None,
        cp_comm_type: str | None = None,
    ) -> None:
        with parameters_on_cpu_without_cuda():
            super().__init__(
                config,
                submodules,
                layer_number,
                bias,
                conv_bias,
                conv_init,
                use_qk_l2norm,
                A_init_range,
                pg_collection,
                name=name,
                cp_comm_type=cp_comm_type,
            )
        self.fusion_binding = bind_layer(config, layer_number, _NVTX)
        self.fusion_binding.check_layer(self)

    def reset_parameters(self) -> None:
        """Initialise as megatron-core does; without CUDA from torch's CPU generator.

        On the CPU every tensor-parallel rank draws the decay of all heads and keeps its own, so
        that the values do not depend on the parallel layout.
        """
        if torch.cuda.is_available():
            super().reset_parameters()
            return
        if not self.config.perform_initialization:
            return
        if self.conv_init is not None:
            torch.nn.init.uniform_(self.conv1d.weight, -self.conv_init, self.conv_init)
        with torch.no_grad():
            self.dt_bias.fill_(1.0)
            decay = torch.empty(self.num_value_heads).uniform_(*self.A_init_range).log()
            rank, heads = self.tp_group.rank(), self.num_v_heads_local_tp
            self.A_log.copy_(decay[rank * heads : (rank + 1) * heads])

    def run_stage(self, stage: str, **inputs: Any) -> Any:
        """Run one stage on its named inputs: the bound fusion, or the unfused code.

        With NVTX profiling on, the range is called `stage:fusion` or `stage`.

        Raises:
            FusionUnsupportedError: a fusion is bound and cannot serve this call.
        """
        if torch.compiler.is_compiling() and self._is_fused(stage):
            return _run_outside_graph(self, stage, inputs)
        return self.fusion_binding.run(stage, self, inputs)

    def _is_fused(self, stage: str) -> bool:
        """Whether a fusion is bound to a stage, so that its unfused code never runs."""
        return bool(self.fusion_binding.stages[stage].candidates)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: BaseInferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: BaseInferenceContext | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Forward of the layer.

        Args:
            hidden_states: `[s, b, hidden]`, s local to the rank under sequence and context
                parallelism.
            attention_mask: unused; the recurrence is causal.
            inference_context: handed to megatron-core's own forward.
            packed_seq_params: documents packed in one row (`thd`).

        Returns:
            Output `[s, b, hidden]` and the output projection's bias or None.
        """
        inference_context = deprecate_inference_params(inference_context, inference_params)
        if inference_context is not None:
            return super().forward(
                hidden_states,
                attention_mask,
                inference_context,
                packed_seq_params,
                sequence_len_offset,
                **kwargs,
            )
        norm_out = self.forward_pre_attn_and_core_attn(
            hidden_states, attention_mask, packed_seq_params=packed_seq_params
        )
        return self.forward_post_core_attn(norm_out)

    def forward_pre_attn_and_core_attn(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Input projection, recurrence and output norm.

        Args:
            hidden_states, packed_seq_params: as in `forward`.

        Returns:
            The normalised recurrence result `[s, b, Hv*Dv]`, heads local to the tensor-parallel
            rank. Hand this very tensor to `forward_post_core_attn`: when the output norm is
            recomputed, its checkpoint travels on it, so that several microbatches may be between
            the two calls.
        """
        del attention_mask
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        batch = hidden_states.shape[1]
        length = hidden_states.shape[0] * self.sp_size * self.cp_size
        cu_seqlens = self._packed_lengths(packed_seq_params, batch, length) if packed else None

        nvtx_range_push("in_proj")
        qkvzba, _ = self.in_proj(hidden_states)
        nvtx_range_pop("in_proj")
        qkvzba, token_order = self._gather_sequence(qkvzba, cu_seqlens, length)

        x, gate = self._run_stages_to_recurrence(qkvzba, cu_seqlens)

        norm_and_scatter = partial(
            self._gated_norm_and_a2a,
            thd_cp_a2a_inv=token_order,
            batch=batch,
            seq_len=length,
            packed_seq_params=packed_seq_params,
        )
        if not self.recompute_norm_out:
            return norm_and_scatter(x, gate)
        checkpoint = None
        if torch.is_grad_enabled() and (x.requires_grad or gate.requires_grad):
            checkpoint = norm_out_checkpoint(self.config.fp8)
            norm_out: Tensor = checkpoint.checkpoint(norm_and_scatter, x, gate)
        else:
            norm_out = norm_and_scatter(x, gate)
        setattr(norm_out, _CHECKPOINT, checkpoint)
        return norm_out

    def forward_post_core_attn(self, norm_out: Tensor) -> tuple[Tensor, Tensor | None]:
        """Output projection.

        Args:
            norm_out: what `forward_pre_attn_and_core_attn` returned. When the output norm is
                recomputed, its memory is released here and restored in backward.

        Returns:
            Output `[s, b, hidden]` and the projection's bias or None.

        Raises:
            ValueError: the output norm is to be recomputed and this is another tensor.
        """
        made_here = hasattr(norm_out, _CHECKPOINT)
        if self.recompute_norm_out and norm_out.grad_fn is not None and not made_here:
            raise ValueError(
                "forward_post_core_attn requires the tensor that forward_pre_attn_and_core_attn "
                "returned, since gdn_norm_out is recomputed and its checkpoint travels on it; got "
                "another tensor. Pass it unchanged, or take gdn_norm_out from recompute_modules"
            )
        nvtx_range_push("out_proj")
        out, bias = self.out_proj(norm_out)
        nvtx_range_pop("out_proj")
        checkpoint = getattr(norm_out, _CHECKPOINT, None)
        # Without a graph (this half under no_grad) nothing would trigger the recomputation.
        if checkpoint is not None and out.requires_grad:
            delattr(norm_out, _CHECKPOINT)
            out.register_hook(_OneBackward())
            checkpoint.discard_output_and_register_recompute(out)
        return out, bias

    def _run_stages_to_recurrence(
        self, qkvzba: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The recurrence's output and the gate, both `[b, s, Hv, Dv]`, from the projection."""
        # The convolution is never called as a module, fused or not: its weight is a stage's input.
        conv1d = self._modules["conv1d"]
        if has_forward_pre_hooks(conv1d) and run_forward_pre_hooks(conv1d, qkvzba) is not qkvzba:
            raise ValueError(
                "a forward pre-hook of conv1d must leave its input as it is, got another; the "
                "convolution runs as part of a stage. Put the hook on the layer"
            )
        q, k, v, gate, beta, g = self.run_stage(
            "pre_gated_delta_rule", qkvzba=qkvzba, **self._pre_parameters(), cu_seqlens=cu_seqlens
        )
        x = self.run_stage("gated_delta_rule", q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens)
        return x, gate

    def _packed_lengths(
        self, packed_seq_params: PackedSeqParams, batch: int, length: int
    ) -> Tensor:
        """Cumulative document lengths `[N+1]`, after megatron-core's own checks."""
        if batch != 1:
            raise ValueError(f"packed sequences require batch 1, got {batch}; pack them in one row")
        if self.config.deterministic_mode:
            raise ValueError(
                "packed sequences require deterministic_mode=False, got True; unpack them or "
                "disable the mode"
            )
        lengths = []
        for name in ("cu_seqlens_q", "cu_seqlens_kv"):
            exact = getattr(packed_seq_params, name)
            padded = getattr(packed_seq_params, f"{name}_padded")
            if exact is None and padded is None:
                raise ValueError(
                    f"packed sequences (qkv_format='thd') require {name}, got None; pass the "
                    "cumulative lengths of the documents as both cu_seqlens_q and cu_seqlens_kv"
                )
            lengths.append(
                self._resolve_cu_seqlens(padded, exact, length, name, cp_size=self.cp_size)
            )
        if not torch.equal(*lengths):
            raise ValueError(
                f"packed sequences require equal cu_seqlens_q and cu_seqlens_kv, got {lengths[0]} "
                f"and {lengths[1]}; pass one of them twice"
            )
        if lengths[0].shape[0] < 2:
            raise ValueError(f"packed sequences require at least one document, got {lengths[0]}")
        # megatron-core asks for half of this, and then computes token positions below zero.
        chunks = 2 * self.cp_size
        if self.cp_size > 1 and (lengths[0].diff() % chunks != 0).any():
            raise ValueError(
                "packed sequences under context parallelism require document lengths that are "
                f"multiples of 2 * context_parallel_size = {chunks}, got "
                f"{lengths[0].diff().tolist()}; pad the documents and pass cu_seqlens_q_padded and "
                "cu_seqlens_kv_padded"
            )
        return lengths[0]

    def _gather_sequence(
        self, qkvzba: Tensor, cu_seqlens: Tensor | None, length: int
    ) -> tuple[Tensor, Tensor | None]:
        """From tokens split over context-parallel ranks to heads split over them.

        Returns:
            The projection with all tokens and this rank's heads, and for packed sequences the
            token order that leads back.
        """
        if self.cp_size == 1:
            return qkvzba, None
        channels = head_permutation_for_context_parallel(
            self.in_proj_split_sections, self.cp_size, qkvzba.device
        )
        qkvzba = tensor_a2a_cp2hp(
            qkvzba.index_select(-1, channels),
            seq_dim=0,
            head_dim=-1,
            cp_group=self.pg_collection.cp,
            undo_attention_load_balancing=cu_seqlens is None,
        )
        if cu_seqlens is None:
            return qkvzba, None
        order, inverse = token_permutation_for_packed_context_parallel(
            cu_seqlens, self.cp_size, length
        )
        return qkvzba.index_select(0, order), inverse

    def _pre_parameters(self) -> dict[str, Any]:
        """Parameters and sizes of the stages before the recurrence, local to this rank."""
        group = self.pg_collection.cp
        sections = [self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp]
        bias = self.conv1d.bias
        return {
            "conv_weight": get_parameter_local_cp(self.conv1d.weight, 0, group, sections),
            "conv_bias": (
                None if bias is None else get_parameter_local_cp(bias, 0, group, sections)
            ),
            "A_log": get_parameter_local_cp(self.A_log, 0, group),
            "dt_bias": get_parameter_local_cp(self.dt_bias, 0, group),
            "num_key_heads": self.num_k_heads_local_tp // self.cp_size,
            "num_value_heads": self.num_v_heads_local_tp // self.cp_size,
            "key_head_dim": self.key_head_dim,
            "value_head_dim": self.value_head_dim,
            "use_qk_l2norm": self.use_qk_l2norm,
        }

    def _apply_gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """The output norm's place in megatron-core's `_gated_norm_and_a2a`, as a stage."""
        # Host time counts here: nn.Module looks up a child, and misses an attribute, in Python.
        norm = self._modules.get("out_norm")
        if self.tp_size > 1 and norm is not None:
            sum_norm_gradient(norm.parameters(), self.config, self.tp_group)
        stage = "gated_output_norm"
        # The unfused code calls the norm, and so its hooks.
        if norm is not None and has_forward_pre_hooks(norm) and self._is_fused(stage):
            x = run_forward_pre_hooks(norm, x.reshape(-1, x.shape[-1])).reshape(x.shape)
        out: Tensor = self.run_stage(
            stage,
            x=x,
            gate=gate,
            weight=getattr(norm, "weight", None),
            eps=getattr(norm, "eps", None),
            zero_centered_gamma=_stores_weight_minus_one(norm),
        )
        return out
