# SPDX-License-Identifier: Apache-2.0
"""How tests start processes: launches share no port, and one that is too slow leaves nothing."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.distributed.ranks import start_bare_ranks
from tests.gdn.layer_support import start_one_rank
from tests.gpu.pretrain_support import run_until

pytestmark = pytest.mark.distributed


def the_port() -> int:
    """Of this launch, where somebody listens already."""
    port = int(os.environ["MASTER_PORT"])
    socket.create_connection(("127.0.0.1", port), timeout=5.0).close()
    return port


def test_launches_side_by_side_have_a_port_each() -> None:
    """It is opened before the ranks start: one that was only looked up can be taken meanwhile."""
    with ThreadPoolExecutor(2) as pool:
        launches = [pool.submit(start_bare_ranks, the_port, 2) for _ in range(2)]
    first, second = (set(launch.result()) for launch in launches)
    assert len(first) == len(second) == 1
    assert first != second


def one_rank_without_a_store() -> float:
    """What a sum over one rank gives, where no store can be opened on a port."""
    torch.distributed.TCPStore = None
    torch.distributed.rendezvous.TCPStore = None
    start_one_rank()
    one = torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu")
    torch.distributed.all_reduce(one)
    return one.item()


def test_one_rank_needs_no_port() -> None:
    assert start_bare_ranks(one_rank_without_a_store, 1) == [1.0]


def test_a_run_that_takes_too_long_is_asked_to_end() -> None:
    """As torchrun, which ends its ranks when asked and leaves them running when killed."""
    script = "sleep 60 & trap 'kill $!; echo asked; exit 3' TERM; echo started; wait"
    status, output = run_until(["bash", "-c", script], dict(os.environ), timeout=5.0)
    assert (status, output.splitlines()) == (3, ["started", "asked", "ended after 5 s"])
