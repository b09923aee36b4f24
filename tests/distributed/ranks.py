# SPDX-License-Identifier: Apache-2.0
"""Starts ranks on this machine, each a process, and brings back what they return.

With as many GPUs as ranks, each rank has its own and they speak NCCL. Otherwise they are ranks on
the CPU, with gloo and Triton's interpreter, forked from one server process that has imported torch
and megatron-core already, so that a launch costs a second. A rank that raises ends the launch with
every rank's traceback; one that hangs shows where, and ends it too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

_PRELOADED = ["tests.distributed.model_on_ranks", "megatron.gdn.fusions.pre_gated_delta_rule"]

_START_ON_GPU = 60.0
"""Seconds more on a GPU, where a rank imports torch itself, NCCL connects and kernels compile."""

_environment = threading.Lock()
"""Launches of several threads would put back each other's variables."""

on_cpu = False
"""Ranks on the CPU also where there are GPUs enough (pytest's --ranks-on-cpu)."""


every_combination = False
"""Cases too many for Triton's interpreter too (pytest's --every-combination)."""


class RankError(AssertionError):
    """A rank raised, died or hung; the text has what every rank said."""


def start_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 220.0
) -> list[Any]:
    """Run `function(*args)` on every rank of a world, torch.distributed started.

    Args:
        function: of a module, so that it can be pickled.
        world_size: number of ranks.
        args: picklable.
        timeout: seconds, from the start of the ranks; on the CPU the one-off import is not
            counted, and ranks on GPUs get a minute more.

    Returns:
        What the ranks returned, by rank.

    Raises:
        RankError: one of them did not return.
    """
    return _launch(_with_process_group, function, world_size, args, timeout)


def start_bare_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 220.0
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
    if enough_gpus(world_size):
        # Not forked: imports ask the CUDA driver things, and a fork of it is of no use.
        context: Any = multiprocessing.get_context("spawn")
        timeout += _START_ON_GPU
    else:
        context = _forkserver_on_cpu()
    import torch

    # This process keeps the store, as torchrun does: a port chosen here for rank 0 to open could be
    # taken by another launch meanwhile.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_run_rank,
                args=(start, function, args, rank, world_size, store.port, folder, timeout),
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


def enough_gpus(world_size: int) -> bool:
    """Whether every rank gets a GPU of its own. Starts no CUDA context in this process."""
    import torch

    return not on_cpu and torch.cuda.device_count() >= world_size


def skip_unless_fast(world_size: int) -> None:
    """Skip a test of many cases, unless GPUs run them or they were asked for."""
    if not (every_combination or enough_gpus(world_size)):
        pytest.skip("minutes in Triton's interpreter: with --every-combination")


def _forkserver_on_cpu() -> Any:
    """The server imports before it forks the first rank, and keeps the environment that it starts
    with: also on a host with GPUs its ranks see none."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with _environment, mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1"):
        first = context.Process(target=_nothing)
        first.start()
        first.join()
    return context


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
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        CUDA_DEVICE_MAX_CONNECTIONS="1",  # as megatron-core wants it under tensor parallelism
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
    _prepare()
    return function(*args)


def _with_process_group(function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
    import datetime

    import torch

    _prepare()
    torch.distributed.init_process_group(backend(), timeout=datetime.timedelta(seconds=timeout))
    returned = function(*args)
    torch.distributed.barrier()
    with contextlib.suppress(RuntimeError):
        torch.distributed.destroy_process_group()
    return returned


def backend() -> str:
    """What this rank speaks: NCCL where it has a GPU."""
    import torch

    return "nccl" if torch.cuda.is_available() else "gloo"


def _prepare() -> None:
    import torch

    from megatron.gdn.triton_3_7 import speed_up_interpreter

    speed_up_interpreter()

    torch.set_num_threads(1)
    # megatron-core compiles small functions on first use, for tens of seconds.
    torch.compiler.set_stance("force_eager")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # Products of different shapes are compared: let them differ in the order of sums alone.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
