# SPDX-License-Identifier: Apache-2.0
"""`megatron.gdn` exports its public names and imports nothing heavy until one is used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import megatron.gdn

CODE = """
import json, sys
import megatron.gdn
print(json.dumps([dir(megatron.gdn), sorted(sys.modules)]))
"""


def test_importing_the_package_is_light() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    names, modules = json.loads(done.stdout)
    assert {"TransformerConfig", "GatedDeltaNet", "use_our_layer", "agree_on_fusions"} <= set(names)
    assert set(modules).isdisjoint({"torch", "triton", "megatron.core"})


def test_every_public_name_is_what_its_module_defines() -> None:
    for name in dir(megatron.gdn):
        thing = getattr(megatron.gdn, name)
        assert thing.__name__ == name
        assert thing.__module__.startswith("megatron.gdn.")
