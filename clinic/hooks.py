"""What checkup.py sees of a script, in each of its processes, without changing it.

Each hook notes something in `me`, which rank 0 gets at the end, or in `now`, which
stays in this process. None of them waits for the device.
"""

import builtins
import functools
import json
import os
import re
import sys
import sysconfig
import threading
from collections import Counter, defaultdict
from contextlib import suppress
from types import SimpleNamespace as Record

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tensor_parallel
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter as Iterator

MERGE = ["all_reduce", "reduce", "all_gather", "gather", "reduce_scatter"]
MERGE += ["all_gather_object", "gather_object", "all_gather_into_tensor"]
MERGE += ["reduce_scatter_tensor", "all_to_all", "all_to_all_single"]
OTHER = ["broadcast", "scatter", "barrier", "broadcast_object_list"]
READ = ["item", "tolist", "cpu", "numpy"]
READ += ["__float__", "__int__", "__bool__", "__format__"]
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HERE = os.path.dirname(os.path.abspath(__file__))
OWN = [f"{HERE}/{name}.py" for name in ("hooks", "promises")]
OWN.append(sys.modules["__main__"].__file__)  # checkup.py, as it was typed
PATHS = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
PATHS.append(os.path.dirname(os.path.dirname(torch.__file__)))
LIBRARIES = ("<", *OWN, *(f"{path}/" for path in PATHS))
CACHES = "/__pycache__/", "/.cache/", "/.triton/", "/torchinductor", ".lock"
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
MOST = 1000  # so many steps are compared

me = Record(rank=RANK, device=None, start=[], grads=[], weights=[], lines=[])
me.epochs, me.names, me.sharded, me.own, me.merged = [], {}, False, {}, False
me.counts, me.last, me.files, me.reads = Counter(), {}, {}, defaultdict(set)
me.draws, me.closed, me.cut = [], None, False  # closed: None without a group
now = Record(script="", limit=0, events=0, steps=0, batch=0, trained=set(), said=[])
now.epoch, now.merged, now.forward, now.values = None, False, -1, defaultdict(list)
now.depth = 0


class Enough(BaseException):
    """As many steps are made as --steps says."""


def here(frame=None):
    """Return the line that runs: of the script, or else of what it uses."""
    frame, other = frame or sys._getframe(1), ""
    while frame:
        name = frame.f_code.co_filename
        line = f"{os.path.basename(name)}:{frame.f_lineno}"
        if name == now.script:
            return line
        if not other and not name.startswith(LIBRARIES):
            other = line
        frame = frame.f_back
    return other


