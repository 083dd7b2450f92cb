"""What the checkup sees of a script, without changing it.

install() wraps the functions of PyTorch that a DDP script calls. Each hook notes
something in `record` or `state` (record.py). None of them waits for a device:
checksums stay there until the script has ended.
"""

import functools
import json
import os
import random
import re
import sys
import threading
from contextlib import suppress
from types import FunctionType, SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter as Iterator

from ddp_checkup.record import is_library, record, state, user_line, user_stack

GATHERS = ["all_gather", "gather", "all_gather_object", "gather_object"]
GATHERS += ["all_gather_into_tensor", "all_gather_single", "gather_single"]
GATHERS += ["gather_into_tensor", "all_gather_coalesced"]
REDUCTIONS = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"]
REDUCTIONS += ["reduce_scatter_single", "all_reduce_coalesced", "all_to_all"]
REDUCTIONS += ["all_to_all_single"]
OTHERS = ["broadcast", "scatter", "barrier", "monitored_barrier"]
OTHERS += ["broadcast_object_list", "scatter_object_list"]
HOST_SYNCS = ["item", "tolist", "cpu", "numpy"]
HOST_SYNCS += ["__float__", "__int__", "__bool__", "__format__"]
# What lies between a hook and its caller; the second one if torch.compile is used.
HOOK_FILES = __file__, "/torch/_dynamo/eval_frame.py"
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CACHES = "/__pycache__/", "/.cache/", "/.triton/", "/torchinductor", ".lock"
MAX_STEPS = 1000  # compared
MAX_BATCHES = 50  # whose contents are compared
MAX_TENSORS = 8  # of a step, of those that go into models
MAX_COLLECTIVES = 100_000  # compared; each takes some bytes of the store
TRAIN = "a forward of the DDP model with gradients"
EVALUATE = "a forward of the DDP model without gradients"
WRAPPERS = {}  # by the id of what they wrap


class StopAfterSteps(BaseException):
    """The script has made as many steps as --steps allows."""


def call(hook, *args):
    """Call a hook; before_compile() keeps this out of graphs."""
    return hook(*args)


