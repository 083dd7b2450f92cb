"""Measures what a GPU holds and sends in each way, beside what formulas.py says.

    sbatch jobscript_ddp.sh beyond_ddp/measure_memory.py
    sbatch --gpus-per-node=4 jobscript_ddp.sh beyond_ddp/measure_memory.py

It runs the scripts of this folder for four steps each, on a small model, and counts.
Without Slurm type bash in place of sbatch, and GPUS=4 bash for four.
"""

import os
import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

import formulas
from common.cli import OptionParser, UserError, at_least
from common.device import get_device, get_ranks
from common.log import rank0_print
from dataset import VOCABULARY

STEPS, ACCUMULATE, TENSOR = 4, 4, 2
COLUMNS = "parameters", "gradients", "Adam's state", "activations", "sent"
# How often a ring passes on (N - 1) / N of the data (formulas.py).
RINGS = {"allreduce_": 2, "all_reduce": 2, "_allgather_base_": 1}
RINGS |= {"_reduce_scatter_base_": 1, "broadcast_": 1}
OWN = {  # options of a script's own
    "accumulate": [f"--accumulate={ACCUMULATE}"],
    "fsdp_tp": [f"--tensor={TENSOR}"],
}
WAYS = {  # script: its way in formulas.py, the ranks among which a model is cut
    "ddp": ("DDP", 1),
    "accumulate": ("DDP", 1),
    "checkpointing": ("DDP", 1),
    "zero": ("ZeRO-1", 1),
    "fsdp": ("FSDP", 1),
    "hsdp": ("HSDP", 2),  # two GPUs play a node
    "tensor_parallel": ("TP", 0),  # 0: all
    "fsdp_tp": ("FSDP + TP", TENSOR),
    "pipeline": ("pipeline", 0),
}


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Watch(TorchDispatchMode):
    """Counts, while a script runs, what its rank holds and sends.

    sent: bytes as a ring sends them (formulas.share), in each step but the first.
    kept: the most bytes that autograd kept at once for the backward pass, without
    parameters. held: bytes of parameters, gradients and optimizer state.
    """

    def __init__(self, nested):
        """nested: the optimizer has another one inside, which steps first."""
        super().__init__()
        self.nested, self.storages, self.held = nested, {}, None
        self.sent, self.steps, self.now, self.kept = 0, 0, 0, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        space, name = op.name().split("::")
        if space in ("c10d", "_c10d_functional") and 0 < self.steps < STEPS:
            self.sent += ring_bytes(name.split(".")[0], args)
        return op(*args, **(kwargs or {}))

    def pack(self, tensor):
        """Note a tensor that is saved; several may share a storage."""
        base = tensor if tensor._base is None else tensor._base
        if base.is_leaf and base.requires_grad:  # a parameter
            return tensor
        tensor = tensor.detach()  # or it and what made it would hold each other
        storage = local(tensor).untyped_storage()
        count = self.storages.get(storage.data_ptr(), 0)
        self.storages[storage.data_ptr()] = count + 1
        self.now += storage.nbytes() * (count == 0)
        self.kept = max(self.kept, self.now)
        return Saved(self, tensor, storage)

    def step(self, optimizer, *_):
        """After an optimizer's step note what there is; the first is to warm up."""
        inner = optimizer.optim if hasattr(optimizer, "optim") else optimizer
        if self.nested and inner is optimizer:
            return
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        states = [v for s in inner.state.values() for v in s.values()]
        states = [v for v in states if torch.is_tensor(v) and v.dim()]
        gradients = [p.grad for p in tensors if p.grad is not None]
        parts = tensors, gradients, states
        self.held = [sum(local(t).nbytes for t in part) for part in parts]
        if self.steps == 0:
            self.kept = self.now
        self.steps += 1


class Saved:
    """A tensor that autograd keeps; when it lets go of it, the watch is told."""

    def __init__(self, watch, tensor, storage):
        self.watch, self.tensor = watch, tensor
        self.place, self.size = storage.data_ptr(), storage.nbytes()

    def __del__(self):
        self.watch.storages[self.place] -= 1
        self.watch.now -= self.size * (self.watch.storages[self.place] == 0)


def unpack(saved):
    return saved.tensor if isinstance(saved, Saved) else saved


def ring_bytes(op, args):
    """Return what a rank sends in this operation, if it goes round a ring."""
    tensors = [a if torch.is_tensor(a) else a[0] for a in args[:2] if is_data(a)]
    if not tensors or op not in RINGS | {"send": 1}:
        return 0
    size = max(tensor.nbytes for tensor in tensors)  # of all pieces together
    if op == "send":
        return size
    name = next((a for a in args if isinstance(a, torch.ScriptObject)), args[-1])
    group = (
        dist.distributed_c10d._resolve_process_group(name)
        if isinstance(name, str)
        else dist.ProcessGroup.unbox(name)
    )
    return RINGS[op] * formulas.share(group.size()) * size


def is_data(argument):
    """Whether it is a tensor, or a list that begins with one."""
    return torch.is_tensor(argument) or (
        isinstance(argument, list) and argument and torch.is_tensor(argument[0])
    )


