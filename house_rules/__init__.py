# SPDX-License-Identifier: Apache-2.0
"""House rules that a machine can check: `python -m house_rules [--fix] [--rule NAME] [PATH ...]`.

Each rule is one function from a file of the repository to its findings: `text_rules` reads bytes
and lines, `python_rules` reads syntax trees. `catalogue` lists them by name.
"""
