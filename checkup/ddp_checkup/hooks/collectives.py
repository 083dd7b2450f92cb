"""Collectives, and other calls that wait for ranks.

    collective   what (name, shape, dtype, operation), group (its ranks; None: all),
                 large (elements of its tensors that are as large as a parameter)
    unwaited     at the end: an asynchronous collective that nobody waited for
    one rank's   a number is read here that was reduced to another rank (`rank`)

The first rank to reach a collective records it in the store. The others compare
before they begin.
"""

import inspect
import json
import re
import threading
from collections import Counter

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ddp_checkup import watch
from ddp_checkup.hooks import late, loops, steps
from ddp_checkup.hooks.checksums import has_bits
from ddp_checkup.hooks.wrapping import file_of_caller, wrap
from ddp_checkup.trace import is_library, trace, user_line

KINDS = "gather|reduce(?!_op)|to_all|broadcast|scatter|barrier"
COLLECTIVE = re.compile(f"(all_|monitored_)?({KINDS})")
MAX_COMPARED = 100_000  # collectives: all of them take bytes of the store
MAX_WORKS = 20  # asynchronous collectives to keep, with their tensors


def reset():
    global counts, works, reduced, reduced_storages, to_other_rank
    counts = Counter()  # of collectives, by group
    works = {}  # by id: (line, name, its Work) of asynchronous collectives
    reduced = (0, "")  # number of the batch in which numbers were reduced, and where
    reduced_storages = set()  # of tensors reduced since the last step
    to_other_rank = {}  # storages of tensors that were reduced to another rank


def members(group):
    """Return the ranks of a group, or None for all ranks."""
    ranks = tuple(dist.get_process_group_ranks(group))
    return ranks if len(ranks) < trace.world_size else None


def compare_order(what, group=None, line=None, large=0):
    """Add a collective event; end the job if another rank reaches another one."""
    line = line or user_line()
    if counts[group] < MAX_COMPARED:
        trace.add("collective", line=line, what=what, group=group, large=large)
    counts[group] += 1
    number = counts[group]
    if watch.store is None or number > MAX_COMPARED:
        return
    mine = json.dumps([what, str(line), trace.rank])
    key = f"collective/{group}/{number}"
    other, place, rank = json.loads(watch.store.compare_set(key, "", mine))
    if other != what:
        text = f"rank {trace.rank} reaches {what}, but rank {rank} reaches {other}"
        watch.stop_job("collectives", line, f"{text} at {place}")
        threading.Event().wait()  # watch.py ends this process


def is_operation(value):
    return isinstance(value, dist.ReduceOp | dist.ReduceOp.RedOpType)


def describe(name, values):
    """Return a text about a collective that must be equal on all ranks."""
    words = [name]
    if "object" not in name:  # objects may have different sizes
        first = name == "all_to_all_single"  # rows differ by rank
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        words += [f"{(*t.shape[first:],)} {t.dtype}" for t in tensors]
        operations = [v for v in values if isinstance(v, dist.ReduceOp.RedOpType)]
        # Ranks may leave out SUM, which is the default.
        words += [v.name for v in operations if v != dist.ReduceOp.SUM]
    if name in ("broadcast", "reduce"):
        words += [f"of rank {v}" for v in values if type(v) is int]
    return " ".join(words).replace("torch.", "")


def before_collective(name, values):
    groups = [v for v in values if isinstance(v, dist.ProcessGroup)]
    if dist.GroupMember.NON_GROUP_MEMBER in [v for v in values if type(v) is int]:
        return  # the call returns at once outside its group
    tensors = [t for t in tree_leaves(values) if has_bits(t)]
    by_script = not (trace.calling or steps.depth)  # not by DDP or an optimizer
    if by_script and name not in ("all_gather_object", "gather_object"):
        steps.synced |= {steps.place_of(t) for t in tensors}
    if name == "all_reduce" and trace.passes and by_hand():
        # Without DDP, gradients that are equal before their sum show equal batches.
        loops.note_inputs(values[:1])
    if re.search("gather|reduce|to_all", name) and by_script:
        note_reduction(name, values, tensors)
    large = 0
    if not trace.passes and name != "broadcast":
        # Weights are averaged after a step, not after a backward pass.
        sizes = steps.parameter_sizes()
        large = sum(t.numel() for t in tensors if t.numel() in sizes)
    group = members(groups[0]) if groups else None
    compare_order(describe(name, values), group, large=large)


def by_hand():
    """Return whether the script averages gradients itself."""
    return not (trace.of("wrap") or steps.depth)


def note_reduction(name, values, tensors):
    """Note that numbers which the script reads from now on come from all ranks."""
    global reduced
    reduced_storages.update(t.untyped_storage().data_ptr() for t in tensors)
    to_one = name == "reduce" or name.startswith("gather")
    reduced = trace.batches, "on one rank" if to_one else "on all ranks"
    for loop in trace.of("loop"):
        loop.reduced = loop.reduced or loop.first == trace.step
    if "gather" in name and trace.loop:
        trace.loop.gathered = True
    ranks = [v for v in values if type(v) is int]
    for tensor in tensors:
        place = tensor.untyped_storage().data_ptr()
        if name == "reduce" and ranks and trace.rank not in ranks:
            to_other_rank[place] = tensor, ranks[0], user_line()
        else:
            to_other_rank.pop(place, None)


def where_reduced():
    """Return where this batch's numbers were reduced, as "on all ranks", or ""."""
    batch, where = reduced
    return where if batch == trace.batches else ""


def after_collective(name):
    def after(work, values):
        if name == "all_reduce":
            note_sum(work, values)
        # A library may wait in other ways.
        of_script = isinstance(work, dist.Work) and not is_library(file_of_caller())
        if of_script and len(works) < MAX_WORKS:
            works[id(work)] = user_line(), name, work

    return after


def note_sum(work, values):
    """Note a sum of gradients, which the script may divide before the step."""
    tensor, *others = values
    operations = [v for v in others if is_operation(v)]
    sums = all(v == dist.ReduceOp.SUM for v in operations)
    of_gradients = trace.passes and by_hand() and sums and work is None
    if of_gradients and has_bits(tensor) and tensor.numel() > 1:
        steps.summed.append(tensor.detach().abs().sum())


def after_wait(result, values):
    works.pop(id(values[0]), None)


def before_redistribute(name, values):
    """Compare full_tensor() and other calls that gather the parts of a DTensor."""
    tensor, mesh = values[0], values[0].device_mesh
    if not all(placement.is_replicate() for placement in tensor.placements):
        ranks = tuple(mesh.mesh.flatten().tolist())
        group = ranks if len(ranks) < trace.world_size else None
        compare_order(f"{name} of a DTensor {tuple(tensor.shape)}", group)


def finish():
    for line, name, _ in works.values():
        trace.add("unwaited", line=line, name=name)


def install():
    for name, value in [*vars(dist).items()]:
        if COLLECTIVE.match(name) and inspect.isfunction(value):
            after = after_collective(name)
            wrap(dist, name, before_collective, after, during="waiting")
    for name in ("send", "recv"):
        wrap(dist, name, during="waiting")
    for name in ("wait", "is_completed", "get_future", "synchronize"):
        wrap(dist.Work, name, after=after_wait)
    tensor = "torch.distributed.tensor"
    redistribute = {"before": before_redistribute, "during": "waiting"}
    late.wrap_when_imported(tensor, "DTensor.redistribute", **redistribute)
