# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of the recurrence output times SiLU of the gate, one kernel each way.

Formula, per row of `d` elements (a row is one head of one token), with `w` the weight, or the
weight plus one when it is stored zero-centred:

    x_hat = x / sqrt(mean(x^2) + eps)
    y     = round(x_hat * w)                      round: to the dtype of x
    out   = round(y * silu(gate))                 silu(z) = z * sigmoid(z)

    dgate = round(dout * y * silu'(gate))         to the dtype of the gate
    dy    = round(dout * silu(gate))
    dx    = round((dy*w - x_hat * mean(dy*w * x_hat)) / sqrt(mean(x^2) + eps))
    dw    = round(sum over rows of dy * x_hat)    to the dtype of the weight

Everything between two roundings is float32. The two inner roundings, of `y` and of `dy`, are the
materialisation boundary: an unfused RMSNorm writes `y`, and receives `dy`, in the activation dtype.

Layout. The work is cut into tiles of `tile_tokens` consecutive tokens of one sequence times
`tile_heads` consecutive heads. `tile_heads` divides the number of heads, so only the end of a
sequence is masked, and the batch, token and head of a tile cost one scalar division each instead
of two divisions per row. `x`, `gate` and `dout` are read where they lie, each with its own batch,
sequence, head and element strides; `out`, `dx` and `dgate` are written contiguously. Offsets of a
tile and of a row are 64-bit.

The backward recomputes `x_hat`, since it reads `x` anyway: the forward saves nothing of its own.
`dw` is reduced in two stages without atomics: a fixed number of programs walk over the tiles in a
fixed order and leave one float32 partial sum each, and a second kernel adds those in a fixed order.
For one shape on one kind of device the result is reproducible bit for bit.

Sources: RMSNorm, Zhang and Sennrich 2019; SiLU, Elfwing et al. 2018; the gradients are derived
from the formulas above.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusion_registry import checked_by_declaration
from megatron.gdn.fusions.kernel_launch import KernelLauncher, alignment_bits, fits_int32

FORWARD_TILE_ELEMENTS = 2048
BACKWARD_TILE_ELEMENTS = 1024
MAX_ALIGNMENT = 16
"""Strides are described to the compiler as multiples of a power of two, of this one at most."""
MULTIPROCESSORS_WITHOUT_CUDA = 1
"""Stands in for the size of the device under Triton's interpreter, which runs on CPU tensors."""
NEGATIVE_LOG2_E = tl.constexpr(-1.4426950408889634)
_LARGEST_EPS = sys.float_info.max
PARTIAL_ROWS = 128
PARTIAL_COLUMNS = 8
"""Tile of the second stage of `dw`: 8 float32 are one 32-byte sector."""
SUM_WARPS = 4

# Kernel arguments that the compiler must not look at: a new sequence length compiles nothing.
_TOKEN_COUNTS = ("n_tiles", "n_sequence")
_X_STRIDES = ("s_x_b", "s_x_s", "s_x_h")
_GATE_STRIDES = ("s_gate_b", "s_gate_s", "s_gate_h")
_DOUT_STRIDES = ("s_dout_b", "s_dout_s", "s_dout_h")


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How one kernel is launched. Depends on the head count and dimension, never on the tokens.

    `programs_per_multiprocessor` bounds the grid of a kernel that walks over its tiles; 0 means
    one program per tile.
    """

    tile_tokens: int
    tile_heads: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int

    def tiles(self, batch: int, length: int, heads: int) -> int:
        return batch * -(-length // self.tile_tokens) * (heads // self.tile_heads)

    def programs(self, tiles: int, multiprocessors: int) -> int:
        if self.programs_per_multiprocessor == 0:
            return tiles
        return min(tiles, multiprocessors * self.programs_per_multiprocessor)


def tile_shape(elements: int, heads: int, head_dim: int) -> tuple[int, int]:
    """Tokens and heads of a tile of about `elements` elements, both powers of two.

    As many heads as divide the head count evenly, since neighbouring heads are usually neighbours
    in memory and then need no mask; tokens make up the rest.
    """
    rows = max(1, elements // head_dim)
    tile_heads = min(rows, heads & -heads)
    return rows // tile_heads, tile_heads


def _warps(tile_elements: int) -> int:
    """At most 16 elements a thread, beyond which the backward spills registers."""
    return min(16, max(4, tile_elements // 512))


@cache
def forward_launch(heads: int, head_dim: int) -> LaunchConfig:
    """Launch configuration of the forward kernel."""
    tokens, tile_heads = tile_shape(FORWARD_TILE_ELEMENTS, heads, head_dim)
    return LaunchConfig(
        tile_tokens=tokens,
        tile_heads=tile_heads,
        num_warps=_warps(tokens * tile_heads * head_dim),
        num_stages=1,
        programs_per_multiprocessor=0,
    )


@cache
def backward_launch(heads: int, head_dim: int) -> LaunchConfig:
    """Launch configuration of the backward kernel."""
    tokens, tile_heads = tile_shape(BACKWARD_TILE_ELEMENTS, heads, head_dim)
    return LaunchConfig(
        tile_tokens=tokens,
        tile_heads=tile_heads,
        num_warps=_warps(tokens * tile_heads * head_dim),
        num_stages=1,
        programs_per_multiprocessor=7,
    )


@triton.jit
def _tile_origin(
    i_tile, n_sequence, TOKENS: tl.constexpr, HEADS: tl.constexpr, HEAD_TILES: tl.constexpr
):
    """First batch, token and head of a tile: heads vary fastest, then tokens, as in memory."""
    n_token_tiles = tl.cdiv(n_sequence, TOKENS)
    i_token_tile = i_tile // HEAD_TILES
    i_batch = i_token_tile // n_token_tiles
    i_token = (i_token_tile - i_batch * n_token_tiles) * TOKENS
    i_head = (i_tile - i_token_tile * HEAD_TILES) * HEADS
    return i_batch.to(tl.int64), i_token.to(tl.int64), i_head.to(tl.int64)


@triton.jit
def _aligned(stride, ALIGN: tl.constexpr):
    """The stride itself, written so that the compiler sees that ALIGN divides it."""
    return (stride // ALIGN) * ALIGN


@triton.jit
def _row_offsets(s_s, s_h, ALIGN: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """Offset of each row from the first row of its tile: heads vary fastest."""
    i_row = tl.arange(0, TOKENS * HEADS)
    o_row = (i_row // HEADS) * _aligned(s_s, ALIGN) + (i_row % HEADS) * _aligned(s_h, ALIGN)
    return o_row[:, None]


@triton.jit
def _tile_offset(i_batch, i_token, i_head, s_b, s_s, s_h, ALIGN: tl.constexpr):
    return (
        i_batch * _aligned(s_b, ALIGN)
        + i_token * _aligned(s_s, ALIGN)
        + i_head * _aligned(s_h, ALIGN)
    )


@triton.jit
def _sigmoid(b_z):
    b_root = tl.rsqrt(1.0 + tl.exp2(b_z * NEGATIVE_LOG2_E))
    return b_root * b_root


@triton.jit(do_not_specialize=_TOKEN_COUNTS + _X_STRIDES + _GATE_STRIDES)
def _forward_kernel(
    p_x,
    p_gate,
    p_weight,
    p_out,
    eps,
    n_tiles,
    n_sequence,
    s_x_b: tl.int64,
    s_x_s: tl.int64,
    s_x_h: tl.int64,
    s_x_d,
    s_gate_b: tl.int64,
    s_gate_s: tl.int64,
    s_gate_h: tl.int64,
    s_gate_d,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    ALIGN_X: tl.constexpr,
    ALIGN_GATE: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_dim = tl.arange(0, DIM)[None, :].to(tl.int64)
    i_row_token = (tl.arange(0, TOKENS * HEADS) // HEADS)[:, None]
    o_x = _row_offsets(s_x_s, s_x_h, ALIGN_X, TOKENS, HEADS) + i_dim * s_x_d
    o_gate = _row_offsets(s_gate_s, s_gate_h, ALIGN_GATE, TOKENS, HEADS) + i_dim * s_gate_d
    o_out = _row_offsets(HEAD_TILES * HEADS * DIM, DIM, DIM, TOKENS, HEADS) + i_dim

    b_weight = tl.load(p_weight + i_dim).to(tl.float32)
    if ZERO_CENTERED:
        b_weight += 1.0

    for i_tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), num_stages=STAGES):
        i_batch, i_token, i_head = _tile_origin(i_tile, n_sequence, TOKENS, HEADS, HEAD_TILES)
        m_row = i_token + i_row_token < n_sequence
        o_tile = _tile_offset(i_batch, i_token, i_head, s_x_b, s_x_s, s_x_h, ALIGN_X)
        b_x = tl.load(p_x + o_tile + o_x, mask=m_row, other=0.0)
        o_tile = _tile_offset(i_batch, i_token, i_head, s_gate_b, s_gate_s, s_gate_h, ALIGN_GATE)
        b_gate = tl.load(p_gate + o_tile + o_gate, mask=m_row, other=0.0)
        b_x, b_gate = b_x.to(tl.float32), b_gate.to(tl.float32)

        b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1, keep_dims=True) * (1.0 / DIM) + eps)
        b_y = (b_x * b_rstd * b_weight).to(p_out.dtype.element_ty).to(tl.float32)
        b_silu = b_gate * _sigmoid(b_gate)
        b_out = (b_y * b_silu).to(p_out.dtype.element_ty)

        o_tile = ((i_batch * n_sequence + i_token) * (HEAD_TILES * HEADS) + i_head) * DIM
        tl.store(p_out + o_tile + o_out, b_out, mask=m_row)


@triton.jit(do_not_specialize=_TOKEN_COUNTS + _X_STRIDES + _GATE_STRIDES + _DOUT_STRIDES)
def _backward_kernel(
    p_x,
    p_gate,
    p_weight,
    p_dout,
    p_dx,
    p_dgate,
    p_partial,
    eps,
    n_tiles,
    n_sequence,
    s_x_b: tl.int64,
    s_x_s: tl.int64,
    s_x_h: tl.int64,
    s_x_d,
    s_gate_b: tl.int64,
    s_gate_s: tl.int64,
    s_gate_h: tl.int64,
    s_gate_d,
    s_dout_b: tl.int64,
    s_dout_s: tl.int64,
    s_dout_h: tl.int64,
    s_dout_d,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    ALIGN_X: tl.constexpr,
    ALIGN_GATE: tl.constexpr,
    ALIGN_DOUT: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes what its pointers ask for: `p_dx`, `p_dgate` and `p_partial` may each be None."""
    i_dim = tl.arange(0, DIM)[None, :].to(tl.int64)
    i_row_token = (tl.arange(0, TOKENS * HEADS) // HEADS)[:, None]
    o_x = _row_offsets(s_x_s, s_x_h, ALIGN_X, TOKENS, HEADS) + i_dim * s_x_d
    o_gate = _row_offsets(s_gate_s, s_gate_h, ALIGN_GATE, TOKENS, HEADS) + i_dim * s_gate_d
    o_dout = _row_offsets(s_dout_s, s_dout_h, ALIGN_DOUT, TOKENS, HEADS) + i_dim * s_dout_d
    o_grad = _row_offsets(HEAD_TILES * HEADS * DIM, DIM, DIM, TOKENS, HEADS) + i_dim

    b_weight = tl.load(p_weight + i_dim).to(tl.float32)
    if ZERO_CENTERED:
        b_weight += 1.0
    if p_partial is not None:
        b_dweight = tl.zeros((TOKENS * HEADS, DIM), dtype=tl.float32)

    for i_tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), num_stages=STAGES):
        i_batch, i_token, i_head = _tile_origin(i_tile, n_sequence, TOKENS, HEADS, HEAD_TILES)
        m_row = i_token + i_row_token < n_sequence
        o_tile = _tile_offset(i_batch, i_token, i_head, s_x_b, s_x_s, s_x_h, ALIGN_X)
        # Not zero: with eps = 0 the root of no row is infinite, and NaN in the sum over rows.
        b_x = tl.load(p_x + o_tile + o_x, mask=m_row, other=1.0)
        o_tile = _tile_offset(i_batch, i_token, i_head, s_gate_b, s_gate_s, s_gate_h, ALIGN_GATE)
        b_gate = tl.load(p_gate + o_tile + o_gate, mask=m_row, other=0.0)
        o_tile = _tile_offset(i_batch, i_token, i_head, s_dout_b, s_dout_s, s_dout_h, ALIGN_DOUT)
        b_dout = tl.load(p_dout + o_tile + o_dout, mask=m_row, other=0.0)
        b_x, b_gate, b_dout = b_x.to(tl.float32), b_gate.to(tl.float32), b_dout.to(tl.float32)
        o_tile = ((i_batch * n_sequence + i_token) * (HEAD_TILES * HEADS) + i_head) * DIM

        b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1, keep_dims=True) * (1.0 / DIM) + eps)
        b_x_hat = b_x * b_rstd
        b_sigmoid = _sigmoid(b_gate)
        b_silu = b_gate * b_sigmoid

        if p_dgate is not None:
            b_y = (b_x_hat * b_weight).to(p_x.dtype.element_ty).to(tl.float32)
            b_slope = b_sigmoid + (b_silu - b_silu * b_sigmoid)
            b_dgate = (b_dout * b_y * b_slope).to(p_dgate.dtype.element_ty)
            tl.store(p_dgate + o_tile + o_grad, b_dgate, mask=m_row)

        if p_dx is not None or p_partial is not None:
            b_dy = (b_dout * b_silu).to(p_x.dtype.element_ty).to(tl.float32)
            if p_dx is not None:
                b_scaled = b_dy * b_weight
                b_mean = tl.sum(b_scaled * b_x_hat, axis=1, keep_dims=True) * (1.0 / DIM)
                b_dx = ((b_scaled - b_x_hat * b_mean) * b_rstd).to(p_dx.dtype.element_ty)
                tl.store(p_dx + o_tile + o_grad, b_dx, mask=m_row)
            if p_partial is not None:
                b_dweight += b_dy * b_x_hat

    if p_partial is not None:
        o_partial = tl.program_id(0) * DIM + tl.arange(0, DIM)
        tl.store(p_partial + o_partial, tl.sum(b_dweight, axis=0))


