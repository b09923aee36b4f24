# SPDX-License-Identifier: Apache-2.0
"""`list_fusions`: table, plain data, stages, config files, and a machine without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fusion_registry import Machine, load_registry, unavailable
from megatron.gdn.commands.check_fusions import main as check_fusions
from megatron.gdn.commands.list_fusions import as_text, describe_registry, main
from megatron.gdn.commands.terminal import READER_GONE
from megatron.gdn.stages import STAGES

HOPPER = Machine("a Hopper", "cuda", (9, 0), packages={"torch": "2.13.0", "triton": "3.7.1"})

NO_TORCH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "triton", "fla"} or name.startswith("megatron.core"):
            raise ImportError(name + " is not installed here")
sys.meta_path.insert(0, Absent())
from megatron.gdn.commands.list_fusions import main
sys.exit(main(sys.argv[1:]))
"""


def test_text_shows_everything() -> None:
    text = as_text(describe_registry(load_registry(), HOPPER), 100)
    for stage in STAGES:
        assert stage.name in text
    for part in (
        "  causal_conv1d",
        "gdn_gated_output_norm_fusion (--gdn-gated-output-norm-fusion)",
        "megatron.gdn.fusions.gated_output_norm:fused_gated_output_norm",
        "deterministic",
        "x of shape [batch, sequence_length, local_heads, head_dim]",
        "megatron/gdn/fusions/gated_output_norm.yaml:3 (built-in)",
        "Availability is judged for: a Hopper",
        "available here  yes",
    ):
        assert part in text, part


def test_80_columns() -> None:
    text = as_text(describe_registry(load_registry(), HOPPER), 80)
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize(
    ("machine", "reasons"),
    [
        (HOPPER, []),
        (
            Machine("a laptop", "cpu", packages={"torch": "2.13.0", "triton": "3.7.1"}),
            ["needs CUDA; set TRITON_INTERPRET=1 to run on the CPU"],
        ),
        (
            Machine(
                "interpreter", "cpu", None, True, packages={"torch": "2.13.0", "triton": "3.7.1"}
            ),
            [],
        ),
        (
            Machine("old", "cuda", (9, 0), packages={"torch": "2.5.0"}),
            [
                "needs torch >=2.6, got 2.5.0",
                "needs triton >=3.4, got nothing: it is not installed",
            ],
        ),
    ],
    ids=["hopper", "laptop", "interpreter", "old_packages"],
)
def test_availability(machine: Machine, reasons: list[str]) -> None:
    registry = load_registry()
    fusion, contract = registry.fusion("gated_output_norm"), registry.stages["gated_output_norm"]
    assert list(unavailable(fusion, contract, machine)) == reasons


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--stage", "gated_output_norm"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [stage["name"] for stage in data["stages"]] == ["gated_output_norm"]
    (fusion,) = data["fusions"]
    assert fusion["option"] == "gdn_gated_output_norm_fusion"
    assert {rule["phase"] for rule in fusion["preconditions"]} == {"config", "layer", "call"}


def test_a_stage_brings_its_children(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--stage", "pre_gated_delta_rule", "--declared-only"]) == 0
    data = json.loads(capsys.readouterr().out)
    names = [stage["name"] for stage in data["stages"]]
    assert names == ["pre_gated_delta_rule", "causal_conv1d", "prepare_qkv", "decay_and_beta"]
    assert data["machine"] is None


def test_a_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "fusions:\n"
        "  - {name: mine, stage: gated_delta_rule, determinism: unknown, preconditions: [],\n"
        "     implementation: 'nowhere.at_all:function'}\n"
    )
    assert main(["--config", str(file), "--stage", "gated_delta_rule", "--json"]) == 0
    (fusion,) = json.loads(capsys.readouterr().out)["fusions"]
    assert fusion["name"] == "mine"
    assert fusion["enabled_by"] == "--gdn-fusions mine"
    assert fusion["origin"] == f"{file}:2"
    assert fusion["origin_kind"] == "config file"
    (reason,) = fusion["unavailable"]
    assert "cannot import nowhere.at_all:function" in reason


def test_mistakes_end_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--stage", "norm"]) == 2
    assert "unknown stage 'norm'" in capsys.readouterr().err
    file = tmp_path / "bad.yaml"
    file.write_text("fusion: []\n")
    assert main(["--config", str(file)]) == 2
    assert "bad.yaml:1: fusion: unknown key 'fusion'; did you mean 'fusions'? valid: fusions" in (
        capsys.readouterr().err
    )


def test_a_wrong_selection_in_a_file_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "typo.yaml"
    file.write_text("select:\n  - {stage: gated_output_norm, fusions: [gated_output_nrm]}\n")
    assert main(["--config", str(file), "--declared-only"]) == 2
    assert (
        "typo.yaml:2: select[0].fusions[0]: unknown fusion 'gated_output_nrm'; did you mean"
        in capsys.readouterr().err
    )


def test_a_contradiction_in_some_layers_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text(
        "select:\n"
        "  - {stage: gated_output_norm, fusions: [gated_output_norm], layers: 1-3}\n"
        "  - {stage: gated_output_norm, fusions: off, layers: 3-4}\n"
    )
    for command in (main, check_fusions):
        assert command(["--config", str(file)]) == 2
        assert "twice.yaml:3: select[1]: stage gated_output_norm is claimed twice in layer 3" in (
            capsys.readouterr().err
        )


def test_a_misspelt_attribute_is_not_available(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "misspelt.yaml"
    file.write_text(
        "fusions:\n"
        "  - {name: mine, stage: gated_delta_rule, determinism: unknown, preconditions: [\n"
        "      {kind: value_equals, subject: config.determinstic_mode, value: false}],\n"
        "     implementation: 'megatron.gdn.reference:gated_delta_rule'}\n"
    )
    assert main(["--config", str(file), "--stage", "gated_delta_rule", "--json"]) == 0
    (fusion,) = json.loads(capsys.readouterr().out)["fusions"]
    assert fusion["unavailable"] == [
        "fusion 'mine' reads config.determinstic_mode, but the transformer configuration has no "
        "'determinstic_mode'; did you mean deterministic_mode or test_mode?"
    ]


def test_a_reader_that_goes_away() -> None:
    """`| head` closes the pipe: no traceback."""
    script = (
        "import sys; from megatron.gdn.commands.list_fusions import main; "
        "sys.exit(main(['--schema']))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    child.stdout.close()
    assert child.stderr.read() == ""
    assert child.wait() == READER_GONE
    child.stderr.close()


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["table", "json"])
def test_without_torch(flags: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "gated_output_norm" in done.stdout
    assert "without torch" in done.stdout
