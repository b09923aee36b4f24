# SPDX-License-Identifier: Apache-2.0
"""Mistakes that plug-ins make, one entry point each."""

BROKEN_KERNEL = "broken/broken_kernel.yaml"
WRONG_SIGNATURE = "broken/wrong_signature.yaml"
DUPLICATE_NAME = "broken/duplicate_name.yaml"
UNKNOWN_STAGE = "broken/unknown_stage.yaml"