@triton.jit(do_not_specialize=("n_partials",))
def _sum_partials_kernel(
    p_partial,
    p_dweight,
    n_partials,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`dweight[d] = sum_p partial[p, d]`, in an order that only `n_partials` decides."""
    o_dim = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    i_row = tl.arange(0, ROWS)
    b_sum = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for i_partial in range(0, n_partials, ROWS):
        i_rows = i_partial + i_row
        p_rows = p_partial + i_rows[:, None] * DIM + o_dim[None, :]
        b_sum += tl.load(p_rows, mask=(i_rows < n_partials)[:, None], other=0.0)
    b_dweight = tl.sum(b_sum, axis=0).to(p_dweight.dtype.element_ty)
    tl.store(p_dweight + o_dim, b_dweight)


_launch_forward_kernel = KernelLauncher(_forward_kernel)
_launch_backward_kernel = KernelLauncher(_backward_kernel)
_launch_sum_partials_kernel = KernelLauncher(_sum_partials_kernel)


def launch_forward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    zero_centered_gamma: bool,
    config: LaunchConfig | None = None,
) -> Tensor:
    """Runs the forward kernel on the current stream; `config` replaces the table's choice."""
    batch, length, heads, head_dim = x.shape
    x_b, x_s, x_h, x_d = x.stride()
    gate_b, gate_s, gate_h, gate_d = gate.stride()
    align_x, align_gate = _alignment(x_b, x_s, x_h), _alignment(gate_b, gate_s, gate_h)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    variant = None
    if config is None:
        config = forward_launch(heads, head_dim)
        if x_d == 1 and gate_d == 1 and fits_int32(batch * length * heads):
            variant = (
                *(x.dtype, gate.dtype, weight.dtype, heads, head_dim, align_x, align_gate),
                *(zero_centered_gamma, alignment_bits(x, gate, weight, out)),
            )
    tiles = config.tiles(batch, length, heads)
    _launch_forward_kernel(
        config.programs(tiles, _multiprocessors(x)),
        x,
        (
            x,
            gate,
            weight,
            out,
            float(eps),
            tiles,
            length,
            x_b,
            x_s,
            x_h,
            x_d,
            gate_b,
            gate_s,
            gate_h,
            gate_d,
            head_dim,
            config.tile_tokens,
            config.tile_heads,
            heads // config.tile_heads,
            align_x,
            align_gate,
            zero_centered_gamma,
            config.num_stages,
        ),
        config.num_warps,
        variant,
    )
    return out


def launch_backward(
    dout: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    zero_centered_gamma: bool,
    needs: tuple[bool, bool, bool] = (True, True, True),
    config: LaunchConfig | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Runs the backward kernels on the current stream.

    Args:
        needs: whether the gradients of x, gate and weight are wanted; at least one is.

    Returns:
        dx, dgate, dweight; None for each that is not wanted.
    """
    batch, length, heads, head_dim = x.shape
    x_b, x_s, x_h, x_d = x.stride()
    gate_b, gate_s, gate_h, gate_d = gate.stride()
    dout_b, dout_s, dout_h, dout_d = dout.stride()
    align_x, align_gate = _alignment(x_b, x_s, x_h), _alignment(gate_b, gate_s, gate_h)
    align_dout = _alignment(dout_b, dout_s, dout_h)
    known = config is None
    config = config or backward_launch(heads, head_dim)
    tiles = config.tiles(batch, length, heads)
    programs = config.programs(tiles, _multiprocessors(x))
    needs_x, needs_gate, needs_weight = needs
    dx = dgate = dweight = partial = None
    if needs_x:
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if needs_gate:
        dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if needs_weight:
        dweight = torch.empty_like(weight)
        partial = torch.empty((programs, head_dim), dtype=torch.float32, device=x.device)
    variant = None
    if known and x_d == 1 and gate_d == 1 and dout_d == 1 and fits_int32(batch * length * heads):
        variant = (
            *(x.dtype, gate.dtype, weight.dtype, heads, head_dim, align_x, align_gate, align_dout),
            *(zero_centered_gamma, needs),
            alignment_bits(x, gate, weight, dout, dx, dgate, partial),
        )
    _launch_backward_kernel(
        programs,
        x,
        (
            x,
            gate,
            weight,
            dout,
            dx,
            dgate,
            partial,
            float(eps),
            tiles,
            length,
            x_b,
            x_s,
            x_h,
            x_d,
            gate_b,
            gate_s,
            gate_h,
            gate_d,
            dout_b,
            dout_s,
            dout_h,
            dout_d,
            head_dim,
            config.tile_tokens,
            config.tile_heads,
            heads // config.tile_heads,
            align_x,
            align_gate,
            align_dout,
            zero_centered_gamma,
            config.num_stages,
        ),
        config.num_warps,
        variant,
    )
    if needs_weight:
        columns = min(head_dim, PARTIAL_COLUMNS)
        _launch_sum_partials_kernel(
            head_dim // columns,
            x,
            (partial, dweight, programs, head_dim, PARTIAL_ROWS, columns),
            SUM_WARPS,
            (weight.dtype, head_dim, alignment_bits(partial, dweight)),
        )
    return dx, dgate, dweight


def _alignment(batch_stride: int, token_stride: int, head_stride: int) -> int:
    """Largest power of two, up to MAX_ALIGNMENT, that divides all three strides."""
    bits = batch_stride | token_stride | head_stride | MAX_ALIGNMENT
    return bits & -bits


@cache
def _multiprocessors_of(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _multiprocessors(x: Tensor) -> int:
    return _multiprocessors_of(x.get_device()) if x.is_cuda else MULTIPROCESSORS_WITHOUT_CUDA


class _GatedOutputNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        zero_centered_gamma: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        ctx.zero_centered_gamma = zero_centered_gamma
        return launch_forward(x, gate, weight, eps, zero_centered_gamma)

    @staticmethod
    def backward(
        ctx: Any, dout: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, gate, weight = ctx.saved_tensors
        grads = _GatedOutputNormGradient.apply(
            dout, x, gate, weight, ctx.eps, ctx.zero_centered_gamma, ctx.needs_input_grad[:3]
        )
        return *grads, None, None


class _GatedOutputNormGradient(torch.autograd.Function):
    """The backward as a function of its own, whose backward raises.

    `once_differentiable` alone raises only where `dout` requires a gradient. For a penalty on a
    gradient it does not, and the second derivative would silently be zero.
    """

    @staticmethod
    def forward(
        ctx: Any,
        dout: Tensor,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        zero_centered_gamma: bool,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return launch_backward(dout, x, gate, weight, eps, zero_centered_gamma, needs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor | None) -> None:
        raise RuntimeError(
            "fused_gated_output_norm requires first-order autograd (it is once_differentiable), "
            "got the gradient of a gradient; disable the fusion to differentiate twice"
        )


def eps_problems(eps: object) -> list[str]:
    """Predicate of the declaration: a norm module may keep None, or keep it under another name."""
    if isinstance(eps, int | float) and not isinstance(eps, bool) and 0 <= eps <= _LARGEST_EPS:
        return []
    return [repr(eps)]


def zero_centered_gamma_problems(zero_centered_gamma: object) -> list[str]:
    """Predicate of the declaration: the kernels are compiled for the value, and kept by it."""
    return [] if type(zero_centered_gamma) is bool else [repr(zero_centered_gamma)]


@checked_by_declaration("gated_output_norm")
def fused_gated_output_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool = False
) -> Tensor:
    """RMSNorm of `x` over its last dimension, times SiLU of `gate`, in one kernel.

    The norm is rounded to the dtype of `x` before the gate multiplies it, as if it had been
    written to memory; the arithmetic is float32. First-order autograd only.

    Args:
        x: `[b, s, h, d]`, BF16 or FP16, any strides; `d` a power of two.
        gate: `[b, s, h, d]`, the dtype of `x` or FP32, any strides: a view of the input projection
            is read in place.
        weight: `[d]`, BF16, FP16 or FP32, contiguous.
        eps: added to the mean square.
        zero_centered_gamma: the weight is stored minus one.

    Returns:
        `[b, s, h, d]`, contiguous, in the dtype of `x`. The gradients of `x` and `gate` are
        contiguous too, and each gradient has the dtype of its input.

    Raises:
        FusionUnsupportedError: a ValueError with every declared precondition that does not hold
            (`gated_output_norm.yaml`, those about the arguments).
        RuntimeError: from autograd, when a gradient is itself differentiated.
    """
    return _GatedOutputNorm.apply(x, gate, weight, eps, zero_centered_gamma)
