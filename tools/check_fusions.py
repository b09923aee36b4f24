# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.check_fusions`: check fusions from their declarations alone."""

from __future__ import annotations

import sys

from megatron.gdn.commands.check_fusions import main

if __name__ == "__main__":
    sys.exit(main())
