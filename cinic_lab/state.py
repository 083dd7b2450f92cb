"""The state of a training run, and checkpoints that hold it."""

import atexit
import hashlib
import os
import signal
import sys
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist

from common.checkpoint import save
from common.cli import UserError
from common.log import rank0_print
from rest import Rest, random_states, set_random_states

REQUEUE = 85  # the status of a run that was stopped and has saved
# By torchrun's --rdzv-id; in a job that is the job's number, also once requeued.
RUN = os.environ.get("TORCHELASTIC_RUN_ID")


class State:
    """What training changes, and what a checkpoint holds.

    state.model (never a wrapped one, whose keys begin with "module."),
    state.optimizer, state.scheduler, and state.scaler if the script sets one;
    state.epoch: how many are complete; state.best: the best accuracy so far in %.
    state.so_far: of the epoch that is not complete, if it was stopped: its batches,
    their sums, the seconds they took, and those spent waiting.
    A checkpoint holds the random states, too.
    """

    LATEST, BEST, LOGS = "checkpoint.pth.tar", "model_best.pth.tar", Path("logs")

    def __init__(self, model, optimizer, scheduler, device, folder=LOGS, **options):
        """folder: of the run; options: those that a checkpoint must agree with."""
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.device, self.folder, self.options = device, folder, options
        self.epoch, self.best, self.so_far = 0, -1.0, (0, 0.0, 0.0, 0.0)
        self.asked, self.scaler, self.loader, self.random = 0, None, None, None
        # Else a signal ends Python while it ends.
        atexit.register(signal.signal, signal.SIGUSR1, signal.SIG_IGN)

    def parts(self):
        names = "model", "optimizer", "scheduler", "scaler"
        parts = {name: getattr(self, name) for name in names}
        return {name: part for name, part in parts.items() if part is not None}

    def save(self, epoch, accuracy):
        """Save checkpoint.pth.tar, and before it the same as model_best.pth.tar, if
        no epoch was better.

        They lie in the run's own folder, so that no run loses another one's; two
        links of these names lead there. Of many processes all call this, as each
        draws its own random numbers; rank 0 writes. Killed between the two files, a
        run does this epoch again.
        """
        files = [self.BEST, self.LATEST] if accuracy > self.best else [self.LATEST]
        self.epoch, self.best = epoch, max(accuracy, self.best)
        self.so_far = 0, 0.0, 0.0, 0.0
        self.write(files)

    def write(self, files):
        content = {name: part.state_dict() for name, part in self.parts().items()}
        content |= {"epoch": self.epoch, "best": self.best, "options": self.options}
        content |= {"so_far": self.so_far, "dealt": self.dealt(), "run": RUN}
        content["random"] = all_ranks(random_states(self.device))
        if rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            save(content, *(self.folder / file for file in files))
            for file in files:
                link_to(self.folder / file, file)

    def resume(self, file):
        """Go on where a checkpoint stands, with any number of processes.

        Processes that the saved run did not have draw what they would in a new run.
        Raises UserError if the file is missing, damaged, of something else, or not
        the same for all processes.
        """
        if not Path(file).is_file():
            raise UserError(f"no file '{file}': leave out --resume to start anew")
        try:
            with zipfile.ZipFile(file) as archive:  # torch.load checks no sums
                if part := archive.testzip():
                    raise zipfile.BadZipFile(part)
            content = torch.load(file, map_location="cpu", weights_only=True)
            options, self.epoch, self.best = (
                content[name] for name in ("options", "epoch", "best")
            )
            if self.epoch < 0:
                raise ValueError(self.epoch)
            states = content["random"]
            done, sums, *times = content.get("so_far", self.so_far)
            sums = torch.as_tensor(sums, device=self.device)
            self.so_far = done, sums, *times
            checksum = hashlib.sha256(Path(file).read_bytes()).hexdigest()
            if options == self.options:
                for name, part in self.parts().items():
                    if content.get(name):  # float32 and bfloat16 have no scaler
                        part.load_state_dict(content[name])
                if rank() < len(states):
                    self.random = states[rank()]
                    set_random_states(self.random, self.device)
        except OSError as error:  # the disk's, not the file's
            raise UserError(f"cannot read {file}: {error.strerror}") from None
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
        if done and content["dealt"] != self.dealt():  # some would come twice
            ranks, size, seed = content["dealt"]
            raise UserError(
                f"{file} is from within an epoch: go on with cinic_requeue.py, on "
                f"{ranks} processes, with --batch-size {size} --seed {seed}"
            )

    def rest(self, loader):
        """Return this loader, but without what a stopped epoch has done already."""
        self.loader = Rest(loader, self)
        return self.loader

    def dealt(self):
        """Return what decides which images a process gets, and in which batches."""
        if self.loader is None:
            return None
        loader = self.loader.loader
        return dist.get_world_size(), loader.batch_size, loader.sampler.seed

    def ask(self, *_):
        """Handle a signal: note that somebody asks to stop."""
        self.asked = 1

    def stop(self, *so_far):
        """Save in the middle of an epoch, and leave."""
        self.so_far = so_far
        self.write([self.LATEST])
        rank0_print(f"Stopped, and saved in {self.LATEST}")
        all_ranks(None)  # when the first one leaves, torchrun ends the others
        dist.destroy_process_group()
        sys.exit(REQUEUE)

    def restarted(self):
        """Say whether this run was started again, and its checkpoint is here."""
        counts = "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"
        again = any(int(os.environ.get(count) or 0) for count in counts)
        its_own = done = False
        # torchrun counts on the node alone whose process was lost.
        if any(all_ranks(again)) and rank() == 0:
            files = Path("logs").glob(f"*/{self.LATEST}")
            for file in sorted(files, key=os.path.getmtime, reverse=True):
                content = torch.load(file, "cpu", mmap=True, weights_only=True)
                if content.get("run") == RUN:
                    link_to(file, self.LATEST)  # others may have saved since
                    its_own = True
                    done = content["epoch"] == content["options"]["epochs"]
                    break
        its_own, done = all_ranks((its_own, done))[0]
        if done:  # it was told to stop when it was at its end
            rank0_print(f"{self.LATEST} has all epochs: nothing is left to do")
            dist.destroy_process_group()
            sys.exit()
        return its_own


def link_to(target, name):
    """Make a link of this name, and keep a file that has it under another one."""
    if os.path.isfile(name) and not os.path.islink(name):
        kept = f"{os.getpid()}_{name}"
        os.replace(name, kept)
        rank0_print(f"{name}, which an earlier run had left, is now {kept}")
    if not os.path.islink(name) or os.readlink(name) != str(target):
        part = Path(f"{name}.{os.getpid()}.part")
        part.unlink(missing_ok=True)
        part.symlink_to(target)
        part.replace(name)


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def all_ranks(value):
    """Return the values of all processes, in the order of their ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
