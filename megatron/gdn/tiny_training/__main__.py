# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron.gdn.tiny_training`."""

import sys

from megatron.gdn.tiny_training.command import main

if __name__ == "__main__":
    sys.exit(main())
