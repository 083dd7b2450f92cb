"""Search for the largest batch that fits in GPU memory, without and with AMP.

    sbatch run.sh largest_batch.py --arch resnet152

It doubles the batch until the GPU runs out of memory, then bisects until the largest
that fits and the smallest that fails are within 5 % of each other. For each batch it
prints images/s and peak memory. It needs a GPU.
"""

import argparse
import time

import torch

import cinic
import cinic_amp
from cinic import ARCHS
from common.device import DTYPES, get_device, pick_dtype
from common.errors import UserError, run
from common.log import peak_memory

STEPS = 5


def train(script, arch, batch_size, device, dtype):
    """Return images/s and peak memory in bytes of a few steps on one batch.

    Two steps before them warm up: a GPU then loads its libraries and kernels.
    """
    autocast = {"dtype": dtype} if dtype else {}  # cinic.py uses no autocast
    model = script.Classifier(arch, **autocast)
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4)
    scaler = torch.GradScaler(device.type, enabled=dtype == torch.float16)
    more = () if script is cinic else (scaler,)
    images = torch.zeros(batch_size, 3, 32, 32, dtype=torch.uint8, device=device)
    batch = images, torch.zeros(batch_size, dtype=torch.long, device=device)
    for num_steps in (2, STEPS):
        torch.get_device_module(device).reset_peak_memory_stats(device)
        start = time.perf_counter()
        for _ in range(num_steps):
            sums = script.train_step(model, batch, optimizer, device, *more)
        sums.tolist()  # waits for the device
    seconds = time.perf_counter() - start
    return num_steps * batch_size / seconds, peak_memory(device)


def largest_batch(attempt, limit):
    """Return the largest batch size up to limit for which attempt(size) succeeds.

    The size doubles from 2 on, then is bisected to within 5 % (or 1). Running out of
    memory raises many different errors, so any RuntimeError counts as a failure, and
    its first line is printed.
    """
    fits, fails, batch_size = 1, None, 2  # BatchNorm needs at least two
    while fits < limit and (not fails or fails - fits > max(1, 0.05 * fits)):
        try:
            attempt(batch_size)
            fits = batch_size
        except RuntimeError as error:  # the tensors are freed when this ends
            print(f"{batch_size:7} {str(error).splitlines()[0]}")
            fails = batch_size
        batch_size = (fits + fails) // 2 if fails else min(2 * fits, limit)
    return fits


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--arch", choices=ARCHS, default="resnet18", help="ResNet")
    parser.add_argument("--dtype", choices=DTYPES, help="autocast dtype")
    parser.add_argument("--max-batch-size", type=int, default=2**20, help="images")
    args = parser.parse_args()
    device = get_device()
    torch.set_float32_matmul_precision("high")  # allow TF32, as convolutions do
    if device.type == "cpu":
        raise UserError("no GPU here: run this on a GPU, or skip it")
    gpu = torch.get_device_module(device)
    print(f"{args.arch} on {gpu.get_device_name(device)}")
    dtype = pick_dtype(device, args.dtype)
    for script in (cinic, cinic_amp):
        print(f"{script.__name__}.py")

        def attempt(batch_size, script=script):
            gpu.empty_cache()
            autocast = dtype if script is cinic_amp else None
            speed, memory = train(script, args.arch, batch_size, device, autocast)
            print(f"{batch_size:7} {speed:10.1f} images/s {memory / 1e9:7.2f} GB")

        largest = largest_batch(attempt, args.max_batch_size)
        print(f"{largest:7} is the largest that fits")


if __name__ == "__main__":
    run(main)
