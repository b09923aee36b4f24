# SPDX-License-Identifier: Apache-2.0
"""Declarations are read without torch, triton or megatron-core, also where none is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BLOCK = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton", "fla") or name.startswith("megatron.core"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Absent())
"""
REPORT = """
import json, sys
print(json.dumps(sorted({m.split(".")[0] for m in sys.modules} | set(sys.modules))))
"""
LOAD = """
from fusion_registry import load_registry
registry = load_registry()
assert registry.fusion("gated_output_norm").declaration.stage == "gated_output_norm"
"""


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", code + REPORT], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code", ["import fusion_registry", LOAD], ids=["import", "import-and-load"]
)
def test_nothing_heavy_is_imported(code: str) -> None:
    loaded = modules_after(code)
    assert "fusion_registry.preconditions" in loaded
    assert loaded.isdisjoint({"torch", "triton", "fla", "numpy", "megatron.core"})


def test_the_registry_loads_where_none_of_them_is_installed() -> None:
    loaded = modules_after(BLOCK + LOAD)
    assert "megatron.gdn.stages" in loaded


def test_the_block_blocks() -> None:
    for module in ("torch", "triton", "megatron.core"):
        code = (
            f"try:\n    import {module}\nexcept ModuleNotFoundError:\n    pass\nelse:\n    1 / 0\n"
        )
        modules_after(BLOCK + code)


def test_a_machine_without_torch_can_be_described() -> None:
    modules_after(
        BLOCK
        + """
from fusion_registry import Machine, load_registry, unavailable
here = Machine.here()
assert here.device_type == "cpu" and "without torch" in here.name, here
registry = load_registry()
fusion = registry.fusion("gated_output_norm")
reasons = list(unavailable(fusion, registry.stages[fusion.declaration.stage], here))
assert any("CUDA" in reason for reason in reasons), reasons
"""
    )
