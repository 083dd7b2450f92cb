"""The checks: what a DDP script promises, how that is seen, and how to fix it.

Each check is a function of the ranks' records (monitor.py finishes them). It returns
found(...), unseen(...) or OK.
"""

from collections import Counter, namedtuple
from itertools import combinations, zip_longest
from pathlib import Path

Check = namedtuple("Check", "name level promise seen fixes function")
Verdict = namedtuple("Verdict", "state text level", defaults=["", None])
OK = Verdict("ok")
CHECKS = []


def check(name, level, promise, seen, fix, **fixes):
    """Add a function to the table of checks.

    level: error (wrong numbers, hangs, lost files), warning (likely a mistake) or
    advice (slow or untidy). seen: how the checkup sees it; fixes: for a framework.
    """

    def add(function):
        fixes_of_all = {"": fix, **fixes}
        CHECKS.append(Check(name, level, promise, seen, fixes_of_all, function))
        return function

    return add


def found(text, level=None):
    return Verdict("found", text, level)


def unseen(why):
    return Verdict("not seen", why)


# What several checks need.
def no_steps(ranks):
    return "" if all(r.steps for r in ranks) else "no optimizer step was made"


def have_parts(ranks):
    """Return whether ranks hold parts of one model, and so may share a batch."""
    names = [r.models[0][1] for r in ranks if r.models]
    return any(n != names[0] for n in names) or any(r.parallel for r in ranks)


def no_replicas(ranks):
    """Say why the ranks have no copies of one model, if so."""
    if no_steps(ranks):
        return no_steps(ranks)
    if any(r.sharded for r in ranks):
        return "the parameters are sharded"
    if not all(r.gradients for r in ranks):
        return "a GPU that waits cannot be read"
    return "the ranks have different parameters" if have_parts(ranks) else ""


def steps_of_all(ranks, part):
    """Yield (step, values on all ranks) for the steps that all ranks have made."""
    places = [{label: i for i, label in enumerate(r.labels)} for r in ranks]
    for i, label in enumerate(ranks[0].labels):
        values = [getattr(r, part) for r in ranks]
        where = [
            place.get(label, len(v)) for place, v in zip(places, values, strict=True)
        ]
        if all(w < len(v) for w, v in zip(where, values, strict=True)):
            yield i, [v[w] for w, v in zip(where, values, strict=True)]


def first_difference(ranks, part):
    """Say where and since when parameters differ between ranks, if they do."""
    for i, of_all in steps_of_all(ranks, part):
        bad = [j for j, v in enumerate(zip(*of_all, strict=False)) if len({*v}) > 1]
        if bad:
            step = i if part == "weights" else i + 1  # weights are those before it
            line, names = ranks[0].models[max(step, 1) - 1]
            name = names[bad[0]] if bad[0] < len(names) else "one"
            many = f"{len(bad)} of {len(names)} parameters differ, first {name}"
            return f"{line}, since step {step}: {many}"
    return ""


def are_averaged_later(ranks):
    """Return whether weights that differed become equal again, as in LocalSGD."""
    differed = set()  # of several optimizers each has its own weights
    for i, of_all in steps_of_all(ranks, "weights"):
        models = ranks[0].models
        model = str(models[min(i, len(models) - 1)])
        if any(v != of_all[0] for v in of_all):
            differed.add(model)
        elif model in differed:
            return True
    return False


def loops(ranks, train):
    """Yield (line, number, loops, items) of each loop over a loader.

    loops: the loop of each rank; items: the set that they share out, or None if each
    rank has its own set.
    """
    known = [e for r in ranks for e in r.epochs]
    training = {e.key for e in known if e.trains}
    # One that was stopped before its first step looks like an evaluation.
    known = [e for e in known if e.trains or e.whole or e.key not in training]
    for key in dict.fromkeys(e.key for e in known if e.trains == train):
        chosen = {id(e) for e in known if e.key == key and e.trains == train}
        of_all = [[e for e in r.epochs if id(e) in chosen] for r in ranks]
        for number, group in enumerate(zip_longest(*of_all), start=1):
            group = [e for e in group if e]
            yield group[0].line, number, group, items_to_share(group)


