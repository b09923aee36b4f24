# SPDX-License-Identifier: Apache-2.0
"""The training flags, on megatron-core's own parser."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron.gdn.arguments import add_gdn_fusion_args
from megatron.gdn.megatron_core_0_19 import printable_help, rewritten_command_line

FLAG = "--experimental-attention-variant"


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(made)
    assert add_gdn_fusion_args(made) is made
    return made


def test_defaults_are_off(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args([])
    assert args.gdn_pre_gated_delta_rule_fusion is False
    assert args.gdn_gated_output_norm_fusion is False
    assert tuple(args.gdn_fusions) == ()
    assert args.gdn_fusion_config is None


def test_flags(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args(
        "--gdn-pre-gated-delta-rule-fusion --gdn-gated-output-norm-fusion "
        "--gdn-fusions a b --gdn-fusion-config f.yaml".split()
    )
    assert args.gdn_pre_gated_delta_rule_fusion is True
    assert args.gdn_gated_output_norm_fusion is True
    assert args.gdn_fusions == ["a", "b"]
    assert args.gdn_fusion_config == "f.yaml"


def test_names_of_a_repeated_flag_add_up(parser: argparse.ArgumentParser) -> None:
    words = "--gdn-fusions a b --lr 1 --gdn-fusions c a".split()
    assert parser.parse_args(words).gdn_fusions == ["a", "b", "c"]
    assert parser.parse_args(["--gdn-fusions", "d"]).gdn_fusions == ["d"]


def test_two_config_files_are_refused(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    file = "--gdn-fusion-config"
    assert parser.parse_args([file, "f.yaml", file, "f.yaml"]).gdn_fusion_config == "f.yaml"
    with pytest.raises(SystemExit):
        parser.parse_args([file, "f.yaml", file, "g.yaml"])
    assert f"argument {file}: takes one file, got f.yaml and g.yaml" in capsys.readouterr().err


def test_variant_gdn(parser: argparse.ArgumentParser, recwarn: pytest.WarningsRecorder) -> None:
    assert parser.parse_args([FLAG, "gdn"]).experimental_attention_variant == "gated_delta_net"
    assert not [w for w in recwarn if "write 'gdn'" in str(w.message)]


def test_variant_alias_warns(parser: argparse.ArgumentParser) -> None:
    with pytest.warns(FutureWarning, match="write 'gdn'"):
        args = parser.parse_args([FLAG, "gated_delta_net"])
    assert args.experimental_attention_variant == "gated_delta_net"


def test_other_variants(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parser.parse_args([FLAG, "dsa"]).experimental_attention_variant == "dsa"
    with pytest.raises(SystemExit):
        parser.parse_args([FLAG, "mamba"])
    assert "invalid choice: 'mamba'" in capsys.readouterr().err


def test_a_parser_of_another_program() -> None:
    made = add_gdn_fusion_args(argparse.ArgumentParser())
    assert made.parse_args(["--gdn-fusions", "x"]).gdn_fusions == ["x"]


def test_help_prints(parser: argparse.ArgumentParser) -> None:
    with pytest.raises(ValueError, match="unsupported format character"):
        parser.format_help()
    printable_help(parser)
    assert "--gdn-gated-output-norm-fusion" in parser.format_help()


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ([FLAG, "gdn", "--x", "gdn"], [FLAG, "gated_delta_net", "--x", "gdn"]),
        ([f"{FLAG}=gdn"], [f"{FLAG}=gated_delta_net"]),
        (["gdn", FLAG, "dsa"], ["gdn", FLAG, "dsa"]),
    ],
    ids=["two_words", "one_word", "other"],
)
def test_command_line_for_the_second_parse(
    given: list[str], seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *given])
    with rewritten_command_line(FLAG, "gdn", "gated_delta_net"):
        assert sys.argv[1:] == seen
    assert sys.argv[1:] == given


def test_flags_need_no_torch() -> None:
    code = "import sys, megatron.gdn.arguments; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
