# SPDX-License-Identifier: Apache-2.0
"""`list_fusions --explain`: both forms of input, text, plain data, exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron.training import global_vars

from fusion_registry.machine import FIXTURE_MACHINES, HOPPER
from megatron.gdn.commands.explain import as_text, describe_plan
from megatron.gdn.commands.list_fusions import main
from megatron.gdn.planning.layers import PlannedCall
from megatron.gdn.planning.run import plan_run
from tests.gdn.explained_runs import words
from tests.gdn.layer_support import make_config

PRE, NORM = "--gdn-pre-gated-delta-rule-fusion", "--gdn-gated-output-norm-fusion"
SMALL = "--key-heads 4 --heads 8 --key-head-dim 16 --head-dim 16 --seq 64".split()

Capture = pytest.CaptureFixture[str]


def explain(capsys: Capture, *flags: str) -> tuple[int, str]:
    """Exit status and text; the text is 80 columns wide when it is no terminal."""
    status = main(["--explain", *flags])
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 80
    return status, out


def explain_json(capsys: Capture, *flags: str) -> tuple[int, Any]:
    status = main(["--explain", "--json", *flags])
    return status, json.loads(capsys.readouterr().out)


def complaint(capsys: Capture, *flags: str) -> str:
    """What stderr says of flags that are wrong; nothing stands on stdout."""
    assert main(["--explain", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_shapes_that_are_served(capsys: Capture) -> None:
    status, out = explain(capsys, *SMALL, "--batch", "4", "--layers", "3", PRE, NORM)
    assert status == 0
    assert out == (
        "Planned for a Hopper GPU (compute capability 9.0), with the packages of this\n"
        "Python.\n"
        "A call: batch 4, 64 tokens, bfloat16.\n"
        "A layer: Hk 4, Hv 8, Dk 16, Dv 16, convolution width 4.\n"
        "\n"
        "Layers 1-3\n"
        "  pre_gated_delta_rule  fusion pre_gated_delta_rule\n"
        "    causal_conv1d       inside pre_gated_delta_rule\n"
        "    prepare_qkv         inside pre_gated_delta_rule\n"
        "    decay_and_beta      inside pre_gated_delta_rule\n"
        "  gated_delta_rule      unfused\n"
        "  gated_output_norm     fusion gated_output_norm\n"
        "\n"
        "Every request would be honoured.\n"
    )


def test_every_reason_is_shown(capsys: Capture) -> None:
    status, out = explain(capsys, *SMALL, "--head-dim", "96", "--dtype", "float32", NORM)
    assert status == 1
    assert (
        "  gated_output_norm     refused when the layer is called\n"
        "                        gdn_gated_output_norm_fusion requires a power-of-two\n"
        "                        head dimension, got 96\n"
        "                        gdn_gated_output_norm_fusion requires x in bfloat16 or\n"
        "                        float16, got float32\n"
        "                        asked for by gdn_gated_output_norm_fusion=True; deselect\n"
        "                        it to run unfused\n"
    ) in out
    assert out.endswith("This run would be refused when the layer is called.\n")


@pytest.mark.parametrize(
    ("flags", "status", "parts"),
    [
        ((), 0, ["pre_gated_delta_rule  unfused", "No fusion is asked for."]),
        (
            (NORM, "--deterministic"),
            1,
            ["refused when the configuration is built", "deterministic_mode=False, got True"],
        ),
        (
            (PRE, "--activation", "gelu"),
            1,
            ["refused when the layer is built", "activation to be silu or swish, got"],
        ),
        (
            (NORM, "--normalization", "LayerNorm"),
            1,
            ["refused when the layer is built", "got LayerNorm"],
        ),
        (("--activation", "gelu"), 1, ["the unfused code raises: the unfused causal convolution"]),
        (
            ("--documents", "3", "--batch", "2"),
            1,
            ["64 tokens in 3 documents", "the layer raises: packed sequences require batch 1"],
        ),
        ((PRE, "--documents", "3"), 0, ["fusion pre_gated_delta_rule"]),
        ((PRE, "--conv-width", "9"), 1, ["conv_width of conv_weight to be at most 8, got 9"]),
        ((NORM, "--machine", "cpu"), 1, ["Triton's interpreter), got x on cpu"]),
        ((NORM, "--machine", "interpreter"), 0, ["fusion gated_output_norm"]),
        ((NORM, "--machine", "ampere"), 0, ["an Ampere GPU (compute capability 8.0)"]),
    ],
    ids=[
        "unfused",
        "deterministic",
        "gelu",
        "layer_norm",
        "unfused_gelu",
        "packed_batch_2",
        "packed",
        "conv_9",
        "cpu",
        "interpreter",
        "ampere",
    ],
)
def test_outcomes(capsys: Capture, flags: tuple[str, ...], status: int, parts: list[str]) -> None:
    got, out = explain(capsys, *SMALL, *flags)
    assert got == status
    unfolded = " ".join(out.split())
    for part in parts:
        assert " ".join(part.split()) in unfolded, out


def test_this_machine(capsys: Capture) -> None:
    assert "Planned for" in explain(capsys, *SMALL, "--machine", "here")[1]


def test_json(capsys: Capture) -> None:
    status, data = explain_json(capsys, *SMALL, "--head-dim", "96", "--layers", "2", PRE, NORM)
    assert status == 1
    assert data["refused"] is True
    assert data["machine"]["name"] == HOPPER.name
    assert data["sizes"]["value_head_dim"] == 96
    (group,) = data["layers"]
    assert group["layers"] == [1, 2]
    assert [stage["outcome"] for stage in group["stages"]] == [
        *("fused", "inside", "inside", "inside", "unfused", "refused"),
    ]
    assert group["stages"][1]["parent"] == "pre_gated_delta_rule"
    refused = group["stages"][-1]
    assert refused["refused_at"] == "call"
    assert refused["origin"] == "gdn_gated_output_norm_fusion=True"
    assert refused["candidates"] == [
        {
            "fusion": "gated_output_norm",
            "option": "gdn_gated_output_norm_fusion",
            "reasons": [
                {
                    "code": "dim_relation:x.head_dim",
                    "phase": "call",
                    "text": "a power-of-two head dimension, got 96",
                }
            ],
            "can_be_loaded": True,
        }
    ]


def test_training_flags(capsys: Capture) -> None:
    line = words({"--num-layers": "8", "--linear-attention-freq": "4", PRE: "", NORM: ""})
    status, out = explain(capsys, "--", *line)
    assert status == 0
    assert "\nLayers 1-3,5-7\n" in out
    assert "\nLayers 4,8: softmax attention, no stages\n" in out
    assert "A call: batch 2, 8 tokens, float16." in out


def test_a_hybrid_model(capsys: Capture) -> None:
    """Its pattern names the layers; no attention variant is set."""
    variant = {"--experimental-attention-variant": None, "--linear-attention-freq": None}
    line = words({**variant, "--hybrid-layer-pattern": "GG-*G", PRE: "", NORM: ""})
    status, out = explain(capsys, "--", *line)
    assert status == 0
    assert "\nLayers 1-2,5\n" in out
    assert "\nLayers 3-4: of other kinds, no stages\n" in out


def test_training_flags_start_nothing(capsys: Capture) -> None:
    before = sys.argv, global_vars._GLOBAL_ARGS, global_vars._GLOBAL_TOKENIZER
    assert explain(capsys, "--", *words({NORM: ""}))[0] == 0
    assert before == (sys.argv, global_vars._GLOBAL_ARGS, global_vars._GLOBAL_TOKENIZER)


def test_training_flags_refused_by_the_configuration(capsys: Capture) -> None:
    status, data = explain_json(capsys, "--", *words({NORM: "", "--deterministic-mode": ""}))
    assert status == 1
    assert data["layers"][0]["stages"][-1]["refused_at"] == "config"


def test_transformer_engine_need_not_be_installed(capsys: Capture) -> None:
    """The flags of a run with Transformer Engine: its norm counts by its class name."""
    flags = dict.fromkeys(("--transformer-impl", "--no-rope-fusion", "--no-persist-layer-norm"))
    line = words({**flags, NORM: "", "--apply-layernorm-1p": ""})
    assert explain(capsys, "--", *line)[0] == 0
    status, out = explain(capsys, "--", *line, "--normalization", "LayerNorm")
    assert status == 1
    assert "got LayerNorm" in out


HALF_THE_HEADS = """
fusions:
  - name: few_heads
    stage: gated_delta_rule
    implementation: megatron.gdn.reference:gated_delta_rule
    determinism: unknown
    preconditions:
      - {kind: dim_relation, dim: q.value_heads, relation: at_most, of: 2}
      - {kind: dim_relation, dim: q.sequence_length, relation: equal_to, of: 64}
  - name: few_channels
    stage: causal_conv1d
    implementation: megatron.gdn.reference:causal_conv1d
    determinism: unknown
    preconditions:
      - {kind: dim_relation, dim: conv_weight.conv_channels, relation: equal_to, of: 64}
      - kind: dim_relation
        dim: conv_weight.conv_channels
        relation: equal_to
        of: qkv.conv_channels
