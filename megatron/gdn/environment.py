# SPDX-License-Identifier: Apache-2.0
"""The only place where this project reads or sets environment variables.

Importing it imports neither torch nor triton: what is set here has to be set before they are.
"""

from __future__ import annotations

import os
import sys

_INTERPRET = "TRITON_INTERPRET"


def use_triton_interpreter() -> None:
    """Let Triton run its kernels in its interpreter, which takes CPU tensors, in this process.

    The interpreter is sped up as well.

    Triton reads the setting when it is imported and whenever a kernel is decorated.

    Raises:
        RuntimeError: Triton has been imported without the setting.
    """
    if os.environ.get(_INTERPRET) != "1":
        if "triton" in sys.modules:
            raise RuntimeError(
                f"Triton's interpreter requires {_INTERPRET}=1 before triton is imported, and it "
                f"is imported already; start the process with {_INTERPRET}=1"
            )
        os.environ[_INTERPRET] = "1"
    from megatron.gdn.triton_3_7 import speed_up_interpreter

    speed_up_interpreter()
