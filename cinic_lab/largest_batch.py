"""Finds the largest batch that fits into a GPU, without AMP and with it.

    sbatch run.sh largest_batch.py --arch resnet152

A batch is doubled until the GPU is out of memory. Prints for each how many images/s
it trains, and how much memory it takes.
"""

import time

import cinic
import cinic_amp
import torch

from common.cli import OptionParser, UserError, at_least
from common.device import get_device
from common.log import RunLog
from state import State

STEPS = 5


def train(script, args, batch_size, device):
    """Return images/s of a few steps on one batch; the first two are not counted."""
    model = script.Classifier(args.arch).to(
        device, memory_format=torch.channels_last
    )
    model.dtype = torch.float16 if args.fp16 else torch.bfloat16
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    state = State(model, optimizer, scheduler, device)
    state.scaler = torch.amp.GradScaler(device.type, enabled=args.fp16)
    images = torch.zeros(batch_size, 3, 32, 32, dtype=torch.uint8, device=device)
    labels = torch.zeros(batch_size, dtype=torch.long, device=device)
    log = RunLog(args, device, enabled=False)
    for steps in (2, STEPS):
        start = time.perf_counter()
        batches = [(images, labels)] * steps
        script.train(args, model, state, batches, device, log)
    return steps * batch_size / (time.perf_counter() - start)


def largest_batch(attempt, most):
    """Return the largest batch, of 2, 4, 8, ..., that attempt(it) has memory for."""
    batch_size = 2  # BatchNorm wants more than one
    while batch_size <= most:
        try:
            attempt(batch_size)
        except RuntimeError as error:
            # cuDNN has words of its own for it.
            words = "out of memory", "ALLOC_FAILED", "unable to find an engine"
            if not any(word in str(error) for word in words):
                raise
            break
        batch_size *= 2
    return batch_size // 2


def main():
    parser = OptionParser(__doc__)
    parser.add_argument("--arch", choices=cinic.ARCHS, default="resnet18")
    parser.add_argument("--fp16", action="store_true", help="not bf16")
    parser.add_argument("--gpu", type=at_least(0), help="number of the GPU")
    parser.add_argument("--most", type=at_least(2), default=2**20, help="then stop")
    args = parser.parse_args()
    args.log_interval = STEPS
    device = get_device(gpu=args.gpu)
    if device.type == "cpu":
        raise UserError("no GPU here, so there is no memory of one to fill")
    print(f"{args.arch} on {torch.cuda.get_device_name(device)}")
    for script in (cinic, cinic_amp):
        print(f"{script.__name__}.py")

        def attempt(batch_size, script=script):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            speed = train(script, args, batch_size, device)
            memory = torch.cuda.max_memory_allocated(device) / 1e9
            print(f"{batch_size:7} {speed:10.1f} images/s {memory:7.2f} GB")

        print(f"{largest_batch(attempt, args.most):7} is the largest that fits")


if __name__ == "__main__":
    main()