def wrap(owner, name, before=None, after=None, during="runs"):
    """Call before(name, arguments), the function, and after(result, arguments).

    during: the field of `state` that holds the name meanwhile: monitor.py looks at
    `waiting` and `busy`, whose functions may wait for other ranks.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        if torch.compiler.is_compiling():  # hooks are no part of a graph
            return original(*args, **kwargs)
        state.events += 1
        values = [*args, *kwargs.values()]
        if before:
            call(before, name, values)
        old = getattr(state, during, "")
        setattr(state, during, name)
        try:
            result = original(*args, **kwargs)
        finally:
            setattr(state, during, old)
            state.events += 1
        if after:
            call(after, result, values)
        return result

    WRAPPERS[id(original)] = wrapper
    setattr(owner, name, wrapper)


# Collectives. The first rank to come to one writes it into the store; the others
# compare before they begin.
def stop_job(kind, text):
    """Tell all ranks that the job cannot go on, and why; the first one counts."""
    state.store.compare_set("stop", "", json.dumps([kind, text]))


def meet(what, ranks=None):
    record.counts[ranks] += 1
    number = record.counts[ranks]
    record.last[ranks] = line = user_line()
    if state.store is None or number > MAX_COLLECTIVES:
        return
    mine = json.dumps([what, line, state.rank])
    first = state.store.compare_set(f"collective/{ranks}/{number}", "", mine)
    other, other_line, rank = json.loads(first)
    if other == what:
        return
    alone = EVALUATE in (other, what)
    stop_job(
        "rank0-eval" if alone else "collectives",
        f"rank {state.rank} comes to {what} at {line}, but rank {rank} to "
        f"{other} at {other_line}",
    )
    threading.Event().wait()  # monitor.py ends this process


def before_collective(name, values):
    groups = [v for v in values if isinstance(v, dist.ProcessGroup)]
    numbers = [v for v in values if type(v) is int]
    if dist.GroupMember.NON_GROUP_MEMBER in numbers:  # it returns at once
        return
    what = [name]
    if "object" not in name:  # objects may have different sizes
        first = name == "all_to_all_single"  # rows differ by rank
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        what += [str(tuple(v.shape[first:])) for v in tensors]
    if name in ("broadcast", "reduce"):
        what += [f"of rank {n}" for n in numbers]
    averages = state.busy or state.depth  # DDP's hooks, ZeroRedundancyOptimizer
    if name in REDUCTIONS + GATHERS and not averages:
        state.reduced = True
    if name in GATHERS and state.epoch:
        state.epoch.gathered = True
    meet(" ".join(what), members(groups[0]) if groups else None)


def note_loss(name, values):
    loss = values[0]
    state.loss = loss.detach() if isinstance(loss, torch.Tensor) else None


def before_all_reduce(name, values):
    """Remember a scalar that is summed: its sum may be printed as a mean."""
    tensor, *others = values
    if not state.ddp and not record.sharded:  # gradients that are averaged by hand
        note_inputs(tensor)
    kinds = dist.ReduceOp, dist.ReduceOp.RedOpType
    operations = [v for v in others if isinstance(v, kinds)]
    sums = not operations or operations[0] == dist.ReduceOp.SUM
    scalar = isinstance(tensor, torch.Tensor) and tensor.numel() == 1
    if scalar and tensor.is_floating_point() and sums:
        loss = None if state.loss is None else state.loss.clone()
        state.summed.append([tensor, None, tensor.detach().clone(), loss])
        del state.summed[:-8]


def after_all_reduce(result, values):
    if state.summed and state.summed[-1][0] is values[0]:
        state.summed[-1][1] = values[0]._version


def is_sum_of_means(tensor):
    """Return whether this is a sum over ranks of their losses, and not divided."""
    own = [candidates(v, state.epoch, "own") for v in state.values.values()]
    for summed, version, given, loss in state.summed:
        if summed is tensor and tensor._version == version:
            value = float(torch.Tensor.item(given))  # the script has just waited
            is_loss = loss is not None and value == float(torch.Tensor.item(loss))
            return is_loss or any(
                abs(value - v) < 1e-6 for found in own for v in found
            )
    return False


def members(group):
    ranks = tuple(dist.get_process_group_ranks(group))
    return ranks if len(ranks) < state.world else None


def before_forward(name, values):
    ddp, state.forward_batch = values[0], state.batch
    training = torch.is_grad_enabled()
    if training:
        state.ddp, state.forward_line = ddp, user_line()
        record.unused = ""
        note_inputs(values[1:])
    if ddp._join_config.enable:
        record.join = True
        return
    buffers = ddp.will_sync_module_buffers() and ddp.require_forward_param_sync
    if buffers or (training and ddp.require_backward_grad_sync):
        what = TRAIN if training else EVALUATE
        meet(what, members(ddp.process_group))


def before_join(name, values):
    """Count a `with join()` as a loop: ranks make different numbers of steps."""
    state.joins, state.join_step = state.joins + 1, state.steps


def note_unused(error):
    """Name the parameters in DDP's error about gradients that were not reduced."""
    indices = re.findall("did not receive grad for rank \\d+: ([\\d ]+)", error)
    if state.ddp and indices:
        named = state.ddp.module.named_parameters()
        names = [name for name, p in named if p.requires_grad]
        unused = ", ".join(names[int(i)] for i in indices[0].split())
        line, rank = state.forward_line, state.rank
        record.unused = f"{line}: rank {rank} had no gradient for {unused}"


def after_ddp(result, values):
    named = values[0].module.named_parameters()
    record.names |= {id(p): name for name, p in named}


def after_fully_shard(result, values):
    for module in values[0] if isinstance(values[0], list) else values[:1]:
        module.register_forward_pre_hook(before_fsdp_forward)


def before_fsdp_forward(module, inputs):
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    if state.fsdp_root in (None, module):  # its parts come later
        state.fsdp_root = module
        note_inputs(inputs)


def after_fsdp1(result, values):
    record.sharded = True


def before_fsdp1_forward(name, values):
    before_fsdp_forward(values[0], values[1:])


