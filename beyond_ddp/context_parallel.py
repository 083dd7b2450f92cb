"""Context parallelism: each GPU trains on a part of every sequence.

    sbatch jobscript_ddp.sh context_parallel.py  # CP: parts of sequences

Without a GPU, the run script adds the options in small.txt: a small model.
"""

import argparse
import time

import torch
import torch.distributed as dist  # CP: communication between processes
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP  # CP: wraps a model
from torch.utils.data import RandomSampler

from common.data import make_loader
from common.device import get_device, get_ranks  # CP: reads torchrun's variables
from common.errors import UserError, positive, run
from common.log import RunLog
from common.metrics import batch_sums, to_metrics
from dataset import random_sequences
from model import Transformer
from ring_attention import ring_attention  # CP: attention over all parts


def train(model, batches, optimizer, device, part):  # CP: each rank trains on a part
    """Train for an epoch; return {"loss": mean, "accuracy": %}."""
    sums = torch.zeros(3, device=device)  # losses, correct answers, count
    for tokens, targets in batches:
        tokens = tokens.to(device, non_blocking=True)[:, part]  # CP: keeps this part
        targets = targets.to(device, non_blocking=True)[:, part].flatten()
        logits = model(tokens).flatten(0, 1)
        loss = cross_entropy(logits, targets)
        sums += batch_sums(loss, logits.argmax(dim=1) == targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(sums)  # CP: the sum over all parts
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
    rank, local_rank, world_size = get_ranks()  # CP: torchrun numbers the processes
    if args.length % world_size:  # CP: all parts are equally long
        line = f"{args.length} tokens cannot be split over {world_size} GPUs"
        raise UserError(f"{line}; use --length {world_size * 64}")

    device = get_device(local_rank)  # CP: local_rank picks the GPU of this node
    torch.set_float32_matmul_precision("high")  # TF32 on Tensor Cores
    torch.manual_seed(args.seed)
    dist.init_process_group()  # CP: NCCL or RCCL on GPUs, Gloo on CPUs

    train_set = random_sequences(args.sequences, args.length)
    size = args.layers, args.width, args.heads, args.length
    model = Transformer(*size, verbose=args.verbose).to(device)
    log = RunLog(args, device, model, enabled=rank == 0)  # CP: only rank 0 logs
    parameters = sum(p.numel() for p in model.parameters())
    log.print(f"Parameters: {parameters / 1e6:.1f} million")
    length = args.length // world_size  # CP: of each GPU's part of a sequence
    model.layers[0].first = rank * length  # CP: position of its first token
    for block in model.layers[1:-2]:  # CP: all but the embedding and the head
        block.attention = ring_attention  # CP: sees the keys and values of all ranks
    ddp_model = DDP(model)  # CP: copies rank 0's weights, averages gradients
    part = slice(rank * length, (rank + 1) * length)  # CP: the tokens of this rank

    sampler = RandomSampler(train_set)  # CP: by one seed, so one order for all ranks
    batch_size = args.batch_size * world_size  # CP: all GPUs share one batch
    loader = make_loader(train_set, batch_size, device, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, fused=True)
    start = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        batches = loader if args.verbose else log.progress(loader, "training")
        epoch_start = time.perf_counter()
        # CP: the wrapped model, on a part of each sequence
        train_metrics = train(ddp_model, batches, optimizer, device, part)
        seconds = time.perf_counter() - epoch_start
        step = {"milliseconds": 1000 * seconds / len(loader)}
        # Tokens per epoch, whatever the number of GPUs.
        tokens = train_set.labels.numel()
        log.epoch(epoch, tokens, seconds, "tokens", train=train_metrics, step=step)
    training_seconds = time.perf_counter() - start
    log.print(f"Total training time: {training_seconds:.1f} s")
    log.write_result(train_metrics["accuracy"], training_seconds)
    dist.destroy_process_group()  # CP: closes what init_process_group opened


if __name__ == "__main__":
    run(main)
