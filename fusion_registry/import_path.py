# SPDX-License-Identifier: Apache-2.0
"""Objects named by text, `package.module:attribute`."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

from pydantic import StringConstraints

ImportPath = Annotated[
    str,
    StringConstraints(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
        r":[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$",
        max_length=300,
    ),
]


def import_object(path: str) -> Any:
    """Import `package.module:attribute.attribute`.

    Raises:
        ImportError, AttributeError, or whatever the module raises while it is imported.
    """
    module, _, attributes = path.partition(":")
    value: Any = importlib.import_module(module)
    for name in attributes.split("."):
        value = getattr(value, name)
    return value
