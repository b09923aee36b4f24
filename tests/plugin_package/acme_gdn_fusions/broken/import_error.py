# SPDX-License-Identifier: Apache-2.0
"""A module that cannot be imported: it needs what nobody has."""

import acme_runtime_that_nobody_has  # noqa: F401

FUSIONS = "broken/import_error.yaml"
