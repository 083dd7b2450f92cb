"""A run's output: printed lines, TensorBoard scalars, and its line of results."""

import json
import os
import platform
import re
import resource
import signal
import statistics
import sys
import time
from itertools import islice
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from tqdm import tqdm

from common import watchdog
from common.cli import UserError, append_line, check_appendable

RESULTS = "logs/results.jsonl"


def rank0_print(line):
    """Print a line if this process is rank 0."""
    if os.environ.get("RANK", "0") == "0":
        with tqdm.external_write_mode():  # hides a progress bar meanwhile
            try:
                print(f"{line}\n", end="", flush=True)  # in one piece
            except BrokenPipeError:  # for example after `| head -1`
                os._exit(128 + signal.SIGPIPE)


class NullWriter:
    """A SummaryWriter that writes nothing."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class RunLog:
    """Prints, writes TensorBoard scalars and, at the end, a line of results.jsonl.

    Only rank 0 does. Each run has its own folder, for example
    logs/train_cifar100-1123-194501-batch128x2-4711: script, Slurm job if there is
    one, date and time, images per GPU x GPUs, process ID.
    """

    def __init__(
        self, args, device, gpus=None, *, enabled=True, scalars=True, unit="images"
    ):
        """args: the script's options; args.batch_size is per GPU.

        gpus: number of GPUs; by default one per process of torchrun. scalars: False
        for a script that has its own SummaryWriter; unit: what the speed counts, for
        example "tokens". Raises UserError if logs/ cannot be written.
        """
        self.args, self.device, self.unit = args, device, unit
        self.gpus = gpus or int(os.environ.get("WORLD_SIZE", 1))
        self.batch = args.batch_size * self.gpus
        self.enabled = enabled and os.environ.get("RANK", "0") == "0"
        self.writer, self.epochs, self.memory = NullWriter(), [], 0
        self.script = Path(sys.argv[0]).stem
        self.job = os.environ.get("SLURM_JOB_ID")
        # TensorBoard shows this as the run's name. The process ID tells apart runs
        # that start in the same second.
        name = [self.script, self.job, time.strftime("%m%d-%H%M%S")]
        name += [f"batch{args.batch_size}x{self.gpus}", str(os.getpid())]
        self.folder = Path("logs", "-".join(filter(None, name)))
        if not self.enabled:
            return
        check_appendable(RESULTS)
        try:
            if scalars:  # slow to import, so only where it is needed
                # Else TensorBoard would import dp_ddp_intro/tensorflow/.
                sys.modules.setdefault("tensorflow", None)
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(self.folder)
        except OSError as error:
            raise UserError(f"cannot write logs/: {error.strerror}") from None
        self.gradient_bytes = None
        register_optimizer_step_pre_hook(self._note_gradient_bytes)
        self.nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))  # by torchrun
        # Without Slurm, one machine stands in for all nodes.
        here = self.gpus // self.nodes if self.job else self.gpus
        cores = os.cpu_count()
        self.device_name, processor = "CPU core", "CPU core"
        if device.type != "cpu":
            module = torch.get_device_module(device)
            self.device_name, processor = module.get_device_name(device), "GPU"
        elif here > cores:
            self.device_name, processor = f"CPU core ({here} share {cores})", "rank"
        plural = "s" if self.gpus > 1 else ""
        total = f"{self.gpus} {processor}{plural} = {self.batch}"
        self.print(f"{self.script} on {self.gpus} x {self.device_name}")
        self.print(f"Batch size: {args.batch_size} per {processor} x {total}")

    def _note_gradient_bytes(self, optimizer, *_):
        """Note the size of the gradients at the optimizer's first step."""
        if self.gradient_bytes is None:
            grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
            sizes = [grad.nbytes for grad in grads if grad is not None]
            self.gradient_bytes = sum(sizes)

    def print(self, line):
        if self.enabled:
            rank0_print(line)

    def progress(self, loader, steps=None):
        """Yield at most `steps` (inputs, labels) batches; a terminal shows a bar."""
        steps = steps or len(loader)
        what = "training" if torch.is_grad_enabled() else "evaluating"
        hide = None if self.enabled else True  # None: where there is no terminal
        with tqdm(desc=what, total=steps, leave=False, disable=hide) as bar:
            for step, batch in enumerate(islice(loader, steps)):
                watchdog.heartbeat(30 if step else 120)  # the first may compile
                yield batch
                bar.update()

    def epoch(self, epoch, images, seconds, **parts):
        """Print an epoch's figures, and write them for TensorBoard.

        epoch: counted from 1; images: of the whole job (or tokens); seconds: without
        the validation; parts: for example train={"loss": 0.1, "accuracy": 98.7}.
        """
        watchdog.heartbeat(120)
        if not self.enabled:
            return
        self.epochs.append((images, seconds, time.time()))
        self.memory = peak_memory(self.device)
        if len(self.epochs) == 1 and self.device.type != "cpu":
            # Some of that memory was for cuDNN's search for its fastest algorithms.
            torch.get_device_module(self.device).reset_peak_memory_stats(self.device)
        self.writer.add_scalar(f"{self.unit}_per_second", images / seconds, epoch)
        line = (
            f"Epoch {epoch}: {seconds:.1f} s, {images / seconds:.1f} {self.unit}/s"
        )
        for part, values in parts.items():
            line += f"; {part}"
            for name, value in values.items():
                self.writer.add_scalar(f"{part}/{name}", value, epoch)
                percent = " %" if name == "accuracy" else ""
                line += f" {name} {value:.4g}{percent}"
        self.print(line)

    def write_result(self, **fields):
        """Add this run, with additional fields, to logs/results.jsonl.

        Its speed is the median of epochs 2 to --epochs: the first one fills caches,
        and later ones are fine-tuning.
        """
        watchdog.stop()
        if not self.enabled:
            time.sleep(0.1)  # main() frees the process group next: cli.drain_gloo()
            return
        epochs = self.epochs[: self.args.epochs]
        images, seconds, _ = zip(*(epochs[1:] or epochs), strict=True)
        median = statistics.median(seconds)
        profiler = getattr(sys.modules.get("line_profiler"), "profile", None)
        result = {
            "script": self.script,
            "folder": Path(sys.argv[0]).parent.name,  # "solutions", for example
            "profiled": getattr(profiler, "enabled", False) is True,  # by kernprof
            "gpus": self.gpus,
            "nodes": self.nodes,
            "device": self.device_name,
            "cpu": cpu_name(),
            "cpus": os.cpu_count(),
            "torch": torch.__version__,
            "slurm_job": self.job,
            "options": vars(self.args),
            "batch": self.batch,
            "batch_per_gpu": self.args.batch_size,
            "unit": self.unit,
            f"{self.unit}_per_epoch": images[0],
            f"{self.unit}_per_second": images[0] / median,
            "seconds_per_epoch": median,
            "peak_memory_gb": self.memory / 1e9,
            "gradient_bytes": self.gradient_bytes,
            "epoch_ends": [end for _, _, end in self.epochs],  # seconds since 1970
            "finished": time.strftime("%FT%T%z"),
        }
        self.writer.close()
        append_line(RESULTS, json.dumps(result | fields))
        if len(epochs) > 1:
            first = epochs[0][1]
            self.print(f"First epoch: {first:.1f} s; later ones: {median:.1f} s")
        self.print(f"Result added to {RESULTS}")


def peak_memory(device):
    """Return this process's peak memory in bytes, on its GPU or in main memory."""
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) of the two systems
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def cpu_name():
    """Return the name of this machine's CPU."""
    info = Path("/proc/cpuinfo")
    found = info.exists() and re.search("model name\t: (.*)", info.read_text())
    return found[1] if found else platform.machine()
