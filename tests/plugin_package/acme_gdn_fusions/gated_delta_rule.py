# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule without a loop: one triangular system for the whole sequence.

With `G = cumsum(g)` and `d[t, i] = exp(G[t] - G[i])` the rule's updates `u` solve

    u[t] = beta[t] (v[t] - sum_{i<t} d[t, i] (k[t] . k[i]) u[i])

and the output is `x[t] = sum_{i<=t} d[t, i] (q[t] . k[i]) u[i] / sqrt(Dk)`.
"""

import torch


def solve(q, k, v, g, beta, cu_seqlens):
    """Stage `gated_delta_rule` on sequences that are not packed, float32 inside.

    Args:
        q, k: `[b, s, Hv, Dk]`; v: `[b, s, Hv, Dv]`; g, beta: `[b, s, Hv]`.

    Returns:
        `[b, s, Hv, Dv]` in the dtype of `v`.
    """
    del cu_seqlens
    # Heads first, so that the last two dimensions are the matrices.
    q_, k_, v_ = (tensor.float().transpose(1, 2) for tensor in (q, k, v))
    g_, beta_ = (tensor.float().transpose(1, 2) for tensor in (g, beta))
    total = g_.cumsum(-1)
    length = total.shape[-1]
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    difference = (total[..., :, None] - total[..., None, :]).masked_fill(~seen, 0.0)
    decay = difference.exp() * seen
    system = (beta_[..., None] * decay * (k_ @ k_.mT)).tril(-1)
    updates = torch.linalg.solve_triangular(
        system, beta_[..., None] * v_, upper=False, unitriangular=True
    )
    x = (decay * (q_ @ k_.mT)) @ updates / q.shape[-1] ** 0.5
    return x.transpose(1, 2).contiguous().to(v.dtype)
