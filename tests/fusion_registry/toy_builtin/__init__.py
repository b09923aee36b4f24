# SPDX-License-Identifier: Apache-2.0
"""Built-in declarations of the toy catalogue."""
