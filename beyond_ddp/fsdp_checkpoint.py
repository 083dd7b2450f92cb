"""FSDP checkpoints: each GPU saves its shard; any number of GPUs can resume.

    sbatch jobscript_ddp.sh fsdp_checkpoint.py  # DCP: sharded checkpoints

Without a GPU, the run script adds the options in small.txt: a small model.
"""

import argparse
import time

import torch
import torch.distributed as dist  # DDP: communication between processes
import torch.distributed.checkpoint as dcp  # DCP: each rank writes its shards
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # FSDP: shards
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler  # DDP: shards of the data

from common.data import make_loader
from common.device import get_device, get_ranks  # DDP: reads torchrun's variables
from common.errors import positive, run
from common.log import RunLog
from common.metrics import batch_sums, to_metrics
from dataset import random_sequences
from dcp_checkpoint import AppState, resuming  # DCP: the state, one-line errors
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
    parser.add_argument("--batch-size", type=int, default=16, help="batch per GPU")
    parser.add_argument("--lr", type=float, default=0.0003, help="learning rate")
    parser.add_argument("--resume", metavar="DIR", help="checkpoint")  # DCP: to load
    # FSDP: gathers weights and computes in 16 bits, but sums gradients in 32
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--layers", type=int, default=12, help="transformer layers")
    parser.add_argument("--width", type=int, default=768, help="embedding dimension")
    parser.add_argument("--heads", type=int, default=12, help="attention heads")
    parser.add_argument("--length", type=int, default=256, help="sequence length")
    parser.add_argument("--verbose", action="store_true", help="print input shapes")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    rank, local_rank, world_size = get_ranks()  # DDP: torchrun numbers the processes

    device = get_device(local_rank)  # DDP: local_rank picks the GPU of this node
    torch.set_float32_matmul_precision("high")  # TF32 on Tensor Cores
    torch.manual_seed(args.seed)  # FSDP: one seed, so equal weights on all ranks
    dist.init_process_group()  # DDP: NCCL or RCCL on GPUs, Gloo on CPUs

    train_set = random_sequences(args.sequences, args.length)
    size = args.layers, args.width, args.heads, args.length
    model = Transformer(*size, verbose=args.verbose)  # FSDP: on the CPU, still whole
    log = RunLog(args, device, model, enabled=rank == 0)  # DDP: only rank 0 logs
    # FSDP: ddp_model is not needed, as fully_shard() modifies the model in place
    mesh = dist.init_device_mesh(device.type, (world_size,))  # FSDP: all GPUs
    # FSDP: layers compute in param_dtype; sums of gradients and outputs have 32 bits
    param_dtype = torch.bfloat16 if args.bf16 else torch.float32
    reduce_dtype = output_dtype = torch.float32
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, output_dtype)
    for layer in model.layers:  # FSDP: each is gathered, used and freed as a unit
        fully_shard(layer, mesh=mesh, mp_policy=policy)  # FSDP: 1/N goes to the GPU
    fully_shard(model, mesh=mesh, mp_policy=policy)  # FSDP: gathers layers early
    parameters = sum(p.numel() for p in model.parameters())
    log.print(f"Parameters: {parameters / 1e6:.1f} million")

    # DDP: each rank trains on its own shard
    sampler = DistributedSampler(train_set, seed=args.seed)
    batch_size = args.batch_size
    loader = make_loader(train_set, batch_size, device, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, fused=True)
    state = AppState(model, optimizer, log)  # DCP: what to save, with the epoch
    if args.resume is not None:
        # DCP: prints one line if the checkpoint is incomplete or another script's
        with resuming(args.resume):
            dcp.load({"run": state}, checkpoint_id=args.resume)  # DCP: reshards it
    start = time.perf_counter()
    for epoch in range(state.epoch + 1, args.epochs + 1):  # DCP: remaining epochs
        sampler.set_epoch(epoch)  # DDP: a new order in every epoch
        batches = loader if args.verbose else log.progress(loader, "training")
        epoch_start = time.perf_counter()
        # FSDP: the model, which has no wrapper
        train_metrics = train(model, batches, optimizer, device)
        seconds = time.perf_counter() - epoch_start
        step = {"milliseconds": 1000 * seconds / len(loader)}
        # Tokens per epoch, whatever the number of GPUs.
        tokens = train_set.labels.numel()
        log.epoch(epoch, tokens, seconds, "tokens", train=train_metrics, step=step)
        state.epoch = epoch  # DCP: saved with the model, so that a run can resume
        folder = state.folder / f"epoch{epoch}"  # DCP: a folder for each checkpoint
        dcp.save({"run": state}, checkpoint_id=folder)  # DCP: all ranks call it
    training_seconds = time.perf_counter() - start
    log.print(f"Total training time: {training_seconds:.1f} s")
    log.write_result(train_metrics["accuracy"], training_seconds)
    dist.destroy_process_group()  # DDP: closes what init_process_group opened


if __name__ == "__main__":
    run(main)
