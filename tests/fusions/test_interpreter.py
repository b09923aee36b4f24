# SPDX-License-Identifier: Apache-2.0
"""What is changed in Triton's interpreter: how often it looks for its language, nothing else."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from megatron.gdn import triton_3_7

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="about Triton's interpreter"
)


@triton.jit
def _double(x):
    return tl.where(x > 0, x * 2, tl.abs(x))


@triton.jit
def _twice(x):
    return _double(_double(x))


@triton.jit
def _kernel(p_x, p_out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    x = tl.load(p_x + i)
    for _ in range(2):
        x = _twice(x)
    tl.store(p_out + i, tl.max(x, axis=0) + x)


def launch() -> torch.Tensor:
    x = torch.linspace(-1.0, 1.0, 8)
    out = torch.empty_like(x)
    _kernel[(1,)](x, out, COUNT=8)
    return out


def test_one_search_for_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one for Triton's own functions, which see more; not one for each call of a function."""
    searches = []
    search = interpreter._patch_builtin

    def counted(package: object, *more: object) -> None:
        searches.append(package)
        search(package, *more)

    monkeypatch.setattr(interpreter, "_patch_builtin", counted)
    quick = launch()
    assert 1 <= searches.count(tl) <= 2
    searches.clear()
    launch()
    assert 1 <= searches.count(tl) <= 2
    plain = interpreter._patch_lang.__closure__
    assert plain is not None
    original = next(cell.cell_contents for cell in plain if callable(cell.cell_contents))
    monkeypatch.setattr(interpreter, "_patch_lang", original)
    searches.clear()
    assert torch.equal(launch(), quick)
    assert searches.count(tl) > 6


def test_the_language_is_put_back() -> None:
    before = (tl.load, tl.range, tl.reduce)
    launch()
    assert (tl.load, tl.range, tl.reduce) == before
    assert not triton_3_7._patched


def test_a_kernel_that_fails_leaves_nothing_behind() -> None:
    with pytest.raises(interpreter.InterpreterError):
        _kernel[(1,)](None, None, COUNT=8)
    assert not triton_3_7._patched
    assert torch.isfinite(launch()).all()


def test_launches_of_several_threads() -> None:
    """None undoes what another has replaced."""
    expected, before = launch(), sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-4)
        with ThreadPoolExecutor(3) as pool:
            launches = [pool.submit(launch) for _ in range(12)]
            assert all(torch.equal(done.result(), expected) for done in launches)
    finally:
        sys.setswitchinterval(before)


def test_calling_it_again_changes_nothing() -> None:
    before = (interpreter._patch_lang, interpreter.GridExecutor.__call__)
    triton_3_7.speed_up_interpreter()
    assert (interpreter._patch_lang, interpreter.GridExecutor.__call__) == before


def test_another_triton_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run = interpreter.GridExecutor.__call__
    monkeypatch.delattr(interpreter, "_patch_lang")
    triton_3_7.speed_up_interpreter()
    assert not hasattr(interpreter, "_patch_lang")
    assert interpreter.GridExecutor.__call__ is run
