"""The check of buffers and copies, which no optimizer updates."""

from collections import Counter

from ddp_checkup.checks.common import need_replicas
from ddp_checkup.checks.findings import Finding, NotSeen, check


@check(
    "buffers",
    "all ranks evaluate and save the same buffers and copies",
    fix="Call dist.broadcast() for every buffer before an evaluation: DDP does so "
    "only when the wrapped model is called. Update a copy, such as an EMA, on all "
    "ranks.",
)
def buffers(traces):
    """checksums of what no optimizer has, after evaluations and at the end"""
    need_replicas(traces)
    finding = other_order(traces)
    if finding:
        return finding
    mild, seen = None, False
    for name in names_of_modules(traces):
        module = [Copies(trace, name) for trace in traces]
        for of_all in notes_of_all(module):
            note = of_all[0]
            if any({*other.names} != {*note.names} for other in of_all):
                continue
            seen = seen or bool(note.names)
            left_out = may_differ(module, of_all)
            bad = [
                tensor
                for tensor in note.names
                if tensor not in left_out
                and any(e.values[tensor] != note.values[tensor] for e in of_all)
            ]
            if bad and (note.evaluated or note.when == "end"):
                text = f"{len(bad)} of {len(note.names)} tensors of {name[0]} "
                text += f"differ between ranks, first {bad[0]}"
                saved = [line for its in module for line in its.saved]
                called = [its.called[0] for its in module if its.called]
                used = saved or called[len(traces) - 1 :]  # if all ranks call it
                line = used[0] if used and not note.evaluated else note.line
                # A tensor that differed at the first step may do so on purpose.
                apart = bad[0] in differ_at_first(module)
                if (note.evaluated or used) and not apart:
                    return Finding(line, text)
                mild = mild or Finding(line, text, "warning")
    if not (mild or seen):
        raise NotSeen("there was none")
    return mild


class Copies:
    """One rank's notes of a module, and the lines that saved or called it."""

    def __init__(self, trace, name):
        notes = [note for note in trace.of("tensors") if note.name == name]
        for note in notes:
            if not isinstance(note.values, dict):
                note.values = dict(zip(note.names, note.values, strict=True))
        self.first = next((n.values for n in notes if n.when == "first"), {})
        self.notes = [note for note in notes if note.when != "first"]
        self.saved = [e.line for e in trace.of("saved") if e.name == name]
        self.called = [e.line for e in trace.of("called") if e.name == name]


def names_of_modules(traces):
    """Return the names of the modules that all ranks noted."""
    names = [{event.name: None for event in trace.of("tensors")} for trace in traces]
    return [name for name in names[0] if all(name in others for others in names)]


def notes_of_all(module):
    """Return the ranks' notes by moment, only the last if their numbers differ."""
    notes = [its.notes for its in module]
    if len({*map(len, notes)}) > 1:  # not all ranks evaluate it
        notes = [its[-1:] for its in notes]
    return [*zip(*notes, strict=False)]


def differ_at_first(module):
    """Return the tensors that differed before the first step."""
    first = module[0].first
    return {n for n in first if any(its.first.get(n) != first[n] for its in module)}


def may_differ(module, of_all):
    """Return the tensors that may differ in a module of this state.

    A tensor that differed at the first step may be constant, or a copy for one rank
    alone. A tensor that one rank alone has changed may also be such a copy, for
    example an EMA of rank 0.
    """
    note, first = of_all[0], module[0].first
    if note.evaluated or all(its.called for its in module):
        return set()
    apart = differ_at_first(module)
    if note.trains:
        apart = {n for n in apart if first[n] == note.values.get(n)}
    changed = Counter(
        name
        for its, e in zip(module, of_all, strict=True)
        for name in e.names
        if its.first.get(name) != e.values[name]
    )
    return apart | {name for name, times in changed.items() if times == 1}


def other_order(traces):
    """Return an error if ranks register buffers in another order.

    DDP broadcasts them in this order, whatever their names are.
    """
    for wraps in zip(*(trace.of("wrap") for trace in traces), strict=False):
        first = wraps[0]
        for rank, other in enumerate(wraps):
            same_names = sorted(other.buffers) == sorted(first.buffers)
            if same_names and other.buffers != first.buffers:
                text = (
                    f"rank {rank} registers the buffers in another order than rank 0"
                )
                fix = (
                    "Register them in the same order, as DDP broadcasts them in it."
                )
                return Finding(first.line, text, fix=fix)
    return None