def before_compile(name, values):
    """Keep DDP's forward and the hooks out of graphs; the model stays in one."""
    global call
    if not hasattr(DDP.forward, "outside_of_graphs"):
        DDP.forward = torch.compiler.disable(DDP.forward, recursive=False)
        DDP.forward.outside_of_graphs = True
        call = torch.compiler.disable(call)


# Loaders: which indices, in which order, and whether steps were made with them.
def loop_of(iterator):
    new = SimpleNamespace(dealt=[], batches=0, steps=0, length=float("inf"), last=0)
    new.exhausted, new.gathered, new.label, new.key = False, False, None, ""
    return vars(iterator).setdefault("checkup", new)


def after_init(result, values):
    vars(values[0])["checkup_made"] = user_stack()


def after_next_index(batch, values):
    loop_of(values[0]).dealt.append(batch)


def before_iter(name, values):  # persistent workers reuse the iterator
    vars(values[0]._iterator or state).pop("checkup", None)


def after_iter(iterator, values):
    loop, loader = loop_of(iterator), values[0]
    data, subsets = loader.dataset, []
    while hasattr(data, "indices") and hasattr(data, "dataset"):  # Subsets
        subsets, data = [*subsets, data.indices], data.dataset
    stream = isinstance(data, IterableDataset) or not hasattr(data, "__len__")
    loop.base_length = 0 if stream else len(data)
    loop.loader, loop.subsets, loop.data = loader, subsets, data
    with suppress(TypeError):  # some have no length
        loop.length = len(loader)
    loop.line, loop.made = user_line(), vars(loader).get("checkup_made", "")
    loop.key = f"{user_stack()} {loop.made} {loop.base_length} {len(subsets)}"
    loop.first = loop.last = state.steps
    loop.base_seed = iterator._base_seed if loader.num_workers else None
    record.epochs.append(loop)


def note_batch(loop, batch):
    state.epoch, loop.batches, loop.last = loop, loop.batches + 1, state.steps
    state.batch, state.reduced = state.batch + 1, False
    if state.steps < MAX_BATCHES:
        loop.latest = contents(batch)


def wrap_next():
    original = Iterator.__next__

    @functools.wraps(original)
    def wrapper(self):
        state.events += 1
        try:
            batch = original(self)
        except StopIteration:
            loop_of(self).exhausted = True
            raise
        note_batch(loop_of(self), batch)
        return batch

    Iterator.__next__ = wrapper


# Checksums: equal for equal tensors. They stay on the device.
def bits_of(t):
    t = t.detach()
    t = torch.view_as_real(t) if t.is_complex() else t
    return t.contiguous().view(BITS[t.element_size()])


def checksums(tensors, device="cpu"):
    """Return a tensor (N,) of the sums of all bits; 0 for what is None or sparse."""
    found = []
    for t in tensors:
        if t is None or t.is_sparse:
            t = torch.zeros(1, device=device)
        bits = bits_of(t)
        found.append(bits.sum(dtype=bits.dtype))
    if len({t.dtype for t in found}) > 1:
        found = [t.long() for t in found]
    # A model may be spread over several GPUs.
    found = [t.to(found[0].device, non_blocking=True) for t in found]
    return torch.stack(found) if found else torch.zeros(0)


def contents(values):
    """Return [(shape, checksum)] of the tensors in a batch or in arguments.

    Values are also weighted by position: sums of labels may be equal by chance.
    A tensor whose elements are all equal has the checksum 0: it says nothing.
    """
    found = []
    for t in tree_leaves(values):
        plain = isinstance(t, torch.Tensor) and not hasattr(t, "device_mesh")
        if not plain or t.is_sparse or t.numel() < 4:
            continue
        bits = bits_of(t).flatten()
        part = bits[:4096].long()
        places = torch.arange(1, len(part) + 1, device=t.device)
        varies = (part != part[0]).any().long()
        total = bits.sum() + (part * places).sum() * 1_000_003
        found.append((tuple(t.shape), total * varies))
    return found


