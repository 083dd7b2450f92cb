"""Errors of predict.py's model, compared with measured runs.

    python validate.py
    python validate.py --off 20        also prints the rows with larger errors

published.json contains runs of other people. The error is predicted speed / measured
speed - 1.

from fewest  predicted from the run on the fewest GPUs, usually one, and data sheets
from 1, 2    predicted from the runs on one GPU and on two GPUs of a node
in range     figures between from and to
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median

from common.errors import run as run_main
from links import load_json, make_links
from step_model import Workload, best_and_worst, fit, predict_step

HERE = Path(__file__).parent
KINDS = "from fewest", "from 1, 2"


def predict_row(row, kind, workload, links):
    """Add the predicted samples/s, and their range, to a row."""
    n, samples = row["n"], row["n"] * workload.batch * workload.accumulate
    steps = predict_step(n, workload, links), *best_and_worst(n, workload, links)
    row[kind], best, worst = (samples / step.seconds for step in steps)
    row[f"range {kind}"] = worst, best


def name_class(machine, n):
    """Return the class of machine that n GPUs of it are."""
    inside = machine["inside"]
    if n > machine["gpus_per_node"]:
        return f"{inside['kind']}, several nodes"
    if inside["kind"] == "NVLink":
        mesh = "without" if "gb_per_s_up_to" in inside else "with"
        return f"NVLink {mesh} switch, one node"
    peer_to_peer = "with" if inside.get("peer_to_peer", True) else "without"
    return f"PCIe {peer_to_peer} peer-to-peer, one node"


def predict_published(data, runs):
    """Yield a row for each figure of published.json on more GPUs than the fewest.

    runs: "runs" or "held_out"
    """
    for run in data[runs]:
        machine = data["machines"][run["machine"]]
        links = make_links(machine)
        speeds = {int(n): speed for n, speed in run["speed"].items()}
        base, batch = min(speeds), run["batch_per_gpu"]
        workload = Workload(batch, run["gradient_bytes"], 1 / speeds[base])
        workload.overlap = run["overlap"]
        chose, overhead = run.get("chose", {}), None
        for n in sorted(speeds):
            workload.accumulate = run["accumulate"]
            if isinstance(workload.accumulate, dict):
                workload.accumulate = workload.accumulate[str(n)]
            seconds = n * batch * workload.accumulate / speeds[n]
            if n == base > 1:
                workload = fit("sample_seconds", seconds, n, workload, links)
            if n == 2 and base == 1 and links.gpus_per_node > 1:
                fitted = fit("sync_overhead", seconds, n, workload, links)
                overhead = fitted.sync_overhead
            if n == base or str(n) in chose:  # a constant was fitted to this row
                continue
            row = {"name": f"{run['machine']} {run['model']}", "n": n}
            row |= {"what": run["what"], "measured": speeds[n]}
            row["class"] = name_class(machine, n)
            predict_row(row, "from fewest", workload, links)
            if n > 2 and overhead is not None:
                known = replace(workload, sync_overhead=overhead)
                predict_row(row, "from 1, 2", known, links)
            yield row


def percent_off(row, kind):
    return 100 * (row[kind] / row["measured"] - 1)


def print_classes(rows, kind):
    """Print the errors of a kind of prediction, and its ranges, by class."""
    classes = {"all": [row for row in rows if kind in row]}
    for row in classes["all"]:
        classes.setdefault(row["class"], []).append(row)
    print(f"{kind}: median error, largest (percent), rows; in range; median range")
    for name, some in sorted(classes.items()):
        errors = [percent_off(row, kind) for row in some]
        middle, largest = median(map(abs, errors)), max(errors, key=abs)
        line = f"{name:37} {middle:5.1f} {largest:+5.0f} {len(errors):4}"
        ranges = [(*row[f"range {kind}"], row["measured"]) for row in some]
        inside = sum(low <= measured <= high for low, high, measured in ranges)
        width = median(high / low for low, high, _ in ranges)
        print(f"{line} | {inside} of {len(some)} | {width:.2f}")
    print()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--off", type=int, help="smallest error to print, in %%")
    off = parser.parse_args().off
    published = load_json(HERE / "published.json")
    sets = {
        "Held out": predict_published(published, "held_out"),
        "Other published runs": predict_published(published, "runs"),
    }
    for title, rows in sets.items():
        print(title)
        rows = sorted(rows, key=lambda row: row["name"])
        for kind in KINDS:
            if any(kind in row for row in rows):
                print_classes(rows, kind)
        for row in rows:
            kind = KINDS[1] if KINDS[1] in row else KINDS[0]
            if off and abs(percent_off(row, kind)) > off:
                text = f"{row['name']}, {row['what']}, {row['n']} GPUs"
                values = f"{row[kind]:.4g}, not {row['measured']:.4g}"
                print(f"{percent_off(row, kind):+.0f} %: {text}: {values}")


if __name__ == "__main__":
    run_main(main)
