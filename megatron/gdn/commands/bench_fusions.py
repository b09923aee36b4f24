# SPDX-License-Identifier: Apache-2.0
"""Time the fusions beside their floor and their peers: `python -m tools.bench_fusions`.

The floor is the traffic that a stage cannot avoid divided by the copy bandwidth measured in the
same run. A figure is printed only for an implementation whose outputs and gradients agree with the
float64 reference; for any other the errors are printed in its place.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from megatron.gdn.commands.bench_cases import STAGES_WITH_CASES, bench_cases
from megatron.gdn.commands.bench_cases.case import BenchCase, Implementation, Inputs
from megatron.gdn.commands.bench_timing import DeviceTimer


@dataclass(frozen=True)
class Measurement:
    """One implementation of one case. The times, in milliseconds, are None without parity."""

    stage: str
    label: str
    implementation: str
    is_ours: bool
    errors: dict[str, float]
    tolerance: float
    parity: bool
    problem: str
    forward_floor_ms: float
    forward_backward_floor_ms: float
    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    host_forward_ms: float | None = None
    host_forward_backward_ms: float | None = None


@dataclass(frozen=True)
class Consultation:
    """Host time of a layer's question whether a fusion may serve a call, preconditions and all."""

    stage: str
    label: str
    host_ms: float


def machine() -> dict[str, str]:
    """GPU, driver and versions of the run."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
        driver = found.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def measure(
    case: BenchCase,
    implementation: Implementation,
    timer: DeviceTimer,
    copy_bytes_per_second: float,
) -> Measurement:
    """Check the parity of one implementation, then time it."""
    torch.manual_seed(0)
    floors = {
        "forward_floor_ms": 1e3 * case.forward_bytes / copy_bytes_per_second,
        "forward_backward_floor_ms": 1e3
        * (case.forward_bytes + case.backward_bytes)
        / copy_bytes_per_second,
    }
    inputs = case.make_inputs()
    output_gradients = case.make_output_gradients()
    errors: dict[str, float] = {}
    problem = ""
    try:
        forward, forward_backward = _calls(implementation, inputs, output_gradients)
        outputs, gradients = forward_backward()
        errors = dict(case.errors(inputs, outputs, output_gradients, gradients))
        del outputs, gradients
    except Exception as error:
        # A peer may be absent or refuse this device; ours may not.
        if implementation.is_ours:
            raise
        problem = f"{type(error).__name__}: {error}".split("\n")[0]
    # A NaN compares false and is no parity.
    parity = not problem and all(error <= case.tolerance for error in errors.values())
    times: dict[str, float] = {}
    if parity:
        times = {
            "forward_ms": timer.device_ms(forward),
            "forward_backward_ms": timer.device_ms(forward_backward),
            "host_forward_ms": timer.host_ms(forward),
            "host_forward_backward_ms": timer.host_ms(forward_backward),
        }
    return Measurement(
        stage=case.stage,
        label=case.label,
        implementation=implementation.name,
        is_ours=implementation.is_ours,
        errors=errors,
        tolerance=case.tolerance,
        parity=parity,
        problem=problem,
        **floors,
        **times,
    )


def consultation(case: BenchCase, timer: DeviceTimer) -> Consultation:
    """Time the registry's part of a stage alone."""
    consult = case.consult(case.make_inputs())
    return Consultation(case.stage, case.label, timer.host_ms(consult))


