"""Tensor parallelism: each GPU holds a part of every layer.

    sbatch jobscript_ddp.sh tensor_parallel.py  # TP: tensor parallelism

Without a GPU, the run script adds the options in small.txt: a small model.
"""

import argparse
import time

import torch
import torch.distributed as dist  # TP: communication between processes
from torch.distributed.tensor import parallel as tp  # TP: splits layers
from torch.nn.functional import cross_entropy
from torch.utils.data import RandomSampler

from common.data import make_loader
from common.device import get_device, get_ranks  # TP: reads torchrun's variables
from common.errors import UserError, positive, run
from common.log import RunLog
from common.metrics import batch_sums, to_metrics
from dataset import random_sequences
from model import Transformer


def train(model, batches, optimizer, device):
    """Train for an epoch; return {"loss": mean, "accuracy": %}."""
    sums = torch.zeros(3, device=device)  # losses, correct answers, count
    for tokens, targets in batches:
        tokens = tokens.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True).flatten()
        logits = model(tokens).flatten(0, 1)
        loss = cross_entropy(logits, targets)
        sums += batch_sums(loss, logits.argmax(dim=1) == targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
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
    parser.add_argument("--layers", type=int, default=12, help="transformer layers")
    parser.add_argument("--width", type=int, default=768, help="embedding dimension")
    parser.add_argument("--heads", type=int, default=12, help="attention heads")
    parser.add_argument("--length", type=int, default=256, help="sequence length")
    parser.add_argument("--verbose", action="store_true", help="print input shapes")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    rank, local_rank, world_size = get_ranks()  # TP: torchrun numbers the processes
    if args.heads % world_size:  # TP: heads must stay whole
        line = f"{args.heads} heads cannot be split over {world_size} GPUs"
        raise UserError(f"{line}; use --heads {world_size}")

    device = get_device(local_rank)  # TP: local_rank picks the GPU of this node
    torch.set_float32_matmul_precision("high")  # TF32 on Tensor Cores
    torch.manual_seed(args.seed)
    dist.init_process_group()  # TP: NCCL or RCCL on GPUs, Gloo on CPUs

    train_set = random_sequences(args.sequences, args.length)
    size = args.layers, args.width, args.heads, args.length
    model = Transformer(*size, verbose=args.verbose)  # TP: on the CPU, still whole
    log = RunLog(args, device, model, enabled=rank == 0)  # TP: only rank 0 logs
    parameters = sum(p.numel() for p in model.parameters())
    log.print(f"Parameters: {parameters / 1e6:.1f} million")
    mesh = dist.init_device_mesh(device.type, (world_size,))  # TP: all GPUs
    col, row = tp.ColwiseParallel(), tp.RowwiseParallel()
    plan = {"qkv": col, "proj": row, "mlp.0": col, "mlp.2": row}  # TP: of a block
    for block in model.layers[1:-2]:  # TP: all but the embedding and the head
        tp.parallelize_module(block, mesh, plan)  # TP: splits it, adds all-reduces
    model.to(device)  # TP: the rest, whole on every GPU
    weights = model.parameters()  # TP: DTensors and plain tensors, which do not mix

    sampler = RandomSampler(train_set)
    batch_size = args.batch_size * world_size  # TP: all GPUs share one batch
    loader = make_loader(train_set, batch_size, device, sampler=sampler)
    optimizer = torch.optim.Adam(weights, args.lr, foreach=False)  # TP: not fused
    start = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        batches = loader if args.verbose else log.progress(loader, "training")
        epoch_start = time.perf_counter()
        train_metrics = train(model, batches, optimizer, device)
        seconds = time.perf_counter() - epoch_start
        step = {"milliseconds": 1000 * seconds / len(loader)}
        # Tokens per epoch, whatever the number of GPUs.
        tokens = train_set.labels.numel()
        log.epoch(epoch, tokens, seconds, "tokens", train=train_metrics, step=step)
    training_seconds = time.perf_counter() - start
    log.print(f"Total training time: {training_seconds:.1f} s")
    log.write_result(train_metrics["accuracy"], training_seconds)
    dist.destroy_process_group()  # TP: closes what init_process_group opened


if __name__ == "__main__":
    run(main)
