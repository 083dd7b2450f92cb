"""Finds the largest batch that fits into a GPU, without AMP and with it.

    sbatch run.sh largest_batch.py --arch resnet152

A batch is doubled until the GPU is out of memory. Prints for each how many images/s
it trains, and how much memory it takes.
"""

import time
from argparse import Namespace

import cinic
import cinic_amp
import torch

from common.cli import OptionParser, UserError, at_least
from common.device import DTYPES, get_device, pick_dtype
from common.log import RunLog, peak_memory
from state import State

STEPS = 5


def train(script, arch, batch_size, device, dtype):
    """Return images/s of a few steps on one batch, and the most memory they took.

    The first two do not count: in them cuDNN tries its algorithms, and some of these
    want much memory.
    """
    model = script.Classifier(arch).to(device, memory_format=torch.channels_last)
    model.dtype = dtype
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, 0.9, weight_decay=1e-4, fused=True
    )
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    state = State(model, optimizer, scheduler, device)
    state.scaler = torch.GradScaler(device.type, enabled=dtype == torch.float16)
    images = torch.zeros(batch_size, 3, 32, 32, dtype=torch.uint8, device=device)
    labels = torch.zeros(batch_size, dtype=torch.long, device=device)
    args = Namespace(log_interval=STEPS)
    log = RunLog(args, device, enabled=False)
    for steps in (2, STEPS):
        torch.get_device_module(device).reset_peak_memory_stats(device)
        start = time.perf_counter()
        batches = [(images, labels)] * steps
        script.train(args, model, state, batches, device, log)
    seconds = time.perf_counter() - start
    return steps * batch_size / seconds, peak_memory(device)


def largest_batch(attempt, most):
    """Return the largest batch, of 2, 4, 8, ..., that attempt(it) has memory for.

    There are many words for no memory, and a batch may also have more numbers than a
    32-bit index can count. So from the second on any error ends it, and is printed.
    """
    batch_size = 2  # BatchNorm wants more than one
    while batch_size <= most:
        try:
            attempt(batch_size)
        except RuntimeError as error:
            if batch_size == 2 and not isinstance(error, torch.OutOfMemoryError):
                raise
            print(f"{batch_size:7} {str(error).splitlines()[0]}")
            break
        batch_size *= 2
    return batch_size // 2


def main():
    parser = OptionParser(__doc__)
    parser.add_argument("--arch", choices=cinic.ARCHS, default="resnet18")
    parser.add_argument("--dtype", choices=DTYPES, help="of AMP; default: fast")
    parser.add_argument("--gpu", type=at_least(0), help="number of the GPU")
    parser.add_argument("--most", type=at_least(2), default=2**20, help="then stop")
    args = parser.parse_args()
    device = get_device(gpu=args.gpu)
    if device.type == "cpu":
        raise UserError("no GPU here, so there is no memory of one to fill")
    gpu = torch.get_device_module(device)
    print(f"{args.arch} on {gpu.get_device_name(device)}")
    dtype = pick_dtype(device, args.dtype)
    for script in (cinic, cinic_amp):
        print(f"{script.__name__}.py")

        def attempt(batch_size, script=script):
            gpu.empty_cache()
            chosen = dtype if script is cinic_amp else None
            speed, memory = train(script, args.arch, batch_size, device, chosen)
            print(f"{batch_size:7} {speed:10.1f} images/s {memory / 1e9:7.2f} GB")

        print(f"{largest_batch(attempt, args.most):7} is the largest that fits")


if __name__ == "__main__":
    main()
