# SPDX-License-Identifier: Apache-2.0
"""The tiny training as a user runs it, on a few steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusion_registry import FusionReport, load_registry
from fusion_registry.report import StageCount
from megatron.gdn.stages import OPTIONS
from megatron.gdn.tiny_training import command, main
from megatron.gdn.tiny_training.corpus import read_file, read_standard_library
from megatron.gdn.tiny_training.fusion_check import fusion_problems
from tests.gdn.layer_support import make_config

SHORT = ["--steps", "6", "--batch", "2", "--sequence", "16"]
UNFUSED = [f"--no-{option.replace('_', '-')}" for option in OPTIONS]


def registered_options() -> dict[str, str]:
    """Stage by option, for the options that have a fusion."""
    return {
        fusion.declaration.option: fusion.declaration.stage
        for fusion in load_registry().fusions.values()
        if fusion.declaration.option in OPTIONS
    }


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """One short run of everything that is on by default, in a process of its own."""
    folder = tmp_path_factory.mktemp("tiny_training")
    results = ["--output", str(folder / "runs"), "--json", str(folder / "result.json")]
    # Without the setting of conftest.py: the command makes its own.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "megatron.gdn.tiny_training", *SHORT, "--compare", *results],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=environment,
    )
    path = folder / "result.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    return SimpleNamespace(done=done, result=result)


def test_exit_status_and_clean_output(compared):
    assert compared.done.returncode == 0, compared.done.stderr
    assert compared.done.stderr == ""
    assert "held-out loss: 5." in compared.done.stdout
    assert "fusion report" in compared.done.stdout
    assert "Warning" not in compared.done.stdout


def test_losses_fall(compared):
    result = compared.result
    assert len(result["losses"]) == 6
    assert result["losses"][-1] < result["losses"][0]
    assert result["held_out_end"] < result["held_out_start"] - command.LEAST_FALL
    assert result["held_out"][0] == [0, result["held_out_start"]]
    assert result["held_out"][-1] == [6, result["held_out_end"]]
    assert result["tokens_per_second"] > 0
    assert result["skipped_steps"] == 0


def test_every_registered_option_is_on_and_ran_at_every_step_in_every_layer(compared):
    result, options = compared.result, registered_options()
    assert options
    assert result["options"] == {option: option in options for option in OPTIONS}
    assert result["forward_passes"] > 6
    for stage in options.values():
        counts = [c for c in result["fusion_report"]["counts"] if c["stage"] == stage]
        assert counts
        for count in counts:
            assert sum(count["fused"].values()) == result["forward_passes"]
            assert (count["unfused"], count["refused"]) == (0, 0)
    assert all(not c["fused"] for c in result["unfused"]["fusion_report"]["counts"])
    assert result["problems"] == []


def test_fused_and_unfused_losses_agree(compared):
    # The largest relative difference was 1.5e-4: FP16 rounds at 5e-4, averaged over 32 bytes. It
    # grows with the learning rate (7e-3 at 0.01), since AdamW starts with steps of full size.
    assert compared.result["losses"] == pytest.approx(
        compared.result["unfused"]["losses"], rel=2e-3
    )


def test_picture_shows_two_curves(compared):
    image = pytest.importorskip("matplotlib.image").imread(compared.result["plot"])
    height, width, _ = image.shape
    assert height > 400
    assert width > 600
    red, green, blue = image[..., 0], image[..., 1], image[..., 2]
    assert ((blue > red + 0.3) & (blue > green + 0.1)).sum() > 200  # fused
    assert ((red > blue + 0.3) & (red > green + 0.1)).sum() > 200  # unfused


def test_same_seed_same_losses_other_seed_others(tmp_path):
    losses = []
    for index, seed in enumerate(("7", "7", "8")):
        path = tmp_path / f"{index}.json"
        main([*SHORT, *UNFUSED, "--steps", "2", "--seed", seed, "--json", str(path)])
        losses.append(json.loads(path.read_text())["losses"])
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_a_loss_that_does_not_fall_is_a_failure(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 20)
    flags = [*SHORT, *UNFUSED, "--steps", "1", "--learning-rate", "1e-9", "--data", str(text)]
    assert main(flags) == 1
    assert "the held-out loss has to fall by 0.25" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, "cannot be read: No such file", id="missing"),
        pytest.param("folder", "cannot be read: Is a directory", id="folder"),
        pytest.param(b"", "is empty", id="empty"),
        pytest.param(b"a few bytes", "is too small", id="too-small"),
    ],
)
def test_bad_data_is_refused(tmp_path, capsys, content, message):
    path = tmp_path / "text"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    assert main([*SHORT, "--data", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(path) in error


def test_unknown_fusion_is_refused(capsys):
    assert main([*SHORT, "--gdn-fusions", "no_such_fusion"]) == 2
    assert "unknown fusion 'no_such_fusion'" in capsys.readouterr().err


def test_comparison_needs_a_fusion(capsys):
    assert main([*SHORT, *UNFUSED, "--compare"]) == 2
    assert "--compare requires an enabled fusion" in capsys.readouterr().err


def test_a_stage_claimed_by_a_config_file_turns_its_option_off_by_default(tmp_path):
    file = tmp_path / "fusions.yaml"
    file.write_text("select:\n  - {stage: gated_output_norm, fusions: [gated_output_norm]}\n")
    arguments = command._parser().parse_args(["--gdn-fusion-config", str(file)])
    options = command._options(arguments, load_registry([file]))
    assert not options["gdn_gated_output_norm_fusion"]


def test_a_fusion_that_missed_a_step_is_a_problem():
    config = make_config(gdn_gated_output_norm_fusion=True)

    def report(calls: int, unfused: int) -> FusionReport:
        return FusionReport(
            tuple(
                StageCount(layer, "gated_output_norm", {"gated_output_norm": calls}, unfused, 0)
                for layer in (1, 2, 3)
            )
        )

    assert fusion_problems(config, report(4, 0), 4) == []
    assert len(fusion_problems(config, report(3, 1), 4)) == 3
    assert len(fusion_problems(config, FusionReport(()), 4)) == 3
    (line, *_) = fusion_problems(config, report(3, 1), 4)
    assert "layer 1, stage gated_output_norm: gated_output_norm ran 3 times in 4" in line


def test_the_standard_library_is_read_alike_every_time_and_split_by_file():
    first, second = read_standard_library(), read_standard_library()
    assert first == second
    assert len(first.train) > 5 * len(first.held_out) > 100_000
    assert len(first.train) + len(first.held_out) <= 4 << 20


def test_the_end_of_a_file_is_held_out(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\xff" * 90 + b"\x00" * 10)
    corpus = read_file(path)
    assert (corpus.train, corpus.held_out) == (b"\xff" * 90, b"\x00" * 10)
    with pytest.raises(
        ValueError, match="a sequence of 10 bytes requires about 110 bytes, got 100"
    ):
        corpus.require(10)
    corpus.require(9)


def test_environment_names_the_variable_when_it_is_too_late():
    code = (
        "import triton, megatron.gdn.environment as e\n"
        "try: e.use_triton_interpreter()\n"
        "except RuntimeError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin", "PYTHONPATH": str(Path(__file__).parents[2])},
        check=True,
    )
    assert "requires TRITON_INTERPRET=1 before triton is imported" in done.stdout
