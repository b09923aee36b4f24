# SPDX-License-Identifier: Apache-2.0
"""How the benchmarks measure: GPU time of one call, host time of one call, copy bandwidth.

GPU time is taken between two CUDA events. Before the first of them the L2 cache is overwritten and
a spin kernel is enqueued, so that the host has enqueued the whole call before the GPU reaches it:
launch latency of the host is not in the figure. A repetition in which the host was not ahead is
thrown away and repeated behind a longer spin.

The L2 cache is flushed by a write, which leaves it full of dirty lines. A call therefore pays for
the write-back of the lines before it and not for that of its own last ones, as in a long queue.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 * 2**20
"""Several times the L2 cache of any current GPU."""
COPY_BYTES = 2**30
INITIAL_SPIN_CYCLES = 1_000_000
LONGEST_SPIN_CYCLES = 2_000_000_000
HOST_CALLS = 50
HOST_SPIN_CYCLES = 20_000_000
"""About 10 ms: the GPU stays busy while the host makes its calls."""


class DeviceTimer:
    """Times calls on the current CUDA device. Holds the flush buffer between measurements."""

    def __init__(self, repetitions: int = 20, warm_up: int = 3) -> None:
        self.repetitions = repetitions
        self.warm_up = warm_up
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._spin_cycles = INITIAL_SPIN_CYCLES

    def device_ms(self, call: Callable[[], object]) -> float:
        """Median GPU time of a call in milliseconds, L2 cold, queue full."""
        for _ in range(self.warm_up):
            call()
        times: list[float] = []
        while len(times) < self.repetitions:
            elapsed = self._one(call)
            if elapsed is not None:
                times.append(elapsed)
        return statistics.median(times)

    def host_ms(self, call: Callable[[], object]) -> float:
        """Wall time of a call in milliseconds while the GPU is busy behind a spin kernel.

        The median of each repetition's calls, of the quietest repetition: what else runs on a
        shared host only ever adds, for seconds at a time, and up to twice the call itself.
        """
        for _ in range(HOST_CALLS):
            call()
        medians = []
        for _ in range(self.repetitions):
            torch.cuda.synchronize()
            torch.cuda._sleep(HOST_SPIN_CYCLES)
            times = []
            for _ in range(HOST_CALLS):
                begin = time.perf_counter()
                call()
                times.append(time.perf_counter() - begin)
            medians.append(statistics.median(times))
        torch.cuda.synchronize()
        return min(medians) * 1e3

    def copy_bytes_per_second(self) -> float:
        """Bytes read plus bytes written per second of a large device-to-device copy."""
        source = torch.empty(COPY_BYTES, dtype=torch.int8, device="cuda").random_()
        target = torch.empty_like(source)
        milliseconds = self.device_ms(lambda: target.copy_(source))
        return 2 * COPY_BYTES / (milliseconds * 1e-3)

    def _one(self, call: Callable[[], object]) -> float | None:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        torch.cuda._sleep(self._spin_cycles)
        start.record()
        result = call()
        end.record()
        host_was_ahead = not start.query()
        torch.cuda.synchronize()
        del result
        if host_was_ahead:
            return start.elapsed_time(end)
        self._spin_cycles *= 2
        if self._spin_cycles > LONGEST_SPIN_CYCLES:
            raise RuntimeError("the call synchronises with the device: its GPU time is not defined")
        return None
