# SPDX-License-Identifier: Apache-2.0
"""Corrections that make Triton's interpreter round as a GPU does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Float32 values, or their bits, rounded to nearest even: the 16 bits of each BF16."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def round_bfloat16_to_nearest_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the interpreter's cast from float32 to BF16, which truncates (Triton 3.6, 3.7.1)."""
    truncating = interpreter._convert_float

    def convert(values: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        toward_zero = (
            rounding_mode is not None and rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ
        )
        if source == tl.float32 and target == tl.bfloat16 and not toward_zero:
            return bfloat16_bits(np.ascontiguousarray(values)).reshape(values.shape)
        return truncating(values, source, target, rounding_mode)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