def note_inputs(values):
    label = next_label(state.epoch)
    known = record.inputs.get(label, [])  # of earlier forwards in this step
    if state.steps < MAX_BATCHES and len(known) < MAX_TENSORS:
        tensors = known + contents(values)
        if tensors:
            record.inputs[label] = tensors


def next_label(loop):
    """Return (loop, step in it): steps of ranks are compared if these are equal."""
    if loop is None:
        return -state.joins, state.steps - state.join_step
    if loop.label is None:
        state.loops += 1
        loop.label = state.loops
    return loop.label, loop.steps


# Steps of the optimizer.
def parameters(optimizer):
    found = [p for group in optimizer.param_groups for p in group["params"]]
    record.sharded = record.sharded or any(hasattr(p, "device_mesh") for p in found)
    return [] if record.sharded or state.steps >= MAX_STEPS else found


def before_step(optimizer, args, kwargs):
    state.depth += 1
    if state.depth > 1 or state.shadowing:  # within another, or for other ranks
        return
    found = parameters(optimizer)
    device = found[0].device if found else torch.device("cpu")
    if not record.start:
        record.start, record.device = [checksums(found)], name_device(device)
        note_shards(optimizer)
    loop = state.epoch
    label = next_label(loop)
    number, steps = label
    if steps == 0 and len(record.random) < 2:
        record.random, state.random_loop = [random_states(device)], number
    elif number == state.random_loop and steps < 5:
        # Between the steps of two optimizers there may be no random numbers.
        record.random[1:] = [random_states(device)]
    if loop is None or loop.batches < loop.length:  # the last one's may be read
        state.trained.add(state.batch)
    if loop:
        if hasattr(loop, "latest"):
            record.batches[label] = loop.__dict__.pop("latest")
        loop.steps += 1
    record.labels.append(label)
    record.gradients.append(checksums([p.grad for p in found], device))
    record.weights.append(checksums(found))  # before the step
    names = [f"{record.names.get(id(p), 'one')} {(*p.shape,)}" for p in found]
    record.models.append((user_line(), names))


def note_shards(optimizer):
    """Record checksums of DTensors: shards differ, and replicas are equal."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in enumerate(tensors, start=1):
        if isinstance(p, DTensor):
            coordinates = p.device_mesh.get_coordinate()
            pairs = zip(p.placements, coordinates, strict=True)
            # Ranks with the same shard, in one mesh or in another, are replicas.
            place = [c for placement, c in pairs if not placement.is_replicate()]
            for shape, checksum in contents(p.to_local()):
                record.shards[number] = place, shape, checksum


def after_clip(result, values):
    """Record the norm by which a rank scales its gradients."""
    note_norm(result)


def before_clip(name, values):
    note_norm(values[2])


def note_norm(norm):
    if isinstance(norm, DTensor):
        if not all(placement.is_replicate() for placement in norm.placements):
            return
        norm = norm.to_local()
    if state.steps < MAX_STEPS:
        label = next_label(state.epoch)
        record.clips.setdefault(label, (user_line(), norm.detach()))


def after_step(optimizer, args, kwargs):
    state.depth -= 1
    if state.depth or state.shadowing:
        return
    state.last_parameters = parameters(optimizer)
    state.steps, state.events = state.steps + 1, state.events + 1
    if state.epoch is None:
        state.batch, state.reduced = state.batch + 1, False
    if state.steps == state.max_steps:
        raise StopAfterSteps


def name_device(device):
    node = os.uname().nodename
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        return f"{node} {device}"
    gpu = torch.cuda.get_device_properties(
        device
    )  # its number may differ by process
    return f"{node} {gpu.uuid} {gpu.pci_domain_id}:{gpu.pci_bus_id}"


def random_states(device):
    states = {"PyTorch's generator": torch.get_rng_state().numpy().tobytes()}
    if device.type != "cpu":
        gpu = torch.get_device_module(device).get_rng_state()
        states["the GPU's generator"] = gpu.numpy().tobytes()
    states["Python's random"] = repr(random.getstate()).encode()
    if "numpy" in sys.modules:
        numpy_state = sys.modules["numpy"].random.get_state()
        states["NumPy's generator"] = repr(numpy_state[2:]).encode()
        states["NumPy's generator"] += numpy_state[1].tobytes()
    return states


# Numbers that are read or printed, and files that are written.
def after_read(result, values):
    caller, loop, tensor = sys._getframe(1), state.epoch, values[0]
    while caller.f_code.co_filename.endswith(HOOK_FILES):
        caller = caller.f_back
    if is_library(caller.f_code.co_filename):
        return
    computed = tensor.requires_grad or state.forward_batch == state.batch
    if tensor.device.type != "cpu" or (computed and record.device in (None, "cpu")):
        record.syncs[user_line()].add(state.batch)
    if isinstance(result, str) and tensor.numel() == 1:  # f"{loss:.3f}"
        result = torch.Tensor.tolist(tensor)
    if not isinstance(result, int | float | list) or isinstance(result, bool):
        return
    numbers = [v for v in tree_leaves(result) if isinstance(v, int | float)]
    if loop:
        where = user_line(), loop.key if not loop.steps else "", not loop.steps
    elif torch.is_grad_enabled():
        return
    else:  # an evaluation without a loader
        where = user_line(), "", None
    if len(record.read[where[0]]) < MAX_STEPS:
        record.read[where[0]] += numbers[:MAX_STEPS]
    if is_sum_of_means(tensor):
        state.totals[where] += numbers
    elif state.reduced:
        record.reduced = True
        state.shared[where] += numbers
    else:
        state.values[where] += numbers


class Tee:
    """sys.stdout or sys.stderr, whose lines are looked at."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        count = self.stream.write(text)
        state.events += 1
        state.partial += text
        *lines, state.partial = re.split("[\r\n]", state.partial[-2000:])
        for line in lines:
            note_output(line)
        return count


