# SPDX-License-Identifier: Apache-2.0
"""Starts ranks on this machine, each a process, and brings back what they return.

Ranks are forked from one server process that has imported torch and megatron-core already, so that
a launch costs a second. A rank that raises ends the launch with every rank's traceback; one that
hangs shows where, and ends it too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

_PRELOADED = ["tests.distributed.layer_on_ranks", "megatron.gdn.fusions.pre_gated_delta_rule"]


class RankError(AssertionError):
    """A rank raised, died or hung; the text has what every rank said."""


def start_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Run `function(*args)` on every rank of a gloo world, torch.distributed started.

    Args:
        function: of a module, so that it can be pickled.
        world_size: number of ranks.
        args: picklable.
        timeout: seconds, from the start of the ranks; the one-off import is not counted.

    Returns:
        What the ranks returned, by rank.

    Raises:
        RankError: one of them did not return.
    """
    return _launch(_with_process_group, function, world_size, args, timeout)


def start_bare_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """As `start_ranks`, with only the environment that torchrun sets: nothing is started."""
    return _launch(_bare, function, world_size, args, timeout)


def _launch(
    start: Callable[..., Any],
    function: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    timeout: float,
) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        # The server imports before it forks the first rank, and keeps the environment that it
        # starts with: also on a host with GPUs these are ranks on the CPU.
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1"):
            first = context.Process(target=_nothing)
            first.start()
            first.join()
        ranks = [
            context.Process(
                target=_run_rank,
                args=(start, function, args, rank, world_size, port, folder, timeout),
                # Not daemons: megatron-core's checkpoint writer starts a process of its own.
                daemon=False,
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout + 5
        # Once a rank has failed, the others only wait for it.
        while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
            if any(process.exitcode not in (None, 0) for process in ranks):
                deadline = min(deadline, time.monotonic() + 2)
            time.sleep(0.02)
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
        said = [Path(folder, f"{rank}.txt") for rank in range(world_size)]
        if any(process.exitcode != 0 for process in ranks):
            raise RankError(
                "\n".join(
                    f"--- rank {rank} of {world_size}, exit {process.exitcode}\n"
                    f"{text.read_text() if text.exists() else 'said nothing'}"
                    for rank, (process, text) in enumerate(zip(ranks, said, strict=True))
                )
            )
        return [
            pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(world_size)
        ]


def _nothing() -> None:
    pass


def _run_rank(
    start: Callable[..., Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    timeout: float,
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    with Path(folder, f"{rank}.txt").open("w") as said:
        faulthandler.dump_traceback_later(timeout, exit=True, file=said)
        try:
            returned = start(function, args, timeout)
            Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(returned))
        except BaseException:
            traceback.print_exc(file=said)
            said.flush()
            # At once: a clean exit would wait for ranks that wait for this one.
            os._exit(1)
        faulthandler.cancel_dump_traceback_later()


def _bare(function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
    import torch

    torch.set_num_threads(1)
    return function(*args)


def _with_process_group(function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
    import datetime

    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    returned = function(*args)
    torch.distributed.barrier()
    with contextlib.suppress(RuntimeError):
        torch.distributed.destroy_process_group()
    return returned
