"""The report: a table of all checks, for people and as JSON."""

import json
import os
import re
import shlex
import subprocess
import sys

from ddp_checkup.checks import CHECKS, OK, found, unseen
from ddp_checkup.record import state

REFERENCE = ("reference", "error", "the losses are those of the reference")
REFERENCE_FIX = "Compare global batch, learning rate and seed with those of {}."


def judge(ranks, stop):
    """Return [check, verdict] of each check.

    ranks: their records, None for one that was killed; stop: [kind, text] if the job
    was stopped.
    """
    kind, text = stop or ("", "")
    missing = [r for r, its in enumerate(ranks) if its is None]
    verdicts = []
    for check in CHECKS:
        if check.name == kind:
            verdict = found(text)
        elif missing:
            verdict = unseen(f"rank {missing[0]} was killed")
        else:
            verdict = check.function(ranks)
        verdicts.append((check, verdict))
    return verdicts


def report(options, ranks, stop):
    """Print the table, write the JSON file, and return the exit status."""
    frameworks = [name for r in ranks if r for name in r.frameworks]
    framework = frameworks[0] if frameworks else ""
    rows = []
    for check, verdict in judge(ranks, stop):
        level = verdict.level or check.level
        fix = check.fixes.get(framework, check.fixes[""])
        rows.append(row_of(check.name, level, check.promise, verdict, fix))
    if options.reference and not stop:
        rows.append(compare_with_reference(options))
    for row in rows:
        if row["name"] in options.ignore and row["state"] in (
            "error",
            "warning",
            "advice",
        ):
            row["state"] = "ignored"
    print_report(options, rows, ranks, stop)
    if options.json:
        with open(options.json, "w") as out:
            json.dump(rows, out, indent=1)
    states = [row["state"] for row in rows]
    failed = (stop and stop[0] == "failed") or None in ranks
    bad = "error" in states or (options.strict and "warning" in states)
    if bad and not failed and not options.ranks:
        line = "The exit status is 1. If torchrun reports it below, nothing crashed."
        print(line, file=state.stdout, flush=True)
    return int(bool(failed or bad))


def row_of(name, level, promise, verdict, fix):
    state_of = {"found": level}.get(verdict.state, verdict.state)
    row = {"name": name, "state": state_of, "promise": promise, "text": verdict.text}
    return row | {"fix": fix if verdict.state == "found" else ""}


def print_report(options, rows, ranks, stop):
    lines = [
        f"\nCheckup of {options.script}: {state.world} ranks, {state.steps} steps"
    ]
    for row in rows:
        why = row["text"] if row["state"] == "not seen" else ""
        line = f"  {row['state']:<9} {row['name']:<17} {row['promise']}"
        lines.append(f"{line} ({why})" if why else line)
        if row["fix"]:
            lines += [f"{'':12}{row['text']}", f"{'':12}Fix: {row['fix']}"]
    killed = [r for r, its in enumerate(ranks) if its is None]
    if killed:
        lines.append(f"Rank {killed[0]} was killed: see its error.")
    elif stop and stop[0] == "failed":
        lines.append(
            f"{stop[1]}: see its error. The table is about the steps before."
        )
    states = [row["state"] for row in rows]
    checked = len(rows) - states.count("not seen")
    errors, warnings = states.count("error"), states.count("warning")
    lines.append(
        f"{checked} of {len(rows)} checked, {errors} error{'s' * (errors != 1)}, "
        f"{warnings} warning{'s' * (warnings != 1)}"
    )
    print("\n".join(lines), file=state.stdout, flush=True)


def compare_with_reference(options):
    """Return a row: whether the losses are those of the script for one GPU."""
    script, *own = shlex.split(options.reference)
    ours = read_losses("\n".join(state.lines))
    command = [sys.executable, script, *options.arguments, *own]
    print(
        f"\nReference: {' '.join([script, *command[2:]])}",
        file=state.stdout,
        flush=True,
    )
    env = {
        k: v for k, v in os.environ.items() if "RANK" not in k and k != "WORLD_SIZE"
    }
    env["LOCAL_WORLD_SIZE"] = "1"
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    theirs = read_losses(done.stdout)
    verdict = found(
        f"{len(ours)} losses were printed, the reference has {len(theirs)}"
    )
    if done.returncode:
        verdict = found(f"{script} failed, see above")
    elif theirs and len(theirs) == len(ours):
        apart = (
            max(abs(a - b) for a, b in zip(theirs, ours, strict=True)) / theirs[0]
        )
        text = f"at most {apart:.2%} of its first loss apart"
        verdict = (
            found(text) if apart > options.tolerance else OK._replace(text=text)
        )
    row = row_of(*REFERENCE, verdict, REFERENCE_FIX.format(script))
    if verdict.state == "ok":
        row["promise"] += f" ({verdict.text})"
    return row


def read_losses(text):
    return [float(number) for number in re.findall(r"loss\W+(\d+\.\d+)", text)]
