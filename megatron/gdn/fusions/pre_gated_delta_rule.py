# SPDX-License-Identifier: Apache-2.0
"""Triton fusion of the stage `pre_gated_delta_rule`: from the input projection to the recurrence.

Formula, per batch entry, token t and channel c (x is the projection, w the convolution):

    pre[t] = bias + sum_i w[i] * x[t - W + 1 + i]        taps before the document count as zero
    y[t]   = round(silu(pre[t]))                         to the activation dtype
    q, k   = round(y / sqrt(sum(y * y) + 1e-6))          over the head; y itself without l2norm
    v      = y
    beta   = sigmoid(beta_logits)                        float32
    g      = -exp(A_log) * softplus(alpha + dt_bias)     float32
    gate   = a view of the projection                    never copied

Layout: the projection is `[s, b, C]`, any strides with channel stride 1, C in the order q, k, v,
z (gate), beta, alpha. Outputs are contiguous `[b, s, Hv, D]`; key head `j // (Hv / Hk)` is read
once and written to every value head j of its group. Both kernels run one grid

    program = (chunk of tokens) x (batch entry) x (slot)

whose slots are blocks of heads of q, of k, of v, (backward) of z, and one for beta and alpha. A
program marches through the tokens of its chunk with the last W - 1 rows of x in registers, so each
row is read once; a chunk starts by reading the W - 1 rows before it. The backward recomputes the
convolution on the same march. Its gradient

    dx[t] = sum_j w[W - 1 - j] * dpre[t + j]

is gathered in W - 1 pending rows, also registers, and row t - W + 1 is written when token t has
been added; a chunk therefore runs W - 1 tokens past its end. Heads, not tokens, lie across a
program: the token is uniform over it, document boundaries are scalar tests, and the sums over a
head stay within one warp.

Rounding points: y once to the activation dtype, q and k once more after the norm, the gradients
once at the store. Everything between is float32. Parameter gradients are float32 sums per (chunk,
batch entry), added in a fixed order by a second small kernel: bitwise reproducible, no atomics.

Packed documents: one small kernel turns `cu_seqlens` into one byte per token, the number of
earlier tokens of its document that the convolution may see (at most W - 1), by bisection. No cost
depends on the number of documents beyond its logarithm, and nothing is copied to the host.

Sources: gated delta rule and its short convolution, Yang et al. 2024, "Gated Delta Networks";
decay parametrisation, Gu and Dao 2023, "Mamba", section 3.5.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusion_registry import checked_by_declaration
from megatron.gdn.fusions.kernel_launch import KernelLauncher, alignment_bits, fits_int32

L2_NORM_EPS = tl.constexpr(1e-6)

_LOG2_E = tl.constexpr(1.4426950408889634)
# ln 2 in two parts (Cody and Waite): the product of the first with any exponent is exact.
_LN2_HIGH = tl.constexpr(0.693359375)
_LN2_LOW = tl.constexpr(-2.12194440e-4)

_VECTOR_BYTES = 16
_LOOKBACK_TOKENS = 1024
_REDUCE_COLUMNS = 64
_REDUCE_ROWS = 16
_DECAY_VALUES_PER_WARP = 128
_MAX_WARPS = 4
_SMALL_WARPS = 4
_MIN_CHUNK, _MAX_CHUNK = 16, 1024
# Several rounds of programs over the 132 multiprocessors of an H100 or H200: the last round is
# never full. A constant, not the device's own count, so that ranks agree.
_FORWARD_PROGRAMS = 8192
_BACKWARD_PROGRAMS = 3072

# Arguments whose values and alignment the compiler must not look at: nothing compiles anew for
# another length, batch, packing or position of a parameter in a flat buffer.
_COUNTS = ("n_batch", "n_tokens", "n_chunk")
_X_STRIDES = ("stride_x_s", "stride_x_b")
_GRADIENT_STRIDES = tuple(
    f"stride_{gradient}_{dim}"
    for gradient, dims in (
        ("dq", "bshd"),
        ("dk", "bshd"),
        ("dv", "bshd"),
        ("dz", "bshd"),
        ("dbeta", "bsh"),
        ("dg", "bsh"),
    )
    for dim in dims
)
_ANY_ALIGNMENT = ("p_weight", "p_bias", "p_a_log", "p_dt_bias", "p_lookback")


class HeadSizes(NamedTuple):
    """Head counts and dimensions of one rank, and whether q and k are normalised."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    use_qk_l2norm: bool = True

    @property
    def gate_channels(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_head_dim + self.gate_channels

    @property
    def channels(self) -> int:
        return self.conv_channels + self.gate_channels + 2 * self.num_value_heads


@dataclass(frozen=True)
class LaunchConfig:
    """How one of the two large kernels is launched; chosen from sizes alone, never by timing.

    Args:
        key_rows: heads of q or k that one program handles, a power of two.
        value_rows: heads of v or z that one program handles, a power of two.
        unroll: tokens whose rows are loaded before the first of them is used, a power of two.
        num_warps: warps per program.
        slots: programs per chunk and batch entry: blocks of heads, and one for beta and alpha.
        chunk: tokens per program, a multiple of `unroll`; a runtime argument of the kernel, so that
            it follows the number of tokens without a new compilation.
    """

    key_rows: int
    value_rows: int
    unroll: int
    num_warps: int
    slots: int
    chunk: int


@triton.jit
def _fast_sigmoid(b_x):
    """Logistic function in five instructions: the square of a reciprocal root needs no division.

    Relative error below 4e-7; exp2 overflows to infinity and the result to zero, as it should.
    """
    b_root = tl.rsqrt(1.0 + tl.exp2(b_x * -_LOG2_E))
    return b_root * b_root


@triton.jit
def _exp(b_x):
    """exp with a relative error of a few float32 units also far from zero."""
    # The clamp keeps infinities out of the reduction below; NaN passes both comparisons.
    b_x = tl.where(b_x < -150.0, -150.0, tl.where(b_x > 150.0, 150.0, b_x))
    b_power = tl.floor(b_x * _LOG2_E + 0.5)
    b_rest = (b_x - b_power * _LN2_HIGH) - b_power * _LN2_LOW
    return tl.exp2(b_power) * tl.exp(b_rest)


@triton.jit
def _log1p(b_x):
    """log(1 + x) for 0 <= x <= 1 as 2 artanh(x / (2 + x)), without cancellation near zero."""
    b_z = b_x / (2.0 + b_x)
    b_z2 = b_z * b_z
    b_sum = 1.0 / 17.0 + b_z2 * 0.0
    b_sum = b_sum * b_z2 + 1.0 / 15.0
    b_sum = b_sum * b_z2 + 1.0 / 13.0
    b_sum = b_sum * b_z2 + 1.0 / 11.0
    b_sum = b_sum * b_z2 + 1.0 / 9.0
    b_sum = b_sum * b_z2 + 1.0 / 7.0
    b_sum = b_sum * b_z2 + 1.0 / 5.0
    b_sum = b_sum * b_z2 + 1.0 / 3.0
    return 2.0 * (b_z + b_z * (b_sum * b_z2))


@triton.jit
def _load_weights(p_weight, p_bias, o_c, m_c, WIDTH: tl.constexpr):
    """The W rows of the convolution weight as a tuple, and the bias (zeros without one)."""
    weights = ()
    for i in tl.static_range(WIDTH):
        b_weight = tl.load(p_weight + o_c * WIDTH + i, mask=m_c, other=0.0)
        weights += (b_weight.to(tl.float32),)
    if p_bias is not None:
        b_bias = tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    else:
        b_bias = tl.zeros_like(weights[0])
    return weights, b_bias


@triton.jit
def _load_lookback(p_lookback, i_t, n_tokens):
    """Earlier tokens of its document that token t may see; not read for dense batches."""
    if p_lookback is not None:
        i_back = tl.load(p_lookback + i_t, mask=i_t < n_tokens, other=0).to(tl.int32)
    else:
        i_back = 0
    return i_back


@triton.jit
def _rows_before(p_x, stride_x, o_c, m_c, p_lookback, i_start, n_tokens, WIDTH: tl.constexpr):
    """Rows t - W + 1 .. t - 1 of x before the first token of a chunk, float32, as a tuple."""
    i_back = _load_lookback(p_lookback, i_start, n_tokens)
    rows = ()
    for i in tl.static_range(WIDTH - 1):
        i_t = i_start - (WIDTH - 1) + i
        m_t = i_t >= 0
        if p_lookback is not None:
            m_t = m_t & (i_back >= WIDTH - 1 - i)
        b_x = tl.load(p_x + i_t * stride_x + o_c, mask=m_c & m_t, other=0.0)
        rows += (b_x.to(tl.float32),)
    return rows


@triton.jit
def _cut_at_document_start(rows, i_back, p_lookback, WIDTH: tl.constexpr):
    """Forget the rows of the document before, when token t is the first of its own."""
    kept = ()
    for i in tl.static_range(WIDTH - 1):
        if p_lookback is not None:
            kept += (tl.where(i_back == 0, 0.0, rows[i]),)
        else:
            kept += (rows[i],)
    return kept


@triton.jit
def _push(rows, b_x):
    return rows[1:] + (b_x,)  # noqa: RUF005, Triton reads no starred tuples


@triton.jit
def _convolve(rows, b_x, weights, b_bias, WIDTH: tl.constexpr):
    # Explicit fma, oldest tap first: a token gets the same bits in every variant of the kernels.
    b_pre = b_bias
    for i in tl.static_range(WIDTH - 1):
        b_pre = tl.fma(rows[i], weights[i], b_pre)
    return tl.fma(b_x, weights[WIDTH - 1], b_pre)


@triton.jit
def _forward_heads(
    p_x,
    stride_x,
    i_channel,
    p_weight,
    p_bias,
    p_lookback,
    p_out,
    i_head,
    i_start,
    i_stop,
    n_tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    L2NORM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """March through a chunk of ROWS heads of q, k or v: convolution, SiLU, norm, expansion."""
    o_h = i_head + tl.arange(0, ROWS)[:, None]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_c = (o_h < HEADS) & (o_d < HEAD_DIM)
    o_c = i_channel + o_h * HEAD_DIM + o_d
    # Pointers are carried and stepped by one token: two additions per row, where a product of
    # token and stride for each row cost a tenth of all instructions.
    p_xt = p_x + i_start * stride_x + o_c
    p_yt = (
        p_out + i_start.to(tl.int64) * (HEADS * GROUP * HEAD_DIM) + o_h * (GROUP * HEAD_DIM) + o_d
    )
    weights, b_bias = _load_weights(p_weight, p_bias, o_c, m_c, WIDTH)
    rows = _rows_before(p_x, stride_x, o_c, m_c, p_lookback, i_start, n_tokens, WIDTH)
    for i_first in tl.range(i_start, i_stop, UNROLL):
        loaded = ()
        backs = ()
        for u in tl.static_range(UNROLL):
            i_t = i_first + u
            m_t = m_c & (i_t < i_stop)
            loaded += (tl.load(p_xt, mask=m_t, other=0.0),)
            backs += (_load_lookback(p_lookback, i_t, n_tokens),)
            p_xt += stride_x
        for u in tl.static_range(UNROLL):
            m_t = m_c & (i_first + u < i_stop)
            b_x = loaded[u].to(tl.float32)
            rows = _cut_at_document_start(rows, backs[u], p_lookback, WIDTH)
            b_pre = _convolve(rows, b_x, weights, b_bias, WIDTH)
            b_y = (b_pre * _fast_sigmoid(b_pre)).to(p_out.dtype.element_ty)
            if L2NORM:
                b_y = b_y.to(tl.float32)
                b_rstd = tl.rsqrt(tl.sum(b_y * b_y, axis=1, keep_dims=True) + L2_NORM_EPS)
                b_y = (b_y * b_rstd).to(p_out.dtype.element_ty)
            for g in tl.static_range(GROUP):
                tl.store(p_yt + g * HEAD_DIM, b_y, mask=m_t)
            p_yt += HEADS * GROUP * HEAD_DIM
            rows = _push(rows, b_x)


@triton.jit
def _sigmoid_terms(b_x):
    """The logistic function, its derivative and exp(-|x|), accurate at both tails."""
    b_tail = _exp(-tl.abs(b_x))
    b_sigmoid = tl.where(b_x < 0.0, b_tail, 1.0) / (1.0 + b_tail)
    b_slope = b_tail / ((1.0 + b_tail) * (1.0 + b_tail))
    return b_sigmoid, b_slope, b_tail


@triton.jit
def _softplus_terms(b_x):
    """softplus = max(x, 0) + log(1 + exp(-|x|)), and its derivative."""
    b_sigmoid, _, b_tail = _sigmoid_terms(b_x)
    return tl.where(b_x < 0.0, 0.0, b_x) + _log1p(b_tail), b_sigmoid


@triton.jit
def _forward_decay(
    p_x,
    stride_x,
    i_channel,
    p_a_log,
    p_dt_bias,
    p_beta,
    p_g,
    i_start,
    i_stop,
    HV: tl.constexpr,
    BLOCK_HV: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """beta and g of a chunk, all heads."""
    o_h = tl.arange(0, BLOCK_HV)[None, :]
    m_h = o_h < HV
    b_a_log = tl.load(p_a_log + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_dt_bias = tl.load(p_dt_bias + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_rate = -_exp(b_a_log)
    for i_first in tl.range(i_start, i_stop, BLOCK_TOKENS):
        o_t = i_first + tl.arange(0, BLOCK_TOKENS)[:, None]
        m_t = m_h & (o_t < i_stop)
        p_row = p_x + o_t * stride_x + (i_channel + o_h)
        b_beta = tl.load(p_row, mask=m_t, other=0.0).to(tl.float32)
        b_alpha = tl.load(p_row + HV, mask=m_t, other=0.0).to(tl.float32)
        b_sigmoid, _, _ = _sigmoid_terms(b_beta)
        b_softplus, _ = _softplus_terms(b_alpha + b_dt_bias)
        o_out = o_t.to(tl.int64) * HV + o_h
        tl.store(p_beta + o_out, b_sigmoid, mask=m_t)
        tl.store(p_g + o_out, b_rate * b_softplus, mask=m_t)


@triton.jit(
    do_not_specialize=[*_COUNTS, *_X_STRIDES], do_not_specialize_on_alignment=_ANY_ALIGNMENT
)
def _pre_gated_delta_rule_forward_kernel(
    p_x,
    p_weight,
    p_bias,
    p_a_log,
    p_dt_bias,
    p_lookback,
    p_q,
    p_k,
    p_v,
    p_beta,
    p_g,
    stride_x_s: tl.int64,
    stride_x_b: tl.int64,
    n_batch,
    n_tokens,
    n_chunk,
    X_VECTOR: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    L2NORM: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    VALUE_ROWS: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_HV: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    # Strides come in units of X_VECTOR elements: the multiplication is what tells the compiler that
    # every row starts at such a multiple, whatever the stride, so that no length recompiles.
    stride_x = stride_x_s * X_VECTOR
    KEY_SLOTS: tl.constexpr = (HK + KEY_ROWS - 1) // KEY_ROWS
    VALUE_SLOTS: tl.constexpr = (HV + VALUE_ROWS - 1) // VALUE_ROWS
    SLOTS: tl.constexpr = 2 * KEY_SLOTS + VALUE_SLOTS + 1
    i_slot = tl.program_id(0) % SLOTS
    i_part = tl.program_id(0) // SLOTS
    i_batch = i_part % n_batch
    i_start = (i_part // n_batch) * n_chunk
    i_stop = tl.minimum(i_start + n_chunk, n_tokens)
    p_x += i_batch * stride_x_b * X_VECTOR
    i_entry = i_batch.to(tl.int64) * n_tokens

    if i_slot < 2 * KEY_SLOTS:
        i_is_key = i_slot // KEY_SLOTS
        _forward_heads(
            p_x,
            stride_x,
            i_is_key * (HK * DK),
            p_weight,
            p_bias,
            p_lookback,
            (p_q if i_is_key == 0 else p_k) + i_entry * (HV * DK),
            (i_slot % KEY_SLOTS) * KEY_ROWS,
            i_start,
            i_stop,
            n_tokens,
            HK,
            DK,
            HV // HK,
            L2NORM,
            WIDTH,
            KEY_ROWS,
            BLOCK_DK,
            UNROLL,
        )
    elif i_slot < 2 * KEY_SLOTS + VALUE_SLOTS:
        _forward_heads(
            p_x,
            stride_x,
            2 * HK * DK,
            p_weight,
            p_bias,
            p_lookback,
            p_v + i_entry * (HV * DV),
            (i_slot - 2 * KEY_SLOTS) * VALUE_ROWS,
            i_start,
            i_stop,
            n_tokens,
            HV,
            DV,
            1,
            False,
            WIDTH,
            VALUE_ROWS,
            BLOCK_DV,
            UNROLL,
        )
    else:
        _forward_decay(
            p_x,
            stride_x,
            2 * HK * DK + 2 * HV * DV,
            p_a_log,
            p_dt_bias,
            p_beta + i_entry * HV,
            p_g + i_entry * HV,
            i_start,
            i_stop,
            HV,
            BLOCK_HV,
            BLOCK_TOKENS,
        )


@triton.jit(
    do_not_specialize=["n_documents", "n_tokens", "n_steps"],
    do_not_specialize_on_alignment=["p_cu_seqlens"],
)
def _document_lookback_kernel(
    p_cu_seqlens,
    p_lookback,
    n_documents,
    n_tokens,
    n_steps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_t = o_t < n_tokens
    # Bisection for the number of document ends at or before the token. Any content of cu_seqlens
    # keeps the indices in range, so a malformed one cannot read or write out of bounds.
    o_low = tl.zeros([BLOCK], tl.int32)
    o_high = tl.zeros([BLOCK], tl.int32) + n_documents
    for _ in tl.range(0, n_steps):
        o_middle = (o_low + o_high) // 2
        m_open = o_low < o_high
        b_end = tl.load(p_cu_seqlens + o_middle + 1, mask=m_t & m_open, other=0)
        m_after = m_open & (b_end <= o_t)
        o_low = tl.where(m_after, o_middle + 1, o_low)
        o_high = tl.where(m_open & (b_end > o_t), o_middle, o_high)
    b_start = tl.load(p_cu_seqlens + o_low, mask=m_t & (o_low > 0), other=0)
    b_back = tl.minimum(tl.maximum(o_t - b_start, 0), WIDTH - 1)
    tl.store(p_lookback + o_t, b_back.to(tl.uint8), mask=m_t)


@triton.jit
def _token_gradient(
    rows, b_x, b_dy, weights, b_bias, DTYPE: tl.constexpr, L2NORM: tl.constexpr, WIDTH: tl.constexpr
):
    """Gradient of one token's pre-activation from that of its q, k or v."""
    b_pre = _convolve(rows, b_x, weights, b_bias, WIDTH)
    b_sigmoid = _fast_sigmoid(b_pre)
    b_silu = b_pre * b_sigmoid
    if L2NORM:
        b_y = b_silu.to(DTYPE).to(tl.float32)
        b_rstd = tl.rsqrt(tl.sum(b_y * b_y, axis=1, keep_dims=True) + L2_NORM_EPS)
        b_dot = tl.sum(b_dy * b_y, axis=1, keep_dims=True)
        # The dot product first: the third power of b_rstd alone is zero for rows beyond 1e13.
        b_dy = tl.fma(b_y, -(b_rstd * b_rstd * (b_rstd * b_dot)), b_dy * b_rstd)
    return b_dy * tl.fma(b_silu, 1.0 - b_sigmoid, b_sigmoid)


@triton.jit
def _add_to_pending(pending, b_dpre, weights, i_back, p_lookback, WIDTH: tl.constexpr):
    """Add token t's part to the gradients of x[t - W + 1 .. t]; the oldest is then complete."""
    added = ()
    for i in tl.static_range(WIDTH):
        b_part = b_dpre
        if i < WIDTH - 1:
            if p_lookback is not None:
                # A select, not a product with zero: infinities must not cross documents.
                b_part = tl.where(i_back >= WIDTH - 1 - i, b_dpre, 0.0)
            added += (tl.fma(b_part, weights[i], pending[i]),)
        else:
            added += (b_part * weights[i],)
    return added[0], added[1:]


@triton.jit
def _add_to_weight_gradient(sums, rows, b_x, b_dpre, WIDTH: tl.constexpr):
    added = ()
    for i in tl.static_range(WIDTH):
        added += (tl.fma(b_dpre, rows[i] if i < WIDTH - 1 else b_x, sums[i]),)
    return added


@triton.jit
def _load_output_gradient(p_dy, stride_group, m_t, GROUP: tl.constexpr):
    """Gradient of a key head, summed over its value heads, float32."""
    b_dy = tl.load(p_dy, mask=m_t, other=0.0).to(tl.float32)
    for g in tl.static_range(1, GROUP):
        b_dy += tl.load(p_dy + g * stride_group, mask=m_t, other=0.0).to(tl.float32)
    return b_dy


@triton.jit
def _backward_heads(
    p_x,
    stride_x,
    i_channel,
    p_weight,
    p_bias,
    p_lookback,
    p_dy,
    stride_dy,
    stride_dy_h,
    stride_dy_d,
    p_dx,
    stride_dx,
    p_partial,
    i_head,
    i_start,
    i_stop,
    n_tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    L2NORM: tl.constexpr,
    WIDTH: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """March through a chunk of ROWS heads of q, k or v and W - 1 tokens past its end."""
    o_h = i_head + tl.arange(0, ROWS)[:, None]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_c = (o_h < HEADS) & (o_d < HEAD_DIM)
    o_c = i_channel + o_h * HEAD_DIM + o_d
    o_dy = o_h * (GROUP * stride_dy_h) + o_d * stride_dy_d
    weights, b_bias = _load_weights(p_weight, p_bias, o_c, m_c, WIDTH)
    rows = _rows_before(p_x, stride_x, o_c, m_c, p_lookback, i_start, n_tokens, WIDTH)
    pending = ()
    for _i in tl.static_range(WIDTH - 1):
        pending += (tl.zeros([ROWS, BLOCK_D], tl.float32),)
    sums = ()
    for _i in tl.static_range(WIDTH):
        sums += (tl.zeros([ROWS, BLOCK_D], tl.float32),)
    b_bias_sum = tl.zeros([ROWS, BLOCK_D], tl.float32)

    # The first W - 1 tokens only start the pending rows: what they would complete belongs to the
    # chunk before, which also counts them in its parameter gradients. No chunk is before the first.
    for i_t in tl.range(i_start, i_start + (WIDTH - 1)):
        m_t = m_c & (i_t < n_tokens)
        b_x = tl.load(p_x + i_t * stride_x + o_c, mask=m_t, other=0.0).to(tl.float32)
        b_dy = _load_output_gradient(p_dy + i_t * stride_dy + o_dy, stride_dy_h, m_t, GROUP)
        i_back = _load_lookback(p_lookback, i_t, n_tokens)
        rows = _cut_at_document_start(rows, i_back, p_lookback, WIDTH)
        b_dpre = _token_gradient(
            rows, b_x, b_dy, weights, b_bias, p_x.dtype.element_ty, L2NORM, WIDTH
        )
        if NEED_X:
            b_dx, pending = _add_to_pending(pending, b_dpre, weights, i_back, p_lookback, WIDTH)
        b_counted = tl.where(i_start == 0, b_dpre, 0.0)
        if NEED_WEIGHT:
            sums = _add_to_weight_gradient(sums, rows, b_x, b_counted, WIDTH)
        if NEED_BIAS:
            b_bias_sum += b_counted
        rows = _push(rows, b_x)

    i_resume = i_start + (WIDTH - 1)
    p_xt = p_x + i_resume * stride_x + o_c
    p_dyt = p_dy + i_resume * stride_dy + o_dy
    p_dxt = p_dx + i_start * stride_dx + o_c
    # Past the last token x and the gradients read as zero, so that nothing is added there.
    for i_first in tl.range(i_resume, i_stop + (WIDTH - 1), UNROLL):
        loaded = ()
        gradients = ()
        backs = ()
        for u in tl.static_range(UNROLL):
            i_t = i_first + u
            m_t = m_c & (i_t < n_tokens)
            loaded += (tl.load(p_xt, mask=m_t, other=0.0),)
            gradients += (_load_output_gradient(p_dyt, stride_dy_h, m_t, GROUP),)
            p_xt += stride_x
            p_dyt += stride_dy
            backs += (_load_lookback(p_lookback, i_t, n_tokens),)
        for u in tl.static_range(UNROLL):
            b_x = loaded[u].to(tl.float32)
            rows = _cut_at_document_start(rows, backs[u], p_lookback, WIDTH)
            b_dpre = _token_gradient(
                rows, b_x, gradients[u], weights, b_bias, p_x.dtype.element_ty, L2NORM, WIDTH
            )
            if NEED_X:
                b_dx, pending = _add_to_pending(
                    pending, b_dpre, weights, backs[u], p_lookback, WIDTH
                )
                m_done = m_c & (i_first + u - (WIDTH - 1) < n_tokens)
                tl.store(p_dxt, b_dx.to(p_dx.dtype.element_ty), mask=m_done)
                p_dxt += stride_dx
            if NEED_WEIGHT:
                sums = _add_to_weight_gradient(sums, rows, b_x, b_dpre, WIDTH)
            if NEED_BIAS:
                b_bias_sum += b_dpre
            rows = _push(rows, b_x)

    if NEED_WEIGHT:
        for i in tl.static_range(WIDTH):
            tl.store(p_partial + i * CHANNELS + o_c, sums[i], mask=m_c)
    if NEED_BIAS:
        p_column = p_partial + (WIDTH * CHANNELS if NEED_WEIGHT else 0)
        tl.store(p_column + o_c, b_bias_sum, mask=m_c)


@triton.jit
def _copy_heads(
    p_from,
    stride_from,
    stride_from_h,
    stride_from_d,
    p_to,
    stride_to,
    i_channel,
    i_head,
    i_start,
    i_stop,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The gradient of the gate, into its place in the gradient of the projection."""
    o_h = i_head + tl.arange(0, ROWS)[:, None]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_c = (o_h < HEADS) & (o_d < HEAD_DIM)
    p_from += i_start * stride_from + o_h * stride_from_h + o_d * stride_from_d
    p_to += i_start * stride_to + i_channel + o_h * HEAD_DIM + o_d
    for i_first in tl.range(i_start, i_stop, UNROLL):
        loaded = ()
        for u in tl.static_range(UNROLL):
            loaded += (tl.load(p_from, mask=m_c & (i_first + u < i_stop), other=0.0),)
            p_from += stride_from
        for u in tl.static_range(UNROLL):
            tl.store(p_to, loaded[u], mask=m_c & (i_first + u < i_stop))
            p_to += stride_to


@triton.jit
def _backward_decay(
    p_x,
    stride_x,
    i_channel,
    p_a_log,
    p_dt_bias,
    p_dbeta,
    stride_dbeta_s,
    stride_dbeta_h,
    p_dg,
    stride_dg_s,
    stride_dg_h,
    p_dx,
    stride_dx,
    p_partial,
    i_start,
    i_stop,
    HV: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_DECAY: tl.constexpr,
    BLOCK_HV: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Gradients of beta logits, alpha, A_log and dt_bias of a chunk, all heads."""
    o_h = tl.arange(0, BLOCK_HV)[None, :]
    m_h = o_h < HV
    b_a_log = tl.load(p_a_log + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_dt_bias = tl.load(p_dt_bias + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_rate = -_exp(b_a_log)
    b_da_log = tl.zeros([BLOCK_TOKENS, BLOCK_HV], tl.float32)
    b_ddt_bias = tl.zeros([BLOCK_TOKENS, BLOCK_HV], tl.float32)
    for i_first in tl.range(i_start, i_stop, BLOCK_TOKENS):
        o_t = i_first + tl.arange(0, BLOCK_TOKENS)[:, None]
        m_t = m_h & (o_t < i_stop)
        p_row = p_x + o_t * stride_x + (i_channel + o_h)
        p_out = p_dx + o_t * stride_dx + (i_channel + o_h)
        b_alpha = tl.load(p_row + HV, mask=m_t, other=0.0).to(tl.float32)
        p_dg_row = p_dg + o_t * stride_dg_s + o_h * stride_dg_h
        b_dg = tl.load(p_dg_row, mask=m_t, other=0.0).to(tl.float32)
        b_softplus, b_slope = _softplus_terms(b_alpha + b_dt_bias)
        b_dalpha = b_dg * b_rate * b_slope
        if NEED_X:
            b_beta = tl.load(p_row, mask=m_t, other=0.0).to(tl.float32)
            p_dbeta_row = p_dbeta + o_t * stride_dbeta_s + o_h * stride_dbeta_h
            b_dbeta = tl.load(p_dbeta_row, mask=m_t, other=0.0).to(tl.float32)
            _, b_beta_slope, _ = _sigmoid_terms(b_beta)
            tl.store(p_out, (b_dbeta * b_beta_slope).to(p_dx.dtype.element_ty), mask=m_t)
            tl.store(p_out + HV, b_dalpha.to(p_dx.dtype.element_ty), mask=m_t)
        if NEED_DECAY:
            b_da_log += tl.where(m_t, b_dg * (b_rate * b_softplus), 0.0)
            b_ddt_bias += tl.where(m_t, b_dalpha, 0.0)
    if NEED_DECAY:
        o_column = tl.arange(0, BLOCK_HV)
        tl.store(p_partial + o_column, tl.sum(b_da_log, axis=0), mask=o_column < HV)
        tl.store(p_partial + HV + o_column, tl.sum(b_ddt_bias, axis=0), mask=o_column < HV)


@triton.jit(
    do_not_specialize=[*_COUNTS, *_X_STRIDES, *_GRADIENT_STRIDES],
    do_not_specialize_on_alignment=_ANY_ALIGNMENT,
)
def _pre_gated_delta_rule_backward_kernel(
    p_x,
    p_weight,
    p_bias,
    p_a_log,
    p_dt_bias,
    p_lookback,
    p_dq,
    p_dk,
    p_dv,
    p_dz,
    p_dbeta,
    p_dg,
    p_dx,
    p_partial,
    stride_x_s: tl.int64,
    stride_x_b: tl.int64,
    stride_dq_b: tl.int64,
    stride_dq_s: tl.int64,
    stride_dq_h: tl.int64,
    stride_dq_d: tl.int64,
    stride_dk_b: tl.int64,
    stride_dk_s: tl.int64,
    stride_dk_h: tl.int64,
    stride_dk_d: tl.int64,
    stride_dv_b: tl.int64,
    stride_dv_s: tl.int64,
    stride_dv_h: tl.int64,
    stride_dv_d: tl.int64,
    stride_dz_b: tl.int64,
    stride_dz_s: tl.int64,
    stride_dz_h: tl.int64,
    stride_dz_d: tl.int64,
    stride_dbeta_b: tl.int64,
    stride_dbeta_s: tl.int64,
    stride_dbeta_h: tl.int64,
    stride_dg_b: tl.int64,
    stride_dg_s: tl.int64,
    stride_dg_h: tl.int64,
    n_batch,
    n_tokens,
    n_chunk,
    NEED_X: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    NEED_DECAY: tl.constexpr,
    X_VECTOR: tl.constexpr,
    DY_VECTOR: tl.constexpr,
    DY_UNIT_STRIDE: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    L2NORM: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    VALUE_ROWS: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_HV: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    CONV_CHANNELS: tl.constexpr = 2 * HK * DK + HV * DV
    CHANNELS: tl.constexpr = CONV_CHANNELS + HV * DV + 2 * HV
    KEY_SLOTS: tl.constexpr = (HK + KEY_ROWS - 1) // KEY_ROWS
    VALUE_SLOTS: tl.constexpr = (HV + VALUE_ROWS - 1) // VALUE_ROWS
    SLOTS: tl.constexpr = 2 * KEY_SLOTS + 2 * VALUE_SLOTS + 1
    WEIGHT_COLUMNS: tl.constexpr = CONV_CHANNELS * WIDTH if NEED_WEIGHT else 0
    CONV_COLUMNS: tl.constexpr = WEIGHT_COLUMNS + (CONV_CHANNELS if NEED_BIAS else 0)
    COLUMNS: tl.constexpr = CONV_COLUMNS + (2 * HV if NEED_DECAY else 0)
    i_slot = tl.program_id(0) % SLOTS
    i_part = tl.program_id(0) // SLOTS
    i_batch = i_part % n_batch
    i_start = (i_part // n_batch) * n_chunk
    i_stop = tl.minimum(i_start + n_chunk, n_tokens)
    stride_x = stride_x_s * X_VECTOR
    stride_dx = n_batch.to(tl.int64) * CHANNELS
    p_x += i_batch * stride_x_b * X_VECTOR
    p_dx += i_batch.to(tl.int64) * CHANNELS
    p_partial += i_part.to(tl.int64) * COLUMNS

    if i_slot < 2 * KEY_SLOTS:
        i_is_key = i_slot // KEY_SLOTS
        m_q = i_is_key == 0
        stride_b = (stride_dq_b if m_q else stride_dk_b) * DY_VECTOR
        _backward_heads(
            p_x,
            stride_x,
            i_is_key * (HK * DK),
            p_weight,
            p_bias,
            p_lookback,
            (p_dq if m_q else p_dk) + i_batch * stride_b,
            (stride_dq_s if m_q else stride_dk_s) * DY_VECTOR,
            (stride_dq_h if m_q else stride_dk_h) * DY_VECTOR,
            1 if DY_UNIT_STRIDE else (stride_dq_d if m_q else stride_dk_d),
            p_dx,
            stride_dx,
            p_partial,
            (i_slot % KEY_SLOTS) * KEY_ROWS,
            i_start,
            i_stop,
            n_tokens,
            HK,
            DK,
            HV // HK,
            CONV_CHANNELS,
            L2NORM,
            WIDTH,
            NEED_X,
            NEED_WEIGHT,
            NEED_BIAS,
            KEY_ROWS,
            BLOCK_DK,
            UNROLL,
        )
    elif i_slot < 2 * KEY_SLOTS + VALUE_SLOTS:
        _backward_heads(
            p_x,
            stride_x,
            2 * HK * DK,
            p_weight,
            p_bias,
            p_lookback,
            p_dv + i_batch * stride_dv_b * DY_VECTOR,
            stride_dv_s * DY_VECTOR,
            stride_dv_h * DY_VECTOR,
            1 if DY_UNIT_STRIDE else stride_dv_d,
            p_dx,
            stride_dx,
            p_partial,
            (i_slot - 2 * KEY_SLOTS) * VALUE_ROWS,
            i_start,
            i_stop,
            n_tokens,
            HV,
            DV,
            1,
            CONV_CHANNELS,
            False,
            WIDTH,
            NEED_X,
            NEED_WEIGHT,
            NEED_BIAS,
            VALUE_ROWS,
            BLOCK_DV,
            UNROLL,
        )
    elif i_slot < SLOTS - 1:
        if NEED_X:
            _copy_heads(
                p_dz + i_batch * stride_dz_b * DY_VECTOR,
                stride_dz_s * DY_VECTOR,
                stride_dz_h * DY_VECTOR,
                1 if DY_UNIT_STRIDE else stride_dz_d,
                p_dx,
                stride_dx,
                CONV_CHANNELS,
                (i_slot - 2 * KEY_SLOTS - VALUE_SLOTS) * VALUE_ROWS,
                i_start,
                i_stop,
                HV,
                DV,
                VALUE_ROWS,
                BLOCK_DV,
                UNROLL,
            )
    else:
        _backward_decay(
            p_x,
            stride_x,
            CONV_CHANNELS + HV * DV,
            p_a_log,
            p_dt_bias,
            p_dbeta + i_batch * stride_dbeta_b,
            stride_dbeta_s,
            stride_dbeta_h,
            p_dg + i_batch * stride_dg_b,
            stride_dg_s,
            stride_dg_h,
            p_dx,
            stride_dx,
            p_partial + CONV_COLUMNS,
            i_start,
            i_stop,
            HV,
            NEED_X,
            NEED_DECAY,
            BLOCK_HV,
            BLOCK_TOKENS,
        )


@triton.jit(do_not_specialize=["n_parts"])
def _sum_parts_kernel(
    p_partial,
    p_dweight,
    p_dbias,
    p_da_log,
    p_ddt_bias,
    n_parts,
    CONV_CHANNELS: tl.constexpr,
    HV: tl.constexpr,
    WIDTH: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    NEED_DECAY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Parameter gradients: the float32 parts of all chunks and batch entries in a fixed order.

    Columns of a part: W rows of Cc for the weight, Cc for the bias, Hv for A_log, Hv for dt_bias.
    """
    WEIGHT_STOP: tl.constexpr = CONV_CHANNELS * (WIDTH if NEED_WEIGHT else 0)
    BIAS_STOP: tl.constexpr = WEIGHT_STOP + (CONV_CHANNELS if NEED_BIAS else 0)
    COLUMNS: tl.constexpr = BIAS_STOP + (2 * HV if NEED_DECAY else 0)
    o_c = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    b_sum = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for i_first in tl.range(0, n_parts, BLOCK_ROWS):
        o_part = i_first + tl.arange(0, BLOCK_ROWS)[:, None]
        p_part = p_partial + o_part.to(tl.int64) * COLUMNS + o_c[None, :]
        b_sum += tl.load(p_part, mask=(o_part < n_parts) & (o_c[None, :] < COLUMNS), other=0.0)
    b_total = tl.sum(b_sum, axis=0)
    if NEED_WEIGHT:
        p_out = p_dweight + (o_c % CONV_CHANNELS) * WIDTH + o_c // CONV_CHANNELS
        tl.store(p_out, b_total.to(p_dweight.dtype.element_ty), mask=o_c < WEIGHT_STOP)
    if NEED_BIAS:
        m_c = (o_c >= WEIGHT_STOP) & (o_c < BIAS_STOP)
        tl.store(p_dbias + (o_c - WEIGHT_STOP), b_total.to(p_dbias.dtype.element_ty), mask=m_c)
    if p_da_log is not None:
        m_c = (o_c >= BIAS_STOP) & (o_c < BIAS_STOP + HV)
        tl.store(p_da_log + (o_c - BIAS_STOP), b_total.to(p_da_log.dtype.element_ty), mask=m_c)
    if p_ddt_bias is not None:
        o_h = o_c - (BIAS_STOP + HV)
        m_c = (o_h >= 0) & (o_h < HV)
        tl.store(p_ddt_bias + o_h, b_total.to(p_ddt_bias.dtype.element_ty), mask=m_c)


def _launch_config(
    sizes: HeadSizes,
    batch: int,
    length: int,
    *,
    per_thread: int,
    unroll: int,
    value_slots: int,
    programs: int,
) -> LaunchConfig:
    key_heads, value_heads, key_dim, value_dim = map(triton.next_power_of_2, sizes[:4])
    smallest = min(key_heads * key_dim, value_heads * value_dim)
    num_warps = max(1, min(_MAX_WARPS, smallest // (32 * per_thread)))
    block = num_warps * 32 * per_thread
    key_rows = max(1, min(key_heads, block // key_dim))
    value_rows = max(1, min(value_heads, block // value_dim))
    slots = (
        2 * -(-sizes.num_key_heads // key_rows)
        + value_slots * -(-sizes.num_value_heads // value_rows)
        + 1
    )
    chunk = _MAX_CHUNK
    while chunk > _MIN_CHUNK and slots * batch * -(-length // chunk) < programs:
        chunk //= 2
    return LaunchConfig(key_rows, value_rows, unroll, num_warps, slots, chunk)


@functools.lru_cache(maxsize=1024)
def forward_config(sizes: HeadSizes, width: int, batch: int, length: int) -> LaunchConfig:
    """Launch of the forward kernel.

    Four channels a thread and eight rows of loads in flight, in short chunks: measured fastest on
    an H200, though eight channels would make wider accesses. Wide convolutions unroll less, since
    they keep more rows in registers.
    """
    return _launch_config(
        sizes,
        batch,
        length,
        per_thread=4,
        unroll=8 if width <= 4 else 4,
        value_slots=1,
        programs=_FORWARD_PROGRAMS,
    )


@functools.lru_cache(maxsize=1024)
def backward_config(
    sizes: HeadSizes, width: int, batch: int, length: int, element_size: int, extra: bool
) -> LaunchConfig:
    """Launch of the backward kernel.

    4 W - 1 rows live across the march: weights, x, pending and weight gradients. With four channels
    a thread and W = 4 the kernel fits 128 registers, so 16 warps share a multiprocessor, each with
    `unroll` x (1 + Hv/Hk) rows of loads in flight. What takes more registers, unrolls less.

    Args:
        extra: a convolution bias or packed documents, a few more registers.
    """
    group = sizes.num_value_heads // sizes.num_key_heads
    roomy = width <= 4 and group <= 2 and element_size == 2 and not extra
    return _launch_config(
        sizes,
        batch,
        length,
        per_thread=4,
        unroll=4 if roomy else 2,
        value_slots=2,
        programs=_BACKWARD_PROGRAMS,
    )


_launch_forward_kernel = KernelLauncher(_pre_gated_delta_rule_forward_kernel)
_launch_backward_kernel = KernelLauncher(_pre_gated_delta_rule_backward_kernel)
_launch_sum_parts_kernel = KernelLauncher(_sum_parts_kernel)
_launch_document_lookback_kernel = KernelLauncher(_document_lookback_kernel)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides with zeros for dimensions of size one, whose stride means nothing."""
    strides = tensor.stride()
    if 1 not in tensor.shape:
        return strides
    return tuple(
        0 if size == 1 else stride for size, stride in zip(tensor.shape, strides, strict=True)
    )


def _vector(tensor: Tensor, strides: tuple[int, ...], row: int) -> int:
    """Elements, 16 bytes at most, of which the strides between the rows are multiples.

    Where no stride tells, as with one row alone, it is what contiguous rows of this size would
    give: the kernels compile anew for another value, and one token must not be a case of its own.
    """
    return math.gcd(*strides, 0 if any(strides) else row, _VECTOR_BYTES // tensor.element_size())


@functools.lru_cache(maxsize=1024)
def _shared_constants(sizes: HeadSizes, width: int, config: LaunchConfig) -> tuple[Any, ...]:
    """The last arguments of both large kernels, from HK on; `chunk` has no part in them."""
    block_hv = triton.next_power_of_2(sizes.num_value_heads)
    return (
        sizes.num_key_heads,
        sizes.num_value_heads,
        sizes.key_head_dim,
        sizes.value_head_dim,
        width,
        sizes.use_qk_l2norm,
        config.key_rows,
        config.value_rows,
        triton.next_power_of_2(sizes.key_head_dim),
        triton.next_power_of_2(sizes.value_head_dim),
        block_hv,
        max(1, config.num_warps * _DECAY_VALUES_PER_WARP // block_hv),
        config.unroll,
    )


def _document_lookback(cu_seqlens: Tensor, length: int, width: int) -> Tensor:
    """`[s]` uint8: how many earlier tokens of its document each token sees, at most W - 1."""
    cu_seqlens = cu_seqlens.contiguous()
    documents = cu_seqlens.shape[0] - 1
    lookback = torch.empty(length, dtype=torch.uint8, device=cu_seqlens.device)
    counts = (documents, length, documents.bit_length())
    _launch_document_lookback_kernel(
        -(-length // _LOOKBACK_TOKENS),
        cu_seqlens,
        (cu_seqlens, lookback, *counts, width, _LOOKBACK_TOKENS),
        _SMALL_WARPS,
        (cu_seqlens.dtype, width, alignment_bits(lookback)) if fits_int32(length) else None,
    )
    return lookback


def _launch_forward(
    qkvzba: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    lookback: Tensor | None,
    sizes: HeadSizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    length, batch, _ = qkvzba.shape
    width = conv_weight.shape[-1]
    config = forward_config(sizes, width, batch, length)
    heads, device, dtype = sizes.num_value_heads, qkvzba.device, qkvzba.dtype
    q = torch.empty((batch, length, heads, sizes.key_head_dim), dtype=dtype, device=device)
    k = torch.empty_like(q)
    if sizes.value_head_dim == sizes.key_head_dim:
        v = torch.empty_like(q)
    else:
        v = torch.empty((batch, length, heads, sizes.value_head_dim), dtype=dtype, device=device)
    beta = torch.empty((batch, length, heads), dtype=torch.float32, device=device)
    g = torch.empty_like(beta)
    stride_s, stride_b, _ = _strides(qkvzba)
    vector = _vector(qkvzba, (stride_s, stride_b), sizes.channels)
    variant = None
    if fits_int32(batch * length):
        variant = (
            *(dtype, conv_weight.dtype, conv_bias is None or conv_bias.dtype),
            *(A_log.dtype, dt_bias.dtype, lookback is None, vector, sizes, width),
            alignment_bits(qkvzba, q, k, v, beta, g),
        )
    _launch_forward_kernel(
        config.slots * batch * -(-length // config.chunk),
        qkvzba,
        (
            qkvzba,
            conv_weight.contiguous(),
            None if conv_bias is None else conv_bias.contiguous(),
            A_log.contiguous(),
            dt_bias.contiguous(),
            lookback,
            q,
            k,
            v,
            beta,
            g,
            stride_s // vector,
            stride_b // vector,
            batch,
            length,
            config.chunk,
            vector,
            *_shared_constants(sizes, width, config),
        ),
        config.num_warps,
        variant,
    )
    return q, k, v, beta, g


def _launch_backward(
    qkvzba: Tensor,
    parameters: Sequence[Tensor | None],
    lookback: Tensor | None,
    sizes: HeadSizes,
    gradients: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of the five tensor inputs; `needed` says which, the others are None."""
    conv_weight, conv_bias, A_log, dt_bias = parameters
    assert conv_weight is not None
    assert A_log is not None
    assert dt_bias is not None
    length, batch, _ = qkvzba.shape
    width = conv_weight.shape[-1]
    extra = conv_bias is not None or lookback is not None
    config = backward_config(sizes, width, batch, length, qkvzba.element_size(), extra)
    heads, device = sizes.num_value_heads, qkvzba.device
    need_x, need_weight, need_bias = needed[:3]
    need_bias = need_bias and conv_bias is not None
    need_decay = needed[3] or needed[4]

    # An unused output reads one row of zeros, repeated by zero strides.
    dq, dk, dv, dz, dbeta, dg = gradients
    key_dim, value_dim = sizes.key_head_dim, sizes.value_head_dim
    wide = [
        qkvzba.new_zeros((heads, dim)).expand(batch, length, heads, dim) if grad is None else grad
        for grad, dim in ((dq, key_dim), (dk, key_dim), (dv, value_dim), (dz, value_dim))
    ]
    narrow = [
        A_log.new_zeros(heads, dtype=torch.float32).expand(batch, length, heads)
        if grad is None
        else grad
        for grad in (dbeta, dg)
    ]
    wide_strides = [_strides(grad) for grad in wide]
    unit_stride = all(
        stride[3] == 1 or grad.shape[3] == 1
        for stride, grad in zip(wide_strides, wide, strict=True)
    )
    dy_vector = 1
    if unit_stride:
        dy_vector = math.gcd(
            *(
                _vector(qkvzba, stride[:3], grad.shape[3])
                for stride, grad in zip(wide_strides, wide, strict=True)
            )
        )
    stride_s, stride_b, _ = _strides(qkvzba)
    x_vector = _vector(qkvzba, (stride_s, stride_b), sizes.channels)

    columns = sizes.conv_channels * (width * need_weight + need_bias) + 2 * heads * need_decay
    parts = batch * -(-length // config.chunk)
    shape = (length, batch, sizes.channels) if need_x else (0,)
    dx = torch.empty(shape, dtype=qkvzba.dtype, device=device)
    partial = torch.empty((parts, columns), dtype=torch.float32, device=device)
    variant = None
    if fits_int32(batch * length):
        variant = (
            *(qkvzba.dtype, conv_weight.dtype, conv_bias is None or conv_bias.dtype),
            *(A_log.dtype, dt_bias.dtype, lookback is None, x_vector, dy_vector, unit_stride),
            *(need_x, need_weight, need_bias, need_decay, sizes, width),
            *(grad.dtype for grad in wide),
            *(grad.dtype for grad in narrow),
            alignment_bits(qkvzba, *wide, *narrow, dx, partial),
        )
    _launch_backward_kernel(
        config.slots * parts,
        qkvzba,
        (
            qkvzba,
            conv_weight.contiguous(),
            None if conv_bias is None else conv_bias.contiguous(),
            A_log.contiguous(),
            dt_bias.contiguous(),
            lookback,
            *wide,
            *narrow,
            dx,
            partial,
            stride_s // x_vector,
            stride_b // x_vector,
            *(
                step
                for stride in wide_strides
                for step in (*(outer // dy_vector for outer in stride[:3]), stride[3])
            ),
            *_strides(narrow[0]),
            *_strides(narrow[1]),
            batch,
            length,
            config.chunk,
            need_x,
            need_weight,
            need_bias,
            need_decay,
            x_vector,
            dy_vector,
            unit_stride,
            *_shared_constants(sizes, width, config),
        ),
        config.num_warps,
        variant,
    )
    sums: list[Tensor | None] = [
        torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if parameter is not None and need
        else None
        for parameter, need in (
            (conv_weight, need_weight),
            (conv_bias, need_bias),
            (A_log, needed[3]),
            (dt_bias, needed[4]),
        )
    ]
    if columns:
        _launch_sum_parts_kernel(
            -(-columns // _REDUCE_COLUMNS),
            partial,
            (
                partial,
                *sums,
                parts,
                sizes.conv_channels,
                heads,
                width,
                need_weight,
                need_bias,
                need_decay,
                _REDUCE_ROWS,
                _REDUCE_COLUMNS,
            ),
            _SMALL_WARPS,
            (
                *(None if total is None else total.dtype for total in sums),
                *(sizes, width, alignment_bits(partial, *sums)),
            ),
        )
    return (dx if need_x else None, *sums)


def projection_problems(
    qkvzba: Tensor,
    conv_weight: Tensor,
    num_key_heads: int,
    num_value_heads: int,
    key_head_dim: int,
    value_head_dim: int,
    use_qk_l2norm: bool,
) -> list[str]:
    """Precondition: sizes are positive ints, and the channels of projection and convolution fit.

    Nothing but an int may pass: sizes are keys of caches and compile-time arguments of the kernels,
    and a numpy integer is equal to the int whose place it would take there.
    """
    sizes = {
        "num_key_heads": num_key_heads,
        "num_value_heads": num_value_heads,
        "key_head_dim": key_head_dim,
        "value_head_dim": value_head_dim,
    }
    odd = [f"{name}={size!r}" for name, size in sizes.items() if type(size) is not int or size < 1]
    if type(use_qk_l2norm) is not bool:
        odd.append(f"use_qk_l2norm={use_qk_l2norm!r}")
    if odd:
        return [", ".join(odd)]
    key_channels = 2 * num_key_heads * key_head_dim
    value_channels = num_value_heads * value_head_dim
    conv_channels = key_channels + value_channels
    channels = conv_channels + value_channels + 2 * num_value_heads
    found = []
    if qkvzba.ndim == 3 and qkvzba.shape[2] != channels:
        found.append(f"{qkvzba.shape[2]} projection channels where the heads make {channels}")
    if conv_weight.ndim == 3 and conv_weight.shape[0] != conv_channels:
        found.append(
            f"{conv_weight.shape[0]} convolution channels where the heads make {conv_channels}"
        )
    return found


def packing_problems(qkvzba: Tensor, cu_seqlens: Tensor | None) -> list[str]:
    """Precondition: packed documents lie in one batch entry, and there is at least one."""
    if cu_seqlens is None:
        return []
    found = []
    if qkvzba.ndim == 3 and qkvzba.shape[1] != 1:
        found.append(f"cu_seqlens with batch size {qkvzba.shape[1]}")
    if cu_seqlens.ndim == 1 and cu_seqlens.shape[0] < 2:
        found.append(f"cu_seqlens of {cu_seqlens.shape[0]} entries, which bound no document")
    return found


class _PreGatedDeltaRule(torch.autograd.Function):
    """Saves its own inputs and, for packed batches, the lookback bytes; nothing else."""

    @staticmethod
    def forward(
        ctx: Any,
        qkvzba: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        A_log: Tensor,
        dt_bias: Tensor,
        cu_seqlens: Tensor | None,
        sizes: HeadSizes,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        lookback = None
        if cu_seqlens is not None:
            lookback = _document_lookback(cu_seqlens, qkvzba.shape[0], conv_weight.shape[-1])
        parameters = (conv_weight, conv_bias, A_log, dt_bias)
        q, k, v, beta, g = _launch_forward(qkvzba, *parameters, lookback, sizes)
        # A view made here is an output like the others to autograd: its gradient arrives in
        # backward, which writes it to its place, where slicing outside would cost a zero-filled
        # projection and an addition. Writing to the gate in place is an error, as it must be.
        # One view operation instead of three, which cost as much as a kernel launch.
        length, batch, _ = qkvzba.shape
        stride_s, stride_b, _ = qkvzba.stride()
        gate = qkvzba.as_strided(
            (batch, length, sizes.num_value_heads, sizes.value_head_dim),
            (stride_b, stride_s, sizes.value_head_dim, 1),
            qkvzba.storage_offset() + sizes.conv_channels,
        )
        ctx.save_for_backward(qkvzba, *parameters, lookback)
        ctx.sizes = sizes
        ctx.set_materialize_grads(False)
        # What depends on frozen inputs alone: torch would take every output to need a gradient.
        need_x, need_weight, need_bias, need_a_log, need_dt_bias = ctx.needs_input_grad[:5]
        if not need_x:
            frozen = [gate, beta]
            if not (need_weight or need_bias):
                frozen += [q, k, v]
            if not (need_a_log or need_dt_bias):
                frozen.append(g)
            ctx.mark_non_differentiable(*frozen)
        return q, k, v, gate, beta, g

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(gradient is None for gradient in gradients):
            return (None,) * 7
        results = _PreGatedDeltaRuleGradient.apply(
            ctx.sizes, ctx.needs_input_grad[:5], *ctx.saved_tensors, *gradients
        )
        return (*results, None, None)


class _PreGatedDeltaRuleGradient(torch.autograd.Function):
    """The backward as a Function, so that differentiating it raises.

    `once_differentiable` on the backward itself would raise only when an incoming gradient
    requires one; of a loss on first-order gradients it would silently drop a part.
    """

    @staticmethod
    def forward(
        ctx: Any,
        sizes: HeadSizes,
        needed: tuple[bool, ...],
        qkvzba: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        A_log: Tensor,
        dt_bias: Tensor,
        lookback: Tensor | None,
        *gradients: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        parameters = (conv_weight, conv_bias, A_log, dt_bias)
        return _launch_backward(qkvzba, parameters, lookback, sizes, gradients, needed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> None:
        raise RuntimeError(
            "fused_pre_gated_delta_rule is differentiable once, got the gradient of its gradient; "
            "disable the fusion for second-order gradients"
        )


@checked_by_declaration("pre_gated_delta_rule")
def fused_pre_gated_delta_rule(
    qkvzba: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    num_key_heads: int,
    num_value_heads: int,
    key_head_dim: int,
    value_head_dim: int,
    use_qk_l2norm: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fused stage `pre_gated_delta_rule`, forward and first-order backward.

    Args:
        qkvzba: `[s, b, C]` BF16, FP16 or FP32, channels q, k, v, z (gate), beta, alpha, with
            C = 2*Hk*Dk + 2*Hv*Dv + 2*Hv. Any strides with channel stride 1: slices and transposed
            views are read in place.
        conv_weight: `[Cc, 1, W]`, Cc = 2*Hk*Dk + Hv*Dv, W from 2 to 8; conv_bias: `[Cc]` or None.
        A_log, dt_bias: `[Hv]`. Parameters may each have another floating dtype than `qkvzba`.
        num_key_heads, num_value_heads: Hk and Hv of this rank, Hv a multiple of Hk.
        key_head_dim, value_head_dim: Dk and Dv, at most 1024, not necessarily powers of two.
        use_qk_l2norm: normalise q and k over the head dimension.
        cu_seqlens: `[N+1]` int32 or int64 on the same device, cumulative document lengths of a
            packed batch (b = 1), nondecreasing from 0 to s; documents may be empty. Its content is
            not read on the host and so not checked; tokens past its last entry form one document.

    Returns:
        q, k `[b, s, Hv, Dk]` and v `[b, s, Hv, Dv]`, contiguous, dtype of `qkvzba`; gate
        `[b, s, Hv, Dv]`, a view of `qkvzba` that autograd forbids to modify in place; beta, g
        `[b, s, Hv]` float32. The gradient of `qkvzba` is contiguous in logical order.

    Raises:
        FusionUnsupportedError: a ValueError with every declared precondition about the arguments
            that does not hold (`pre_gated_delta_rule.yaml`).
        RuntimeError: from autograd, when a gradient is itself differentiated.

    Autograd keeps references to the five inputs and, for packed batches, one byte per token. The
    convolution is recomputed, and no output is kept for this function's own backward.
    """
    sizes = HeadSizes(num_key_heads, num_value_heads, key_head_dim, value_head_dim, use_qk_l2norm)
    return _PreGatedDeltaRule.apply(
        qkvzba, conv_weight, conv_bias, A_log, dt_bias, cu_seqlens, sizes
    )
