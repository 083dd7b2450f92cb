"""A run's output: printed lines, and a line of results at the end."""

import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

RESULTS = "logs/results.jsonl"


class RunLog:
    """Prints a run's lines and, at the end, adds a line to logs/results.jsonl.

    args: the script's options, with the batch size per GPU; model: the model without
    its DDP wrapper, to count its gradients' bytes; gpus: the number of GPUs, by
    default one per process; enabled: True in the process that prints and writes,
    which is rank 0. Other files of the run belong in its `folder`.
    """

    def __init__(self, args, device, model=None, gpus=None, *, enabled=True):
        self.args, self.device, self.enabled = args, device, enabled
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.gpus = gpus or ranks
        self.global_batch = args.batch_size * self.gpus  # per step, on all GPUs
        self.gradient_bytes = count_gradient_bytes(model) if model else None
        self.job = os.environ.get("SLURM_JOB_ID")
        self.folder = Path("logs", run_name(self.gpus, self.job))
        self.unit, self.epochs = "images", []
        here = torch.accelerator.device_count()
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.gpus_shared = here if 0 < here < processes else None
        if enabled:  # if this fails, it fails before training
            os.makedirs("logs", exist_ok=True)
        self.print_header(args.batch_size)

    def print_header(self, batch_size):
        """Print the processors, and the batch size per GPU and of the whole job."""
        script, name = Path(sys.argv[0]).stem, processor_name(self.device)
        self.print(f"{script} on {self.gpus} x {name}")
        if self.gpus_shared:
            self.print(f"Its ranks share {self.gpus_shared} GPU: compare no times")
        kind = "CPU core" if self.device.type == "cpu" else "GPU"
        kinds = f"{kind}s" if self.gpus > 1 else kind
        total = f"{self.gpus} {kinds} = {self.global_batch}"
        self.print(f"Batch size: {batch_size} per {kind} x {total}")

    def print(self, line):
        """Print a line, above the progress bar."""
        if self.enabled:
            with tqdm.external_write_mode():
                print(line, flush=True)

    def progress(self, batches, desc):
        """Return an iterable over these batches; a terminal shows a bar."""
        hide = None if self.enabled else True  # None: a bar only on a terminal
        return tqdm(batches, desc, leave=False, disable=hide)

    def epoch(self, epoch, count, seconds, unit="images", **parts):
        """Print an epoch's figures, and keep them for write_result().

        epoch: counted from 1; count: how many images (or `unit`) all ranks together
        trained on; seconds: how long that took; parts: for example
        train={"loss": 0.1, "accuracy": 98.7}.
        """
        self.epochs.append((count, seconds, time.time()))
        self.unit = unit
        line = f"Epoch {epoch}: {seconds:.1f} s, {count / seconds:.1f} {unit}/s"
        for part, values in parts.items():
            line += f"; {part}"
            for name, value in values.items():
                line += f" {name} {value:.4g}"
                line += " %" if name == "accuracy" else ""
        self.print(line)

    def write_result(self, accuracy, training_seconds=None, **fields):
        """Add this run's figures, and other fields, to logs/results.jsonl."""
        counts, seconds, ends = zip(*self.epochs, strict=True)
        result = {
            "script": sys.argv[0],
            "gpus": self.gpus,
            "gpus_shared": self.gpus_shared,  # None: one GPU per rank
            "nodes": int(os.environ.get("GROUP_WORLD_SIZE", 1)),  # torchrun sets it
            "device": processor_name(self.device),
            "cpu": getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name"),
            "cpus": os.cpu_count(),
            "torch": torch.__version__,
            "slurm_job": self.job,
            "options": vars(self.args),
            "unit": self.unit,
            "per_epoch": counts[0],  # images, or tokens
            "epoch_seconds": seconds,  # a list, as printed
            "peak_memory_gb": peak_memory(self.device) / 1e9,
            "epoch_ends": ends,  # seconds since 1970
            "accuracy": accuracy,  # in %
            "training_seconds": training_seconds,
            "gradient_bytes": self.gradient_bytes,  # averaged by DDP in a step
            "checkup": "DDP_CHECKUP" in os.environ,  # it slows the run down
        }
        if self.enabled:
            file = Path(RESULTS)
            # If a full disk has left half a line, begin a new one.
            torn = file.exists() and file.read_text()[-1:] not in ("", "\n")
            with file.open("a") as results:
                results.write("\n" * torn + json.dumps(result | fields) + "\n")
        self.print(f"Result added to {RESULTS}")


def run_name(gpus, job):
    """Return a name for this run: gpus, script, job, time and process."""
    script, start = Path(sys.argv[0]).stem, time.strftime("%m%d-%H%M%S")
    return f"{gpus}gpus-{script}-{job or 'local'}-{start}-{os.getpid()}"


def processor_name(device):
    """Return the GPU's name, or "CPU core"."""
    if device.type == "cpu":
        return "CPU core"
    return torch.get_device_module(device).get_device_name(device)


def count_gradient_bytes(model):
    """Return the size in bytes of the gradients that a step computes."""
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


def peak_memory(device):
    """Return this process's peak memory in bytes, on its GPU or in main memory."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.get_device_module(device).max_memory_allocated(device)