def calculated(script, args, ranks):
    """Return the bytes of parameters, gradients, Adam, activations, and sent."""
    way, group = WAYS[script]
    group = group or ranks
    shape = formulas.Shape(
        args.layers, args.width, args.heads, args.heads, 4 * args.width,
        VOCABULARY, args.length, llama=False,
    )  # fmt: skip
    embedding, block, head = formulas.parameters(shape)
    everything, tokens = formulas.count(shape), args.batch_size * args.length
    cut, whole, blocks = everything, 0, args.layers
    if "TP" in way:  # it leaves whole: norms, biases of rows, embedding and head
        whole = embedding + head + args.layers * 6 * args.width
        cut, tokens = everything - whole, tokens * group
    if way == "pipeline":  # of the first stage, with as many micro-batches as stages
        blocks = args.layers // ranks
        cut = group * (embedding + blocks * block)
        tokens = tokens * ranks // args.micro_batches
    state = formulas.state_bytes(cut, way, ranks, group)
    data = ranks // group if way == "FSDP + TP" else 1
    state = [a + b * whole / data for a, b in zip(state, (4, 4, 8), strict=True)]
    size = 4 * tokens * args.width
    kept = formulas.block_activations(shape, tokens, cut=group if "TP" in way else 1)
    kept = size if script == "checkpointing" else kept
    ends = 8 * tokens + 8 * args.length  # tokens and positions, for the embedding
    if way == "pipeline":
        kept = ranks * (blocks * kept + ends)
        sent = 2 * formulas.share(ranks) * size * args.micro_batches
    else:  # the last norm, the head, the loss, and the targets
        ends += 2 * size + 8 * tokens + 4 * VOCABULARY * tokens + 8 * tokens
        kept = args.layers * kept + ends
        sent = formulas.sent_bytes(cut, way, ranks, group)
        sent += 12 * whole * formulas.share(data)  # by FSDP
        sent += formulas.sent_activations(size, args.layers, way, group)
    return [*state, kept, sent]


def measured(script, options, node):
    """Run a script on all ranks; return what calculated() does, of rank 0.

    What is sent is the mean over the ranks.
    """
    module = import_module(script)
    sys.argv = [script, *map(str, options)]
    watch = Watch(script == "zero")
    hook = register_optimizer_step_post_hook(watch.step)
    os.environ["LOCAL_WORLD_SIZE"] = str(node)
    saved = torch.autograd.graph.saved_tensors_hooks(watch.pack, unpack)
    with redirect_stdout(None), saved, watch:
        module.main()
    hook.remove()
    sent = torch.tensor(watch.sent / (watch.steps - 1))
    dist.all_reduce(sent)
    return [*watch.held, watch.kept, sent.item() / dist.get_world_size()]


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--batch-size", type=at_least(1), default=16, help="sequences per GPU")
    add(
        "--layers", type=at_least(1), help="default: 4, or 1 per GPU if that is more"
    )
    add("--width", type=at_least(1), default=128, help="numbers for each token")
    add("--heads", type=at_least(1), help="default: 4, or 1 per GPU if that is more")
    add("--length", type=at_least(1), default=64, help="of a sequence, in tokens")
    args = parser.parse_args()
    _, local_rank, ranks = get_ranks()
    if ranks % 2:
        raise UserError(f"{ranks} processes cannot be two equal nodes: type GPUS=2")
    args.layers, args.heads = (
        args.layers or max(4, ranks),
        args.heads or max(4, ranks),
    )
    node = os.environ["LOCAL_WORLD_SIZE"]
    sys.path.append(str(Path(__file__).resolve().parent.parent))  # for ddp.py
    get_device(local_rank)
    dist.init_process_group()
    # One group for all the scripts: to make another each time would take longer.
    dist.init_process_group, end = lambda: None, dist.destroy_process_group
    dist.destroy_process_group = lambda: None
    options = [f"--{name.replace('_', '-')}={n}" for name, n in vars(args).items()]
    args.micro_batches = max(4, ranks)
    OWN["pipeline"] = [f"--micro-batches={args.micro_batches}"]
    one = f"{args.layers} layers of width {args.width}"
    rank0_print(
        f"{ranks} ranks, {one}, {args.batch_size} x {args.length} tokens each"
    )
    rank0_print("MB of a rank, counted and calculated; sent: in a step")
    rank0_print(f"{'':15}" + "".join(f"{column:^18}" for column in COLUMNS))
    with TemporaryDirectory() as folder:
        os.chdir(folder)  # for their logs/
        for script, (way, _) in WAYS.items():
            batches = STEPS * (ACCUMULATE if script == "accumulate" else 1)
            own = [f"--sequences={batches * args.batch_size * ranks}", "--epochs=1"]
            inside = 2 if way == "HSDP" and ranks % 2 == 0 else node
            counted = measured(script, options + own + OWN.get(script, []), inside)
            pairs = zip(counted, calculated(script, args, ranks), strict=True)
            cells = [f"{a / 1e6:9.3f} {b / 1e6:<8.3f}" for a, b in pairs]
            rank0_print(f"{script:15}" + "".join(cells))
        os.chdir("/")
    end()


if __name__ == "__main__":
    main()
