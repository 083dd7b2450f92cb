"""Finds the largest batch that fits into a GPU, without AMP and with it.

    sbatch run.sh largest_batch.py --arch resnet152

A batch is doubled until the GPU is out of memory. Then it looks on between the last
that fits and the first that does not, until they are within 5 % of each other. It
prints for each how many images/s it trains, and how much memory it takes. Without a
GPU it says so and ends.
"""

import time
from argparse import Namespace

import cinic
import cinic_amp
import torch

from common.cli import OptionParser, UserError, at_least
from common.device import DTYPES, get_device, pick_dtype
from common.log import RunLog, peak_memory
from common.optimizer import init_momentum
from state import TrainingState

STEPS = 5


def train(script, arch, batch_size, device, dtype):
    """Return images/s of a few steps on one batch, and the most memory they took.

    The first two do not count: in them cuDNN tries its algorithms, and some of these
    want much memory.
    """
    model = script.Classifier(arch).to(device, memory_format=torch.channels_last)
    model.amp = device.type, dtype, bool(dtype)
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, 0.9, weight_decay=1e-4, fused=True
    )
    init_momentum(optimizer)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    args = Namespace(log_interval=STEPS, batch_size=batch_size)
    state = TrainingState(args, model, optimizer, scheduler, device)
    state.scaler = torch.GradScaler(device.type, enabled=dtype == torch.float16)
    images = torch.zeros(batch_size, 3, 32, 32, dtype=torch.uint8, device=device)
    labels = torch.zeros(batch_size, dtype=torch.long, device=device)
    log = RunLog(args, device, enabled=False)
    for steps in (2, STEPS):
        torch.get_device_module(device).reset_peak_memory_stats(device)
        start = time.perf_counter()
        batches = [(images, labels)] * steps
        script.train(args, model, state, batches, device, log)
    seconds = time.perf_counter() - start
    return steps * batch_size / seconds, peak_memory(device)


def largest_batch(attempt, limit):
    """Return the largest batch up to limit that attempt(it) has memory for.

    Doubles it from 2 on until one does not fit, then tries the middle between the
    last that fits and the first that does not, until these are within 5 % of each
    other (or neighbours). 1 says that not even 2 fit.

    There are many words for no memory, and a batch may also have more numbers than a
    32-bit index can count. So from the second on any error, which is printed, says
    that it does not fit.
    """
    fits, fails, batch_size = 1, None, 2  # BatchNorm wants more than one
    while fits < limit and (not fails or fails - fits > max(1, 0.05 * fits)):
        try:
            attempt(batch_size)
            fits = batch_size
        except RuntimeError as error:  # ends here, and so do its tensors
            if batch_size == 2 and not isinstance(error, torch.OutOfMemoryError):
                raise
            print(f"{batch_size:7} {str(error).splitlines()[0]}")
            fails = batch_size
        batch_size = (fits + fails) // 2 if fails else min(2 * fits, limit)
    return fits


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--arch", choices=cinic.ARCHS, default="resnet18", help="the net")
    add("--dtype", choices=DTYPES, help="of AMP; default: what is fast")
    add("--max-batch-size", type=at_least(2), default=2**20, help="largest to try")
    args = parser.parse_args()
    device = get_device()
    if device.type == "cpu":
        raise UserError(
            "no GPU here, and this fills the memory of one: leave it out"
        )
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

        largest = largest_batch(attempt, args.max_batch_size)
        print(f"{largest:7} is the largest that fits")


if __name__ == "__main__":
    main()
