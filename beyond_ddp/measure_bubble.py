"""Measure how long the GPUs of a pipeline wait; compare with (p - 1) / (m + p - 1).

    sbatch jobscript_ddp.sh measure_bubble.py

Runs every schedule of pipeline.py with several numbers of micro-batches, and times
all forward and backward passes of a stage. The rest of a step counts as waiting.
Needs no GPU.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from common.device import get_device, get_ranks
from common.errors import run
from dataset import random_sequences
from model import Transformer
from schedule import SCHEDULES, assign_stages, make_schedule

STEPS, BATCH, HEADS = 6, 16, 4


def synchronize(device):
    """Wait for this stream's kernels and receives, but not for its sends."""
    if device.type != "cpu":
        torch.accelerator.current_stream().synchronize()


class TimedStage(PipelineStage):
    """A stage that adds up the seconds of its forward and backward passes."""

    seconds = 0.0

    def time(self, function, *args, **kwargs):
        synchronize(self.device)  # earlier work does not count
        start = time.perf_counter()
        result = function(*args, **kwargs)
        synchronize(self.device)
        self.seconds += time.perf_counter() - start
        return result

    def forward_one_chunk(self, *args, **kwargs):
        return self.time(super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, *args, **kwargs):
        return self.time(super().backward_one_chunk, *args, **kwargs)


def measure_waiting(args, device):
    """Return the fraction of a step that a GPU waits.

    args: the options that schedule.py takes, width and length. The fraction is the
    median over all steps except the first, which exchanges shapes, and then the mean
    over the ranks.
    """
    rank, _, ranks = get_ranks()
    my_stages, num_stages = assign_stages(args, rank, ranks)
    model = Transformer(args.layers, args.width, HEADS, args.length)
    model = model.stages(my_stages, num_stages).to(device)
    stages = [
        TimedStage(module, i, num_stages, device)
        for i, module in zip(my_stages, model, strict=True)
    ]
    schedule = make_schedule(stages, cross_entropy, args)
    sequences = random_sequences(args.sequences, args.length)
    # PyTorch 2.11's stages refuse a view whose strides are not a new tensor's.
    tokens = sequences.images.contiguous().to(device)
    targets = sequences.labels.to(device).flatten()
    inputs = [tokens] if rank == 0 else []  # the other ranks receive theirs
    waiting = []
    for _ in range(STEPS):
        for stage in stages:
            stage.seconds = 0.0
        start = time.perf_counter()
        schedule.step(*inputs, target=targets, losses=[])
        synchronize(device)
        busy = sum(stage.seconds for stage in stages)
        waiting.append(1 - busy / (time.perf_counter() - start))
        model.zero_grad()
    median = torch.tensor(waiting[1:], device=device).median()
    dist.all_reduce(median)
    return median.item() / ranks


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256, help="embedding dimension")
    parser.add_argument("--length", type=int, default=128, help="sequence length")
    args = parser.parse_args()
    rank, local_rank, p = get_ranks()
    print_line = print if rank == 0 else lambda line: None  # one table
    device = get_device(local_rank)
    dist.init_process_group()
    args.layers, args.batch_size, args.sequences = max(4, 2 * p), BATCH, BATCH * p
    print_line(f"{p} GPUs: fraction of a step spent waiting, measured (calculated)")
    micro_batches = p, 2 * p, 4 * p, 8 * p
    hide = None if rank == 0 else True  # None: shown only on a terminal
    runs = len(SCHEDULES) * len(micro_batches)
    bar = tqdm(total=runs, desc="runs", leave=False, disable=hide)
    for args.schedule, v in SCHEDULES.items():
        cells = []
        for m in micro_batches:
            args.micro_batches = m
            measured = measure_waiting(args, device)
            calculated = (p - 1) / (v * m + p - 1)
            cells.append(f"m = {m}: {measured:.2f} ({calculated:.2f})")
            bar.update()
        print_line(f"{args.schedule:16}" + "   ".join(cells))
    bar.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
