"""How far off is predict.py? Holds its model against runs that were measured.

    python held.py
    python held.py --off 20        each row that is off by more than 20 %, too
    python held.py others.json     runs of your own, in the form of published.json

published.json is of others, network.json of network.py. Errors are of the
speed: what was predicted by what was measured, less one.

from 1        predicted from the run on one GPU and data sheets
from 1, 2     and from the run on two of a node
nothing lost  if n GPUs were n times as fast as one
as on 2       if more GPUs had the efficiency of two
"""

import signal
from itertools import groupby
from pathlib import Path
from statistics import median

from scaling import GROUP, extremes, group_seconds, read, read_net, step, work

from common.cli import OptionParser, at_least

HERE = Path(__file__).parent
FREE = {"overlap": True, "accumulate": 1, "loader": 1e9, "storage": 1e9}


def speed(n, batch, case, net, *ways):
    parts, _ = step(n, batch, case, net, *ways)
    return n * batch * case["accumulate"] / sum(parts.values())


def published(data):
    """Yield a row for each figure of published.json, of more than one GPU."""
    for run in data["runs"]:
        speeds = {int(n): value for n, value in run["speed"].items()}
        batch, often = run["batch_per_gpu"], run["accumulate"]
        net = read_net(data["machines"][run["machine"]])
        seconds = batch / speeds[1]
        case = {
            **FREE,
            "fixed": 0,
            "each": seconds / batch,
            "overlap": run["overlap"],
        }
        case |= {"gradients": run["gradient_bytes"], "group": GROUP * seconds}

        def at(n, net=net, case=case, run=run, often=often):  # nodes may not be full
            here = run.get("gpus_per_node", {}).get(str(n), net["gpus_per_node"])
            times = often if isinstance(often, int) else often[str(n)]
            return case | {"accumulate": times}, net | {"gpus_per_node": here}

        two = None
        if 2 in speeds and at(2)[1]["gpus_per_node"] > 1:
            on_two, links = at(2)
            two = 2 * batch * on_two["accumulate"] / speeds[2]
            two = group_seconds(two, batch, on_two, links)
        for n, measured in sorted(speeds.items()):
            if n == 1 or str(n) in run.get("chose", {}):
                continue
            case, links = at(n)
            row = {"name": (run["machine"], run["model"]), "n": n}
            row |= {"what": run["what"], "measured": measured}
            if "GROUP" not in run.get("chose", {}).values():  # else it has seen them
                row["from 1"] = speed(n, batch, case, links)
                row["nothing lost"] = n * speeds[1]
            fast, slow = extremes(n)
            row["to"] = speed(n, batch, case, links, *fast)
            row["from"] = speed(n, batch, case, links, *slow)
            if two is not None and n > 2:
                row["from 1, 2"] = speed(n, batch, case | {"group": two}, links)
                row["as on 2"] = n / 2 * speeds[2]
            yield row


def ours(data):
    """Yield a row for each run of network.json."""
    for run in data["runs"]:
        net = read_net(None, [data["networks"][run["network"]]])
        n, case = run["n"], {**FREE, "group": 0}
        if run["model"] == "asleep":
            batch, (_, megabytes) = 1, run["case"]
            case |= {"gradients": megabytes * 1e6, **work({1: run["alone"]}, 1)}
            kind = f"ring of {n}"
        else:
            base, batch = data["bases"][run["model"]], run["batch"]
            points = {int(b): median(times) for b, times in base["points"].items()}
            case |= {
                "gradients": base["gradient_bytes"],
                **work(points, max(points)),
            }
            here = read_net(None, [data["here"]])
            two = median(base["two"])
            case["group"] = group_seconds(two, max(points), case, here)
            kind = "weak" if batch == max(points) else "strong"
        row = {"name": (kind, run["model"]), "n": n, "what": run["network"]}
        row |= {"measured": n * batch / run["seconds"]}
        yield row | {"from 1, 2": speed(n, batch, case, net)}


def summary(rows, kind):
    """Return the median and the largest error of a kind, in percent."""
    errors = [100 * (row[kind] / row["measured"] - 1) for row in rows if kind in row]
    if not errors:
        return ["", "", ""]
    largest = max(errors, key=abs)
    return [f"{median(map(abs, errors)):.1f}", f"{largest:+.0f}", str(len(errors))]


def report(rows, off):
    """Print a table, a line for each name, and the rows that are off by more."""
    kinds = ["from 1", "from 1, 2", "nothing lost", "as on 2"]
    kinds = [kind for kind in kinds if any(kind in row for row in rows)]
    print("median and largest error in percent, rows:", "; ".join(kinds))
    groups = [
        [" ".join(name), [*r]] for name, r in groupby(rows, lambda r: r["name"])
    ]
    for name, some in [*groups, ["all", rows]]:
        cells = [summary(some, kind) for kind in kinds]
        print(f"{name:30}", *(f"{a:>6} {b:>6} {c:>4} |" for a, b, c in cells))
    if inside := [row for row in rows if "from" in row]:
        share = sum(row["from"] <= row["measured"] <= row["to"] for row in inside)
        print(f"{share} of {len(inside)} are between from and to")
    for row in rows if off else []:
        kind = "from 1, 2" if "from 1, 2" in row else "from 1"
        error = 100 * (row[kind] / row["measured"] - 1)
        if abs(error) > off:
            name = f"{' '.join(row['name'])}, {row['what']}, {row['n']} GPUs"
            print(
                f"{error:+.0f} %: {name}: {row[kind]:.4g}, not {row['measured']:.4g}"
            )


def main():
    parser = OptionParser(__doc__)
    text = "in the form of published.json; default: that, and network.json"
    parser.add_argument("file", nargs="?", help=text)
    text = "rows that are off by more; default: none"
    parser.add_argument("--off", type=at_least(1), metavar="PERCENT", help=text)
    args = parser.parse_args()
    kinds = {"Published by others": (published, HERE / "published.json")}
    kinds["Measured here, over slow networks"] = ours, HERE / "network.json"
    if args.file:
        kinds = {args.file: (published, args.file)}
    for title, (found, file) in kinds.items():
        rows = sorted(found(read(file, "runs")), key=lambda row: row["name"])
        print(title)
        report(rows, args.off)
        print()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it in silence
    main()
