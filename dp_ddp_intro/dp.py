"""DataParallel: one process copies the model to all GPUs in each step.

    sbatch jobscript.sh single.py # or jobscript_dp.sh dp.py, jobscript_ddp.sh ddp.py

Without a GPU, the run script adds the options in small.txt: a small model.
"""

import argparse
import time

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import RandomSampler

from common.data import make_loader
from common.device import get_device
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
    gpus = max(1, torch.accelerator.device_count())  # DP: one process for all GPUs

    device = get_device()
    torch.set_float32_matmul_precision("high")  # TF32 on Tensor Cores
    torch.manual_seed(args.seed)

    train_set = random_sequences(args.sequences, args.length)
    size = args.layers, args.width, args.heads, args.length
    model = Transformer(*size, verbose=args.verbose).to(device)
    log = RunLog(args, device, model, gpus)  # DP: counts all GPUs
    dp_model = torch.nn.DataParallel(model)  # DP: copied to all GPUs in every step
    parameters = sum(p.numel() for p in model.parameters())
    log.print(f"Parameters: {parameters / 1e6:.1f} million")

    sampler = RandomSampler(train_set)
    batch_size = args.batch_size * gpus  # DP: split over all GPUs
    loader = make_loader(train_set, batch_size, device, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, fused=True)
    start = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        batches = loader if args.verbose else log.progress(loader, "training")
        epoch_start = time.perf_counter()
        # DP: train with the wrapper, which splits the batch
        train_metrics = train(dp_model, batches, optimizer, device)
        seconds = time.perf_counter() - epoch_start
        step = {"milliseconds": 1000 * seconds / len(loader)}
        # Tokens per epoch, whatever the number of GPUs.
        tokens = train_set.labels.numel()
        log.epoch(epoch, tokens, seconds, "tokens", train=train_metrics, step=step)
    training_seconds = time.perf_counter() - start
    log.print(f"Total training time: {training_seconds:.1f} s")
    log.write_result(train_metrics["accuracy"], training_seconds)


if __name__ == "__main__":
    run(main)
