# SPDX-License-Identifier: Apache-2.0
"""Fusions of Gated DeltaNet stages. Importing this package imports no torch."""

FUSIONS = ("causal_conv1d.yaml", "pre_gated_delta_rule.yaml", "gated_delta_rule.yaml")
