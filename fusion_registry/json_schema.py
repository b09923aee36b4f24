# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of a declaration file, for editors that complete and check YAML.

It is made from the models that read the files. Two keys of a selection are written otherwise than
the model holds them, so that they are described here: `fusions` and `layers`. An editor sees less
than `load_registry`: it knows no other file and does not judge a precondition against its stage.
"""

from __future__ import annotations

from typing import Any

from fusion_registry.registry import Catalogue
from fusion_registry.schema import (
    LARGEST_LAYER_NUMBER,
    LAYER_RANGES,
    WORDS_OF_YAML,
    FusionFile,
)

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_LAYERS = [
    {"type": "integer", "minimum": 1, "maximum": LARGEST_LAYER_NUMBER},
    {"type": "string", "pattern": f"^{LAYER_RANGES}$"},
]
# A JSON Schema has no flag for the case of letters.
_WORDS_OF_YAML = "|".join(
    "".join(f"[{letter.upper()}{letter}]" for letter in word) for word in WORDS_OF_YAML
)


def declaration_file_schema(catalogue: Catalogue) -> dict[str, Any]:
    """The schema, as plain data.

    Args:
        catalogue: its stages and options are offered as the only values.
    """
    schema = FusionFile.model_json_schema()
    definitions = schema["$defs"]
    # What the model makes of `layers`; no file holds it.
    del definitions["LayerSet"]
    declaration = definitions["FusionDeclaration"]["properties"]
    selection = definitions["StageSelection"]["properties"]
    stages = [{"const": stage.name, "description": stage.summary} for stage in catalogue.stages]
    for properties in (declaration, selection):
        properties["stage"] = _described(properties["stage"], oneOf=stages)
    declaration["option"] = _described(
        declaration["option"], enum=[*catalogue.options, None], default=None
    )
    declaration["packages"]["additionalProperties"] = False
    declaration["name"]["not"] = {"pattern": f"^({_WORDS_OF_YAML})$"}
    (names,) = (item for item in selection["fusions"]["anyOf"] if item["type"] == "array")
    selection["fusions"] = _described(
        selection["fusions"],
        anyOf=[
            {
                **names,
                "items": {**names["items"], "not": {"const": "off"}},
                "minItems": 1,
                "uniqueItems": True,
            },
            # YAML 1.1 reads a bare `off` as false, YAML 1.2 as a text.
            {"enum": ["off", False]},
        ],
        examples=[["first_choice", "second_choice"], "off"],
    )
    selection["layers"] = _described(
        selection["layers"],
        anyOf=[
            *_LAYERS,
            {"type": "array", "items": {"anyOf": _LAYERS}, "minItems": 1},
            {"type": "null"},
        ],
        default=None,
        examples=[3, "1-4,7", ["1-4", 7]],
    )
    schema["title"] = "Fusions of stages: what exists and what is selected"
    return {"$schema": DIALECT, **_in_one_line(schema)}


def _described(field: dict[str, Any], **kind: Any) -> dict[str, Any]:
    """A field's title and description with another statement of what it may hold."""
    return {key: field[key] for key in ("title", "description") if key in field} | kind


def _in_one_line(part: Any, key: str = "") -> Any:
    """Descriptions come from docstrings, which are broken into lines of source code."""
    if isinstance(part, dict):
        return {name: _in_one_line(value, name) for name, value in part.items()}
    if isinstance(part, list):
        return [_in_one_line(item) for item in part]
    return " ".join(part.split()) if key == "description" and isinstance(part, str) else part
