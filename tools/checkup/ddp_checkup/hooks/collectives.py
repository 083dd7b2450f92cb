"""Collectives, and forwards that wait for other ranks.

The first rank to come to a collective writes it into the store; the others compare
before they begin.
"""

import inspect
import json
import re
import threading
import weakref
from collections import Counter, namedtuple

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, _dispatch, parallel
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_checkup.hooks.loaders import leave_evaluation, note_inputs
from ddp_checkup.hooks.losses import note_gather, note_graph
from ddp_checkup.hooks.modules import note_overwritten
from ddp_checkup.hooks.shared import (
    file_of_caller,
    keep_out_of_graphs,
    set_record,
    tensors_of,
    wrap,
)
from ddp_checkup.record import is_library, record, state, user_line

KINDS = "gather|reduce(?!_op)|to_all|broadcast|scatter|barrier"
COLLECTIVE = re.compile(f"(all_|monitored_)?({KINDS})")
MAX_NUMBERS = 1000  # losses, and tensors with numbers that are reduced
MAX_SUMS = 8  # numbers in such a tensor
MAX_WORKS = 20  # that nobody has waited for: each keeps its tensors
# numbers: before they were added up over the ranks; again: in the same tensor as the
# last ones; losses[first:count]: those of the loop over a loader; sizes: of its
# batches; passes: backward passes of a step; averages: whether the op is AVG
Sum = namedtuple("Sum", "line again first count passes sizes numbers averages")
MAX_COLLECTIVES = 100_000  # compared; each takes some bytes of the store


def reset():
    record.counts, record.last = Counter(), {}  # collectives, by group
    record.join = record.parallel = record.drawn_alike = False
    record.unused = None  # where DDP missed gradients; None: no DDP
    record.uncalled = {}  # by id: lines where DDP models were made
    record.moved = Counter()  # by step: elements of weights reduced or gathered then
    record.losses = []  # numbers whose backward pass was made
    record.sums, state.summed = [], {}  # each a Sum; by line: the last tensor
    record.to_one = False  # whether one rank gets what others give
    state.unwaited = {}  # by id: (line, what, its Work) of asynchronous collectives
    state.summed_gradients = []  # since the step, by hand: sums of absolute values
    state.passes = 0  # backward passes since the last step
    state.waiting, state.busy = "", ""  # what runs: wrap()
    record.late_no_sync = (
        None  # a backward pass within it, after a forward that is not
    )
    state.forward_syncs = False  # whether DDP prepared to reduce in the last forward
    state.ddp, state.forward_line = None, ""  # the last forward with gradients
    state.forward_batch, state.fsdp_root = -1, None
    state.backward_line, state.compiles = "", False
    state.reduced_storages = set()  # of tensors reduced since the last step


def stop_job(kind, text):
    """Tell all ranks that the job cannot go on, and why; the first one counts."""
    state.store.compare_set("stop", "", json.dumps([kind, text]))


def check_collective_order(what, ranks=None, line=""):
    record.counts[ranks] += 1
    number = record.counts[ranks]
    record.last[ranks] = line = line or user_line()
    if state.store is None or number > MAX_COLLECTIVES:
        return
    mine = json.dumps([what, line, state.rank])
    first = state.store.compare_set(f"collective/{ranks}/{number}", "", mine)
    other, other_line, rank = json.loads(first)
    if other != what:
        text = f"rank {state.rank} reaches {what} at {line}, but rank {rank} reaches"
        stop_job("collectives", f"{text} {other} at {other_line}")
        threading.Event().wait()  # monitor.py ends this process


def members(group):
    ranks = tuple(dist.get_process_group_ranks(group))
    return ranks if len(ranks) < state.world else None


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
    if state.depth:
        note_own_averages(name, values)
    averages = state.busy or state.depth  # DDP's hooks, ZeroRedundancyOptimizer
    # No gradients, but weights that are averaged after a step, or in one
    if not state.passes and not state.busy and name != "broadcast":
        weights = {record.elements, *state.parameter_sizes}
        sizes = [tensor.numel() for tensor in tensors_of(values)]
        record.moved[state.steps] += sum(size for size in sizes if size in weights)
    if state.passes and not averages and "reduce" in name:
        record.averages |= any(tensor.numel() > 1 for tensor in tensors_of(values))
    if name in ("all_reduce", "reduce") and not averages:
        note_sum(values)
    if re.search("gather|reduce|to_all", name) and not averages:
        for tensor in tensors_of(values):
            state.reduced_storages.add(tensor.untyped_storage().data_ptr())
        to_one = name == "reduce" or name.startswith("gather")
        state.reduced = "on one rank" if to_one else "on all ranks"
        record.to_one |= to_one
        for loop in record.epochs:
            loop.reduced = loop.reduced or loop.first == state.steps
    if "gather" in name and state.epoch:
        state.epoch.gathered = True
    # A model or a loss that DDP wraps may gather in its forward.
    if "gather" in name and not state.depth and state.busy in ("", "forward"):
        note_gather(name, values)
    check_collective_order(" ".join(what), members(groups[0]) if groups else None)