def items_to_share(group):
    levels = [*zip(*(e.sets for e in group), strict=False)]
    for number, sets in enumerate(levels, start=1):
        if all(s == sets[0] for s in sets):
            return sets[0]
        # Subsets are shards if they are disjoint, but for what fills them up.
        union = set.union(*sets)
        if sum(map(len, sets)) - len(union) >= len(group):
            return None
        if number == len(levels) - 1:  # the rest may be there for another purpose
            return union
    return None


def count(group, items):
    """Return how many items were dealt out again, and how many never."""
    dealt = Counter(i for e in group for i in e.items)
    return dealt.total() - len(dealt), len(items - dealt.keys())


def evaluates_all(group, items):
    """Return whether each rank has evaluated all items."""
    return all({*e.items} == items for e in group)


def ended(ranks):
    return all(r.done for r in ranks)


# The checks, in the order of the table.
@check(
    "own-gpu",
    "error",
    "each rank has its own GPU",
    "the device of the parameters",
    "Choose the GPU by local_rank: torch.cuda.set_device(local_rank).",
)
def own_gpu(ranks):
    devices = Counter(r.device for r in ranks)
    shared = [device for device, n in devices.items() if n > 1]
    if no_steps(ranks) or "cpu" in devices:
        return unseen(no_steps(ranks) or "ranks on CPUs share the cores")
    return found(f"several ranks use {shared[0]}") if shared else OK


@check(
    "start",
    "error",
    "all ranks start from the same weights",
    "checksums of the parameters before the first step",
    "Wrap the model in DistributedDataParallel, which broadcasts rank 0's weights.",
)
def start(ranks):
    different = compare_shards(ranks, replicas=True)
    if different:
        return found(different)
    if no_replicas(ranks):
        return unseen(no_replicas(ranks))
    of_all = [r.start[0] for r in ranks]
    bad = [i for i, v in enumerate(zip(*of_all, strict=False)) if len({*v}) > 1]
    if not bad:
        return OK
    line, names = ranks[0].models[0]
    many = f"{len(bad)} of {len(names)} parameters differ, first {names[bad[0]]}"
    return found(f"{line}, before step 1: {many}")


def compare_shards(ranks, replicas):
    """Name a DTensor whose replicas differ, or whose shards are equal."""
    for a, b in combinations(ranks, 2):
        for number, (place, shape, value) in a.shards.items():
            other_place, other_shape, other = b.shards.get(number, (None, None, 0))
            if shape != other_shape or 0 in (value, other):  # 0: all zeros or ones
                continue
            if (place == other_place) == replicas and (value != other) == replicas:
                where = (
                    f"{a.models[0][0]}, before step 1: ranks {a.rank} and {b.rank}"
                )
                what = "different replicas" if replicas else "equal shards"
                return f"{where} have {what} of parameter {number} {shape}"
    return ""


@check(
    "shards",
    "error",
    "the shards of a parameter differ",
    "checksums of DTensors' shards before the first step",
    "Draw shards with seed + rank, and what is the same on all ranks with one seed.",
)
def shards(ranks):
    if not any(r.shards for r in ranks):
        return unseen(no_steps(ranks) or "no DTensor was trained")
    if any(r.drawn_alike for r in ranks):
        return unseen("on CPUs all ranks draw the same DTensors")
    equal = compare_shards(ranks, replicas=False)
    return found(equal) if equal else OK


@check(
    "gradients",
    "error",
    "gradients are averaged over the ranks",
    "checksums of the gradients at each step",
    "Train by the wrapped model, and wrap again after you unfreeze layers.",
    lightning="Call the modules from training_step(), not a copy kept elsewhere.",
    accelerate="Pass the model to accelerator.prepare(), and train what it returns.",
)
def gradients(ranks):
    if no_replicas(ranks):
        return unseen(no_replicas(ranks))
    if any(r.unused for r in ranks):
        return unseen("see unused-parameters")
    zero = {0}
    if all({*step} <= zero for r in ranks for step in r.gradients):
        return unseen("all gradients are zero")
    where = first_difference(ranks, "gradients")
    joined = any(r.join for r in ranks)  # join() sends weights at its end
    if where and are_averaged_later(ranks) and not joined:
        return unseen("the ranks average their weights now and then")
    return found(where) if where else OK


