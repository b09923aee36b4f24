# SPDX-License-Identifier: Apache-2.0
"""What the commands share in talking to a terminal. Imports no torch."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator

from rich.console import Console

NOISY_LOGGERS = ("megatron", "torch.utils.cpp_extension", "torch.distributed")


@contextlib.contextmanager
def without_package_noise() -> Iterator[None]:
    """Spare the reader what megatron-core, FLA and torch say about packages that nothing uses."""
    loggers = [logging.getLogger(name) for name in NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def printed_text(print_to: Callable[[Console], None], width: int | None) -> str:
    """What a function prints to a rich console, without trailing spaces.

    Args:
        print_to: prints to the console that it is given.
        width: columns; None takes the terminal's, with its colours.
    """
    console = Console(highlight=False, markup=False, width=width)
    with console.capture() as captured:
        print_to(console)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
