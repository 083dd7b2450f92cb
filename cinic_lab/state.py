"""The state of a training run, and the checkpoints that hold it."""

import os
import sys
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist

from common.checkpoint import save_atomically
from common.cli import UserError
from common.log import rank0_print

EXIT_REQUEUE = 85  # the status of a run that has stopped before its last epoch
OPTIONS = "arch", "epochs", "lr", "seed"  # a resumed run must have the same
PARTS = "model", "optimizer", "scheduler", "scaler"


class TrainingState:
    """What training changes, and what a checkpoint holds.

    model: not the wrapped one, whose keys begin with "module."; scaler: does nothing
    unless a script sets another one; epoch: how many are complete; best: the best
    accuracy so far in %. A checkpoint also holds the options and random states.
    """

    LATEST, BEST = "checkpoint.pth.tar", "model_best.pth.tar"

    def __init__(self, args, model, optimizer, scheduler, device, folder="logs"):
        """args: the script's options; folder: where this run's checkpoints go."""
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.scaler = torch.GradScaler(device.type, enabled=False)
        self.options, self.device, self.folder = vars(args), device, Path(folder)
        self.epoch, self.best = 0, -1.0
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.generators = [torch.random]
        if device.type != "cpu":
            self.generators.append(torch.get_device_module(device))

    def save(self, epoch, accuracy):
        """Save checkpoint.pth.tar, and before it model_best.pth.tar if it is better.

        They lie in the run's own folder, so that no run overwrites those of another;
        two links of these names lead there. All ranks call this, as each has random
        states, and rank 0 writes.
        """
        files = [self.LATEST]
        if accuracy > self.best:
            files = [self.BEST, self.LATEST]
            self.best = accuracy
        self.epoch = epoch
        random = [generator.get_rng_state() for generator in self.generators]
        content = {name: getattr(self, name).state_dict() for name in PARTS}
        content["random"] = gather_from_ranks(random)
        content["options"] = self.options
        content["epoch"], content["best"] = self.epoch, self.best
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in files:
                save_atomically(content, self.folder / file)
            for file in files:
                replace_symlink(file, self.folder / file)

    def resume(self, file):
        """Continue where a checkpoint stands, with any number of ranks.

        Ranks that the saved run did not have draw what they would in a new run.
        """
        if not Path(file).is_file():
            raise UserError(f"no file '{file}': leave out --resume to start anew")
        try:
            with zipfile.ZipFile(file) as archive:  # torch.load checks no checksums
                checksums = [part.CRC for part in archive.infolist()]
                if damaged := archive.testzip():
                    raise zipfile.BadZipFile(damaged)
            content = torch.load(file, map_location="cpu", weights_only=True)
            parts = {name: content[name] for name in PARTS}
            random = content["random"][self.rank : self.rank + 1]
            options = {name: content["options"][name] for name in OPTIONS}
            epoch, best = int(content["epoch"]), float(content["best"])
        except Exception as error:
            raise UserError(
                f"{file} is damaged, or no checkpoint of this script "
                f"({type(error).__name__}): leave out --resume to start anew"
            ) from None
        if any(other != checksums for other in gather_from_ranks(checksums)):
            raise UserError(f"{file} is not the same on all nodes: copy it")
        if not options.items() <= self.options.items():
            its = " ".join(f"--{name} {value}" for name, value in options.items())
            raise UserError(f"{file} is of another run: use its options, {its}")
        if epoch >= options["epochs"]:
            raise UserError(f"{file} has all its {epoch} epochs: leave out --resume")
        for name, part in parts.items():
            if name != "scaler" or part:  # only that of float16 has a state
                getattr(self, name).load_state_dict(part)
        for states in random:
            for generator, state in zip(self.generators, states, strict=False):
                generator.set_rng_state(state)
        self.epoch, self.best = epoch, best

    def find_own_checkpoint(self):
        """Return the furthest checkpoint of this job if it was requeued, or None."""
        epochs = {}
        if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
            job = self.folder.name.rpartition("-")[0]  # what follows differs
            for file in self.folder.parent.glob(f"{job}-*/{self.LATEST}"):
                try:
                    content = torch.load(file, "cpu", mmap=True, weights_only=True)
                    epochs[str(file)] = content["epoch"]
                except Exception as error:
                    rank0_print(f"Left out: {file} is damaged ({error})")
        furthest = max(epochs, key=epochs.get, default=None)
        return gather_from_ranks(furthest)[0]

    def stop_requested(self):
        """Return 1 on the device if run-requeue.sh was told to stop, else 0."""
        requested = os.path.exists(os.environ.get("STOP_FILE", ""))
        return torch.tensor(float(requested), device=self.device)

    def exit_for_requeue(self):
        """Leave with the status that says that this run can be continued."""
        rank0_print(f"Stopped after epoch {self.epoch}: use --resume {self.LATEST}")
        gather_from_ranks(None)  # torchrun ends all ranks when the first one leaves
        dist.destroy_process_group()
        sys.exit(EXIT_REQUEUE)


def replace_symlink(name, target):
    """Point a link to another file. A file of its name gets a new name."""
    if os.path.isfile(name) and not os.path.islink(name):
        kept = f"{os.getpid()}_{name}"
        os.replace(name, kept)
        rank0_print(f"{name}, which an earlier run had left, is now {kept}")
    part = Path(f"{name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    part.symlink_to(target)
    part.replace(name)


def gather_from_ranks(value):
    """Return the values of all ranks, in their order."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