@check(
    "unused-parameters",
    "error",
    "each backward pass reaches all parameters",
    "DDP's error in the next forward pass",
    "Use all parameters in each forward pass, freeze those that are never used "
    "before DDP wraps the model, or set find_unused_parameters=True.",
    lightning='Set strategy="ddp_find_unused_parameters_true".',
    transformers="Set ddp_find_unused_parameters=True in TrainingArguments.",
    accelerate="Pass DistributedDataParallelKwargs(find_unused_parameters=True).",
)
def unused_parameters(ranks):
    if all(r.unused is None for r in ranks):
        return unseen("no DDP model was trained")
    texts = [r.unused for r in ranks if r.unused]
    return found(texts[0]) if texts else OK


@check(
    "weights",
    "error",
    "all ranks have the same weights after each step",
    "checksums of the parameters after each step",
    "Give the optimizers of all ranks the same options and the same state.",
)
def weights(ranks):
    if no_replicas(ranks):
        return unseen(no_replicas(ranks))
    if start(ranks).state == "found" or gradients(ranks).state != "ok":
        return unseen("the gradients or the first weights say it")
    where = first_difference(ranks, "weights")
    return found(where) if where else OK


@check(
    "clipping",
    "error",
    "all ranks clip by the same norm",
    "the norms of clip_grad_norm_() and clip_grads_with_norm_()",
    "Clip by the norm of all gradients, after they were averaged. If a rank has a "
    "part of them, sum the squares with dist.all_reduce(), then call "
    "clip_grads_with_norm_().",
)
def clipping(ranks):
    if not any(r.clips for r in ranks):
        return unseen(no_steps(ranks) or "no gradient was clipped")
    if not no_replicas(ranks) and gradients(ranks).state != "ok":
        return unseen("see gradients")
    for label in ranks[0].clips:
        clips = [r.clips[label] for r in ranks if label in r.clips]
        norms = [norm for _, norm in clips]
        if max(norms) - min(norms) > 1e-3 * max(norms):
            texts = " and ".join(f"{norm:.4g}" for norm in norms[:2])
            return found(f"{clips[0][0]}: ranks 0 and 1 clip by the norms {texts}")
    return OK


@check(
    "same-batch",
    "error",
    "each rank trains on different batches",
    "checksums of the batches and of the inputs to the wrapped model",
    "Give each rank its own data: a part by rank, or random batches by seed + rank.",
    transformers="Shard the stream: datasets.distributed.split_dataset_by_node().",
)
def same_batch(ranks):
    if no_steps(ranks) or have_parts(ranks):
        return unseen(
            no_steps(ranks) or "ranks that share a model may share a batch"
        )
    by_index = coverage(ranks)
    if by_index.state != "not seen":
        return OK if by_index.state == "ok" else unseen("see coverage")
    inputs, why = same_tensors(ranks, "inputs", all)
    if inputs:
        return found(inputs)
    batches, _ = same_tensors(ranks, "batches", any)
    # Ranks may load one batch and take a part of it each.
    if batches and (why or not slices(ranks)):
        return found(batches)
    return unseen("too few batches with contents") if why else OK


def same_tensors(ranks, part, how_many):
    """Say which ranks had the same tensors in all steps; or why that is not known.

    how_many: all or any of the tensors that differ from step to step.
    """
    labels = [
        label
        for label in ranks[0].labels
        if all(label in getattr(r, part) for r in ranks)
    ]
    labels = labels[:50]
    steps = [[getattr(r, part)[label] for label in labels] for r in ranks]
    if len(labels) < 3:
        return "", "there are fewer than three"
    width = min(len(step) for rank in steps for step in rank)
    telling = []
    for j in range(width):
        shape = steps[0][0][j][0]
        values = {step[j][1] for step in steps[0] if step[j][0] == shape} - {0}
        if len(values) > 1:
            telling.append(j)
    if not telling:
        return "", "they do not change"
    for a, b in combinations(range(len(ranks)), 2):
        pairs = [*zip(steps[a], steps[b], strict=True)]
        if how_many(all(one[j] == two[j] for one, two in pairs) for j in telling):
            line = ranks[0].models[0][0]
            return f"{line}: ranks {a} and {b} had the same batch in all steps", ""
    return "", ""


def slices(ranks):
    """Return whether ranks pass only a part of each batch to the wrapped model."""
    for label in ranks[0].labels:
        given, taken = ranks[0].batches.get(label), ranks[0].inputs.get(label)
        if given and taken:
            shape, shapes = given[0][0], [shape for shape, _ in taken]
            smaller = any(t < g for t, g in zip(shapes[0], shape, strict=False))
            return shape not in shapes and smaller
    return False


