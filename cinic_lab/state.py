"""The state of a training run and its checkpoints."""

import os
import sys
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist

from common.checkpoint import save_atomically
from common.errors import UserError
from common.log import rank0_print

EXIT_REQUEUE = 85  # exit status of a run that stopped before its last epoch
OPTIONS = "arch", "epochs", "lr", "seed"  # must be the same when resumed
PARTS = "model", "optimizer", "scheduler", "scaler"


class TrainingState:
    """Model, optimizer, scheduler, scaler and progress of a run.

    model: unwrapped, or the keys begin with "module."; scaler: disabled unless the
    script replaces it; epoch: number of completed epochs; best: best accuracy in %.
    A checkpoint also holds the options and each rank's random states.
    """

    LATEST, BEST = "checkpoint.pth.tar", "model_best.pth.tar"

    def __init__(self, args, model, optimizer, scheduler, device, folder="logs"):
        """args: the script's options; folder: for this run's checkpoints."""
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.scaler = torch.GradScaler(device.type, enabled=False)
        self.options, self.device, self.folder = vars(args), device, Path(folder)
        self.epoch, self.best = 0, -1.0
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.generators = [torch.random]
        if device.type != "cpu":
            self.generators.append(torch.get_device_module(device))

    def save(self, epoch, accuracy):
        """Save checkpoint.pth.tar, and model_best.pth.tar first if it is the best.

        They go to the run's folder, so no run overwrites another's checkpoint. Links
        of the same names point there. All ranks must call this, because it gathers
        their random states; rank 0 writes.
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
        """Load a checkpoint, saved by any number of ranks.

        A rank that the saved run did not have keeps the random state of a new run.
        """
        if not Path(file).is_file():
            raise UserError(f"no file '{file}': leave out --resume to start over")
        try:
            with zipfile.ZipFile(file) as archive:  # torch.load() skips the CRCs
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
                f"{file} is damaged, or not a checkpoint of this script "
                f"({type(error).__name__}): leave out --resume to start over"
            ) from None
        if any(other != checksums for other in gather_from_ranks(checksums)):
            raise UserError(f"{file} differs between the nodes: copy it to all")
        if not options.items() <= self.options.items():
            saved = " ".join(f"--{name} {value}" for name, value in options.items())
            raise UserError(f"{file} has other options: use {saved}")
        if epoch >= options["epochs"]:
            raise UserError(
                f"{file} has done all {epoch} epochs: leave out --resume"
            )
        for name, part in parts.items():
            if name != "scaler" or part:  # only float16's scaler has state
                getattr(self, name).load_state_dict(part)
        for states in random:
            for generator, state in zip(self.generators, states, strict=False):
                generator.set_rng_state(state)
        self.epoch, self.best = epoch, best

    def find_own_checkpoint(self):
        """Return a requeued job's checkpoint with the most epochs, or None."""
        epochs = {}
        if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
            job = os.environ["SLURM_JOB_ID"]
            script = self.folder.name.partition(f"-{job}-")[0]
            for file in self.folder.parent.glob(f"{script}-{job}-*/{self.LATEST}"):
                try:
                    content = torch.load(file, "cpu", mmap=True, weights_only=True)
                    epochs[str(file)] = content["epoch"]
                except Exception as error:
                    rank0_print(f"Skipping {file}: damaged ({error})")
        furthest = max(epochs, key=epochs.get, default=None)
        return gather_from_ranks(furthest)[0]

    def stop_requested(self):
        """Return 1.0 on the device if run-requeue.sh created STOP_FILE, else 0.0."""
        requested = os.path.exists(os.environ.get("STOP_FILE", ""))
        return torch.tensor(float(requested), device=self.device)

    def exit_for_requeue(self):
        """Exit with EXIT_REQUEUE: this run can be resumed."""
        rank0_print(f"Stopped after epoch {self.epoch}: use --resume {self.LATEST}")
        gather_from_ranks(None)  # torchrun ends all ranks when one exits
        dist.destroy_process_group()
        sys.exit(EXIT_REQUEUE)


def replace_symlink(name, target):
    """Point the link `name` to target; rename a regular file of that name."""
    if os.path.isfile(name) and not os.path.islink(name):
        backup = f"{os.getpid()}_{name}"
        os.replace(name, backup)
        rank0_print(f"Renamed an earlier run's {name} to {backup}")
    part = Path(f"{name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    part.symlink_to(target)
    part.replace(name)


def gather_from_ranks(value):
    """Return a list of all ranks' values, by rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