select:
  - {stage: gated_delta_rule, fusions: [few_heads]}
  - {stage: causal_conv1d, fusions: [few_channels]}
"""


@pytest.mark.parametrize(
    ("tp", "cp", "status"), [(1, 1, 1), (2, 1, 1), (2, 2, 0), (4, 1, 0), (1, 4, 0)]
)
def test_shapes_are_local_to_a_rank(
    capsys: Capture, tmp_path: Path, tp: int, cp: int, status: int
) -> None:
    file = tmp_path / "local.yaml"
    file.write_text(HALF_THE_HEADS)
    got, data = explain_json(
        capsys, *SMALL, "--tp", str(tp), "--cp", str(cp), "--gdn-fusion-config", str(file)
    )
    assert got == status
    assert data["sizes"]["num_value_heads"] == 8 // (tp * cp)
    reasons = [
        reason["text"]
        for stage in data["layers"][0]["stages"]
        for candidate in stage["candidates"]
        for reason in candidate["reasons"]
    ]
    channels, heads = 256 // (tp * cp), 8 // (tp * cp)
    assert reasons == (
        []
        if status == 0
        else [
            f"conv_channels of conv_weight to be equal to 64, got {channels} beside 64",
            f"value_heads of q to be at most 2, got {heads} beside 2",
        ]
    )


def test_parallel_training_flags(capsys: Capture) -> None:
    """The number of ranks follows from the flags; sequence parallelism changes no stage."""
    changes = {
        "--tensor-model-parallel-size": "2",
        "--context-parallel-size": "1",
        "--pipeline-model-parallel-size": "2",
        "--sequence-parallel": "",
        "--transformer-impl": None,
        "--no-persist-layer-norm": None,
        "--linear-num-key-heads": "4",
        NORM: "",
    }
    status, data = explain_json(capsys, "--", *words(changes))
    assert status == 0
    assert data["sizes"]["num_key_heads"] == 2
    assert data["sizes"]["length"] == 8
    assert data["layers"][0]["layers"] == [1, 2]


def test_per_layer_choice_by_a_file(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "layers.yaml"
    file.write_text("select:\n  - {stage: gated_output_norm, fusions: off, layers: 2-3}\n")
    status, out = explain(
        capsys, *SMALL, "--layers", "5", NORM, "--gdn-fusion-config", str(file), "--head-dim", "96"
    )
    assert status == 1
    first, _, second = out.partition("\nLayers 2-3\n")
    assert "\nLayers 1,4-5\n" in first
    assert "refused when the layer is called" in first
    assert "gated_output_norm     unfused" in second


def test_the_second_candidate(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "ordered.yaml"
    file.write_text(
        "fusions:\n"
        "  - {name: any_norm, stage: gated_output_norm, determinism: unknown, preconditions: [],\n"
        "     implementation: 'megatron.gdn.reference:gated_output_norm'}\n"
        "select:\n"
        "  - {stage: gated_output_norm, fusions: [gated_output_norm, any_norm]}\n"
    )
    chosen = ("--gdn-fusion-config", str(file))
    status, out = explain(capsys, *SMALL, "--head-dim", "96", *chosen)
    assert status == 0
    assert (
        "  gated_output_norm     fusion any_norm\n"
        "                        not gated_output_norm, which comes first:\n"
        "                        gdn_gated_output_norm_fusion requires a power-of-two\n"
        "                        head dimension, got 96\n"
    ) in out
    assert "fusion gated_output_norm\n" in explain(capsys, *SMALL, *chosen)[1]


@pytest.mark.parametrize(
    ("implementation", "packages", "reason"),
    [
        (
            "nowhere.at_all:norm",
            "",
            "cannot import nowhere.at_all:norm, which is broken here: ModuleNotFoundError",
        ),
        (
            "megatron.gdn.reference:gated_delta_rule",
            "",
            "does not accept the inputs of stage gated_output_norm",
        ),
        (
            "megatron.gdn.reference:gated_output_norm",
            "packages: {no-such-package: '>=1'},",
            "requires no-such-package >=1, got nothing: it is not installed",
        ),
    ],
    ids=["import", "signature", "package"],
)
def test_what_cannot_be_loaded(
    capsys: Capture, tmp_path: Path, implementation: str, packages: str, reason: str
) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(
        "fusions:\n"
        "  - {name: broken, stage: gated_output_norm, determinism: unknown, preconditions: [],\n"
        f"     {packages} implementation: '{implementation}'}}\n"
        "select:\n"
        "  - {stage: gated_output_norm, fusions: [gated_output_norm, broken]}\n"
    )
    status, out = explain(capsys, *SMALL, "--gdn-fusion-config", str(file))
    assert status == 1
    assert "refused when the layer is built" in out
    assert "fusion gated_output_norm could run, but" in out
    assert reason in " ".join(out.split())


def test_a_predicate_that_reads_contents(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "contents.yaml"
    file.write_text(
        "fusions:\n"
        "  - name: curious\n"
        "    stage: gated_output_norm\n"
        "    determinism: unknown\n"
        "    implementation: megatron.gdn.reference:gated_output_norm\n"
        "    preconditions:\n"
        "      - {kind: predicate, callable: 'builtins:sorted', reads: [x], says: nothing}\n"
        "select: [{stage: gated_output_norm, fusions: [curious]}]\n"
    )
    text = complaint(capsys, *SMALL, "--gdn-fusion-config", str(file))
    assert "preconditions of fusion 'curious' cannot be judged before the run" in text


def test_mistakes(capsys: Capture, tmp_path: Path) -> None:
    assert "self.linear_num_key_heads=4 must be a multiple of" in complaint(
        capsys, *SMALL, "--tp", "3"
    )
    assert "unknown fusion 'fast_norm'; valid: " in complaint(
        capsys, *SMALL, "--gdn-fusions", "fast_norm"
    )
    file = tmp_path / "bad.yaml"
    file.write_text("fusion: []\n")
    assert "bad.yaml:1: fusion: unknown key 'fusion'" in complaint(
        capsys, *SMALL, "--gdn-fusion-config", str(file)
    )
    file.write_text("select: [{stage: gated_output_norm, fusions: off, layers: 9}]\n")
    assert "layers 9 match no layer of this model" in complaint(
        capsys, *SMALL, "--gdn-fusion-config", str(file)
    )


def test_mistaken_training_flags(capsys: Capture) -> None:
    none: dict[str, str | None] = {
        "--experimental-attention-variant": None,
        "--linear-attention-freq": None,
    }
    assert "requires --experimental-attention-variant gdn" in complaint(capsys, "--", *words(none))
    assert "megatron-core refuses these flags" in complaint(
        capsys, "--", *words({"--micro-batch-size": None})
    )
    assert "--use-checkpoint-args" in complaint(capsys, "--", *words({"--use-checkpoint-args": ""}))
    assert "megatron-core refuses to build layer 1" in complaint(
        capsys, "--", *words({"--apply-layernorm-1p": ""})
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch", "0"], "0 is not a positive number"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--machine", "laptop"], "invalid choice: 'laptop'"),
        (["--batch", "x"], "x is not a positive number"),
        (["--batch", "9" * 30], "is larger than 1099511627776; give less"),
        (
            ["--batch", "4", "--", *words({})],
            "before `--` only --json and --machine may stand, got --batch 4; give shapes and",
        ),
        (
            ["--num-layers", "4"],
            "unrecognized arguments: --num-layers 4; flags of a training run go after `--`",
        ),
        (["--stage", "gated_output_norm"], "unrecognized arguments: --stage"),
        (["--", *words({"--no-such-flag": ""})], "unrecognized arguments: --no-such-flag"),
    ],
    ids=[
        "batch_0",
        "dtype",
        "machine",
        "batch_x",
        "batch_beyond_64_bits",
        "both_forms",
        "training_flag_for_shapes",
        "flag_of_the_list",
        "training_flag",
    ],
)
def test_unknown_flags(capsys: Capture, flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--explain", *flags])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_help(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--explain", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for flag in ("--machine", "--documents", "--gdn-fusions", "TRAINING FLAGS"):
        assert flag in out


def test_a_process_of_its_own() -> None:
    """Status and clean output as a shell sees them."""
    command = [sys.executable, "-m", "tools.list_fusions", "--explain", "--json", "--"]
    done = subprocess.run(
        [*command, *words({NORM: "", "--linear-value-head-dim": "96"})],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["refused"] is True
    assert "Warning" not in done.stderr


def test_machines_have_the_packages_of_this_python() -> None:
    assert all(machine.packages is None for machine in FIXTURE_MACHINES.values())
    plan = plan_run(make_config(), PlannedCall(2, 8), replace(HOPPER, packages={"torch": "2.13.0"}))
    assert "with its packages." in as_text(describe_plan(plan), 80)


def test_sizes_that_torch_cannot_count(capsys: Capture) -> None:
    many = str(10**9)
    text = complaint(capsys, *SMALL, "--seq", many, "--batch", many, NORM)
    assert f"torch cannot plan a call of batch {many} and {many} tokens in layer 1" in text


@pytest.mark.parametrize("raised", ["SystemExit(3)", "AssertionError"], ids=["exit", "assert"])
def test_a_predicate_that_ends_the_process(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str
) -> None:
    module = f"ending_by_{raised[:9].lower()}"
    (tmp_path / f"{module}.py").write_text(f"def ends(x):\n    raise {raised}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "ending.yaml"
    file.write_text(
        "fusions:\n"
        "  - name: ending\n"
        "    stage: gated_output_norm\n"
        "    determinism: unknown\n"
        "    implementation: megatron.gdn.reference:gated_output_norm\n"
        "    preconditions:\n"
        f"      - {{kind: predicate, callable: '{module}:ends', reads: [x], says: nothing}}\n"
        "select: [{stage: gated_output_norm, fusions: [ending]}]\n"
    )
    text = complaint(capsys, *SMALL, "--gdn-fusion-config", str(file))
    assert f"fusion 'ending' cannot be judged before the run: {raised.split('(')[0]}: " in text
    assert "; a predicate must take what it `reads` by keyword, and read metadata only" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--cp", "2", "--seq", "7"),
            "requires a sequence of a multiple of 2 * cp = 4 tokens, got --seq 7 with --cp 2",
        ),
        (("--documents", "65"), "got --documents 65 in --seq 64 tokens; pack fewer"),
    ],
    ids=["context_parallel", "documents"],
)
def test_calls_that_no_run_makes(capsys: Capture, flags: tuple[str, ...], message: str) -> None:
    assert message in complaint(capsys, *SMALL, *flags)


def test_a_bare_assert_of_megatron_core_is_told_by_its_line(capsys: Capture) -> None:
    text = complaint(capsys, "--", *words({"--micro-batch-size": None}))
    assert "AssertionError: assert args.micro_batch_size is not None" in text