def note_work(name):
    """Return a hook that notes what a script has to wait for."""

    def after(work, values):
        few = len(state.unwaited) < MAX_WORKS
        # A library has other ways to wait.
        if isinstance(work, dist.Work) and not is_library(file_of_caller()) and few:
            state.unwaited[id(work)] = user_line(), name, work

    return after


def after_wait(result, values):
    state.unwaited.pop(id(values[0]), None)


def before_redistribute(name, values):
    """Compare full_tensor() and others that gather the parts of a DTensor."""
    tensor, mesh = values[0], values[0].device_mesh
    if not all(placement.is_replicate() for placement in tensor.placements):
        ranks = tuple(mesh.mesh.flatten().tolist())
        group = ranks if len(ranks) < state.world else None
        what = f"{name} of a DTensor {tuple(tensor.shape)}"
        check_collective_order(what, group)


def note_own_averages(name, values):
    """Note that optimizer.step() itself averages over the ranks, as ZeRO does.

    To gather or to broadcast parameters is no average, and neither is one number.
    """
    groups = state.optimizer.param_groups if state.optimizer else ()
    parameters = [p for group in groups for p in group["params"]]
    own = {t.untyped_storage().data_ptr() for t in tensors_of([*parameters])}
    for tensor in tensors_of(values[:1]):  # where the result goes
        other = tensor.untyped_storage().data_ptr() not in own
        if tensor.numel() > 1 and (other or re.search("reduce|to_all", name)):
            record.own_averages = True


def note_sum(values):
    """Record numbers before ranks add them up: a mean's sum is no mean."""
    tensor, *others = values
    plain = isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor)
    kinds = [v for v in others if is_operation(v)]
    few = plain and tensor.numel() <= MAX_SUMS and tensor.is_floating_point()
    averages = kinds == [dist.ReduceOp.AVG]
    sums = averages or kinds in ([], [dist.ReduceOp.SUM])
    if few and sums and len(record.sums) < MAX_NUMBERS:
        loop = state.epoch
        first, sizes = (loop.losses, [*loop.sizes]) if loop else (0, [])
        passes = state.passes or [1, *record.passes][-1]
        numbers = tensor.detach().flatten().clone()
        count, line = len(record.losses), user_line()
        again = state.summed.get(line, type(None))() is tensor
        state.summed[line] = weakref.ref(tensor)
        again = again and not averages
        of_loop = first, count, passes, sizes
        record.sums.append(Sum(line, again, *of_loop, numbers, averages))


def before_all_reduce(name, values):
    if not state.ddp and not record.sharded:  # gradients that are averaged by hand
        note_inputs(values[0])


def after_all_reduce(result, values):
    """Note a sum of gradients, which the script may divide before the step."""
    tensor, *others = values
    sums = all(v == dist.ReduceOp.SUM for v in others if is_operation(v))
    by_hand = state.passes and not (state.busy or state.depth or state.ddp)
    plain = isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor)
    if by_hand and plain and sums and tensor.numel() > 1 and result is None:
        state.summed_gradients.append(tensor.detach().abs().sum())


def is_operation(value):
    return isinstance(value, dist.ReduceOp | dist.ReduceOp.RedOpType)


def before_backward(name, values):
    state.passes += 1
    loss = values[0] if values else None
    plain = isinstance(loss, torch.Tensor) and not isinstance(loss, DTensor)
    is_number = plain and loss.numel() == 1
    if is_number and len(record.losses) < MAX_NUMBERS:
        record.losses.append(loss.detach().reshape(()).clone())
    state.backward_line = user_line()
    if (
        state.ddp
        and state.forward_syncs
        and not state.ddp.require_backward_grad_sync
    ):
        record.late_no_sync = record.late_no_sync or state.backward_line
    if is_number:
        note_graph(loss)