@check(
    "coverage",
    "error",
    "each sample is trained on by one rank, and none is left out",
    "the indices that the loaders dealt out in an epoch",
    "Use DistributedSampler(dataset), with the global rank, and not local_rank.",
    transformers="Do not set a sampler of your own, or make it shard by rank.",
    accelerate="Pass the loader to accelerator.prepare().",
    lightning="Do not set use_distributed_sampler=False, or shard by rank yourself.",
)
def coverage(ranks):
    why, bad = no_replicas(ranks), ""
    if have_parts(ranks):
        return unseen("ranks that share a model may share a batch")
    if not any(r.loaders for r in ranks):
        return unseen("no DataLoader was used")
    if slices(ranks):
        return unseen("the ranks take a part of each batch")
    why = "no DataLoader with indices was used"
    for line, number, group, items in loops(ranks, True):
        first = group[0]
        alike = all(e.sample == first.sample for e in group)
        known = first.shards or len(first.sets) > 1 or (first.sample and alike)
        batch = first.batch * len(ranks)
        twice = any(len(e.items) - len({*e.items}) >= batch for e in group)
        if items is None or not known:
            why = "each rank may have its own data set"
        elif first.replaces or (twice and not first.shards):
            why = "samples are drawn with replacement"
        else:
            why = ""
            again, missing = count(group, items)
            whole = all(e.whole for e in group) and len(group) == len(ranks)
            # The last global batch may be filled up, or dropped.
            batch = first.batch * len(ranks)
            may_miss = batch * first.drops if whole else len(items)
            may_repeat = batch if first.drops or not first.shards else len(ranks)
            differ = len({frozenset(e.items) for e in group}) == len(group)
            if again < min(may_repeat, len(items)) and missing <= may_miss:
                continue
            if first.chooses and differ:
                why = "the script's own sampler chooses the samples"
            else:
                bad = bad or (
                    f"{line}, epoch {number}: of {len(items)} samples {again} are "
                    f"dealt out again, {missing} never"
                )
    if bad:
        return found(bad)
    return unseen(why) if why else OK


@check(
    "set-epoch",
    "error",
    "each epoch has a new order",
    "the indices that the loader dealt out, from epoch to epoch",
    "Call sampler.set_epoch(epoch) before each epoch.",
    accelerate="Call loader.set_epoch(epoch) before each epoch.",
)
def set_epoch(ranks):
    before, why = {}, no_steps(ranks) or "there was one epoch"
    if not no_steps(ranks) and not any(r.epochs for r in ranks):
        why = "no DataLoader with indices was used"
    for line, number, group, _ in loops(ranks, True):
        now, last = group[0].order, before.get(line)
        before[line] = now
        if last and min(len(now), len(last)) >= 8:  # a few may be alike by chance
            shown = min(len(now), len(last))
            if now == sorted(now):
                why = "the loader does not shuffle"
            elif now[:shown] == last[:shown]:
                text = f"epoch {number} has the order of epoch {number - 1}"
                return found(f"{line}: {text}")
            else:
                why = ""
    return unseen(why) if why else OK


@check(
    "split",
    "error",
    "all ranks split the data alike",
    "length and items of the data set, and the indices of subsets",
    "Split with a torch.Generator that has the same seed on all ranks.",
)
def split(ranks):
    why = no_steps(ranks) or "the script did not come to its end"
    if not no_steps(ranks) and not any(r.epochs for r in ranks):
        why = "no DataLoader with indices was used"
    for line, number, group, items in loops(ranks, True):
        if items is None:
            return found(f"{line}: the ranks' subsets overlap, and are not the same")
        first = group[0]
        if number == 1 and first.shards and len(group) < len(ranks):
            return found(f"{line}: the data sets have different lengths")
        if number == 1 and first.sample and len(group) == len(ranks):
            same = all(e.sample == first.sample for e in group)
            if first.shards and not same:
                return found(f"{line}: the same index gives different items")
            why = "" if same else "each rank has its own data set"
    return unseen(why) if why else OK


