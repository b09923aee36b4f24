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
from unittest import mock

import pytest
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as CoreGatedDeltaNet
from megatron.training.arguments import parse_args, validate_args
from megatron.training.models.base import compose_hooks
from torch import nn

from megatron.gdn import GatedDeltaNet, pretrain
from megatron.gdn.megatron_core_0_19 import flags_checked_for, parameters_on_cpu_without_cuda
from megatron.gdn.variant import gdn_layer_numbers
from tests.gdn.layer_support import start_one_rank
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
    done = run(GDN, NORM, PRE, "--mock-data --micro-batch-size 1 --global-batch-size 2")
    assert len(lines(done)) == 7
    assert "pre_gated_delta_rule (4)" in done.stdout


@pytest.mark.parametrize(
    ("flags", "gdn_layers"),
    [
        (f"--hybrid-layer-pattern G-*E --num-experts 2 {PRE}", 1),
        (
            f"--hybrid-layer-pattern G-G --dataloader-inter-document-masking {GDN} "
            "--recompute-granularity selective --recompute-modules gdn_norm_out",
            2,
        ),
    ],
    ids=["every_kind_of_layer", "packed_recomputed"],
)
def test_a_hybrid_model(flags: str, gdn_layers: int, data: str) -> None:
    """Layers of a pattern, of megatron-core's own modules; no attention variant is needed."""
    done = run(NORM, data, flags)
    *steps, parameters = lines(done)
    assert [step["step"] for step in steps] == [0, 0, 1, 1, 2, 2]
    assert all(4 < step["loss"] < 7 for step in steps)
    assert parameters["with_gradient"] == parameters["parameters"]
    for stage in ["gated_output_norm"] + ["pre_gated_delta_rule"] * (PRE in flags):
        row = next(line for line in done.stdout.splitlines() if line.split()[:1] == [stage])
        assert row.split()[1] == f"{gdn_layers}/{gdn_layers}"
        assert f"{stage} (" in row


