# SPDX-License-Identifier: Apache-2.0
"""The training entry point, as far as it runs without CUDA."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from megatron.training.arguments import parse_args, validate_args

from megatron.gdn import pretrain
from tests.gpu.pretrain_support import ROOT, write_byte_dataset

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 32 "
    "--seq-length 16 --max-position-embeddings 16 --position-embedding-type none "
    "--linear-attention-freq [1,1] --linear-conv-kernel-dim 4 "
    "--linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--linear-num-key-heads 1 --linear-num-value-heads 2 "
    "--normalization RMSNorm --swiglu --disable-bias-linear "
    "--transformer-impl local --no-persist-layer-norm --no-rope-fusion "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --use-cpu-initialization "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 4 "
    "--lr 1e-3 --fp16 --train-iters 3 --eval-iters 0 "
    "--tokenizer-type NullTokenizer --vocab-size 255 --split 100,0,0"
)
GDN = "--experimental-attention-variant gdn"
NORM = "--gdn-gated-output-norm-fusion"
PRE = "--gdn-pre-gated-delta-rule-fusion"


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    words = [word for text in (MODEL, *flags) for word in text.split()]
    return subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("pretrain_on_cpu.py"), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"--data-path {write_byte_dataset(tmp_path_factory.mktemp('data'), files=4)}"


@pytest.mark.parametrize(
    "packing", ["", "--dataloader-inter-document-masking"], ids=["dense", "packed"]
)
def test_training_step(packing: str, data: str) -> None:
    done = run(GDN, NORM, data, packing)
    *steps, parameters = lines(done)
    assert [step["step"] for step in steps] == [0, 0, 1, 1, 2, 2]
    assert all(step["n"] == 32 and 4 < step["loss"] < 7 for step in steps)
    assert parameters["with_gradient"] == parameters["parameters"]
    # Logged once, at the first forward after the first step: two microbatches in each layer.
    assert done.stdout.count("fusion report\n") == 1
    report = done.stdout.split("fusion report\n")[1]
    row = next(line for line in report.splitlines() if "gated_output_norm" in line)
    assert "2/2" in row
    assert "gated_output_norm (4)" in row


def test_mock_data_with_both_fusions() -> None:
    done = run(GDN, NORM, PRE, "--mock-data")
    assert len(lines(done)) == 7
    assert "pre_gated_delta_rule (4)" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "requires --experimental-attention-variant gdn or a --spec"),
        (f"{GDN} --multi-latent-attention", "GPT models without --multi-latent-attention"),
        (f"{GDN} {NORM} --deterministic-mode", "requires deterministic_mode=False, got True"),
        (f"{GDN} --gdn-fusions nothing", "unknown fusion 'nothing'"),
        (f"{GDN} --gdn-fusion-config no.yaml", "no.yaml: cannot be read"),
    ],
    ids=["no_variant", "mla", "deterministic", "unknown_fusion", "no_file"],
)
def test_refused_flags(flags: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain", *MODEL.split(), *flags.split(), "--mock-data"])
    args = parse_args(pretrain.add_args)
    validate_args(args)
    with pytest.raises(ValueError, match=re.escape(message)):
        pretrain.model_config_from_args(args)