def after_ddp(result, values):
    record.names |= {id(p): n for n, p in values[0].module.named_parameters()}
    record.uncalled[id(values[0])] = user_line()


def before_forward(name, values):
    ddp, state.forward_batch = values[0], state.batch
    record.uncalled.pop(id(ddp), None)
    training = torch.is_grad_enabled()
    if training:
        state.ddp, state.forward_line = ddp, user_line()
        state.forward_syncs = ddp.require_backward_grad_sync
        record.unused = ""
        leave_evaluation()
        note_inputs(values[1:])
        if ddp.will_sync_module_buffers():
            note_overwritten(ddp)
    if record.join:
        return
    buffers = ddp.will_sync_module_buffers() and ddp.require_forward_param_sync
    if buffers or (training and ddp.require_backward_grad_sync):
        what = f"a DDP forward with{'' if training else 'out'} gradients"
        check_collective_order(what, members(ddp.process_group))


def after_forward(result, values):
    """Count the backward pass as a collective: its gradients wait for all ranks."""
    ddp = values[0]
    syncs = torch.is_grad_enabled() and ddp.require_backward_grad_sync
    outputs = [t for t in tensors_of(result) if t.requires_grad]
    if record.join or not (syncs and outputs):
        return
    begun = []

    def before_gradient(gradient):
        if not begun:
            begun.append(True)
            group, line = members(ddp.process_group), state.backward_line
            check_collective_order("the backward pass of a DDP model", group, line)

    for output in outputs:
        output.register_hook(before_gradient)


def note_unused(error):
    """Name the parameters in DDP's error about gradients that were not reduced."""
    indices = re.findall("did not receive grad for rank \\d+: ([\\d ]+)", error)
    if state.ddp and indices:
        named = state.ddp.module.named_parameters()
        names = [name for name, p in named if p.requires_grad]
        unused = ", ".join(names[int(i)] for i in indices[0].split())
        line, rank = state.forward_line, state.rank
        record.unused = f"{line}: rank {rank} had no gradient for {unused}"


def after_fully_shard(result, values):
    for module in values[0] if isinstance(values[0], list) else values[:1]:
        module.register_forward_pre_hook(before_fsdp_forward)


def before_fsdp_forward(module, inputs):
    record.sharded = True
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    if state.fsdp_root in (None, module):  # its parts come later
        state.fsdp_root = module
        note_inputs(inputs)


def before_compile(name, values):
    """Keep DDP's forward and the hooks out of graphs; the model stays in one."""
    state.compiles = True
    if not hasattr(DDP.forward, "outside_of_graphs"):
        DDP.forward = torch.compiler.disable(DDP.forward, recursive=False)
        DDP.forward.outside_of_graphs = True
        keep_out_of_graphs()


def install():
    for name, value in [*vars(dist).items()]:
        if COLLECTIVE.match(name) and inspect.isfunction(value):
            after = note_work(name)
            wrap(dist, name, before_collective, after, during="waiting")
    for name in ("send", "recv"):
        wrap(dist, name, during="waiting")
    for name in ("wait", "is_completed", "get_future", "synchronize"):
        wrap(dist.Work, name, after=after_wait)
    wrap(DTensor, "redistribute", before=before_redistribute, during="waiting")
    wrap(dist, "all_reduce", before_all_reduce, after_all_reduce)
    wrap(DDP, "__init__", after=after_ddp)
    wrap(DDP, "forward", before_forward, after_forward, during="busy")
    wrap(torch.autograd, "backward", before=before_backward, during="busy")
    wrap(Join, "__init__", after=set_record("join"))
    wrap(FSDP1, "__init__", after=after_fully_shard)
    wrap(FSDP1, "forward", during="busy")
    wrap(torch, "compile", before=before_compile)
    wrap(fsdp, "fully_shard", after=after_fully_shard)
    wrap(parallel, "parallelize_module", after=set_record("parallel"))
    if hasattr(_dispatch, "is_rng_supported_mesh"):  # not on CPUs
        alike = set_record("drawn_alike")  # all ranks draw the same numbers there
        wrap(_dispatch, "is_rng_supported_mesh", after=lambda ok, _: ok or alike())
