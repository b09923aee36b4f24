# SPDX-License-Identifier: Apache-2.0
"""Tiny training: a byte-level Gated DeltaNet language model on text found on every machine.

`python -m megatron.gdn.tiny_training` (or `gdn-tiny-training`) trains megatron-core's GPT model
with the layers and the fusions of this project, on the GPU if there is one, else on the CPU with
Triton's interpreter, and checks that every enabled fusion ran at every step.
"""

from megatron.gdn.tiny_training.command import main

__all__ = ["main"]
