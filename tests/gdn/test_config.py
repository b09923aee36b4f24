# SPDX-License-Identifier: Apache-2.0
"""The configuration: variant names, fusion fields, what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer import TransformerConfig as CoreTransformerConfig

from fusion_registry import FusionConfigError
from megatron.gdn import TransformerConfig
from megatron.gdn.stages import OPTIONS
from tests.gdn.layer_support import make_config, make_layer

FUSION_FIELDS = {*OPTIONS, "gdn_fusions", "gdn_fusion_config"}


def test_fields_added_to_megatron_core() -> None:
    ours = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    theirs = {field.name for field in dataclasses.fields(CoreTransformerConfig)}
    assert set(ours) - theirs == FUSION_FIELDS
    assert ours["gdn_gated_output_norm_fusion"] is False
    assert ours["gdn_pre_gated_delta_rule_fusion"] is False
    assert ours["gdn_fusions"] == ()
    assert ours["gdn_fusion_config"] is None


def test_gdn_is_accepted_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        config = make_config(experimental_attention_variant="gdn")
    assert config.experimental_attention_variant == "gated_delta_net"


def test_the_alias_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="'gated_delta_net' is deprecated; write 'gdn'"):
        config = make_config(
            experimental_attention_variant="gated_delta_net", gdn_gated_output_norm_fusion=True
        )
    assert config.gdn_gated_output_norm_fusion


def test_a_user_sees_the_warning() -> None:
    """With Python's default filters, in a script that builds the configuration itself."""
    script = (
        "from megatron.gdn import TransformerConfig\n"
        "TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2,\n"
        "    experimental_attention_variant='gated_delta_net', linear_attention_freq=2,\n"
        "    linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8,\n"
        "    linear_num_key_heads=1, linear_num_value_heads=1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "DeprecationWarning: experimental_attention_variant='gated_delta_net'" in done.stderr


def test_a_configuration_made_from_another_does_not_warn() -> None:
    config = make_config(experimental_attention_variant="gdn")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        dataclasses.replace(config, hidden_size=128)
        pickle.loads(pickle.dumps(config.experimental_attention_variant))
        settings = dataclasses.asdict(config)
    assert type(settings["experimental_attention_variant"]) is not str


@pytest.mark.parametrize("frequency", [0, [1, 0], "x"], ids=["zero", "short_list", "text"])
def test_layers_that_cannot_be_counted(frequency: Any) -> None:
    with pytest.raises(
        ValueError, match=r"linear_attention_freq must be a number from 1 or a list"
    ):
        make_config(linear_attention_freq=frequency, gdn_gated_output_norm_fusion=True)


def test_a_relative_config_file_outlives_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = "{stage: gated_output_norm, fusions: [gated_output_norm]}"
    file = Path(select_file(tmp_path, entry))
    monkeypatch.chdir(tmp_path)
    config = make_config(gdn_fusion_config=file.name)
    monkeypatch.chdir("/")
    assert config.gdn_fusion_config == str(file)
    make_layer(config)


@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
def test_copies_keep_the_fields(on: bool) -> None:
    config = make_config(gdn_gated_output_norm_fusion=on)
    for copied in (copy.deepcopy(config), copy.copy(config)):
        assert copied.gdn_gated_output_norm_fusion is on
    kept = pickle.loads(pickle.dumps(dataclasses.asdict(config)["gdn_fusions"]))
    assert kept == ()


def test_a_hybrid_model_sets_no_variant() -> None:
    config = make_config(
        experimental_attention_variant=None,
        linear_attention_freq=None,
        is_hybrid_model=True,
        gdn_gated_output_norm_fusion=True,
    )
    assert config.gdn_gated_output_norm_fusion


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gdn_gated_output_norm_fusion": "yes"},
            "gdn_gated_output_norm_fusion must be True or False, got 'yes'",
        ),
        ({"gdn_fusions": "gated_output_norm"}, "must be a tuple of fusion names"),
        ({"gdn_fusions": (1,)}, "must be a tuple of fusion names"),
        (
            {"gdn_fusions": ("gated_output_nrom",)},
            "gdn_fusions: unknown fusion 'gated_output_nrom'; did you mean 'gated_output_norm'?",
        ),
        ({"gdn_fusion_config": "no/such/file.yaml"}, "no/such/file.yaml: cannot be read"),
        ({"gdn_fusion_config": 3}, "gdn_fusion_config must name a YAML file, got 3"),
        ({"gdn_fusion_config": ""}, "gdn_fusion_config must name a YAML file, got ''"),
    ],
    ids=["not_bool", "text", "numbers", "unknown", "no_file", "file_number", "file_empty"],
)
def test_bad_fields(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FusionConfigError) as found:
        make_config(**changes)
    assert message in str(found.value)


def test_a_name_and_its_option_may_agree() -> None:
    config = make_config(gdn_gated_output_norm_fusion=True, gdn_fusions=["gated_output_norm"])
    assert config.gdn_fusions == ("gated_output_norm",)


