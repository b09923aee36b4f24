# SPDX-License-Identifier: Apache-2.0
"""What the commands share in talking to a terminal. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console

READER_GONE = 141
"""Exit status when the reader of the output has gone: that of a program that SIGPIPE ended."""

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


Main = Callable[[Sequence[str] | None], int]


def ends_quietly_without_reader(main: Main) -> Callable[..., int]:
    """Let a command end without a traceback when `| head` has read enough.

    Args:
        main: the command's main function, which returns its exit status.
    """

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            status = main(argv)
            sys.stdout.flush()
        except BrokenPipeError:
            # Python flushes once more when it exits, and would complain there.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return READER_GONE
        return status

    return run


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
