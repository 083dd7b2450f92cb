"""The state of a training run, and its checkpoints."""

from pathlib import Path

import torch
import torch.distributed as dist

from common.errors import UserError

OPTIONS = "arch", "epochs", "lr", "seed"  # must be the same when resumed
PARTS = "model", "optimizer", "scheduler", "scaler"


class TrainingState:
    """Model, optimizer, scheduler, scaler and progress of a run.

    model: unwrapped, or the keys begin with "module."; scaler: disabled unless the
    script replaces it; epoch: the last that has begun; best_accuracy: in %.
    """

    LATEST, BEST = "checkpoint.pth.tar", "model_best.pth.tar"

    def __init__(self, args, model, optimizer, scheduler, device, folder="logs"):
        """args: the script's options; folder: for this run's checkpoints."""
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.scaler = torch.GradScaler(device.type, enabled=False)
        self.options, self.folder = vars(args), Path(folder)
        self.epoch, self.best_accuracy = 0, -1.0
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.generators = [torch.random]
        if device.type != "cpu":
            self.generators.append(torch.get_device_module(device))

    def save(self, accuracy):
        """Save checkpoint.pth.tar, and model_best.pth.tar first if it is the best.

        They go to the run's folder, and links in the working directory point there.
        All ranks call this, because it gathers their random states; rank 0 writes.
        """
        names = [self.LATEST]
        if accuracy > self.best_accuracy:
            names, self.best_accuracy = [self.BEST, self.LATEST], accuracy
        random = [generator.get_rng_state() for generator in self.generators]
        content = {name: getattr(self, name).state_dict() for name in PARTS}
        content |= {"random": gather_from_ranks(random), "options": self.options}
        content |= {"epoch": self.epoch, "best_accuracy": self.best_accuracy}
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            part, link = self.folder / "checkpoint.part", self.folder / "link"
            for name in names:
                torch.save(content, part)
                part.replace(self.folder / name)  # so a killed run leaves no half
            for name in names:
                link.symlink_to(self.folder / name)
                link.replace(name)

    def resume(self, file):
        """Load a checkpoint, saved by any number of ranks.

        A rank that the saved run did not have keeps the random state of a new run.
        """
        if not Path(file).is_file():
            raise UserError(f"no file '{file}': leave out --resume to start over")
        content = torch.load(file, map_location="cpu", weights_only=True)
        options = {name: content["options"][name] for name in OPTIONS}
        if not options.items() <= self.options.items():
            saved = " ".join(f"--{name} {value}" for name, value in options.items())
            raise UserError(f"{file} has other options: use {saved}")
        if content["epoch"] >= options["epochs"]:
            raise UserError(f"{file} has done all its epochs: leave out --resume")
        for name in PARTS:
            if content[name]:  # a disabled scaler's is empty
                getattr(self, name).load_state_dict(content[name])
        for states in content["random"][self.rank : self.rank + 1]:
            for generator, random in zip(self.generators, states, strict=False):
                generator.set_rng_state(random)
        self.epoch, self.best_accuracy = content["epoch"], content["best_accuracy"]


def gather_from_ranks(value):
    """Return a list of all ranks' values, by rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