def _calls(
    implementation: Implementation, inputs: Inputs, output_gradients: tuple[Tensor, ...]
) -> tuple[
    Callable[[], tuple[Tensor, ...]],
    Callable[[], tuple[tuple[Tensor, ...], dict[str, Tensor]]],
]:
    run = implementation.build(inputs)
    wanted = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}

    def forward() -> tuple[Tensor, ...]:
        return run(inputs)

    def forward_backward() -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        outputs = run(inputs)
        gradients = torch.autograd.grad(outputs, tuple(wanted.values()), output_gradients)
        return outputs, dict(zip(wanted, gradients, strict=True))

    return forward, forward_backward


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 1 when an implementation of ours has no parity, 2 without CUDA."""
    parser = argparse.ArgumentParser(prog="bench_fusions", description=__doc__)
    parser.add_argument(
        "--stage", action="append", choices=STAGES_WITH_CASES, help="only this stage; repeatable"
    )
    parser.add_argument(
        "--shape", default="", metavar="TEXT", help="only shapes whose title contains this text"
    )
    parser.add_argument("--repetitions", type=int, default=20, help="timed calls of each median")
    parser.add_argument("--ours-only", action="store_true", help="leave out the peers")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args(argv)
    cases = bench_cases(tuple(arguments.stage or STAGES_WITH_CASES))
    titles = [_title(case) for case in cases]
    cases = tuple(case for case in cases if arguments.shape in _title(case))
    if not cases:
        parser.error(
            f"--shape must be part of a title, got {arguments.shape!r}; there are {titles}"
        )
    if not torch.cuda.is_available():
        print("bench_fusions needs a CUDA device, found none", file=sys.stderr)
        return 2

    timer = DeviceTimer(repetitions=arguments.repetitions)
    bandwidth = timer.copy_bytes_per_second()
    if not arguments.json:
        print(", ".join(f"{key} {value}" for key, value in machine().items()))
        print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s, read plus written", flush=True)
    measurements, consultations = [], []
    for case in cases:
        rows = [
            measure(case, implementation, timer, bandwidth)
            for implementation in case.implementations
            if implementation.is_ours or not arguments.ours_only
        ]
        measurements += rows
        consultations.append(consultation(case, timer))
        if not arguments.json:
            print_table(rows, consultations[-1])
    if arguments.json:
        document = {
            "machine": machine(),
            "copy_bytes_per_second": bandwidth,
            "measurements": [dataclasses.asdict(m) for m in measurements],
            "consultations": [dataclasses.asdict(c) for c in consultations],
        }
        print(json.dumps(document, indent=2))
    return int(any(m.is_ours and not m.parity for m in measurements))


def print_table(rows: Sequence[Measurement], consulted: Consultation) -> None:
    """Print the measurements of one case, at once: a case takes up to a minute."""
    from rich.console import Console
    from rich.table import Table

    floor = rows[0]
    table = Table(title=_title(floor), title_justify="left")
    table.add_column("implementation")
    table.add_column("parity (largest error)")
    for heading in ("forward ms", "x floor", "forward+backward ms", "x floor", "host us"):
        table.add_column(heading, justify="right")
    table.add_row(
        "floor",
        "",
        f"{floor.forward_floor_ms:.3f}",
        "1.00",
        f"{floor.forward_backward_floor_ms:.3f}",
        "1.00",
        "",
    )
    for row in rows:
        table.add_row(row.implementation, _parity_text(row), *_time_texts(row))
    table.caption = f"registry's part of the host time: {consulted.host_ms * 1e3:.1f} us"
    table.caption_justify = "left"
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    sys.stdout.flush()


def _title(of: BenchCase | Measurement) -> str:
    return f"{of.stage}: {of.label}"


def _parity_text(row: Measurement) -> str:
    if row.problem:
        return f"did not run: {row.problem}"
    if row.parity:
        return f"ok ({max(row.errors.values()):.1e} <= {row.tolerance:.1e})"
    wrong = ", ".join(f"{n} {e:.1e}" for n, e in row.errors.items() if not e <= row.tolerance)
    return f"FAILS ({wrong} > {row.tolerance:.1e})"


def _time_texts(row: Measurement) -> tuple[str, ...]:
    if row.forward_ms is None or row.forward_backward_ms is None or row.host_forward_ms is None:
        return ("",) * 5
    return (
        f"{row.forward_ms:.3f}",
        f"{row.forward_ms / row.forward_floor_ms:.2f}",
        f"{row.forward_backward_ms:.3f}",
        f"{row.forward_backward_ms / row.forward_backward_floor_ms:.2f}",
        f"{row.host_forward_ms * 1e3:.0f}",
    )


if __name__ == "__main__":
    sys.exit(main())
