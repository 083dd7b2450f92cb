"""Check of your script for part 1, 2, 3 or 4: what is there and what is missing.

    python check_part.py amp my_amp.py
    python check_part.py tensorboard my_tensorboard.py
    python check_part.py wandb my_wandb.py
    sbatch run-dp.sh check_part.py dp my_dp.py

It runs two epochs of six steps in a temporary folder, and checks what the script
does, not how it is written. It sends nothing to W&B. Exit status: 0 if nothing is
missing, 1 if something is missing or the script fails, 2 after a user error.
"""

import argparse
import io
import os
import re
import runpy
import sys
import tempfile
from collections import defaultdict
from contextlib import redirect_stdout
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import Subset
from torch.utils.tensorboard import SummaryWriter

import dataset
from common.errors import UserError, run

BATCH, STEPS = 16, 6  # images per GPU, steps per epoch
OPTIONS = f"--epochs 2 --batch-size {BATCH} --log-interval 2".split()
calls = []  # (method, first argument, whether under autocast)
layers = {"training": [], "validation": []}  # (dtype, whether under autocast)
batches = []  # sizes of the batches that DataParallel trained with
curves = defaultdict(list)  # name: steps at which it was logged


def in_autocast():
    """Return whether this is in an autocast block, even in a disabled one."""
    names = [name for name, _, _ in calls]
    return names.count("__enter__") > names.count("__exit__")


def record_calls(owner, name):
    """Wrap owner.name() to append each call to `calls`."""
    original = getattr(owner, name)

    def recorded(*args, **kwargs):
        calls.append((name, args[0], in_autocast()))
        return original(*args, **kwargs)

    setattr(owner, name, recorded)


def record_layer(layer, inputs, output):
    """A forward hook: record each convolution, and each batch of DataParallel."""
    if isinstance(layer, nn.Conv2d):
        part = "training" if layer.training else "validation"
        layers[part].append((output.dtype, in_autocast()))
    if isinstance(layer, nn.DataParallel) and layer.training:
        batches.append(len(inputs[0]))


class FakeWandb:
    """Stands in for the module wandb and for a run: sends nothing, and records."""

    options, num_logs, finished = None, 0, False

    def init(self, config=None, **_):
        self.options = config
        return self

    def log(self, data, step=None, **_):
        for name in data:
            curves[name].append(self.num_logs if step is None else step)
        self.num_logs += 1  # without a step, W&B counts the calls

    def finish(self, *_, **__):
        self.finished = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.finished = True

    # The rest of W&B's interface does nothing, such as wandb.config.update(...).

    def __getattr__(self, name):
        if name.startswith("__"):  # Python itself looks for these in a module
            raise AttributeError(name)
        return self

    def __call__(self, *_, **__):
        return self

    def __setitem__(self, *_):
        pass


wandb = FakeWandb()


# Each check yields (whether a feature is there, its name, what to do if it isn't).


def check_amp(gpus):
    steps = "scale", "backward", "step", "update"
    names = [name for name, _, _ in calls if name in steps]
    for part, seen in layers.items():
        passed = bool(seen) and all(under for _, under in seen)
        if gpus:  # on a CPU, autocast may be entered but disabled
            passed = passed and all(dtype.itemsize == 2 for dtype, _ in seen)
        yield passed, f"{part} in 16 bits", "run the model in a torch.autocast block"
    losses = [call for call in calls if call[0] == "backward"]
    yield losses, "a backward pass", "call backward() on the loss"
    full = all(loss.dtype == torch.float32 for _, loss, _ in losses)
    yield full, "the loss in 32 bits", "convert the scores with .float()"
    outside = not any(under for _, _, under in losses)
    yield outside, "backward() outside of autocast", "end the block before it"
    scalers = [scaler for name, scaler, _ in calls if name == "scale"]
    scaled = names == [*steps] * len(losses)
    if (torch.float16, True) in layers["training"]:
        scaled = scaled and all(scaler.is_enabled() for scaler in scalers)
    bf16 = (torch.bfloat16, True) in layers["training"]
    yield bf16 or scaled, "a GradScaler", "float16 needs scale(), step(), update()"


