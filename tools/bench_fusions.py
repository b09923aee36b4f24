# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.bench_fusions`: time the fusions beside their floor and their peers."""

from __future__ import annotations

import sys

from megatron.gdn.commands.bench_fusions import main

if __name__ == "__main__":
    sys.exit(main())
