# SPDX-License-Identifier: Apache-2.0
"""How large the model is and how long it trains. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingSize:
    """Sizes of model and run.

    Args:
        layers: transformer layers; every `attention_every`th is softmax attention, the others are
            Gated DeltaNet layers.
        hidden_size: width of the model; the feed-forward layer is twice as wide.
        key_heads, value_heads: of a Gated DeltaNet layer; head_dim: of both.
        batch, sequence: rows and bytes per row of a step.
        steps: optimiser steps; learning_rate: the highest of the schedule.
        held_out_rows: rows of held-out text per evaluation; evaluations: spread over the run, the
            first before the first step and the last after the last.
    """

    layers: int
    attention_every: int
    hidden_size: int
    key_heads: int
    value_heads: int
    head_dim: int
    batch: int
    sequence: int
    steps: int
    learning_rate: float
    held_out_rows: int
    evaluations: int


GPU = TrainingSize(
    layers=8,
    attention_every=4,
    hidden_size=512,
    key_heads=4,
    value_heads=8,
    head_dim=64,
    batch=16,
    sequence=512,
    steps=300,
    learning_rate=2e-3,
    held_out_rows=64,
    evaluations=5,
)

# The interpreter spends about 10 ms on each tile of 2048 elements of the output norm, forward and
# again backward. Two heads of 16 make 64 tokens a tile, so that a row of 64 bytes fills it.
CPU = TrainingSize(
    layers=4,
    attention_every=4,
    hidden_size=128,
    key_heads=1,
    value_heads=2,
    head_dim=16,
    batch=8,
    sequence=64,
    steps=40,
    learning_rate=3e-3,
    held_out_rows=32,
    evaluations=3,
)

# The fused stage before the recurrence marches token by token: 8 ms forward and 16 ms backward for
# each token of each layer in the interpreter. Two Gated DeltaNet layers and few tokens remain: one
# layer could not show that a fusion's output is right for the next one.
CPU_TOKEN_BY_TOKEN = TrainingSize(
    layers=3,
    attention_every=3,
    hidden_size=128,
    key_heads=1,
    value_heads=2,
    head_dim=16,
    batch=2,
    sequence=32,
    steps=18,
    learning_rate=3e-3,
    held_out_rows=8,
    evaluations=2,
)


def default_size(device_type: str, token_by_token: bool) -> TrainingSize:
    """The size that trains in about a minute.

    Args:
        device_type: `cuda` or `cpu`, there with Triton's interpreter.
        token_by_token: whether a fusion is enabled whose kernels walk over the tokens in a loop.
    """
    if device_type == "cuda":
        return GPU
    return CPU_TOKEN_BY_TOKEN if token_by_token else CPU
