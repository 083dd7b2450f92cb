"""Train a transformer on sequences of tokens: one GPU, DataParallel, DDP, others.

    sbatch jobscript.sh single.py     # one GPU
    sbatch jobscript_dp.sh dp.py      # DataParallel: two GPUs, one process
    sbatch jobscript_ddp.sh ddp.py    # DistributedDataParallel: two processes
    sbatch jobscript_ddp.sh ddp_unfinished.py    # DDP, to finish in exercise 3
    sbatch jobscript_ddp.sh beyond_ddp/fsdp.py   # and others, for large models

Without a GPU, add $SMALL: `source common/env.sh` sets it to a small model.
"""

import time

import torch
import torch.distributed as dist  # DDP: communication between processes
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler  # DDP: shards of the data

from common.cli import OptionParser, at_least
from common.data import make_loader
from common.device import get_device, get_ranks  # DDP: the ranks
from common.log import RunLog
from common.metrics import batch_sums, to_metrics
from dataset import random_sequences
from model import Transformer


def train(model, batches, optimizer, device):
    """Train for an epoch; return the mean loss and the accuracy in %."""
    sums = torch.zeros(3, device=device)
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
    return to_metrics(sums)


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--epochs", type=at_least(1), default=4, help="epochs")
    add("--sequences", type=at_least(1), default=1024, help="sequences to train on")
    add("--batch-size", type=at_least(1), default=16, help="sequences per GPU")
    add("--lr", type=at_least(0.0), default=0.0003, help="learning rate")
    add("--layers", type=at_least(1), default=12, help="transformer layers")
    add("--width", type=at_least(1), default=768, help="embedding dimension")
    add("--heads", type=at_least(1), default=12, help="attention heads")
    add("--length", type=at_least(1), default=256, help="tokens per sequence")
    add("--verbose", action="store_true", help="print the shape of each input")
    add("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    rank, local_rank, world_size = get_ranks()  # DDP: torchrun numbers the processes

    device = get_device(local_rank)  # DDP: local_rank picks the GPU of this node
    dist.init_process_group()  # DDP: NCCL or RCCL on GPUs, Gloo on CPUs
    torch.manual_seed(args.seed)

    train_set = random_sequences(args.sequences, args.length)
    size = args.layers, args.width, args.heads, args.length
    model = Transformer(*size, verbose=args.verbose).to(device)
    log = RunLog(args, device, unit="tokens")
    ddp_model = torch.nn.parallel.DistributedDataParallel(model)  # DDP: kept in sync
    parameters = sum(p.numel() for p in model.parameters())
    log.print(f"Parameters: {parameters / 1e6:.1f} million")

    sampler = DistributedSampler(train_set, seed=args.seed)  # DDP: a shard per rank
    batch_size = args.batch_size
    loader = make_loader(train_set, batch_size, device, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, fused=True)
    start = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)  # DDP: a new order in each epoch
        batches = loader if args.verbose else log.progress(loader)
        epoch_start = time.perf_counter()
        trained = train(ddp_model, batches, optimizer, device)  # DDP: wrapped
        seconds = time.perf_counter() - epoch_start
        step = {"milliseconds": 1000 * seconds / len(loader)}
        tokens = train_set.labels.numel()  # of the data set, on any number of GPUs
        log.epoch(epoch, tokens, seconds, train=trained, step=step)
    training = time.perf_counter() - start
    log.print(f"Total training time: {training:.1f} s")
    log.write_result(accuracy=trained["accuracy"], training_seconds=training)
    dist.destroy_process_group()  # DDP: closes what init_process_group opened


if __name__ == "__main__":
    main()