def model_config(flags: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model's configuration of a command line, in this process."""
    monkeypatch.setattr(sys, "argv", ["pretrain", *MODEL.split(), *flags.split(), "--mock-data"])
    args = parse_args(pretrain.add_args)
    args.world_size = args.context_parallel_size
    with flags_checked_for(None):
        validate_args(args)
    return pretrain.model_config_from_args(args)


def build(config: Any) -> nn.Module:
    """The model, checked as before training."""
    start_one_rank()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model: nn.Module = config.get_builder_cls()(config).build_model(groups)
    (model,) = compose_hooks(config.pre_wrap_hooks)([model])
    return model


@pytest.mark.parametrize(
    "spec",
    [
        "tests.gdn.own_specs our_block",
        "tests.gdn.own_specs core_layer",
        "tests.gdn.own_specs OUR_LAYER",
        "tests.gdn.own_specs CORE_LAYER",
        "tests.gdn.own_specs CORE_LAYER_BY_LOCATION",
        "tests.gdn.own_specs CORE_BLOCK",
        "megatron.gdn get_gdn_block_spec",
        "tests.gdn.own_specs HYBRID_STACK --hybrid-layer-pattern GG",
    ],
)
def test_a_spec_of_ones_own(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our layer stands where the spec names it, and where it names megatron-core's."""
    config = model_config(f"{GDN} {NORM} {PRE} --spec {spec}", monkeypatch)
    layers = [type(layer.self_attention) for layer in build(config).decoder.layers]
    assert layers == [GatedDeltaNet, GatedDeltaNet]
    assert config.transformer.experimental_attention_variant == "gated_delta_net"


@pytest.mark.parametrize(
    ("spec", "built"), [("THEIR_LAYER", "TheirSubclass"), ("SOFTMAX_LAYER", "SelfAttention")]
)
def test_a_spec_that_cannot_honour_a_request(
    spec: str, built: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs unfused in silence: the model is refused before it is wrapped."""
    flags = f"{GDN} --spec tests.gdn.own_specs {spec}"
    config = model_config(f"{flags} {NORM}", monkeypatch)
    with (
        parameters_on_cpu_without_cuda(),
        mock.patch.object(CoreGatedDeltaNet, "reset_parameters"),
        pytest.raises(ValueError, match="layer 1 cannot run fusion gated_output_norm") as found,
    ):
        build(config)
    assert f"{built}, which has no stages" in str(found.value)
    assert "gdn_gated_output_norm_fusion=True" in str(found.value)
    with parameters_on_cpu_without_cuda(), mock.patch.object(CoreGatedDeltaNet, "reset_parameters"):
        build(model_config(flags, monkeypatch))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "requires --experimental-attention-variant gdn, a --hybrid-layer-pattern"),
        (f"{GDN} --multi-latent-attention", "builds models without --multi-latent-attention"),
        (f"{GDN} {NORM} --deterministic-mode", "requires deterministic_mode=False, got True"),
        (f"{GDN} --gdn-fusions nothing", "unknown fusion 'nothing'"),
        (f"{GDN} --gdn-fusion-config no.yaml", "no.yaml: cannot be read"),
        (f"{GDN} --spec local", "--spec requires a module and the name of a spec in it, got"),
        (f"{GDN} --spec no.such spec", "--spec no.such spec cannot be imported"),
        (f"{GDN} --spec tests.gdn.own_specs NONE", "NONE cannot be imported: AttributeError"),
        (f"{GDN} --spec megatron.gdn GatedDeltaNet", "got megatron.gdn.GatedDeltaNet, a class;"),
        (f"{GDN} --spec megatron.gdn.variant VARIANT", "got megatron.gdn.variant.VARIANT, a str;"),
        (f"{GDN} --mtp-num-layers 1", "no other multi-token prediction, got 1 with 'gated_delta_"),
        (
            f"{GDN} --dataloader-inter-document-masking --context-parallel-size 2",
            "with --context-parallel-size 2 requires Transformer Engine, which cuts documents",
        ),
        ("--hybrid-layer-pattern M-G", "(M) require the package mamba-ssm, which is not installed"),
        ("--hybrid-layer-pattern G+", "without latent attention, got the layers +"),
        ("--hybrid-layer-pattern GE", "(E) require --num-experts"),
        ("--hybrid-layer-pattern G/G", "got 'G/G' with '/', for which megatron-core 0.19 has"),
        (f"--hybrid-layer-pattern *- {NORM}", "its hybrid layer pattern has no G"),
        (
            "--hybrid-layer-pattern G --transformer-impl transformer_engine",
            "requires Transformer Engine, which is not installed; install it, or pass",
        ),
        (
            "--hybrid-layer-pattern G --spec tests.gdn.own_specs core_layer",
            "--spec of a hybrid model requires a ModuleSpec",
        ),
    ],
    ids=[
        "no_variant",
        "mla",
        "deterministic",
        "unknown_fusion",
        "no_file",
        "spec_of_one_word",
        "spec_of_no_module",
        "spec_of_no_name",
        "spec_that_is_a_class",
        "spec_that_is_text",
        "multi_token_prediction",
        "packed_over_context_parallel_ranks",
        "hybrid_mamba",
        "hybrid_latent_attention",
        "hybrid_experts",
        "hybrid_multi_token_prediction",
        "hybrid_without_gdn",
        "hybrid_transformer_engine",
        "hybrid_spec",
    ],
)
def test_refused_flags(flags: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        model_config(flags, monkeypatch)


def test_a_selection_for_layers_that_a_pattern_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fusions.yaml"
    entry = "{stage: gated_output_norm, fusions: [gated_output_norm], layers: 2}"
    file.write_text(f"select:\n  - {entry}\n")
    flags = f"--gdn-fusion-config {file} --hybrid-layer-pattern"
    config = model_config(f"{flags} GG-", monkeypatch)
    assert gdn_layer_numbers(config.transformer) == (1, 2)
    with pytest.raises(ValueError, match="layers 2 match no layer of this model"):
        model_config(f"{flags} G-G", monkeypatch)
