"""What a run says and leaves behind: lines, TensorBoard scalars, and its result."""

import json
import os
import resource
import statistics
import sys
import time
from itertools import islice
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from tqdm import tqdm

from common.cli import UserError, add_line


def rank0_print(line):
    """Print a line, if this is the one of many processes that speaks for all."""
    if os.environ.get("RANK", "0") == "0":
        with tqdm.external_write_mode():  # wipes a bar meanwhile
            print(f"{line}\n", end="", flush=True)  # in one piece


def gets_on():
    """Let common.torchrun know that this process gets on; see its watch()."""
    if folder := os.environ.get("RANKS_TELL"):
        Path(folder, "steps").touch()


class Nothing:
    """A writer that writes nothing: whatever it is asked to do, it does not."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class RunLog:
    """Prints, writes TensorBoard scalars and, at the end, a line of results.jsonl.

    Where enabled is false it does nothing: of many processes, one reports. Files go
    to logs/ in the working directory; each run has a folder of its own there.
    """

    def __init__(
        self,
        args,
        device,
        world_size=1,
        enabled=True,
        *,
        scalars=True,
        counts="images",
    ):
        """args: the script's options; args.batch_size is per GPU.

        scalars: false for a script with a SummaryWriter of its own; counts: what its
        speed counts, say "tokens". Raises UserError if logs/ cannot be written.
        """
        self.enabled, self.writer, self.counts = enabled, Nothing(), counts
        self.batch, self.world_size = args.batch_size * world_size, world_size
        gets_on()
        script, job = Path(sys.argv[0]).stem, os.environ.get("SLURM_JOB_ID")
        self.folder = Path(f"logs/{script}-{job or int(time.time())}-{os.getpid()}")
        if not enabled:
            return
        try:
            Path("logs").mkdir(exist_ok=True)
            if scalars:  # slow to import, and only one process needs it
                # Else TensorBoard takes dp_ddp_intro/tensorflow/ for TensorFlow.
                sys.modules.setdefault("tensorflow", None)
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(self.folder)
        except OSError as error:
            raise UserError(f"cannot write logs/: {error.strerror}") from None
        self.device, self.epochs, self.memory = device, [], 0
        register_optimizer_step_pre_hook(self._weigh)
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))  # as torchrun counts them
        here = world_size // nodes if job else world_size  # a laptop plays all nodes
        name, unit, cores = "CPU core", "CPU core", os.cpu_count()
        if device.type != "cpu":
            module, unit = torch.get_device_module(device), "GPU"
            name = module.get_device_name(device)
        elif here > cores:
            name, unit = f"CPU core ({here} share {cores})", "rank"
        self.fields = {"script": script, "gpus": world_size, "nodes": nodes}
        self.fields |= {"device": name, "slurm_job": job, "options": vars(args)}
        self.fields |= {"batch": self.batch, "batch_per_gpu": args.batch_size}
        self.print(f"{script} on {world_size} x {name}")
        batches = f"{args.batch_size} per {unit} x {world_size} {unit}"
        self.print(f"Batch size: {batches}{'s' * (world_size > 1)} = {self.batch}")

    def _weigh(self, optimizer, *_):
        """Note how large the gradients are, at the first step of an optimizer."""
        if "gradient_bytes" not in self.fields:
            grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
            size = sum(grad.nbytes for grad in grads if grad is not None)
            self.fields["gradient_bytes"] = size

    def print(self, line):
        if self.enabled:
            rank0_print(line)

    def bar(self, loader, steps=None):
        """Give a loader's batches, steps of them or all, (inputs, labels) each.

        Meanwhile a bar moves on a terminal; elsewhere a line comes every 30 seconds.
        """
        steps, seen, said, start = steps or len(loader), 0, 0, time.perf_counter()
        what = "training" if torch.is_grad_enabled() else "evaluating"
        form = what + " {l_bar}{bar}| {n}/{total} steps [{elapsed}{postfix}]"
        hide = None if self.enabled else True  # None: where there is no terminal
        alike = hasattr(getattr(loader, "sampler", 0), "replacement")  # shuffled
        with tqdm(total=steps, leave=False, disable=hide, bar_format=form) as bar:
            for step, (inputs, labels) in enumerate(islice(loader, steps), start=1):
                gets_on()
                yield inputs, labels
                seen += labels.numel() * (1 if alike else self.world_size)
                took = time.perf_counter() - start
                speed = f"{seen / took:.1f} {self.counts}/s"
                bar.set_postfix_str(speed, refresh=False)
                bar.update()
                if bar.disable and took - said > 30:
                    said = took
                    self.print(f"{what}: {step} of {steps} steps, {speed}")

    def epoch(self, epoch, images, seconds, **parts):
        """Report an epoch; they are numbered from 1.

        images: of the whole job (or tokens); seconds: without the validation; parts:
        for example train={"loss": 0.1, "accuracy": 98.7}.
        """
        gets_on()
        if not self.enabled:
            return
        self.epochs.append((images, seconds, time.time()))
        self.memory = peak_memory(self.device)
        if len(self.epochs) == 1 and self.device.type != "cpu":
            # Of that much, a part was for cuDNN's search for its fastest algorithms.
            torch.get_device_module(self.device).reset_peak_memory_stats(self.device)
        self.writer.add_scalar(f"{self.counts}_per_second", images / seconds, epoch)
        line = f"Epoch {epoch}: {seconds:.1f} s, "
        line += f"{images / seconds:.1f} {self.counts}/s"
        for part, values in parts.items():
            line += f"; {part}"
            for name, value in values.items():
                self.writer.add_scalar(f"{part}/{name}", value, epoch)
                line += f" {name} {value:.4g}" + " %" * (name == "accuracy")
        self.print(line)

    def finish(self, **fields):
        """Add this run to logs/results.jsonl, with these fields besides its own.

        Its speed is the median of epochs 2 to --epochs: the first fills caches, and
        those after are fine-tuning.
        """
        if not self.enabled:  # main() frees the process group next: see cli.leave()
            return time.sleep(0.1)
        epochs = self.epochs[: self.fields["options"]["epochs"]]
        images, seconds, _ = zip(*(epochs[1:] or epochs), strict=True)
        mid = statistics.median(seconds)
        cpu = "".join(file.read_text() for file in Path("/proc").glob("cpuinfo"))
        cpu = cpu.partition("model name\t: ")[2].split("\n")[0] or os.uname().machine
        fields |= {"counts": self.counts, f"{self.counts}_per_epoch": images[0]}
        fields |= {f"{self.counts}_per_second": images[0] / mid, "cpu": cpu}
        fields |= {"seconds_per_epoch": mid, "peak_memory_gb": self.memory / 1e9}
        ends = [end for _, _, end in self.epochs]  # seconds since 1970
        fields |= {"epoch_ends": ends, "finished": time.strftime("%FT%T%z")}
        self.fields |= {"torch": torch.__version__, "cpus": os.cpu_count(), **fields}
        self.writer.close()
        add_line("logs/results.jsonl", json.dumps(self.fields))
        if len(epochs) > 1:
            self.print(f"First epoch: {epochs[0][1]:.1f} s; later ones: {mid:.1f} s")
        self.print("Result added to logs/results.jsonl")


def peak_memory(device):
    """Return the most bytes that this process had, on its GPU or in main memory."""
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) of the two systems
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
