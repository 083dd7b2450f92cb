"""The state of a training run, and checkpoints that hold it."""

import hashlib
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist

from common.checkpoint import save
from common.cli import UserError


class State:
    """What training changes, and what a checkpoint holds.

    state.model (never a wrapped one, whose keys begin with "module."),
    state.optimizer, state.scheduler, and state.scaler if the script sets one;
    state.epoch: how many are complete; state.best: the best accuracy so far in %.
    A checkpoint holds the random states, too.
    """

    LATEST, BEST = "checkpoint.pth.tar", "model_best.pth.tar"

    def __init__(self, model, optimizer, scheduler, device, **options):
        """options: of the script, those that a checkpoint must agree with."""
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.scaler, self.device, self.options = None, device, options
        self.epoch, self.best = 0, -1.0

    def parts(self):
        names = "model", "optimizer", "scheduler", "scaler"
        parts = {name: getattr(self, name) for name in names}
        return {name: part for name, part in parts.items() if part is not None}

    def save(self, epoch, accuracy):
        """Save checkpoint.pth.tar, and before it the same as model_best.pth.tar, if
        no epoch was better.

        Of many processes all call this, as each draws its own random numbers; rank 0
        writes. Killed between the two files, a run does this epoch again.
        """
        files = [self.BEST, self.LATEST] if accuracy > self.best else [self.LATEST]
        self.epoch, self.best = epoch, max(accuracy, self.best)
        content = {name: part.state_dict() for name, part in self.parts().items()}
        content |= {"epoch": epoch, "best": self.best, "options": self.options}
        content["random"] = all_ranks(random_states(self.device))
        if rank() == 0:
            for file in files:
                save(content, file)

    def resume(self, file):
        """Go on where a checkpoint stands, with any number of processes.

        Processes that the saved run did not have draw what they would in a new run.
        Raises UserError if the file is missing, damaged, of something else, or not
        the same for all processes.
        """
        if not Path(file).is_file():
            raise UserError(f"no {file}: leave out --resume to start anew")
        try:
            with zipfile.ZipFile(file) as archive:  # torch.load checks no sums
                if part := archive.testzip():
                    raise zipfile.BadZipFile(part)
            content = torch.load(file, map_location="cpu", weights_only=True)
            options, self.epoch, self.best = (
                content[name] for name in ("options", "epoch", "best")
            )
            states = content["random"]
            checksum = hashlib.sha256(Path(file).read_bytes()).hexdigest()
            if options == self.options:
                for name, part in self.parts().items():
                    if content.get(name):  # float32 and bfloat16 have no scaler
                        part.load_state_dict(content[name])
                if rank() < len(states):
                    set_random_states(states[rank()], self.device)
        except Exception as error:
            raise UserError(
                f"{file} is damaged, or no checkpoint of this script "
                f"({type(error).__name__}): leave out --resume to start anew"
            ) from None
        if len(set(all_ranks(checksum))) > 1:
            raise UserError(f"{file} is not the same on all nodes: copy it")
        its = {k: v for k, v in options.items() if v != self.options.get(k)}
        if self.epoch == options.get("epochs") and set(its) <= {"epochs"}:
            raise UserError(f"{file} has all its {self.epoch} epochs: it is done")
        if its:
            its = " ".join(f"--{name} {value}" for name, value in its.items())
            raise UserError(f"{file} is of another run: type {its}")


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def all_ranks(value):
    """Return the values of all processes, in the order of their ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def random_states(device):
    """Return what this process draws next: the loader's order, and on its device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_states(states, device):
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"], device)