def note_output(line):
    state.lines.append(line)
    if re.search(r"(rank|gpu|process|worker)\W*0(?![\d.])", line, re.IGNORECASE):
        return  # it says whose numbers these are
    note_numbers(re.findall(r"(?<![\w.])\d+\.\d+|(?<![\w.])\d{3,}(?![\w.])", line))


def before_scalar(name, values):
    for value in tree_leaves(values[1:]):
        if isinstance(value, float):
            note_numbers([repr(value)])


def note_numbers(texts):
    """Compare the numbers of a line of output with those that this rank has read."""
    loop = state.epoch
    # Shorter ones are often the same by chance.
    texts = [t for t in texts if len(t.replace(".", "").lstrip("0")) >= 3]
    if not texts or (loop and not (loop.exhausted or loop.batches >= loop.length)):
        return  # in the middle of an epoch a rank may print its own loss
    shared = [candidates(values, loop, "own") for values in state.shared.values()]
    shared = [number for numbers in shared for number in numbers]
    texts = [text for text in texts if not found_in([text], shared)]
    for kind, sources in (("own", state.values), ("sum", state.totals)):
        for (line, key, evaluates), values in sources.items():
            old = record.prints.get((kind, line, key), ["", 0, 0, evaluates])
            printed = found_in(texts, candidates(values, loop, kind))
            if printed:
                old[0] = f"{user_line()}: {printed} is what rank 0 read at {line}"
            old[1:3] = old[1] + bool(printed), old[2] + 1
            record.prints[kind, line, key] = old
    for numbers in (state.values, state.totals, state.shared):
        numbers.clear()


def candidates(values, loop, kind):
    """Return the numbers that a script may compute from those it has read."""
    last, before, total = values[-1], values[-2:][0], sum(values)
    if kind == "sum":
        return [last, total / len(values)]
    if loop is None:
        return [f * v for v in (last, total / len(values)) for f in (1, 100)]
    samples = sum(len(b) for b in loop.dealt if hasattr(b, "__len__"))
    own = len(loop.subsets[0]) if loop.subsets else loop.base_length
    found = [last, total / len(values), before / (last or 1)]
    for count in {samples, own, loop.base_length, loop.batches} - {0}:
        found += [total / count, last / count]
    return [factor * value for value in found for factor in (1, 100)]


def found_in(texts, numbers):
    """Return the first text that is one of these numbers."""
    for text in texts:
        decimals = len(text.partition(".")[2])
        for number in numbers:
            if text in (repr(number), f"{number:.{decimals}f}"):
                return text
    return ""