@check(
    "seeds",
    "warning",
    "ranks draw different random numbers",
    "the states of all random number generators that training uses",
    "Call torch.manual_seed(seed + rank), and seed NumPy and random likewise.",
    transformers="Call set_seed(seed + rank) in a callback's on_train_begin().",
    accelerate="Call set_seed(seed, device_specific=True).",
    lightning="Call torch.manual_seed(seed + self.global_rank) in on_train_start(). "
    "Keep one seed for seed_everything(): the samplers use it.",
)
def seeds(ranks):
    if no_steps(ranks) or any(len(r.random) < 2 for r in ranks):
        return unseen(no_steps(ranks) or "no epoch has two steps")
    if have_parts(ranks):
        return unseen("ranks that share a model may share a seed")
    if same_batch(ranks).state == "found":
        return unseen("see same-batch")
    first, second = ranks[0].random
    drawn = [n for n in first if all(n in r.random[0] for r in ranks)]
    drawn = [n for n in drawn if first[n] != second[n]]
    line = ranks[0].models[0][0]
    for name in drawn:
        if all(r.random[0][name] == first[name] for r in ranks):
            return found(
                f"{line}, at step 1: all ranks have the same state of {name}"
            )
    for line, _, group, _ in loops(ranks, True):
        if group[0].random and group[0].base_seed is not None:
            if group[0].own_seeds:
                return unseen("worker_init_fn seeds the loader's workers")
            drawn.append("workers")
            if len(group) == len(ranks) and len({e.base_seed for e in group}) == 1:
                return found(f"{line}: the loaders' workers have the same seeds")
    return OK if drawn else unseen("no random numbers were drawn")


@check(
    "eval-coverage",
    "error",
    "evaluation counts each sample once",
    "the indices dealt out by loops without optimizer steps",
    "Evaluate Subset(dataset, range(rank, len(dataset), world_size)): a "
    "DistributedSampler repeats samples to fill up.",
    lightning="Evaluate on one GPU: Trainer(devices=1, num_nodes=1).",
    accelerate="Collect predictions with accelerator.gather_for_metrics().",
)
def eval_coverage(ranks):
    why = no_steps(ranks) or "no loop without steps was seen"
    if no_steps(ranks) or have_parts(ranks):
        return unseen(
            no_steps(ranks) or "ranks that share a model may share a batch"
        )
    all_loops = [*loops(ranks, False)]
    for line, number, group, items in all_loops:
        stopped = len(group) < len(ranks) and not ended(ranks)
        other = any(e.also_trains for e in group)  # for example to update BatchNorm
        if items is None or stopped or other or not all(e.whole for e in group):
            continue
        if evaluates_all(group, items):
            why = ""
            continue
        group = [*group, *auxiliary(all_loops, group)]
        again, missing = count(group, items)
        batch = max(e.batch for e in group) * len(ranks)
        if (
            again
            and not missing
            and again < batch
            and any(e.gathered for e in group)
        ):
            why = "the script may cut what it has gathered"
            continue
        why = ""
        if (again or missing) and any(e.chooses for e in group):
            why = "the script's own sampler chooses the samples"
        elif again or missing:
            text = f"{again} of {len(items)} samples count twice, {missing} never"
            small = again < len(ranks) and missing < batch
            level = "warning" if small else "error"
            return found(f"{line}, loop {number}: {text}", level)
    return unseen(why) if why else OK


def auxiliary(all_loops, group):
    """Return loops over the rest of the same data set, without steps in between."""
    first, dealt, added = group[0], {i for e in group for i in e.items}, []
    for _, _, others, _ in all_loops:
        for e in others:
            same_time = (e.base, e.first) == (first.base, first.first)
            if same_time and not dealt & {*e.items}:
                dealt |= {*e.items}
                added.append(e)
    return added


@check(
    "rank0-eval",
    "error",
    "all ranks take part in forwards of the wrapped model",
    "forwards of the DDP model, compared before each begins",
    "Evaluate ddp_model.module on rank 0, or evaluate on all ranks.",
)
def rank0_eval(ranks):
    if not any(r.counts for r in ranks):
        return unseen("no DDP model was used")
    return OK  # a mismatch stops the job: report.py


