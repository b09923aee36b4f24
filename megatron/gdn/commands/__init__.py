# SPDX-License-Identifier: Apache-2.0
"""The commands of the project; the files in `tools/` and the console scripts call them."""
