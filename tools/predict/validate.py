"""Errors of predict.py's model, compared with measured runs.

    python validate.py
    python validate.py --off 20        also prints the rows with larger errors

published.json has the runs of others, network.json ours over slow networks. The
error is that of the speed: predicted / measured - 1.

from 1        predicted from the run on one GPU and data sheets
from 1, 2     predicted from the runs on one GPU and on two GPUs of a node
nothing lost  n GPUs are n times as fast as one
as on 2       n GPUs have the efficiency of two
in range      figures between from and to

The figures held out chose no constant.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median

from common.errors import run as run_main
from links import load_json, make_links
from step_model import (
    Workload,
    best_and_worst,
    fit_compute,
    fit_sync_overhead,
    predict_step,
)

HERE = Path(__file__).parent
KINDS = "from 1", "from 1, 2", "nothing lost", "as on 2"


def to_speed(n, workload, step):
    """Return the samples/s of n GPUs."""
    return n * workload.batch * workload.accumulate / step.seconds


def name_class(machine, n):
    """Return the class of machine that n GPUs of it are."""
    inside = machine["inside"]
    if n > machine["gpus_per_node"]:
        return f"{inside['kind']}, several nodes"
    if inside["kind"] == "NVLink":
        return "NVLink, one node"
    peer_to_peer = "with" if inside.get("peer_to_peer", True) else "without"
    return f"PCIe {peer_to_peer} peer-to-peer, one node"


def predict_published(data, runs="runs"):
    """Yield a row for each figure of published.json on more than one GPU.

    runs: "runs" or "held_out"
    """
    for run in data[runs]:
        machine = data["machines"][run["machine"]]
        links = make_links(machine)
        speeds = {int(n): speed for n, speed in run["speed"].items()}
        batch, gradient_bytes = run["batch_per_gpu"], run["gradient_bytes"]
        workload = Workload(batch, gradient_bytes, 1 / speeds[1])
        workload.overlap = run["overlap"]
        chose, fitted = run.get("chose", {}), None
        for n in sorted({*speeds} - {1}):
            workload.accumulate = run["accumulate"]
            if isinstance(workload.accumulate, dict):
                workload.accumulate = workload.accumulate[str(n)]
            if n == 2 and links.gpus_per_node > 1:
                seconds = 2 * workload.batch * workload.accumulate / speeds[2]
                fitted = fit_sync_overhead(seconds, workload, links)
            if str(n) in chose:  # a constant was fitted to this row
                continue
            row = {"name": f"{run['machine']} {run['model']}", "n": n}
            row |= {"what": run["what"], "measured": speeds[n]}
            row["class"] = name_class(machine, n)
            if "SYNC_OVERHEAD" not in chose.values():
                step = predict_step(n, workload, links)
                row["from 1"] = to_speed(n, workload, step)
                row["nothing lost"] = n * speeds[1]
            best, worst = best_and_worst(n, workload, links)
            row["best"] = to_speed(n, workload, best)
            row["worst"] = to_speed(n, workload, worst)
            if fitted is not None and n > 2:
                workload_2 = replace(workload, sync_overhead=fitted)
                step = predict_step(n, workload_2, links)
                row["from 1, 2"] = to_speed(n, workload, step)
                row["as on 2"] = n / 2 * speeds[2]
            yield row


def predict_slow_networks(data):
    """Yield a row for each run of network.json."""
    one_node = make_links(None, [data["here"]])
    for run in data["runs"]:
        if run["model"] == "fake_compute":
            kind, batch = f"ring of {run['n']}", 1
            gradient_bytes = run["case"][1] * 1e6
            workload = Workload(1, gradient_bytes, run["alone"], sync_overhead=0)
        else:
            base, batch = data["bases"][run["model"]], run["batch"]
            seconds = {int(b): median(times) for b, times in base["points"].items()}
            largest = max(seconds)
            kind = "weak" if batch == largest else "strong"
            compute = fit_compute(seconds, largest)
            workload = Workload(largest, base["gradient_bytes"], *compute)
            overhead = fit_sync_overhead(median(base["two"]), workload, one_node)
            workload = replace(workload, batch=batch, sync_overhead=overhead)
        links = make_links(None, [data["networks"][run["network"]]])
        step = predict_step(run["n"], workload, links)
        row = {
            "name": f"{kind} {run['model']}",
            "n": run["n"],
            "what": run["network"],
        }
        row["measured"] = run["n"] * batch / run["seconds"]
        yield row | {"from 1, 2": to_speed(run["n"], workload, step)}


def percent_off(row, kind):
    return 100 * (row[kind] / row["measured"] - 1)


def summarize(rows, kind):
    """Return the median and largest error of a kind, and the row count."""
    errors = [percent_off(row, kind) for row in rows if kind in row]
    if not errors:
        return f"{'':18} |"
    middle, largest = median(map(abs, errors)), max(errors, key=abs)
    return f"{middle:6.1f} {largest:+6.0f} {len(errors):4} |"


def print_errors(rows, off):
    """Print the errors by name, and the rows with an error above `off` percent."""
    rows = sorted(rows, key=lambda row: row["name"])
    kinds = [kind for kind in KINDS if any(kind in row for row in rows)]
    print("median error, largest error (percent), rows:", "; ".join(kinds))
    by_name = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row)
    by_name["all"] = rows
    for name, some in by_name.items():
        print(f"{name:30}", *(summarize(some, kind) for kind in kinds))
    for row in rows:
        kind = "from 1, 2" if "from 1, 2" in row else "from 1"
        if off and abs(percent_off(row, kind)) > off:
            print(
                f"{percent_off(row, kind):+.0f} %: {row['name']}, {row['what']}, "
                f"{row['n']} GPUs: {row[kind]:.4g}, not {row['measured']:.4g}"
            )


def print_classes(rows):
    """Print the errors from one GPU, and figures in range, by class of machine."""
    classes = {}
    for row in rows:
        classes.setdefault(row["class"], []).append(row)
    classes["all classes"] = rows
    print("\nClass of machine: from 1; in range")
    for name, some in sorted(classes.items()):
        inside = [r for r in some if r["worst"] <= r["measured"] <= r["best"]]
        in_range = f"{len(inside)} of {len(some)}"
        print(f"{name:37} {summarize(some, 'from 1')} {in_range}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--off", type=int, help="rows to print: off by more percent")
    off = parser.parse_args().off
    published = load_json(HERE / "published.json")
    rows = [*predict_published(published)]
    print("Published runs of others")
    print_errors(rows, off)
    print_classes(rows)
    held_out = [*predict_published(published, "held_out")]
    print("\nHeld out")
    print_errors(held_out, off)
    print_classes(held_out)
    print("\nOur runs over slow networks")
    print_errors(predict_slow_networks(load_json(HERE / "network.json")), off)


if __name__ == "__main__":
    run_main(main)
