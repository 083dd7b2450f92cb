"""Model parallelism: one model on two GPUs, each of which has half of the layers.

    sbatch jobscript_ddp.sh model_parallel.py --micro-batches 4

It trains first naively (while one half works, the other waits), then with each
batch cut into micro-batches, so that both work. Without a GPU add $SMALL, which
`source common/env.sh` sets: a small model.
beyond_ddp/pipeline.py has it by PyTorch's own module, on any number of GPUs.
"""

import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import RandomSampler

from common.cli import OptionParser, UserError, at_least
from common.data import make_loader
from common.device import get_device, get_ranks
from common.log import RunLog
from dataset import random_sequences
from model import Transformer


def first_half(layers, pieces):
    """Send what these layers make of each piece; get the gradients, and go back.

    pieces: tokens (n, length), one micro-batch after the other.
    """
    activations, sent = [], []
    for tokens in pieces:
        activations.append(layers(tokens))
        # Not dist.send(): it may wait until the other half has time for it.
        sent.append(dist.isend(activations[-1].detach(), 1))
    for activation in activations:
        gradient = torch.empty_like(activation)
        dist.recv(gradient, 1)
        activation.backward(gradient)
    for sending in sent:
        sending.wait()


def second_half(layers, pieces, width):
    """Go on with each piece; send the gradients back; return the batch's mean loss.

    pieces: targets (n, length), one micro-batch after the other.
    """
    count = sum(targets.numel() for targets in pieces)
    inputs, losses = [], []
    for targets in pieces:
        received = torch.empty(*targets.shape, width, device=targets.device)
        dist.recv(received, 0)
        inputs.append(received.requires_grad_())
        # A piece's share of the mean: the gradients add up to those of the batch.
        logits = layers(received)
        loss = cross_entropy(logits, targets.flatten(), reduction="sum") / count
        losses.append(loss)
    for received, loss in zip(inputs, losses, strict=True):
        loss.backward()
        dist.send(received.grad, 0)
    return sum(loss.detach() for loss in losses)


def train(layers, batches, optimizer, device, micro_batches, width):
    """Train for an epoch; return the last batch's loss."""
    loss = torch.zeros((), device=device)
    for tokens, targets in batches:
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            tokens = tokens.to(device, non_blocking=True)
            first_half(layers, tokens.chunk(micro_batches))
        else:
            targets = targets.to(device, non_blocking=True)
            loss = second_half(layers, targets.chunk(micro_batches), width)
        optimizer.step()
    dist.broadcast(loss, 1)  # the second half has it, the first one prints it
    return loss.item()


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--micro-batches", type=at_least(1), default=4, help="pieces of a batch")
    add("--epochs", type=at_least(1), default=2, help="in each of the two ways")
    add("--sequences", type=at_least(1), default=1024, help="in the data set")
    add("--batch-size", type=at_least(1), default=16, help="sequences for both GPUs")
    add("--lr", type=at_least(0.0), default=0.0003, help="learning rate")
    add("--layers", type=at_least(1), default=12, help="of the transformer")
    add("--width", type=at_least(1), default=768, help="numbers for each token")
    add("--heads", type=at_least(1), default=12, help="of attention")
    add("--length", type=at_least(1), default=256, help="of a sequence, in tokens")
    add("--seed", type=int, default=0, help="of all random numbers")
    args = parser.parse_args()

    rank, local_rank, world_size = get_ranks()
    if world_size != 2:
        raise UserError(
            f"two halves cannot be put on {world_size} GPUs: run "
            "`bash jobscript_ddp.sh model_parallel.py`"
        )
    device = get_device(local_rank)
    dist.init_process_group()
    torch.manual_seed(args.seed)  # both halves see the same batches

    train_set = random_sequences(args.sequences, args.length)
    model = Transformer(args.layers, args.width, args.heads, args.length)
    layers = model.stages([rank], 2)[0].to(device)
    # Not enabled at first: it would say that the batch is per GPU.
    log = RunLog(args, device, enabled=False, unit="tokens")
    log.enabled = rank == 0
    half = args.layers // 2
    log.print(f"On {device}: the embedding and {half} of {args.layers} layers")

    sampler = RandomSampler(train_set)
    loader = make_loader(train_set, args.batch_size, device, sampler=sampler)
    optimizer = torch.optim.Adam(layers.parameters(), args.lr)
    for micro_batches in (1, args.micro_batches):
        for _ in range(args.epochs):  # the last one is timed
            batches = log.progress(loader)
            start = time.perf_counter()
            loss = train(
                layers, batches, optimizer, device, micro_batches, args.width
            )
            seconds = time.perf_counter() - start
        speed = train_set.labels.numel() / seconds
        step = f"{1000 * seconds / len(loader):.1f} ms a step, {speed:.1f} tokens/s"
        log.print(f"Micro-batches: {micro_batches}; {step}; loss {loss:.4g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