def audit(event, arguments):
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        note_file(arguments[0], append=bool(arguments[2] & os.O_APPEND))
    elif event == "os.rename":
        note_file(arguments[1])


def before_save(name, values):
    paths = [v for v in values if isinstance(v, str | os.PathLike)]
    if paths:
        note_file(paths[0])


def note_file(path, append=False):
    if not isinstance(path, str | os.PathLike):
        return
    path = os.path.abspath(path)
    ignored = path.startswith(("/dev/", "/proc/"))
    if not ignored and not any(cache in path for cache in CACHES):
        line, only_appended = record.files.get(path, (None, True))
        record.files[path] = line or user_line(), only_appended and append


def watch_late_imports(*_):
    """Wrap what a script may have imported since."""
    tensorboard = sys.modules.get("torch.utils.tensorboard.writer")
    wandb = sys.modules.get("wandb.sdk.wandb_run")
    for module, owner, name in (
        (tensorboard, "SummaryWriter", "add_scalar"),
        (wandb, "Run", "log"),
    ):
        owner = getattr(module, owner, None)
        if owner and not hasattr(getattr(owner, name), "__wrapped__"):
            wrap(owner, name, before=before_scalar)


def install():
    """Wrap the functions through which every DDP script passes."""
    for name in (*GATHERS, *REDUCTIONS, *OTHERS):
        if hasattr(dist, name):
            wrap(dist, name, before=before_collective, during="waiting")
    wrap(dist, "all_reduce", before=before_all_reduce, after=after_all_reduce)
    wrap(DDP, "__init__", after=after_ddp)
    wrap(DDP, "forward", before=before_forward, during="busy")
    wrap(torch.autograd, "backward", before=note_loss, during="busy")
    wrap(Join, "__enter__", before=before_join)
    wrap(Join, "__exit__", during="shadowing")
    wrap(FSDP1, "__init__", after=after_fsdp1)
    wrap(FSDP1, "forward", before=before_fsdp1_forward, during="busy")
    wrap(torch.nn.utils, "clip_grad_norm_", after=after_clip)
    wrap(torch.nn.utils, "clip_grads_with_norm_", before=before_clip)
    wrap(torch, "compile", before=before_compile)
    for module, name, after in (
        ("torch.distributed.fsdp", "fully_shard", after_fully_shard),
        ("torch.distributed.tensor.parallel", "parallelize_module", note_parallel),
        ("torch.distributed.tensor._dispatch", "is_rng_supported_mesh", note_drawn),
    ):
        with suppress(ImportError, AttributeError):
            wrap(__import__(module, fromlist=[name]), name, after=after)
    wrap(DataLoader, "__init__", after=after_init)
    wrap(DataLoader, "__iter__", before=before_iter, after=after_iter)
    wrap(DataLoader, "__iter__", before=watch_late_imports)
    wrap(Iterator, "_next_index", after=after_next_index)
    wrap_next()
    for name in HOST_SYNCS:
        wrap(torch.Tensor, name, after=after_read)
    wrap(torch, "save", before=before_save)
    wrap(
        dist,
        "destroy_process_group",
        before=lambda *_: setattr(record, "closed", True),
    )
    optimizers.register_optimizer_step_pre_hook(before_step)
    optimizers.register_optimizer_step_post_hook(after_step)
    sys.addaudithook(audit)


def rebind():
    """Replace what the user's modules have imported before: in a spawned process."""
    for module in [*sys.modules.values()]:
        if is_library(getattr(module, "__file__", None) or "<"):
            continue
        # The functions of a spawned process's main module have globals of their own.
        functions = [v for v in vars(module).values() if isinstance(v, FunctionType)]
        for names in [vars(module), *(f.__globals__ for f in functions)]:
            for name, value in [*names.items()]:
                if id(value) in WRAPPERS:
                    names[name] = WRAPPERS[id(value)]


def note_parallel(result, values):
    record.parallel = True


def note_drawn(supported, values):
    record.drawn_alike = record.drawn_alike or not supported
