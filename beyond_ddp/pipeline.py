"""Pipeline parallelism: each GPU holds some of the layers.

    sbatch jobscript_ddp.sh pipeline.py  # PP: pipeline parallelism

Without a GPU, the run script adds the options in small.txt: a small model.
"""

import argparse
import time

import torch
import torch.distributed as dist  # PP: communication between processes
from torch.distributed.pipelining import PipelineStage  # PP: a part of the model
from torch.nn.functional import cross_entropy
from torch.utils.data import RandomSampler

from common.data import make_loader
from common.device import get_device, get_ranks  # PP: reads torchrun's variables
from common.errors import positive, run
from common.log import RunLog
from common.metrics import batch_sums, to_metrics
from dataset import random_sequences
from model import Transformer
from schedule import SCHEDULES, assign_stages, make_schedule  # PP: who computes what


def train(model, batches, optimizer, device):
    """Train for an epoch; return {"loss": mean, "accuracy": %}."""
    sums = torch.zeros(3, device=device)  # losses, correct answers, count
    for tokens, targets in batches:
        loss = []  # PP: one per micro-batch, on the GPU of the last stage
        tokens = tokens.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True).flatten()
        inputs = [tokens] if dist.get_rank() == 0 else []  # PP: for the first stage
        # PP: the schedule runs all forward and backward passes
        logits = model(*inputs, target=targets, losses=loss)
        if loss:  # PP: this GPU has the last stage
            sums += batch_sums(sum(loss) / len(loss), logits.argmax(1) == targets)
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(sums)  # PP: only the last rank has sums; others add zeros
    return to_metrics(sums, check_finite=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=positive, default=4, help="epochs")
    parser.add_argument("--sequences", type=int, default=1024, help="data set size")
    parser.add_argument("--batch-size", type=int, default=16, help="batch per GPU")
    parser.add_argument("--lr", type=float, default=0.0003, help="learning rate")
    # PP: these two decide how long GPUs wait and how much memory they use
    parser.add_argument("--schedule", choices=SCHEDULES, default="1F1B", help="kind")
    parser.add_argument("--micro-batches", type=int, default=4, help="per step")
    parser.add_argument("--layers", type=int, default=12, help="transformer layers")
    parser.add_argument("--width", type=int, default=768, help="embedding dimension")
    parser.add_argument("--heads", type=int, default=12, help="attention heads")
    parser.add_argument("--length", type=int, default=256, help="sequence length")
    parser.add_argument("--verbose", action="store_true", help="print input shapes")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    rank, local_rank, world_size = get_ranks()  # PP: torchrun numbers the processes

    device = get_device(local_rank)  # PP: local_rank picks the GPU of this node
    torch.set_float32_matmul_precision("high")  # TF32 on Tensor Cores
    torch.manual_seed(args.seed)
    dist.init_process_group()  # PP: NCCL or RCCL on GPUs, Gloo on CPUs
    my_stages, num_stages = assign_stages(args, rank, world_size)  # PP: by index

    train_set = random_sequences(args.sequences, args.length)
    size = args.layers, args.width, args.heads, args.length
    model = Transformer(*size, verbose=args.verbose)  # PP: on the CPU, still whole
    log = RunLog(args, device, model, enabled=rank == 0)  # PP: only rank 0 logs
    parameters = sum(p.numel() for p in model.parameters())
    log.print(f"Parameters: {parameters / 1e6:.1f} million")
    model = model.stages(my_stages, num_stages).to(device)  # PP: a list of stages
    stages = [
        PipelineStage(module, i, num_stages, device)
        for i, module in zip(my_stages, model, strict=True)
    ]
    schedule = make_schedule(stages, cross_entropy, args)  # PP: orders the passes

    sampler = RandomSampler(train_set)  # PP: by one seed, so one order for all ranks
    batch_size = args.batch_size * world_size  # PP: all GPUs share one batch
    loader = make_loader(train_set, batch_size, device, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, fused=True)
    start = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        batches = loader if args.verbose else log.progress(loader, "training")
        epoch_start = time.perf_counter()
        # PP: step() takes the place of model()
        train_metrics = train(schedule.step, batches, optimizer, device)
        seconds = time.perf_counter() - epoch_start
        step = {"milliseconds": 1000 * seconds / len(loader)}
        # Tokens per epoch, whatever the number of GPUs.
        tokens = train_set.labels.numel()
        log.epoch(epoch, tokens, seconds, "tokens", train=train_metrics, step=step)
    training_seconds = time.perf_counter() - start
    log.print(f"Total training time: {training_seconds:.1f} s")
    log.write_result(train_metrics["accuracy"], training_seconds)
    dist.destroy_process_group()  # PP: closes what init_process_group opened


if __name__ == "__main__":
    run(main)
