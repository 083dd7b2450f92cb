"""Errors of predict.py's model, compared with measured runs.

    python validate.py
    python validate.py --off 20        also prints the rows with larger errors

published.json has the runs of others, network.json ours over slow networks. The
error is that of the speed: predicted / measured - 1.

from fewest  predicted from the run on the fewest GPUs, mostly one, and data sheets
from 1, 2    predicted from the runs on one GPU and on two GPUs of a node
in range     figures between from and to

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
    fit,
    fit_compute,
    predict_step,
)

HERE = Path(__file__).parent
KINDS = "from fewest", "from 1, 2"


def to_speed(n, workload, step):
    """Return the samples/s of n GPUs."""
    return n * workload.batch * workload.accumulate / step.seconds


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
            row |= {"class": name_class(machine, n), "letter": run.get("class")}
            known = {"from fewest": workload}
            if n > 2 and overhead is not None:
                known["from 1, 2"] = replace(workload, sync_overhead=overhead)
            for kind, its in known.items():
                step = predict_step(n, its, links)
                best, worst = best_and_worst(n, its, links)
                row[kind] = to_speed(n, workload, step)
                row[f"range {kind}"] = [
                    to_speed(n, workload, s) for s in (worst, best)
                ]
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
            seconds = median(base["two"])
            workload = fit("sync_overhead", seconds, 2, workload, one_node)
            workload = replace(workload, batch=batch)
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
        kind = "from 1, 2" if "from 1, 2" in row else "from fewest"
        if off and abs(percent_off(row, kind)) > off:
            print(
                f"{percent_off(row, kind):+.0f} %: {row['name']}, {row['what']}, "
                f"{row['n']} GPUs: {row[kind]:.4g}, not {row['measured']:.4g}"
            )


def print_classes(rows):
    """Print the errors from the fewest GPUs, and the ranges, by class of machine."""
    classes = {}
    for row in rows:
        classes.setdefault(row["class"], []).append(row)
    classes["all classes"] = rows
    print("\nClass of machine: from fewest; in range; range, median of to / from")
    for name, some in sorted(classes.items()):
        ranges = [(row["range from fewest"], row["measured"]) for row in some]
        inside = sum(low <= measured <= high for (low, high), measured in ranges)
        width = median(high / low for (low, high), _ in ranges)
        in_range = f"{inside} of {len(some)} | {width:.2f}"
        print(f"{name:37} {summarize(some, 'from fewest')} {in_range}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--off", type=int, help="rows to print: off by more percent")
    off = parser.parse_args().off
    published = load_json(HERE / "published.json")
    for runs, title in (
        ("runs", "Published runs of others"),
        ("held_out", "Held out"),
    ):
        rows = [*predict_published(published, runs)]
        print(f"\n{title}")
        print_errors(rows, off)
        print_classes(rows)
    print("\nOur runs over slow networks")
    print_errors([*predict_slow_networks(load_json(HERE / "network.json"))], off)


if __name__ == "__main__":
    run_main(main)
