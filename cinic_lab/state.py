"""The state of a training run, and its checkpoints."""

from pathlib import Path

import torch

from common.errors import UserError, explain
from random_states import (
    gather_from_ranks,
    get_random_states,
    get_rank,
    set_random_states,
)

LATEST, BEST = "checkpoint.pth.tar", "model_best.pth.tar"
PARTS = "model", "optimizer", "scheduler", "scaler"
OPTIONS = "arch", "epochs", "lr", "seed"  # must be the same in a resumed run


class TrainingState:
    """Model, optimizer, scheduler, scaler (disabled at first) and progress of a run.

    model: without a wrapper, which would add "module." to all keys; epoch: the last
    that has begun; best_accuracy: in %; folder: for this run's checkpoints.
    """

    def __init__(self, args, model, optimizer, scheduler, device, folder):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.scaler = torch.GradScaler(device.type, enabled=False)
        self.options, self.device, self.folder = vars(args), device, Path(folder)
        self.epoch, self.best_accuracy = 0, -1.0

    def save(self, accuracy):
        """Save checkpoint.pth.tar, and model_best.pth.tar if accuracy is the best.

        All ranks call this, because it gathers their random states; rank 0 writes.
        """
        names = [BEST, LATEST] if accuracy > self.best_accuracy else [LATEST]
        self.best_accuracy = max(accuracy, self.best_accuracy)
        content = {name: getattr(self, name).state_dict() for name in PARTS}
        random = gather_from_ranks(get_random_states(self.device))
        content |= {"options": self.options, "random": random}
        content |= {"epoch": self.epoch, "best_accuracy": self.best_accuracy}
        if get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            part = self.folder / "checkpoint.part"
            # In the working directory, because logs may be on another disk.
            link = Path(f"{self.folder.name}.part")
            for name in names:
                # torch.save(path) would hide a full disk.
                with part.open("wb") as stream:
                    torch.save(content, stream)
                part.replace(self.folder / name)  # if killed, leaves no half file
                link.symlink_to(self.folder / name)
                link.replace(name)  # replaces the old link at once

    def resume(self, file):
        """Load a checkpoint, saved by any number of ranks."""
        with explain(f"{file} is not a checkpoint of this script", "use another"):
            content = torch.load(file, map_location="cpu", weights_only=True)
            options, epoch = content["options"], content["epoch"]
            for name in OPTIONS:
                if options[name] != self.options[name]:
                    raise UserError(f"{file}: use --{name} {options[name]}")
            if epoch == self.options["epochs"]:
                problem = f"{file} has done all its epochs"
                raise UserError(f"{problem}: leave out --resume")
            for name in PARTS:
                if content[name]:  # a disabled scaler has no state
                    getattr(self, name).load_state_dict(content[name])
            set_random_states(content["random"], self.device)
            self.epoch, self.best_accuracy = epoch, content["best_accuracy"]
