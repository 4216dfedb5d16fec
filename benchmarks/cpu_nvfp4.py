"""NVFP4 on the CPU, side by side with compressed-tensors: time, bytes, memory.

    python benchmarks/cpu_nvfp4.py

Both sides get the same bfloat16 matrix and the same global scale, choose max-rule block scales, and round.
One process, repetitions interleaved (job 1, 2, 3, ..., then again), so that a busy machine disturbs all
alike; ratios are taken within a repetition, and their median is shown. The outputs must agree in every
bit, else this stops. Memory is measured in a process of its own for every job: the high-water mark of
resident memory while the job runs, less what was resident before it; its output is in that number.
Imports, compiling and one warm-up run on a smaller matrix come first on both sides and are in neither time
nor memory; how long the first compiled call took is in the JSON line, the last one printed.

Cannot show: speed on a GPU, or on CPUs without vector instructions. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import compressed_tensors
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import NVFP4
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from manners.nvfp4 import backend, block_scales, fake_quant_weight, global_scale, quantize_weight
from manners.nvfp4.compiled import COMPILE_FROM

SCHEME = QuantizationScheme(targets=["Linear"], **NVFP4)
Job = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def their_scales(w_OK: Tensor, g: Tensor) -> Tensor:
    blocks = w_OK.unflatten(-1, (-1, 16))
    return calculate_qparams(blocks.amin(-1), blocks.amax(-1), SCHEME.weights, global_scale=g)[0]


def their_fake_quant(w_OK: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    return (fake_quantize(w_OK, their_scales(w_OK, g), None, SCHEME.weights, g),)


def their_pack(w_OK: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    state = {"weight": w_OK, "weight_scale": their_scales(w_OK, g), "weight_global_scale": g}
    compressed = NVFP4PackedCompressor.compress(state, SCHEME)
    return compressed["weight_packed"], compressed["weight_scale"]


def our_fake_quant(w_OK: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    return (fake_quant_weight(w_OK, g),)


def our_pack(w_OK: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    quantized = quantize_weight(w_OK, g)
    return quantized.packed, quantized.block_scale


def our_search(w_OK: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    return (block_scales(w_OK, g, "mse"),)


@contextlib.contextmanager
def no_compile() -> Iterator[None]:
    before = os.environ.get("MANNERS_NO_COMPILE", "0")
    os.environ["MANNERS_NO_COMPILE"] = "1"
    try:
        yield
    finally:
        os.environ["MANNERS_NO_COMPILE"] = before


def eager(job: Job) -> Job:
    def run(w_OK: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        with no_compile():
            return job(w_OK, g)

    return run


# The first of each task is the peer; the `mse` search has none in compressed-tensors.
TASKS: dict[str, dict[str, Job]] = {
    "fake-quant": {
        "compressed-tensors": their_fake_quant,
        "manners, compiled": our_fake_quant,
        "manners, eager": eager(our_fake_quant),
    },
    "quantize-and-pack": {
        "compressed-tensors": their_pack,
        "manners, compiled": our_pack,
        "manners, eager": eager(our_pack),
    },
    "mse scale search": {"manners, compiled": our_search, "manners, eager": eager(our_search)},
}


def make_matrix(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A bfloat16 matrix with a few outliers, and its global scale."""
    w_OK = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    w_OK[:, 7] *= 10
    w_OK[0, :64] = 0
    w_OK = w_OK.bfloat16()
    return w_OK, global_scale(w_OK.abs().max())