def select_file(tmp_path: Path, entry: str) -> str:
    file = tmp_path / "fusions.yaml"
    file.write_text(f"select:\n  - {entry}\n")
    return str(file)


def test_layers_that_are_no_gdn_layers(tmp_path: Path) -> None:
    """Layer 4 of this model is softmax attention."""
    entry = "{stage: gated_output_norm, fusions: [gated_output_norm], layers: 4}"
    with pytest.raises(FusionConfigError) as found:
        make_config(gdn_fusion_config=select_file(tmp_path, entry))
    assert str(found.value).endswith(
        "fusions.yaml:2: select[0].layers: stage gated_output_norm: layers 4 match no layer of "
        "this model; it has 1-3"
    )


def test_a_selection_without_gdn_layers(tmp_path: Path) -> None:
    file = tmp_path / "fusions.yaml"
    file.write_text(
        "fusions:\n"
        "  - {name: mine, stage: gated_delta_rule, determinism: unknown, preconditions: [],\n"
        "     implementation: 'megatron.gdn.reference:gated_delta_rule'}\n"
    )
    with pytest.raises(FusionConfigError, match="this model has no Gated DeltaNet layer"):
        make_config(
            gdn_fusion_config=str(file),
            gdn_fusions=("mine",),
            experimental_attention_variant=None,
            linear_attention_freq=None,
        )


def test_off_for_some_layers_beats_the_option(tmp_path: Path) -> None:
    from megatron.gdn.selection import select_fusions

    entry = "{stage: gated_output_norm, fusions: off, layers: 2}"
    config = make_config(
        gdn_gated_output_norm_fusion=True, gdn_fusion_config=select_file(tmp_path, entry)
    )
    selection = select_fusions(config)
    used = [set(selection.for_layer(layer)) for layer in (1, 2, 3)]
    assert used == [{"gated_output_norm"}, set(), {"gated_output_norm"}]


def test_off_for_every_layer_contradicts_the_option(tmp_path: Path) -> None:
    entry = "{stage: gated_output_norm, fusions: off}"
    with pytest.raises(FusionConfigError) as found:
        make_config(
            gdn_gated_output_norm_fusion=True, gdn_fusion_config=select_file(tmp_path, entry)
        )
    assert "gdn_gated_output_norm_fusion=True" in str(found.value)
    assert "fusions.yaml:2" in str(found.value)


def count_loads(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Arguments of every load of the registry from now on."""
    from megatron.gdn import selection

    loads: list[list[str]] = []
    inner = selection.load_registry

    def counting(files: list[str]) -> Any:
        loads.append(files)
        return inner(files)

    monkeypatch.setattr(selection, "load_registry", counting)
    return loads


def test_declarations_are_read_once_for_all_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models with different selections, built in turns: each reads once, none the other's."""
    from megatron.gdn.selection import bind_layer, select_fusions

    loads = count_loads(monkeypatch)
    entry = "{stage: gated_output_norm, fusions: [gated_output_norm], layers: 2}"
    by_file = make_config(gdn_fusion_config=select_file(tmp_path, entry))
    by_option = make_config(gdn_pre_gated_delta_rule_fusion=True)
    assert len(loads) == 2
    bound: dict[str, list[set[str]]] = {"file": [], "option": []}
    for number in (1, 2, 3):
        for name, config in (("file", by_file), ("option", by_option)):
            stages = bind_layer(config, number).stages.values()
            bound[name].append({stage.contract.name for stage in stages if stage.candidates})
    assert bound["file"] == [set(), {"gated_output_norm"}, set()]
    assert bound["option"] == [{"pre_gated_delta_rule"}] * 3
    assert len(loads) == 2
    # A changed field counts at once, here and nowhere else.
    changed = copy.copy(by_option)
    changed.gdn_gated_output_norm_fusion = True
    assert len(select_fusions(changed).requests) == 2
    assert len(select_fusions(by_option).requests) == 1
    assert len(loads) == 3


def test_a_kept_selection_survives_copies_and_stays_out_of_pickles() -> None:
    from megatron.gdn.selection import select_fusions

    config = make_config(gdn_gated_output_norm_fusion=True)
    for other in (
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        dataclasses.replace(config),
    ):
        assert other.gdn_gated_output_norm_fusion
        assert select_fusions(other).requests == select_fusions(config).requests
    assert "resolved" not in repr(config)


def test_each_fusion_is_announced_by_the_first_layer_that_selects_it(tmp_path: Path) -> None:
    from megatron.gdn.selection import bind_layer

    entry = "{stage: gated_output_norm, fusions: [gated_output_norm], layers: 2-3}"
    config = make_config(
        gdn_fusion_config=select_file(tmp_path, entry), gdn_pre_gated_delta_rule_fusion=True
    )
    loud = [
        [
            fusion.name
            for stage in bind_layer(config, number).stages.values()
            for fusion in stage.candidates
            if fusion.log_level == logging.INFO
        ]
        for number in (1, 2, 3)
    ]
    assert loud == [["pre_gated_delta_rule"], ["gated_output_norm"], []]
