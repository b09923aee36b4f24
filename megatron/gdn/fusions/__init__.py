# SPDX-License-Identifier: Apache-2.0
"""Triton fusions of the stages of a Gated DeltaNet layer, one file each."""
