# SPDX-License-Identifier: Apache-2.0
"""A third party's package, built and installed: its good fusions run, its broken ones harm nobody.

tests/plugin_package holds it. What the fusions compute is compared with the unfused layer in
float32; a wrong decay, head order or missing scale is off by order 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tests" / "plugin_package"
GOOD = {
    "acme_causal_conv1d": "causal_conv1d",
    "acme_pre_gated_delta_rule": "pre_gated_delta_rule",
    "acme_gated_delta_rule": "gated_delta_rule",
}
BROKEN = {
    "acme_broken_kernel": [
        "fusion 'acme_broken_kernel' cannot import acme_gdn_fusions.broken.import_error:kernel",
        "No module named 'acme_runtime_that_nobody_has'",
    ],
    "acme_wrong_signature": [
        "fusion 'acme_wrong_signature' names "
        "acme_gdn_fusions.broken.kernels:convolve_without_weight, which does not accept the inputs "
        "of stage causal_conv1d (qkv, conv_weight, conv_bias, cu_seqlens)",
    ],
    "gated_output_norm": [
        "gdn_fusions: fusion 'gated_output_norm' is declared in "
        "megatron/gdn/fusions/gated_output_norm.yaml:3",
        "'acme-duplicate-name' (acme-gdn-fusions)",
        "remove the plug-in, or enable the former by gdn_gated_output_norm_fusion",
    ],
    "acme_unknown_stage": [
        "unknown fusion 'acme_unknown_stage'",
        "plug-in 'acme-unknown-stage' (acme-gdn-fusions) failed to load",
        "fusions[0].stage: unknown stage 'gated_delta_rul'; did you mean 'gated_delta_rule'?",
    ],
    "acme_import_error": [
        "plug-in 'acme-import-error' (acme-gdn-fusions) failed to load and may have declared it: "
        "ModuleNotFoundError: No module named 'acme_runtime_that_nobody_has'",
    ],
}


pytestmark = pytest.mark.slow


def run(command: list[Any], path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    if path is not None:
        environment["PYTHONPATH"] = f"{path}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr[-3000:]}"
    return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed from its wheel."""
    folder = tmp_path_factory.mktemp("plugin")
    run(["-m", "build", "--wheel", "--no-isolation", "--outdir", folder, PACKAGE])
    (wheel,) = folder.glob("*.whl")
    offline = ["--no-deps", "--no-index", "--quiet"]
    run(["-m", "pip", "install", *offline, "--target", folder / "site", wheel])
    return folder / "site"


@pytest.fixture(scope="module")
def listed(installed: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(run(["-m", "tools.list_fusions", "--json"], installed).stdout)
    return data


@pytest.fixture(scope="module")
def ran(installed: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("plugin_run.py")
    done = run([script, *GOOD, *BROKEN], installed)
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize("name", GOOD)
def test_a_good_fusion_is_listed_with_its_origin(listed: dict[str, Any], name: str) -> None:
    (fusion,) = (item for item in listed["fusions"] if item["name"] == name)
    assert fusion["stage"] == GOOD[name]
    assert fusion["origin_kind"] == "plug-in"
    assert fusion["origin"].startswith("acme_gdn_fusions:FUSIONS (")
    assert fusion["origin"].endswith(f"acme_gdn_fusions/{GOOD[name]}.yaml):3")
    assert fusion["enabled_by"] == f"--gdn-fusions {name}"
    assert fusion["unavailable"] == []


def test_broken_entry_points_are_listed_with_their_errors(listed: dict[str, Any]) -> None:
    errors = {plugin["name"]: plugin["error"] for plugin in listed["broken_plugins"]}
    assert set(errors) == {"acme-import-error", "acme-duplicate-name", "acme-unknown-stage"}
    assert "No module named 'acme_runtime_that_nobody_has'" in errors["acme-import-error"]
    assert (
        "declared already, in megatron/gdn/fusions/gated_output_norm.yaml:3"
        in (errors["acme-duplicate-name"])
    )
    assert "unknown stage 'gated_delta_rul'" in errors["acme-unknown-stage"]
    assert all(plugin["origin"] == "acme-gdn-fusions" for plugin in listed["broken_plugins"])


@pytest.mark.parametrize("name", ["acme_broken_kernel", "acme_wrong_signature"])
def test_a_broken_implementation_is_listed_as_unavailable(
    listed: dict[str, Any], name: str
) -> None:
    (fusion,) = (item for item in listed["fusions"] if item["name"] == name)
    (reason,) = fusion["unavailable"]
    assert BROKEN[name][-1] in reason


def test_the_table_names_good_and_broken(installed: Path) -> None:
    words = " ".join(run(["-m", "tools.list_fusions"], installed).stdout.split())
    for name in GOOD:
        assert name in words
    assert "plug-in acme-unknown-stage (acme-gdn-fusions) failed to load: " in words


@pytest.mark.parametrize("name", GOOD)
def test_a_good_fusion_computes_its_stage(ran: dict[str, Any], name: str) -> None:
    # Float32 in another order of operations: up to 3e-6, and 2e-5 where log decays are summed over
    # the sequence first (they reach -300, where float32 has steps of 3e-5).
    for part, error in ran[name]["errors"].items():
        assert error < 1e-4, part
    fused = {total["stage"]: total["fused"] for total in ran[name]["report"] if total["fused"]}
    assert fused == {GOOD[name]: {name: 1}}
    (total,) = (total for total in ran[name]["report"] if total["stage"] == GOOD[name])
    assert total["summary"] == "1/1 layers"


def test_a_run_that_selects_none_is_not_harmed(ran: dict[str, Any]) -> None:
    assert set(ran["nothing selected"]["errors"].values()) == {0.0}
    assert not any(total["fused"] for total in ran["nothing selected"]["report"])


def test_a_built_in_fusion_runs_by_its_option_though_a_plugin_claims_its_name(
    ran: dict[str, Any],
) -> None:
    (total,) = (t for t in ran["by option"]["report"] if t["stage"] == "gated_output_norm")
    assert total["fused"] == {"gated_output_norm": 1}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_one_that_is_selected_fails_with_its_reason(
    ran: dict[str, Any], name: str
) -> None:
    for text in BROKEN[name]:
        assert text in ran[name]["refused"]
