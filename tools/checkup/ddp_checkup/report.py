"""The report: a table of all checks, for people and as JSON."""

import json
import os
import re
import subprocess
import sys
from collections import Counter

from ddp_checkup import __version__
from ddp_checkup.checks import CHECKS
from ddp_checkup.checks.verdicts import OK, Check, found, unseen
from ddp_checkup.record import state

LEVELS = "error", "warning", "advice", "ignored", "ok", "not seen"


def judge(ranks, stop):
    """Return a row of each check, as in the JSON file.

    ranks: their records, None if one sent none. stop: [kind, text] if it stopped.
    """
    kind, text = stop or ("", "")
    rows = []
    for check in CHECKS:
        if check.name == kind:
            verdict = found(text)
        elif None in ranks:
            verdict = unseen(f"rank {ranks.index(None)} sent no record")
        else:
            verdict = check(ranks)
        rows.append(make_row(check, verdict))
    return rows


def make_row(check, verdict):
    row = {"name": check.name, "promise": check.promise, "text": verdict.text}
    if verdict.state == "found":
        level = verdict.level or check.level
        return row | {"state": level, "fix": verdict.fix or check.fix}
    return row | {"state": verdict.state, "fix": ""}


def report(options, ranks, stop):
    """Print the table, write the JSON file, and return the exit status."""
    rows = judge(ranks, stop)
    if options.reference and not stop:
        rows.append(compare_with_reference(options))
    paths = {line: path for r in ranks if r for line, path in r.paths.items()}
    for row in rows:
        row |= find_place(row, paths, options.folder)
        if row["name"] in (options.ignore or []) and row["fix"]:
            row["state"] = "ignored"
    unseen_run = "" if stop or None in ranks else saw_nothing(ranks)
    print_report(options, rows, ranks, stop, unseen_run)
    states = [row["state"] for row in rows]
    failed = (stop and stop[0] == "failed") or None in ranks or unseen_run
    bad = "error" in states or (options.strict and "warning" in states)
    status = int(bool(failed or bad))
    if options.json and not write_json(options, rows, status):
        return 2
    return status


def write_json(options, rows, status):
    """Write the report for a program; return whether that was possible."""
    content = {"format": 1, "version": __version__, "script": options.script}
    content |= {"ranks": state.world, "steps": state.steps, "status": status}
    try:
        with open(os.path.join(options.folder, options.json), "w") as out:
            json.dump(content | {"checks": rows}, out, indent=1)
    except OSError as error:
        show(f"Error: --json {options.json}: {error}")
        return False
    return True


def find_place(row, paths, folder):
    """Return the file and the line in a row's text, None if there is none."""
    place = re.search(r"([^\s:]+\.\w+):(\d+)", row["text"])
    if not (place and row["fix"]):
        return {"file": None, "line": None}
    file = os.path.join(folder, paths.get(place[0], place[1]))
    return {"file": os.path.relpath(file, folder), "line": int(place[2])}


def saw_nothing(ranks):
    """Say why nothing could be checked, if so: no test may pass for ever by that."""
    if any(r.steps for r in ranks):
        return ""
    if not any(r.grouped for r in ranks):
        return "the script made no process group, so it is no DDP script yet"
    if any(r.backwards for r in ranks):
        return "there were backward passes, but no step of a torch.optim.Optimizer"
    if any(r.loaders for r in ranks):
        return ""
    return "there was no optimizer step, and no loop over a DataLoader"


def show(*lines):
    state.stdout.write("\n".join([*lines, ""]))  # scripts may replace print()
    state.stdout.flush()


def print_report(options, rows, ranks, stop, unseen_run):
    title = f"Checkup of {options.script}: {state.world} ranks, {state.steps} steps"
    lines = ["", title]
    for level in LEVELS:
        for row in rows:
            asked_for = options.all or row["fix"] or row["name"] == "reference"
            if row["state"] == level and asked_for:
                what = row["text"] if row["fix"] else row["promise"]
                why = f" ({row['text']})" if level == "not seen" else ""
                lines.append(f"  {level:<9} {row['name']:<17} {what}{why}")
                if row["fix"]:
                    lines.append(f"{'':12}Fix: {row['fix']}")
    if stop and stop[0] == "failed":
        lines.append(f"{stop[1]}. The report is about the steps before.")
    if unseen_run:
        lines.append(f"Error: nothing was checked: {unseen_run}.")
    n = Counter(row["state"] for row in rows)
    last = f"Errors: {n['error']}, warnings: {n['warning']}, advice: {n['advice']}; "
    last += f"{n['ok']} checks ok, {n['not seen']} not seen"
    lines.append(last + " (--all lists them)" * (not options.all))
    show(*lines)


def compare_with_reference(options):
    """Return a row: whether the losses are those of the script for one GPU."""
    script, *own = options.reference
    command = [sys.executable, script, *options.arguments, *own]
    show(f"\nReference: {' '.join(command[1:])}")
    env = {name: v for name, v in os.environ.items() if "RANK" not in name}
    env |= {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}
    streams = {"stdout": subprocess.PIPE, "text": True}
    done = subprocess.run(command, cwd=options.folder, env=env, **streams)
    ours, theirs = read_losses("\n".join(state.lines)), read_losses(done.stdout)
    text = f"the script printed {len(ours)} losses, and {script} {len(theirs)}"
    promise, good = "the losses are those of the reference", False
    if theirs and len(theirs) == len(ours):
        differences = [abs(a - b) for a, b in zip(theirs, ours, strict=True)]
        apart = max(differences) / theirs[0]
        good = apart <= options.tolerance
        promise += f" (at most {apart:.2%} of its first loss apart)"
        text = f"the losses differ from those of {script} by up to {apart:.2%}"
        text += f" of its first loss (limit {options.tolerance:.2%})"
    fix = f"Compare with {script}: global batch, learning rate, seed, split, "
    fix += "augmentation, dropout and BatchNorm; --tolerance allows for chance."
    check = Check("reference", "error", promise, "", fix, None)
    return make_row(check, OK if good else found(text))


def read_losses(text):
    return [float(number) for number in re.findall(r"loss\W+(\d+\.\d+)", text)]
