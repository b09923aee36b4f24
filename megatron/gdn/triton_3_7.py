# SPDX-License-Identifier: Apache-2.0
"""What this project asks of Triton 3.7.1 beyond its public interface. Imports triton."""

from __future__ import annotations

import functools
import threading
from types import FunctionType, ModuleType
from typing import Any

import triton
import triton.language as tl
from triton.runtime import interpreter


class _Nothing:
    """Stands for replacements that others made and will undo."""

    def restore(self) -> None:
        pass


_patched: set[ModuleType] = set()
"""Modules of the language that the running kernel has had replaced."""
_running = threading.RLock()


@functools.cache
def _languages(function: FunctionType) -> frozenset[ModuleType]:
    """Modules of Triton's language that a function sees."""
    return frozenset(
        language
        for language in (tl, tl.core)
        if any(value is language for value in function.__globals__.values())
    )


def speed_up_interpreter() -> None:
    """Let Triton's interpreter look for functions of its language once for each kernel.

    For a launch it replaces them by its own and puts them back afterwards. At every call of a
    device function it looks for them anew and finds them replaced already: half of the time of a
    kernel that is made of device functions. Results are the same. Kernels of several threads run
    one after another. Calling it twice, or without the interpreter, is harmless.
    """
    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None or getattr(patch, "once", False) or not triton.knobs.runtime.interpret:
        return  # another Triton is as slow as it is
    run = interpreter.GridExecutor.__call__

    def patch_once(function: FunctionType) -> Any:
        languages = _languages(function)
        if languages and languages <= _patched:
            return _Nothing()
        scope = patch(function)
        _patched.update(languages)
        return scope

    def run_kernel(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with _running:
            try:
                return run(executor, *args, **kwargs)
            finally:
                # Of a launch inside of another one too, which then looks again.
                _patched.clear()

    patch_once.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = run_kernel
