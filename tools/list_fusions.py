# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.list_fusions`: what exists, what it requires, what is available here."""

import sys

from megatron.gdn.commands.list_fusions import main

if __name__ == "__main__":
    sys.exit(main())