@check(
    "collectives",
    "error",
    "all ranks take part in each collective",
    "name and shape, compared before each begins, and their number at the end",
    "Call it on all ranks: neither a collective nor a forward of the wrapped model "
    "belongs within `if rank == 0`.",
)
def collectives(ranks):
    for members in {m for r in ranks for m in r.counts}:
        counts = {
            r.rank: r.counts[members]
            for r in ranks
            if not members or r.rank in members
        }
        least = min(
            (counts[r.rank] for r in ranks if r.rank in counts and r.done),
            default=None,
        )
        if least is None:
            continue
        most = max(counts, key=counts.get)
        if counts[most] > least:
            last = next(r.last[members] for r in ranks if r.rank == most)
            return found(f"{last}: rank {most} comes to more of them than others")
    return OK if any(r.counts for r in ranks) else unseen("there was none")


@check(
    "files",
    "error",
    "one rank writes each file",
    "files that are opened for writing",
    "Write it within `if rank == 0`, or put the rank into its name.",
    accelerate="Write it within `if accelerator.is_main_process`.",
    lightning="Write it in a function with @rank_zero_only.",
    transformers="Write it within `if trainer.is_world_process_zero()`.",
)
def files(ranks):
    writers = Counter(file for r in ranks for file in r.files)
    shared = [file for file, number in writers.items() if number > 1]
    kinds = {}
    for file in shared:
        lines = [r.files[file] for r in ranks if file in r.files]
        only_appended = all(append for _, append in lines)
        text = f"{lines[0][0]}: {len(lines)} ranks write {Path(file[0]).name}"
        kinds.setdefault("warning" if only_appended else "error", text)
    for level in ("error", "warning"):
        if level in kinds:
            return found(kinds[level], level)
    return OK if writers else unseen("no file was written")


@check(
    "own-number",
    "error",
    "printed numbers are the whole job's",
    "what rank 0 prints or logs after a loop, and the tensors that it has read",
    "Add up sums and counts of all ranks with dist.all_reduce() first.",
    lightning="Log with self.log(..., sync_dist=True).",
    accelerate="Average with accelerator.reduce(), or use gather_for_metrics().",
)
def own_number(ranks):
    if have_parts(ranks):
        return unseen("ranks that share a model may share a batch")
    alone, full, rest = set(), set(), set()
    all_loops = [*loops(ranks, False)]
    for _, _, group, items in all_loops:
        if len(group) < len(ranks):
            alone.add(group[0].key)
        elif items and evaluates_all(group, items):
            full.add(group[0].key)
        else:
            rest |= {e.key for e in auxiliary(all_loops, group)}
    warning = ""
    prints_of_all = ranks[0].prints.items()
    for (kind, line, key), (text, matches, prints, evaluates) in prints_of_all:
        often = matches and 2 * matches >= prints  # else it is by chance
        if not often or key in alone | full - rest:
            continue
        reads = [str(r.read.get(line)) for r in ranks]
        if kind == "own" and len({*reads}) == 1:
            continue  # it is the same on all ranks
        if evaluates is None and "None" in reads:  # there is no loader
            continue  # not all ranks evaluate
        reason = "its own part of the evaluation"
        if kind == "sum":
            reason = "a sum over ranks, not a mean"
        elif evaluates is False:
            reason = "its own loss"
        if kind == "own" and evaluates:
            return found(f"{text}: {reason}")
        warning = warning or f"{text}: {reason}"
    if warning:
        return found(warning, "warning")
    seen = ranks[0].prints or ranks[0].reduced
    return OK if seen else unseen("no number of a tensor was read")


@check(
    "host-sync",
    "advice",
    "a step does not wait for the device",
    "computed numbers that are read in each step",
    "Add them up on the device, and read the sum once per epoch.",
)
def host_sync(ranks):
    for r in ranks:
        for line, steps in r.syncs.items():
            if r.trained >= 3 and steps >= 0.9 * r.trained:
                many = f"in {steps} of {r.trained} steps"
                return found(f"{line}: rank {r.rank} reads a number {many}")
    few = any(r.trained < 3 for r in ranks)
    return unseen(no_steps(ranks) or "too few steps") if few else OK


@check(
    "destroy-group",
    "advice",
    "the process group is destroyed at the end",
    "calls of destroy_process_group",
    "Call dist.destroy_process_group() at the end: else NCCL warns, and a rank that "
    "leaves early can break the others.",
)
def destroy_group(ranks):
    if not ended(ranks):
        return unseen("the script did not come to its end")
    if all(r.closed is None for r in ranks):
        return unseen("there was no process group")
    if any(r.frameworks for r in ranks):
        return unseen("the framework does that")
    return OK if all(r.closed for r in ranks) else found("it was not destroyed")
