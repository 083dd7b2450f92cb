"""A run's output: printed lines, TensorBoard scalars, and its line of results."""

import json
import os
import resource
import statistics
import sys
import time
from itertools import islice
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

RESULTS = "logs/results.jsonl"


def rank0_print(line):
    """Print a line, above the progress bar, if this process is rank 0."""
    if os.environ.get("RANK", "0") == "0":
        with tqdm.external_write_mode():
            print(line, flush=True)  # where stdout is closed, this prints nothing


class NullWriter:
    """A SummaryWriter that writes nothing."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class RunLog:
    """Prints, writes TensorBoard scalars and, at the end, a line of results.jsonl.

    Only rank 0 does. args: the script's options, with the batch size per GPU. gpus:
    their number, by default one per process. scalars: False for a script with its
    own SummaryWriter. unit: what the speed counts. Each run has its own folder.
    """

    def __init__(
        self, args, device, gpus=None, *, enabled=True, scalars=True, unit="images"
    ):
        self.args, self.device, self.unit = args, device, unit
        self.gpus = gpus or int(os.environ.get("WORLD_SIZE", 1))
        self.batch = args.batch_size * self.gpus
        self.enabled = enabled and os.environ.get("RANK", "0") == "0"
        script, self.job = Path(sys.argv[0]).stem, os.environ.get("SLURM_JOB_ID")
        name = f"{script}-{self.job or 'local'}-{time.strftime('%m%d-%H%M%S')}"
        self.folder = Path("logs", f"{name}-{self.gpus}gpus-{os.getpid()}")
        self.epochs, self.writer = [], NullWriter()
        self.processor, unit = "CPU core", "CPU core"
        if device.type != "cpu":
            module, unit = torch.get_device_module(device), "GPU"
            self.processor = module.get_device_name(device)
        total = f"{self.gpus} {unit}{'s' * (self.gpus > 1)} = {self.batch}"
        self.print(f"{script} on {self.gpus} x {self.processor}")
        self.print(f"Batch size: {args.batch_size} per {unit} x {total}")
        if self.enabled:
            os.makedirs("logs", exist_ok=True)
            if scalars:
                self.writer = SummaryWriter(self.folder)

    def print(self, line):
        if self.enabled:
            rank0_print(line)

    def progress(self, loader, desc, steps=None):
        """Return at most `steps` batches of a loader; a terminal shows a bar."""
        steps = steps or len(loader)
        hide = None if self.enabled else True  # None: where there is no terminal
        return tqdm(islice(loader, steps), desc, steps, leave=False, disable=hide)

    def epoch(self, epoch, images, seconds, **parts):
        """Print an epoch's figures, and write them for TensorBoard.

        epoch: counted from 1; images: of the whole job (or tokens); seconds: without
        the validation; parts: for example train={"loss": 0.1, "accuracy": 98.7}.
        """
        self.epochs.append((images, seconds, time.time()))
        speed = images / seconds
        self.writer.add_scalar(f"{self.unit}_per_second", speed, epoch)
        line = f"Epoch {epoch}: {seconds:.1f} s, {speed:.1f} {self.unit}/s"
        for part, values in parts.items():
            line += f"; {part}"
            for name, value in values.items():
                self.writer.add_scalar(f"{part}/{name}", value, epoch)
                line += f" {name} {value:.4g}{' %' * (name == 'accuracy')}"
        self.print(line)

    def write_result(
        self, accuracy, training_seconds=None, gradient_bytes=None, **fields
    ):
        """Add this run's figures, and other fields, to logs/results.jsonl."""
        self.writer.close()
        images, seconds, ends = zip(*self.epochs, strict=True)
        # The first epoch fills caches, and those after --epochs are fine-tuning.
        seconds = seconds[1 : self.args.epochs] or seconds[:1]
        result = {
            "script": sys.argv[0],
            "gpus": self.gpus,
            "nodes": int(os.environ.get("GROUP_WORLD_SIZE", 1)),  # set by torchrun
            "device": self.processor,
            "cpu": getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name"),
            "cpus": os.cpu_count(),
            "torch": torch.__version__,
            "slurm_job": self.job,
            "options": vars(self.args),
            "unit": self.unit,
            "per_epoch": images[0],  # images, or tokens
            "seconds_per_epoch": statistics.median(seconds),
            "peak_memory_gb": peak_memory(self.device) / 1e9,
            "epoch_ends": ends,  # seconds since 1970
            "finished": time.strftime("%FT%T%z"),
            "accuracy": accuracy,  # in %
            "training_seconds": training_seconds,
            "gradient_bytes": gradient_bytes,  # what DDP averages in a step
        }
        if self.enabled:
            with open(RESULTS, "a") as file:
                file.write(json.dumps(result | fields) + "\n")
        self.print(f"Result added to {RESULTS}")


def peak_memory(device):
    """Return this process's peak memory in bytes, on its GPU or in main memory."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.get_device_module(device).max_memory_allocated(device)