def check_curves():
    print("Logged:", ", ".join(sorted(curves)) or "nothing")
    val = [name for name in curves if re.search("val|test", name, re.I)]
    train = [name for name in curves if name not in val]
    loss, acc1, acc5, lr = "loss", r"(acc|top)\S*1", r"(acc|top)\S*5", "lr|learn"
    wanted = {"train/loss": loss, "train/acc1": acc1, "train/acc5": acc5}
    wanted |= {f"validation{name[5:]}": word for name, word in wanted.items()}
    for name, word in {**wanted, "train/lr": lr}.items():
        logged = train if "train" in name else val
        yield any(re.search(word, seen, re.I) for seen in logged), name, "log it"
    if train and val:
        grow = all(steps == sorted({*steps}) for steps in curves.values())
        ends = [max(curves[name][-1] for name in part) for part in (train, val)]
        shared = grow and abs(ends[0] - ends[1]) <= STEPS / 2
        yield shared, "one growing x axis", "count batches over all epochs"
        few = max(len(curves[name]) for name in train) < 2 * STEPS
        yield few, "points for some batches only", "log where a line is printed"


def check_tensorboard(gpus):
    writers = [writer for name, writer, _ in calls if name == "__init__"]
    closed = all(writer.all_writers is None for writer in writers)
    for writer in writers:
        writer.close()
    for file in Path().rglob("events.out.tfevents*"):
        events = EventAccumulator(str(file)).Reload()
        for name in events.Tags()["scalars"]:
            curves[name] = [point.step for point in events.Scalars(name)]
    yield from check_curves()
    yield writers and closed, "a closed file", "call writer.close()"


def check_wandb(gpus):
    yield wandb.options, "the options", "pass config to wandb.init()"
    yield from check_curves()
    yield wandb.finished, "a finished run", "call wandb.finish()"


def check_dp(gpus):
    batch, size = max(batches, default=0), BATCH * gpus
    yield batch, "training in DataParallel", "train the wrapped model"
    if batch and gpus > 1:
        yield batch == size, f"a batch for {gpus} GPUs", "multiply the batch size"
    names = torch.load("checkpoint.pth.tar", "cpu", weights_only=True)["model"]
    bare = not any(name.startswith("module.") for name in names)
    yield bare, "a checkpoint of the bare model", "save the unwrapped model"


CHECKS = {"amp": check_amp, "tensorboard": check_tensorboard}
CHECKS |= {"wandb": check_wandb, "dp": check_dp}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=CHECKS, help="feature to check")
    parser.add_argument("script", help="script to check")
    args = parser.parse_args()
    script, missing = Path(args.script).resolve(), 0
    gpus = torch.accelerator.device_count()
    if script.suffix != ".py" or not script.is_file():
        raise UserError(f"no script {args.script}: make one as README.md says")
    gpus_used = max(1, gpus) if args.part == "dp" else 1
    size = BATCH * STEPS * gpus_used
    sets = dataset.cinic()
    few = [range(0, len(part), max(1, len(part) // size))[:size] for part in sets]
    dataset.cinic = lambda: [*map(Subset, sets, few)]
    sys.argv = [str(script), *OPTIONS]
    sys.path.insert(0, str(script.parent))
    nn.modules.module.register_module_forward_hook(record_layer)
    record_calls(torch.Tensor, "backward")
    record_calls(SummaryWriter, "__init__")
    record_calls(torch.autocast, "__enter__")
    record_calls(torch.autocast, "__exit__")
    for name in ("scale", "step", "update"):
        record_calls(torch.GradScaler, name)
    sys.modules["wandb"] = wandb
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            with redirect_stdout(io.StringIO()):
                runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:  # it may end with sys.exit()
            if end.code:
                sys.exit(f"{args.script} failed with {end.code}; run it alone first")
        if not layers["training"]:
            raise UserError(f"{args.script} trains no ResNet: copy cinic.py first")
        for present, feature, advice in CHECKS[args.part](gpus):
            missing += not present
            line = f"missing  {feature}: {advice}"
            print(f"found    {feature}" if present else line)
    if missing:
        print(f"{missing} missing in {args.script}")
        sys.exit(1)
    diff = f"diff -W 180 -y {args.script} cinic_{args.part}.py | less"
    print(f"Nothing is missing. Compare it with our solution: {diff}")


if __name__ == "__main__":
    run(main)
