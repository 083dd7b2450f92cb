"""The report: one row per check, for people and as JSON."""

import json
import os
import re
import subprocess
import sys
import traceback
from collections import Counter

from ddp_checkup import __version__
from ddp_checkup.checks import CHECKS
from ddp_checkup.checks.findings import Check, Finding, NotSeen
from ddp_checkup.hooks import prints

STATES = "error", "warning", "ignored", "ok", "not seen"
# The number after the word may be negative, and may have an exponent: 1.2e-05.
LOSS = re.compile(r"loss\W*?(-?\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+))", re.IGNORECASE)


def report(options, traces, stop, out):
    """Print the report, write it as JSON, and return the exit status.

    traces: one per rank, None for a rank that sent none. stop: the arguments of
    stop_job(), or None if nothing stopped the job.
    """
    failed = stop and stop[0] == "failed"
    rows = [judge(check, traces, stop, options) for check in CHECKS]
    if options.reference and not stop:
        rows.append(compare_with_reference(options, out))
    states = Counter(row["state"] for row in rows)
    found = states["error"] or states["warning"]
    unchecked = "" if found else find_nothing(options, traces, failed)
    if failed and unchecked:  # the script's own error is printed, too
        show(out, f"Error: nothing was checked: {unchecked} ({stop[2]}).")
        return 1
    ends = []
    if failed:
        reason = stop[2][0].upper() + stop[2][1:]
        ends.append(f"{reason}. The report is about the steps before.")
    if unchecked:
        ends.append(f"Error: nothing was checked: {unchecked}.")
    steps = max(trace.step for trace in traces if trace)
    title = f"Checkup of {options.script}: {len(traces)} ranks, "
    title += f"{steps} step{'s' * (steps != 1)}"
    show(out, "", title, *table(rows, options.all), *ends, summary(states, options))
    bad = states["error"] or (options.strict and states["warning"])
    status = int(bool(bad or failed or unchecked or None in traces))
    if options.json:
        head = {"format": 2, "version": __version__, "script": options.script}
        head |= {"ranks": len(traces), "steps": steps, "status": status}
        try:
            with open(os.path.join(options.folder, options.json), "w") as file:
                json.dump(head | {"checks": rows}, file, indent=1)
        except OSError as error:
            show(out, f"Error: --json {options.json}: {error}")
            return 2
    return status


def judge(check, traces, stop, options):
    """Return the row of a check, as in the JSON file."""
    if stop and check.name == stop[0]:
        _, line, text, fix = stop
        return make_row(check, Finding(line, text, fix=fix), options)
    if None in traces:
        text = f"rank {traces.index(None)} sent no trace"
        return make_row(check, None, options, unseen=text)
    try:
        return make_row(check, check.function(traces), options)
    except NotSeen as why:
        return make_row(check, None, options, unseen=str(why))
    except Exception as error:  # the other checks' findings are not lost
        traceback.print_exc()
        text = f"the check itself failed, please report it: {error!r}"
        return make_row(check, None, options, unseen=text)


def make_row(check, finding, options, unseen=""):
    row = {"name": check.name, "state": "not seen" if unseen else "ok"}
    row |= {"text": unseen, "fix": "", "promise": check.promise}
    row |= {"file": None, "line": None}
    if finding:
        ignored = check.name in (options.ignore or [])
        row["state"] = "ignored" if ignored else finding.level or check.level
        row["text"], row["fix"] = finding.text, finding.fix or check.fix
        if finding.line:
            row["text"] = f"{finding.line}: {finding.text}"
            file = os.path.join(options.folder, finding.line.file)
            row["file"] = os.path.relpath(file, options.folder)
            row["line"] = finding.line.number
    return row


def find_nothing(options, traces, failed):
    """Return why nothing was checked, or "": without a check, a run fails."""
    script, known = options.script, [trace for trace in traces if trace]

    def any_has(kind):
        return any(trace.of(kind) for trace in known)

    if any(trace.step for trace in known) or (None in traces and not failed):
        return ""
    if not any_has("group"):
        if any_has("init"):
            passed = (event.passed for trace in known for event in trace.of("init"))
            calls = " and ".join(f"init_process_group({text})" for text in passed)
            return f"{script} ended in {calls}"
        if any_has("start"):
            return f"{script} starts processes; if they are its ranks, leave out -n"
        if failed or any_has("exit"):
            return f"{script} ended before it made a process group"
        return f"{script} made no process group, so it is no DDP script yet"
    if failed:
        return f"{script} ended before its first optimizer step"
    if any_has("backward"):
        return "there were backward passes, but no step of a torch.optim.Optimizer"
    if any_has("loop"):
        return ""
    return "there was no optimizer step, and no loop over a DataLoader"


def show(out, *lines):
    out.write("\n".join([*lines, ""]))  # scripts may replace print()
    out.flush()


def table(rows, list_all):
    """Return the lines of the rows, those with findings first."""
    lines = []
    for row in sorted(rows, key=lambda row: STATES.index(row["state"])):
        name, state, text = row["name"], row["state"], row["text"]
        start = f"  {state:<9} {name:<17} "
        if row["fix"]:
            lines += [start + text, f"{'':12}Fix: {row['fix']}"]
        elif list_all or name == "reference":
            lines.append(start + row["promise"] + (f" ({text})" if text else ""))
    return lines


def summary(states, options):
    line = f"Errors: {states['error']}, warnings: {states['warning']}; "
    line += f"{states['ok']} checks ok, {states['not seen']} not seen"
    return line if options.all else f"{line} (--all lists them)"


def compare_with_reference(options, out):
    """Return the row that compares the losses with those of the one-GPU script."""
    script, *own = options.reference
    command = [sys.executable, script, *options.arguments, *own]
    show(out, "", f"Reference: {' '.join(command[1:])}")
    env = {name: v for name, v in os.environ.items() if "RANK" not in name}
    env |= {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}
    streams = {"stdout": subprocess.PIPE, "text": True}
    done = subprocess.run(command, cwd=options.folder, env=env, **streams)
    ours, theirs = read_losses("\n".join(prints.lines)), read_losses(done.stdout)
    text = f"the script printed {len(ours)} losses, and {script} {len(theirs)}"
    promise, is_close = "the losses are those of the reference", False
    if theirs and len(theirs) == len(ours):
        differences = [abs(a - b) for a, b in zip(theirs, ours, strict=True)]
        apart = max(differences) / (abs(theirs[0]) or 1)
        is_close = apart <= options.tolerance
        promise += f" (at most {apart:.2%} of its first loss apart)"
        text = f"the losses differ from those of {script} by up to {apart:.2%}"
        text += f" of its first loss (limit {options.tolerance:.2%})"
    fix = f"Compare with {script}: global batch, learning rate, seed, split, "
    fix += "augmentation, dropout and BatchNorm; --tolerance allows for chance."
    check = Check("reference", promise, fix, "error", None)
    finding = None if is_close else Finding(None, text)
    return make_row(check, finding, options)


def read_losses(text):
    return [float(number) for number in LOSS.findall(text)]
