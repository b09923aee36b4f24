# SPDX-License-Identifier: Apache-2.0
"""Training flags of the GDN fusions, for megatron-core's argument parser. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron.gdn.variant import VARIANT, to_megatron_core_variant


def add_gdn_fusion_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the fusion flags, and `gdn` as a value of `--experimental-attention-variant`.

    Args:
        parser: megatron-core's parser (as its `extra_args_provider`), or any other.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group(title="gated delta net fusions")
    group.add_argument(
        "--gdn-pre-gated-delta-rule-fusion",
        action="store_true",
        help="Fuse causal convolution, SiLU, layout, Q/K L2 norm, head expansion, beta and decay.",
    )
    group.add_argument(
        "--gdn-gated-output-norm-fusion",
        action="store_true",
        help="Fuse the output RMSNorm and the SiLU gate after the gated delta rule.",
    )
    group.add_argument(
        "--gdn-fusions",
        nargs="+",
        action=_AddNames,
        default=(),
        metavar="NAME",
        help="Further registered fusions to use in every layer; list_fusions shows their names. "
        "May be repeated.",
    )
    group.add_argument(
        "--gdn-fusion-config",
        action=_OneFile,
        default=None,
        metavar="FILE",
        help="YAML file that registers fusions and selects them, per stage and per layer.",
    )
    for action in parser._actions:
        if action.dest == "experimental_attention_variant" and action.choices is not None:
            # argparse converts a value before it compares it with the choices.
            action.type = _VariantName()
            action.choices = [*action.choices, VARIANT]
            action.help = f"{action.help or ''} {VARIANT} stands for gated_delta_net.".strip()
    return parser


class _AddNames(argparse.Action):
    """Keeps the names of a flag that is repeated; argparse's own would drop all but the last."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        known = getattr(namespace, self.dest)
        setattr(namespace, self.dest, list(dict.fromkeys([*known, *(values or ())])))


class _OneFile(argparse.Action):
    """Refuses a second file; argparse's own would leave the first one unread."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        known = getattr(namespace, self.dest)
        if known not in (None, values):
            raise argparse.ArgumentError(
                self, f"takes one file, got {known} and {values}; write both into one"
            )
        setattr(namespace, self.dest, values)


class _VariantName:
    """Converts a variant's name; argparse prints the class name in its error messages."""

    def __call__(self, text: str) -> str:
        # On a command line a DeprecationWarning would never be seen.
        return to_megatron_core_variant(text, FutureWarning) or text

    def __repr__(self) -> str:
        return "variant"
