"""Model parallelism: a transformer on two GPUs, half of its layers on each.

    sbatch jobscript_ddp.sh model_parallel.py --micro-batches 4

It first trains naively (one half works while the other waits), then with each batch
split into micro-batches, so that both halves work at the same time.
../beyond_ddp/pipeline.py uses PyTorch's pipeline, on any number of GPUs.

Without a GPU, the run script adds the options in small.txt: a small model.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import RandomSampler

from common.data import make_loader
from common.device import get_device, get_ranks
from common.errors import UserError, positive, run
from common.log import RunLog
from dataset import random_sequences
from model import Transformer


def first_half(layers, micro_batches):
    """Run the forward passes, then a backward pass for each gradient received.

    micro_batches: a list of tokens (n, length).
    """
    activations, requests = [], []
    for tokens in micro_batches:
        activations.append(layers(tokens))
        # Not dist.send(), which may wait until the other half receives.
        requests.append(dist.isend(activations[-1].detach(), 1))
    for activation in activations:
        gradient = torch.empty_like(activation)
        dist.recv(gradient, 1)
        activation.backward(gradient)
    for request in requests:
        request.wait()


def second_half(layers, micro_batches, width):
    """Run both passes on the activations received; return the batch's mean loss.

    micro_batches: a list of targets (n, length).
    """
    count = sum(targets.numel() for targets in micro_batches)
    inputs, losses = [], []
    for targets in micro_batches:
        received = torch.empty(*targets.shape, width, device=targets.device)
        dist.recv(received, 0)
        inputs.append(received.requires_grad_())
        logits = layers(received).flatten(0, 1)
        # Divide by the whole batch's count: the gradients then add up to its mean's.
        loss = cross_entropy(logits, targets.flatten(), reduction="sum") / count
        losses.append(loss)
    for received, loss in zip(inputs, losses, strict=True):
        loss.backward()
        dist.send(received.grad, 0)
    return sum(loss.detach() for loss in losses)


def train(layers, batches, optimizer, device, num_micro_batches, width):
    """Train for an epoch; return the loss of the last batch."""
    loss = torch.zeros((), device=device)
    for tokens, targets in batches:
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            tokens = tokens.to(device, non_blocking=True)
            first_half(layers, tokens.chunk(num_micro_batches))
        else:
            targets = targets.to(device, non_blocking=True)
            loss = second_half(layers, targets.chunk(num_micro_batches), width)
        optimizer.step()
    dist.broadcast(loss, 1)  # from the second half, so that rank 0 can print it
    return loss.item()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--micro-batches", type=int, default=4, help="micro-batches per step"
    )
    parser.add_argument(
        "--epochs", type=positive, default=2, help="epochs per schedule"
    )
    parser.add_argument("--sequences", type=int, default=1024, help="data set size")
    parser.add_argument("--batch-size", type=int, default=16, help="batch per step")
    parser.add_argument("--lr", type=float, default=0.0003, help="learning rate")
    parser.add_argument("--layers", type=int, default=12, help="transformer layers")
    parser.add_argument("--width", type=int, default=768, help="embedding dimension")
    parser.add_argument("--heads", type=int, default=12, help="attention heads")
    parser.add_argument("--length", type=int, default=256, help="sequence length")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()

    rank, local_rank, world_size = get_ranks()
    if world_size != 2:
        raise UserError(
            f"model_parallel.py needs two processes, not {world_size}; run "
            "`sbatch jobscript_ddp.sh model_parallel.py`"
        )
    device = get_device(local_rank)
    torch.set_float32_matmul_precision("high")  # TF32 on Tensor Cores
    torch.manual_seed(args.seed)  # both halves load the same batches
    dist.init_process_group()

    train_set = random_sequences(args.sequences, args.length)
    model = Transformer(args.layers, args.width, args.heads, args.length)
    cut = 1 + args.layers // 2  # after the embedding and half of the blocks
    layers = (model.layers[:cut] if rank == 0 else model.layers[cut:]).to(device)
    # Enabled below, because RunLog() would print the batch size as if per GPU.
    log = RunLog(args, device, enabled=False)
    log.enabled = rank == 0
    log.print(f"On {device}: the embedding and {cut - 1} of {args.layers} layers")

    sampler = RandomSampler(train_set)
    loader = make_loader(train_set, args.batch_size, device, sampler=sampler)
    optimizer = torch.optim.Adam(layers.parameters(), args.lr, fused=True)
    for m in (1, args.micro_batches):
        for _ in range(args.epochs):  # only the last one is reported
            batches = log.progress(loader, "training")
            start = time.perf_counter()
            loss = train(layers, batches, optimizer, device, m, args.width)
            seconds = time.perf_counter() - start
        speed = train_set.labels.numel() / seconds
        step = f"{1000 * seconds / len(loader):.1f} ms per step"
        line = f"{step}, {speed:.1f} tokens/s; loss {loss:.4g}"
        log.print(f"Micro-batches: {m}; {line}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