def warm_up(job: Job) -> None:
    job(*make_matrix(COMPILE_FROM // 4096, 4096))


def assert_same_bytes(task: str, outputs: dict[str, tuple[Tensor, ...]]) -> None:
    first_name, first = next(iter(outputs.items()))
    for name, output in outputs.items():
        for one, other in zip(first, output, strict=True):
            same = one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            if not same:
                raise SystemExit(f"{task}: {name} and {first_name} differ, so their times mean nothing")


def time_jobs(w_OK: Tensor, g: Tensor, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every repetition, by task and side."""
    seconds: dict[str, dict[str, list[float]]] = {
        task: {side: [] for side in jobs} for task, jobs in TASKS.items()
    }
    for _ in range(repeats):
        for task, jobs in TASKS.items():
            for side, job in jobs.items():
                started = time.perf_counter()
                job(w_OK, g)
                seconds[task][side].append(time.perf_counter() - started)
    return seconds


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (highest since the mark was last reset) of this process."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match
    return int(match[1]) * 1024


def measure_memory(job: Job, rows: int, columns: int) -> int:
    """Bytes that become resident while a job runs, at the worst moment, its output included."""
    warm_up(job)
    w_OK, g = make_matrix(rows, columns)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the allocator keeps would hide what the job takes
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
    job(w_OK, g)
    return resident_bytes("VmHWM") - before


def measure_memory_apart(task: str, side: str, arguments: argparse.Namespace) -> int:
    command = [sys.executable, __file__, "--memory-of", task, side, "--rows", str(arguments.rows)]
    command += ["--columns", str(arguments.columns), "--threads", str(arguments.threads)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(process.stdout.splitlines()[-1])


def summarise(
    seconds: dict[str, list[float]], extra: dict[str, int], peer: str | None
) -> dict[str, dict[str, float]]:
    """One row for each side: median and best seconds, median ratio to the peer, extra megabytes."""
    rows = {}
    for side, times in seconds.items():
        row = {"median_s": statistics.median(times), "best_s": min(times), "extra_mb": extra[side] / 1e6}
        if peer:
            row["times_as_fast"] = statistics.median(b / a for a, b in zip(times, seconds[peer], strict=True))
        rows[side] = {key: round(value, 4) for key, value in row.items()}
    return rows


def print_table(results: dict[str, dict[str, dict[str, float]]]) -> None:
    print(f"{'task':<18} {'side':<20} {'median s':>9} {'best s':>8} {'times as fast':>14} {'extra MB':>9}")
    for task, rows in results.items():
        for side, row in rows.items():
            ratio = f"{row['times_as_fast']:.1f}" if "times_as_fast" in row else "no peer"
            numbers = f"{row['median_s']:>9.3f} {row['best_s']:>8.3f} {ratio:>14} {row['extra_mb']:>9.0f}"
            print(f"{task:<18} {side:<20} {numbers}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=12288)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory-of", nargs=2, metavar=("TASK", "SIDE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        task, side = arguments.memory_of
        print(measure_memory(TASKS[task][side], arguments.rows, arguments.columns))
        return

    w_OK, g = make_matrix(arguments.rows, arguments.columns)
    started = time.perf_counter()
    warm_up(our_fake_quant)
    first_call_s = time.perf_counter() - started
    for task, jobs in TASKS.items():
        for job in jobs.values():
            warm_up(job)
        assert_same_bytes(task, {side: job(w_OK, g) for side, job in jobs.items()})
    seconds = time_jobs(w_OK, g, arguments.repeats)
    results = {}
    for task, jobs in TASKS.items():
        extra = {side: measure_memory_apart(task, side, arguments) for side in jobs}
        results[task] = summarise(seconds[task], extra, next((side for side in jobs if side[0] == "c"), None))

    matrix_mb = w_OK.numel() * w_OK.element_size() / 1e6
    print(
        f"{arguments.rows} x {arguments.columns} bfloat16 ({matrix_mb:.0f} MB), {arguments.threads} threads, "
    )
    print(f"median of {arguments.repeats} interleaved repetitions, every bit equal. {backend().why}.")
    print_table(results)
    summary = {
        "rows": arguments.rows,
        "columns": arguments.columns,
        "matrix_mb": matrix_mb,
        "threads": arguments.threads,
        "repeats": arguments.repeats,
        "same_bytes": True,
        "backend": backend()._asdict(),
        "first_compiled_call_s": round(first_call_s, 2),
        "results": results,
        "load_average": os.getloadavg(),
        "versions": {
            "torch": torch.__version__,
            "compressed-tensors": compressed_tensors.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
