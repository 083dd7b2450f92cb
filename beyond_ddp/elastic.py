"""Elastic training: the number of GPUs changes while it trains.

    sbatch jobscript_ddp.sh elastic.py  # ELASTIC: nodes come and go

Without a GPU, the run script adds the options in small.txt: a small model.
"""

import argparse
import time

import torch
import torch.distributed as dist  # DDP: communication between processes
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP: wraps a model
from torch.utils.data import DistributedSampler  # DDP: shards of the data

import elastic_state  # ELASTIC: the checkpoint
from common.data import make_loader
from common.device import get_device, get_ranks  # DDP: reads torchrun's variables
from common.errors import positive, run
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
    dist.all_reduce(sums)  # DDP: the sum over all ranks
    return to_metrics(sums, check_finite=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=positive, default=4, help="epochs")
    parser.add_argument("--sequences", type=int, default=1024, help="data set size")
    # ELASTIC: the global batch, and the checkpoint that every epoch writes
    parser.add_argument("--batch-size", type=int, default=32, help="global batch")
    parser.add_argument("--checkpoint", default="logs/elastic.pt", help="file")
    parser.add_argument("--lr", type=float, default=0.0003, help="learning rate")
    parser.add_argument("--layers", type=int, default=12, help="transformer layers")
    parser.add_argument("--width", type=int, default=768, help="embedding dimension")
    parser.add_argument("--heads", type=int, default=12, help="attention heads")
    parser.add_argument("--length", type=int, default=256, help="sequence length")
    parser.add_argument("--verbose", action="store_true", help="print input shapes")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    rank, local_rank, world_size = get_ranks()  # DDP: torchrun numbers the processes

    args.batch_size = elastic_state.split_batch(args, world_size)  # ELASTIC: per GPU
    device = get_device(local_rank)  # DDP: local_rank picks the GPU of this node
    torch.set_float32_matmul_precision("high")  # TF32 on Tensor Cores
    torch.manual_seed(args.seed + rank)  # DDP: each rank has its own random numbers
    dist.init_process_group()  # DDP: NCCL or RCCL on GPUs, Gloo on CPUs

    train_set = random_sequences(args.sequences, args.length)
    size = args.layers, args.width, args.heads, args.length
    model = Transformer(*size, verbose=args.verbose).to(device)
    log = RunLog(args, device, model, enabled=rank == 0)  # DDP: only rank 0 logs
    ddp_model = DDP(model)  # DDP: copies rank 0's weights, averages gradients
    parameters = sum(p.numel() for p in model.parameters())
    log.print(f"Parameters: {parameters / 1e6:.1f} million")

    # DDP: each rank trains on its own shard
    sampler = DistributedSampler(train_set, seed=args.seed)
    batch_size = args.batch_size
    loader = make_loader(train_set, batch_size, device, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, fused=True)
    done = elastic_state.load_checkpoint(args, model, optimizer)  # ELASTIC: epochs
    start = time.perf_counter()
    for epoch in range(done + 1, args.epochs + 1):  # ELASTIC: the remaining epochs
        sampler.set_epoch(epoch)  # DDP: a new order in every epoch
        batches = loader if args.verbose else log.progress(loader, "training")
        epoch_start = time.perf_counter()
        # DDP: train with the wrapper, which averages gradients
        train_metrics = train(ddp_model, batches, optimizer, device)
        seconds = time.perf_counter() - epoch_start
        step = {"milliseconds": 1000 * seconds / len(loader)}
        # Tokens per epoch, whatever the number of GPUs.
        tokens = train_set.labels.numel()
        log.epoch(epoch, tokens, seconds, "tokens", train=train_metrics, step=step)
        if rank == 0:  # ELASTIC: only rank 0 writes the checkpoint
            elastic_state.save_checkpoint(args, epoch, model, optimizer)
    training_seconds = time.perf_counter() - start
    log.print(f"Total training time: {training_seconds:.1f} s")
    log.write_result(train_metrics["accuracy"], training_seconds)
    dist.destroy_process_group()  # DDP: closes what init_process_group opened


if __name__ == "__main__":
    run(main)
