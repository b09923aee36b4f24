# SPDX-License-Identifier: Apache-2.0
"""Preconditions that read what a configuration or a layer does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion_registry import FusionConfigError, load_registry
from megatron.gdn.subjects import config_attributes, layer_attributes, unknown_attributes
from tests.gdn.layer_support import make_config, make_layer


def declared(folder: Path, *paths: str, select: bool = True) -> str:
    file = folder / "mine.yaml"
    rules = "".join(
        f"      - {{kind: predicate, callable: 'builtins:dict', reads: [{path}], says: it}}\n"
        for path in paths
    )
    file.write_text(
        "fusions:\n"
        "  - name: mine\n"
        "    stage: gated_delta_rule\n"
        "    determinism: unknown\n"
        "    implementation: megatron.gdn.reference:gated_delta_rule\n"
        f"    preconditions:\n{rules}"
        + ("select: [{stage: gated_delta_rule, fusions: [mine]}]\n" if select else "")
    )
    return str(file)


def test_a_run_refuses_a_misspelt_field_of_the_configuration(tmp_path: Path) -> None:
    """A predicate would be handed None for it, on every call and without a word."""
    file = declared(tmp_path, "config.bf16", "config.determinstic_mode", "layer.config.fp61")
    with pytest.raises(FusionConfigError) as found:
        make_config(gdn_fusion_config=file)
    first, second = found.value.problems
    assert str(first) == (
        f"{file}:8: fusions[0].preconditions[1]: fusion 'mine' reads config.determinstic_mode, but "
        "the transformer configuration has no 'determinstic_mode'; did you mean deterministic_mode "
        "or test_mode?"
    )
    assert (second.line, second.path) == (9, "fusions[0].preconditions[2]")


def test_what_is_not_selected_harms_no_run(tmp_path: Path) -> None:
    make_config(gdn_fusion_config=declared(tmp_path, "config.nothing_like_it", select=False))


def test_names_of_every_kind(tmp_path: Path) -> None:
    paths = ("config.q_lora_rank", "config.bf16", "layer.out_norm.eps", "layer.tp_size")
    registry = load_registry([declared(tmp_path, *paths)])
    everything = config_attributes(), layer_attributes()
    assert unknown_attributes(registry.fusion("mine"), *everything) == []
    registry = load_registry([declared(tmp_path, "config.zzz", "layer.zzz")])
    texts = [problem.text for problem in unknown_attributes(registry.fusion("mine"), *everything)]
    assert texts == [
        "fusion 'mine' reads config.zzz, but the transformer configuration has no 'zzz'; correct "
        "or remove the rule",
        "fusion 'mine' reads layer.zzz, but a GatedDeltaNet layer has no 'zzz'; correct or remove "
        "the rule",
    ]
    assert unknown_attributes(registry.fusion("mine")) == []


def test_the_built_in_fusions_read_what_exists() -> None:
    for fusion in load_registry(plugins=False).fusions.values():
        assert unknown_attributes(fusion, config_attributes(), layer_attributes()) == []


def test_a_planned_layer_has_what_a_real_one_has() -> None:
    real = set(dir(make_layer(make_config())))
    assert {name for name in real - layer_attributes() if not name.startswith("_")} == set()
