# SPDX-License-Identifier: Apache-2.0
"""Thin entry points of the commands in `megatron.gdn.commands`; not part of the wheel."""
