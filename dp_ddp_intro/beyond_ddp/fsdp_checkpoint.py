"""A transformer learns sequences of tokens, in scripts that differ in a few rows.

    sbatch jobscript.sh single.py     # one GPU
    sbatch jobscript_dp.sh dp.py      # DataParallel: two GPUs, one process
    sbatch jobscript_ddp.sh ddp.py    # DistributedDataParallel: two processes
    sbatch jobscript_ddp.sh ddp_no_sampler.py    # the same, unfinished
    sbatch jobscript_ddp.sh beyond_ddp/fsdp.py   # and others, for large models

Without a GPU add $SMALL, which `source common/env.sh` sets: a small model.
"""

import time

import torch
import torch.distributed as dist  # DDP: communication between processes
import torch.distributed.checkpoint as dcp  # DCP: each process writes its shards
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # FSDP: 1 in N
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler  # DDP: shards of the data

from common.cli import OptionParser, at_least
from common.data import make_loader
from common.device import get_device, get_ranks  # DDP: its ranks
from common.log import RunLog
from common.metrics import batch_sums, to_metrics
from dataset import random_sequences
from model import Transformer
from shards import State, reading, writing  # DCP: what is saved, and where


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
    add("--epochs", type=at_least(1), default=4, help="passes over the data")
    add("--sequences", type=at_least(1), default=1024, help="in the data set")
    add("--batch-size", type=at_least(1), default=16, help="sequences per GPU")
    add("--lr", type=at_least(0.0), default=0.0003, help="learning rate")
    add("--resume", metavar="FOLDER", help="default: none")  # DCP: to go on
    add("--bf16", action="store_true", help="use 16 bits")  # FSDP: while it computes
    add("--layers", type=at_least(1), default=12, help="of the transformer")
    add("--width", type=at_least(1), default=768, help="numbers for each token")
    add("--heads", type=at_least(1), default=12, help="of attention")
    add("--length", type=at_least(1), default=256, help="of a sequence, in tokens")
    add("--verbose", action="store_true", help="print the size of each input")
    add("--seed", type=int, default=0, help="of all random numbers")
    args = parser.parse_args()
    rank, local_rank, world_size = get_ranks()  # DDP: torchrun numbers the processes

    device = get_device(local_rank)  # DDP: local_rank picks the GPU of this node
    dist.init_process_group()  # DDP: NCCL or RCCL on GPUs, Gloo on CPUs
    torch.manual_seed(args.seed)

    train_set = random_sequences(args.sequences, args.length)
    size = args.layers, args.width, args.heads, args.length
    model = Transformer(*size, verbose=args.verbose)  # FSDP: never all on one GPU
    log = RunLog(args, device, unit="tokens")
    # FSDP: ddp_model is left out, as fully_shard() changes the model itself
    mesh = dist.init_device_mesh(device.type, (world_size,))  # FSDP: all in a row
    full = torch.float32  # FSDP: for Adam, and to add up gradients
    half = torch.bfloat16 if args.bf16 else full  # FSDP: to gather and compute
    policy = MixedPrecisionPolicy(half, full, full)  # FSDP: 16 bits on the way
    for layer in model.layers:  # FSDP: all of a layer is there when it is its turn
        fully_shard(layer, mesh=mesh, mp_policy=policy)  # FSDP: else each has 1/N
    fully_shard(model, mesh=mesh, mp_policy=policy)  # FSDP: the next one meanwhile
    parameters = sum(p.numel() for p in model.parameters())
    log.print(f"Parameters: {parameters / 1e6:.1f} million")

    sampler = DistributedSampler(train_set, seed=args.seed)  # DDP: a shard per rank
    batch_size = args.batch_size
    loader = make_loader(train_set, batch_size, device, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    state = State(model, optimizer, log)  # DCP: and the number of epochs
    if args.resume is not None:  # DCP: on any number of GPUs
        with reading(args.resume, args.epochs, state) as folder:  # DCP: a whole one
            dcp.load({"run": state}, checkpoint_id=folder)  # DCP: into our shards
    start = time.perf_counter()
    for epoch in range(state.epoch + 1, args.epochs + 1):  # DCP: what is left
        sampler.set_epoch(epoch)  # DDP: a new order in each epoch
        batches = loader if args.verbose else log.progress(loader)
        epoch_start = time.perf_counter()
        trained = train(model, batches, optimizer, device)  # FSDP: each its shards
        seconds = time.perf_counter() - epoch_start
        step = {"milliseconds": 1000 * seconds / len(loader)}
        tokens = train_set.labels.numel()  # of the data set, on any number of GPUs
        log.epoch(epoch, tokens, seconds, train=trained, step=step)
        with writing(state, epoch) as folder:  # DCP: of this epoch alone
            dcp.save({"run": state}, checkpoint_id=folder)  # DCP: all of ours
    training = time.perf_counter() - start
    log.print(f"Total training time: {training:.1f} s")
    log.write_result(accuracy=trained["accuracy"], training_seconds=training)
    dist.destroy_process_group()  # DDP: closes what init_process_group opened


if __name__ == "__main__":
    main()