def wrap(owner, name, before=None, after=None):
    """Call before(name, arguments), the function, and after(result, arguments)."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        now.events += 1
        every = [*args, *kwargs.values()]
        if before:
            before(name, every)
        result = original(*args, **kwargs)
        if after:
            after(result, every)
        return result

    setattr(owner, name, wrapper)


# Collectives: who comes first to the n-th writes down what it is, for the others.
def stop(why):
    now.store.compare_set("stop", "", why)


def meet(what, ranks=None):
    me.counts[ranks] += 1
    me.last[ranks] = line = here()
    key, mine = f"{ranks}/{me.counts[ranks]}", json.dumps([what, line, RANK])
    theirs, where, rank = json.loads(now.store.compare_set(key, "", mine))
    if theirs != what:
        mine = f"rank {RANK} to {what} at {line}"
        stop(f"rank {rank} comes to {theirs} at {where}, {mine}")
        threading.Event().wait()  # checkup.py's thread ends this process


def collective(name, every):
    groups = [a for a in every if isinstance(a, dist.ProcessGroup)]
    numbers = [a for a in every if type(a) is int]
    if dist.GroupMember.NON_GROUP_MEMBER in numbers:  # it returns at once
        return
    what = [name]
    if "object" not in name:  # these may have different lengths
        what += [str(tuple(a.shape)) for a in every if isinstance(a, torch.Tensor)]
    if name in ("broadcast", "reduce"):
        what += [f"of rank {a}" for a in numbers]
    now.merged = now.merged or name in MERGE
    meet(" ".join(what), members(groups[0]) if groups else None)


def members(group):
    ranks = tuple(dist.get_process_group_ranks(group))
    return ranks if len(ranks) < WORLD else None


def forward(name, every):
    ddp, now.forward = every[0], now.batch
    buffers = ddp.will_sync_module_buffers() and ddp.require_forward_param_sync
    averages = torch.is_grad_enabled() and ddp.require_backward_grad_sync
    if (buffers or averages) and not ddp._join_config.enable:
        meet("forward of a model in DDP", members(ddp.process_group))


def wrapped(result, every):
    me.names |= {id(p): name for name, p in every[0].module.named_parameters()}


# Loaders: which indices, in which order, and whether steps were made with them.
def epoch_of(iterator):
    new = Record(dealt=[], batches=0, steps=0, most=float("inf"), last=0, key="")
    return vars(iterator).setdefault("checkup", new)


def deal(batch, every):
    epoch_of(every[0]).dealt.append(batch)


def begin(name, every):  # workers may go on from the last epoch: this is another one
    vars(every[0]._iterator or now).pop("checkup", None)


def begun(iterator, every):
    epoch, data, chain = epoch_of(iterator), every[0].dataset, []
    while hasattr(data, "indices") and hasattr(data, "dataset"):  # Subsets
        chain, data = [*chain, data.indices], data.dataset
    stream = isinstance(data, IterableDataset) or not hasattr(data, "__len__")
    epoch.length = 0 if stream else len(data)
    epoch.loader, epoch.chain, epoch.data = every[0], chain, data
    with suppress(TypeError):  # some have no length
        epoch.most = len(every[0])
    epoch.key, epoch.first = f"{here()} {epoch.length}", now.steps
    epoch.last = now.steps
    me.epochs.append(epoch)


def take(batch, every):
    epoch = now.epoch = epoch_of(every[0])
    epoch.batches, epoch.last = epoch.batches + 1, now.steps
    now.batch, now.merged = now.batch + 1, False


# Steps: sums of all bits. They are equal for equal tensors, and stay on the device.
def sums(tensors, device="cpu"):
    """Return one tensor (N,) of sums, 0 for what is none or sparse."""
    found = []
    for t in tensors:
        if t is None or t.is_sparse:
            t = torch.zeros(1, device=device)
        t = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
        t = t.view(BITS[t.element_size()])
        found.append(t.sum(dtype=t.dtype))
    if len({t.dtype for t in found}) > 1:
        found = [t.long() for t in found]
    # A model may be spread over several GPUs.
    found = [t.to(found[0].device, non_blocking=True) for t in found]
    return torch.stack(found) if found else torch.zeros(0)


def parameters(optimizer):
    every = [p for group in optimizer.param_groups for p in group["params"]]
    me.sharded = me.sharded or any(hasattr(p, "device_mesh") for p in every)
    return [] if me.sharded or now.steps >= MOST else every


def before_step(optimizer, args, kwargs):
    now.depth += 1
    if now.depth > 1:  # an optimizer within another
        return
    every = parameters(optimizer)
    device = every[0].device if every else torch.device("cpu")
    if not me.start:
        me.start, me.device = [sums(every)], "cpu"
        if device.type == "cuda":  # a process may see it by another number
            its = torch.cuda.get_device_properties(device)
            gpu = f"{its.uuid} {its.pci_domain_id}:{its.pci_bus_id}"
            me.device = f"{os.uname().nodename} {gpu}"
        elif device.type != "cpu":
            me.device = f"{os.uname().nodename} {device}"
    if now.epoch:
        now.epoch.steps += 1
        if now.epoch.batches < now.epoch.most:  # after the last one may be read
            now.trained.add(now.batch)
        if now.epoch.steps == len(me.draws) + 1 < 3:
            states = {"CPU": torch.get_rng_state()}
            if device.type != "cpu":
                states["GPU"] = torch.get_device_module(device).get_rng_state()
            me.draws.append(states)
    me.grads.append(sums([p.grad for p in every], device))
    names = [f"{me.names.get(id(p), 'one')} {(*p.shape,)}" for p in every]
    me.lines.append((here(), names))


def after_step(optimizer, args, kwargs):
    now.depth -= 1
    if now.depth:
        return
    me.weights.append(sums(parameters(optimizer)))
    now.steps, now.events = now.steps + 1, now.events + 1
    if now.steps == now.limit:
        raise Enough


# Numbers that are read, or printed; files that are written.
def read(result, every):
    caller, epoch, tensor = sys._getframe(2).f_code.co_filename, now.epoch, every[0]
    if not epoch or caller.startswith(LIBRARIES):
        return
    computed = tensor.requires_grad or now.forward == now.batch
    if tensor.device.type != "cpu" or (computed and me.device in (None, "cpu")):
        me.reads[here()].add(now.batch)
    if isinstance(result, float | list) and not now.merged:
        where = here(), epoch.key * (not epoch.steps)
        numbers = [v for v in tree_leaves(result) if isinstance(v, float)]
        if numbers:
            now.values[where] += numbers


def printing(name, every):
    text = " ".join(str(a) for a in every if isinstance(a, str | float))
    now.said.append(text)
    numbers = re.findall(r"\d+\.\d+", text)
    if not numbers or not now.epoch or now.epoch.batches < now.epoch.most:
        return  # not at the end of an epoch
    for (line, key), values in now.values.items():
        last, before = values[-1], values[-2:][0]
        owns = [last, sum(values) / len(values), before / (last or 1)]
        forms = {f".{len(number.partition('.')[2])}f" for number in numbers}
        shown = {f"{n:{f}}" for own in owns for n in (own, 100 * own) for f in forms}
        shown = {n for n in shown if len(n.replace(".", "").strip("0-")) >= 3}
        same = shown & {*numbers}
        if shown:  # fewer digits are often the same by chance
            why, matches, all_of = me.own.get(key, ("", 0, 0))
            if same:
                why = f"{here()}: {min(same)} is what rank 0 alone read at {line}"
            me.own[key] = why, matches + bool(same), all_of + 1
    now.values.clear()
    me.merged = me.merged or now.merged


def audit(event, arguments):
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        wrote(event, arguments[:1])
    elif event == "os.rename":
        wrote(event, arguments[1:])


def wrote(name, every):
    for path in [a for a in every if isinstance(a, str | os.PathLike)][:1]:
        path = os.path.abspath(path)
        ignored = path.startswith(("/dev/", "/proc/"))
        if not ignored and not any(cache in path for cache in CACHES):
            me.files.setdefault(path, here())


def start():
    """Hang the hooks where a DDP script passes by."""
    for name in [n for n in (*MERGE, *OTHER) if hasattr(dist, n)]:
        wrap(dist, name, before=collective)
    wrap(DDP, "__init__", after=wrapped)
    cut = "parallelize_module"
    wrap(tensor_parallel, cut, before=lambda *_: setattr(me, "cut", True))
    wrap(DDP, "forward", before=forward)
    wrap(Iterator, "_next_index", after=deal)
    wrap(Iterator, "__next__", after=take)
    wrap(DataLoader, "__iter__", before=begin, after=begun)
    for name in READ:
        wrap(torch.Tensor, name, after=read)
    wrap(builtins, "print", before=printing)
    wrap(torch, "save", before=wrote)
    made = "init_process_group"
    wrap(dist, made, before=lambda *_: setattr(me, "closed", False))
    wrap(
        dist, "destroy_process_group", before=lambda *_: setattr(me, "closed", True)
    )
    optimizers.register_optimizer_step_pre_hook(before_step)
    optimizers.register_optimizer_step_post_hook(after_step)
    sys.addaudithook(audit)
