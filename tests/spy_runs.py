"""Runs scripts of dp_ddp_intro as `python SCRIPT` would; saves what each rank did.

    torchrun ... spy_runs.py SCRIPT [OPTIONS] [/ SCRIPT [OPTIONS]] ...

RANK.pt has a dict for each of them: losses, of its epochs; order, what a pipeline
did, each (kind, stage, micro-batch); held, for how many of these autograd kept
tensors at most; gathered, the bytes of each all-gather; graphs, how many Dynamo
made. What is loaded from a checkpoint is saved again, to loadedN, N the number of
ranks. KILL=FOLDER: rank 0 is killed before a checkpoint of this name is whole.
"""

import os
import signal
import sys
from collections import Counter
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._dynamo.utils import counters
from torch.distributed.pipelining import PipelineStage
from torch.utils._python_dispatch import TorchDispatchMode

runs, kept = [], Counter()


class Gathers(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if "_allgather_base_" in op.name():
            runs[-1]["gathered"].append(args[0].nbytes)
        return op(*args, **(kwargs or {}))


class Kept:
    """What autograd keeps for the backward pass of a micro-batch."""

    def __init__(self, tensor):
        self.tensor, self.chunk = tensor.detach(), runs[-1]["order"][-1]
        kept[self.chunk] += 1

    def __del__(self):
        kept[self.chunk] -= 1


def noting(kind, function):
    def chunk(stage, number, *args, **kwargs):
        run = runs[-1]
        run["order"].append((kind, stage.stage_index, number))
        hooks = torch.autograd.graph.saved_tensors_hooks(Kept, lambda k: k.tensor)
        with hooks if kind == "F" else nullcontext():
            done = function(stage, number, *args, **kwargs)
        run["held"] = max(run["held"], sum(map(bool, kept.values())))
        return done

    return chunk


def noting_means(sums, *names):
    found = means(sums, *names)
    runs[-1]["losses"].append(found["loss"])
    return found


def loading(state, **where):
    load(state, **where)
    dcp.save(state, checkpoint_id=f"loaded{dist.get_world_size()}")


def finishing(writer, *args, **kwargs):
    if Path(writer.path).name == os.environ.get("KILL"):
        os.kill(os.getpid(), signal.SIGKILL)
    return finish(writer, *args, **kwargs)


load, dcp.load = dcp.load, loading
finish, dcp.FileSystemWriter.finish = dcp.FileSystemWriter.finish, finishing
for kind, name in {"F": "forward_one_chunk", "B": "backward_one_chunk"}.items():
    setattr(PipelineStage, name, noting(kind, getattr(PipelineStage, name)))
end, dist.destroy_process_group = dist.destroy_process_group, lambda: None
commands = [list(words) for _, words in groupby(sys.argv[1:], lambda w: w == "/")]
for script, *options in commands[::2]:
    runs.append({"losses": [], "order": [], "held": 0, "gathered": []})
    sys.path.insert(0, str(Path(script).resolve().parent))
    module = __import__(Path(script).stem)
    if module.means is not noting_means:  # it runs for the first time
        means, module.means = module.means, noting_means
    sys.argv = [script, *options]
    with Gathers() if Path(script).stem == "fsdp" else nullcontext():
        module.main()
    runs[-1]["graphs"] = counters["stats"]["unique_graphs"] - sum(
        run.get("graphs", 0) for run in runs[:-1]
    )
    dist.init_process_group = lambda: None  # one group for all
end()
torch.save(runs, f"{os.environ['RANK']}.pt")
