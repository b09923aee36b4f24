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
        ImportError, AttributeError, or whatever Exception the module raises while it is imported.
        What would end the process (SystemExit, and all else that is no Exception) becomes an
        ImportError: a module that cannot be had is no reason to stop without a message.
    """
    module, _, attributes = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ImportError(
            f"the module {module} wants to end the process: {type(error).__name__}: {error}"
        ) from error
    for name in attributes.split("."):
        value = getattr(value, name)
    return value
