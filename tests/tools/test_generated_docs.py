# SPDX-License-Identifier: Apache-2.0
"""The generated parts of the documentation are current, and stale ones are noticed."""

from __future__ import annotations

import dataclasses

import pytest

from tools.generated_docs import PARTS, main, option_fields, regenerate


def test_documentation_is_current() -> None:
    assert main(["--check"]) == 0


@pytest.mark.parametrize("part", PARTS)
def test_a_stale_part_is_replaced(part: str) -> None:
    text = f"before\n<!-- generated: {part} -->\nSTALE TEXT\n<!-- end of {part} -->\nafter\n"
    new = regenerate(text)
    assert "STALE TEXT" not in new
    assert new.startswith("before\n")
    assert new.endswith(f"<!-- end of {part} -->\nafter\n")
    assert regenerate(new) == new


def test_an_unknown_part() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        regenerate("<!-- generated: nonsense -->\n<!-- end of nonsense -->\n")


def test_every_field_that_our_configuration_adds_is_in_the_table_of_options() -> None:
    from megatron.core.transformer import TransformerConfig as CoreTransformerConfig

    from megatron.gdn import TransformerConfig

    ours = {field.name for field in dataclasses.fields(TransformerConfig)}
    added = ours - {field.name for field in dataclasses.fields(CoreTransformerConfig)}
    assert set(option_fields()) == added
    table = PARTS["options"]()
    for name in added:
        assert f"| `{name}` |" in table
        assert f"`--{name.replace('_', '-')}" in table
