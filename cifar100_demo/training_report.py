"""Reports within an epoch: loss, speed, profile."""

import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from common.log import peak_memory
from common.metrics import to_metrics


def report_interval(steps):
    """Return the number of steps between two reports of an epoch.

    The number is 100, or a tenth of the epoch's steps if that is less.
    """
    return min(100, math.ceil(steps / 10))


def report_iterations(log, writer, done, sums, start):
    """Print loss and speed since the last report, and write them to TensorBoard.

    log: the RunLog; writer: the SummaryWriter, or None on all ranks but 0; done:
    iterations in this epoch; sums: [loss_sum, correct, count] of the whole job since
    `start`, a time.perf_counter(). This waits for the device.
    """
    if not writer:
        return
    loss, images = to_metrics(sums, check_finite=True)["loss"], int(sums[2])
    seconds = time.perf_counter() - start
    iteration = seconds / math.ceil(images / log.global_batch)
    epoch, steps = len(log.epochs) + 1, log.args.steps
    writer.add_scalar("iterations/loss", loss, (epoch - 1) * steps + done)
    writer.add_scalar("iterations/seconds", iteration, (epoch - 1) * steps + done)
    line = f"Epoch {epoch} [{done}/{steps}]: loss {loss:.4f}"
    line += f", {iteration * 1e3:.1f} ms per iteration"
    line += f", {images / seconds:.1f} images/s"
    log.print(f"{line}, {peak_memory(log.device) / 1e9:.2f} GB")


def save_profile(log, profiler):
    """Save the trace and print the costliest operators.

    The trace goes to logs/profiler/SCRIPT.json, under DDP to SCRIPT_rank0.json and
    so on. log: the RunLog, which prints the ten costliest operators and the
    all-reduces, which are rarely among them.
    """
    rank = f"_rank{dist.get_rank()}" if dist.is_initialized() else ""
    name = f"{Path(sys.argv[0]).stem}{rank}.json"
    folder = Path("logs/profiler")
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / name))
    gpu = torch.accelerator.is_available()
    costliest = {"sort_by": f"self_{'device' if gpu else 'cpu'}_time_total"}
    costliest |= {"row_limit": 10, "max_name_column_width": 40}
    operators = profiler.key_averages()
    log.print(operators.table(**costliest))
    rows = [("All-reduces", "Number", "CPU ms", "GPU ms")]
    for sums in operators:
        if "allreduce" in sums.key.lower().replace("_", ""):
            times = sums.cpu_time_total / 1e3, sums.device_time_total / 1e3
            rows.append((sums.key[:40], sums.count, *(f"{t:.1f}" for t in times)))
    for key, *numbers in rows if len(rows) > 1 else []:  # none in a single process
        numbers = [f"{number:>12}" for number in numbers[: 2 + gpu]]
        log.print(f"{key:40}{''.join(numbers)}")
    log.print(f"Trace saved to {folder / name}")
