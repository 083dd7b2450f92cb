"""A check of the machine: GPUs, CPUs, network and data. Any run script starts it:

    cd exercise8
    sbatch run-2nodes.sh ../tools/check.py
    bash run-2gpus.sh ../tools/check.py      without Slurm: two GPUs or cores
    bash run.sh ../tools/check.py            one process, without communication

It needs only PyTorch and machine.py: copy both to any cluster, and run

    torchrun --standalone --nproc-per-node=4 check.py

(If that prints nothing for ten seconds, the host's own name does not resolve: add
--local-addr=127.0.0.1.)

Prints which PyTorch it found, the devices of all processes, and the speed of
communication, of matrix products and of reading DATADIR. The last line reports that
all is well, or what is wrong and what to do. The check takes less than two minutes.
All results go to logs/check-JOB.json, or to the file of `--to FILE`. Ranks that do
not answer within 60 seconds are listed.

Exit status: 0; 1 if something is wrong; 2 if the check had to stop.
"""

import argparse
import importlib.util
import json
import os
import sys
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

try:
    import torch
    import torch.distributed as dist
except ImportError as error:  # also if another module's torch comes first
    torch = importlib.util.find_spec("torch")
    text = f"Error: {error}. The torch that Python found is {torch and torch.origin}"
    sys.exit(f"{text}; if PYTHONPATH leads there, `unset PYTHONPATH`")

import machine

MB = 2**20
SIZES = 2**12, 2**16, MB, 16 * MB, 64 * MB, 256 * MB  # CPUs stop at 16 MB
WAIT = timedelta(seconds=60)  # for each rank
NETWORK_HINT = "find the interface between the nodes (`ip -brief address`), and set "
NETWORK_HINT += "GLOO_SOCKET_IFNAME or, with GPUs, NCCL_SOCKET_IFNAME to it"
IOMMU_HINT = "if NCCL_P2P_DISABLE=1 helps, the cause is the IOMMU"


class Job:
    """The processes of this job, and their results, which become the JSON file.

    They meet at torchrun's store, which needs neither Gloo nor NCCL, so a missing
    rank or a problem is reported before Gloo or NCCL would hang.

    Keys of `found`: backend; nodes (names); finished (the time, or null);
    gpus_shared (the number of GPUs, if ranks share them, or null);
    processes (describe_process() and matmul_tflops() of all ranks); all_reduce (over
    a node or "all", nodes, processes, bytes, seconds, bus_gb_per_s, correct); data
    (read_data() of all nodes); problems, warnings
    """

    def __init__(self, file):
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.problems, self.warnings = [], []
        name = os.environ.get("SLURM_JOB_ID", int(time.time()))
        self.file = file or Path("logs", f"check-{name}.json")
        lists = "nodes", "processes", "all_reduce", "data"
        self.found = dict.fromkeys(["backend", "finished", "gpus_shared"])
        self.found |= {name: [] for name in lists}
        self.found |= {"problems": self.problems, "warnings": self.warnings}
        self.save()
        self.print(f"{machine.describe_versions()}\ntorch is {torch.__file__}")
        self.store = dist.HashStore()
        if self.size > 1:
            store, *_ = next(dist.rendezvous("env://", timeout=WAIT))
            self.store = dist.PrefixStore("check", store)
        self.nodes = ["an unknown node"] * self.size
        self.nodes = self.gather("answer", machine.NODE)
        self.found["nodes"] = list(dict.fromkeys(self.nodes))
        self.device = machine.pick_device()
        self.sizes = SIZES[:4] if self.device.type == "cpu" else SIZES

    def gather(self, what, value):
        """Return the value of each rank; what: its name, for the error."""
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(value))
        try:
            self.store.wait(keys, WAIT)
        except dist.DistStoreError:
            lost = [r for r in range(self.size) if not self.store.check([keys[r]])]
            names = ", ".join(f"rank {rank} on {self.nodes[rank]}" for rank in lost)
            text = (
                f"{names}: no {what} within {WAIT.seconds} s. Look for what hangs "
            )
            text += "there (`ssh NODE top`), or `sbatch --exclude=NODE`"
            self.give_up(text)
        return [json.loads(self.store.get(key)) for key in keys]

    @contextmanager
    def deadline(self, what):
        """Give up if the block fails, or hangs, as NCCL may for ever."""
        late = f"{what}: timed out after {WAIT.seconds} s; {NETWORK_HINT}"
        timer = threading.Timer(WAIT.seconds, self.give_up, [late])
        timer.start()
        try:
            yield
        except RuntimeError as error:
            why = str(error).splitlines()[0].split("] ")[-1]  # without the file
            self.give_up(f"{what}: {why} (on {machine.NODE}); {NETWORK_HINT}")
        finally:
            timer.cancel()

    def give_up(self, text):
        """Print the error and end this process; torchrun then ends the job."""
        time.sleep(min(self.rank, 5))  # only the first rank prints it
        print(f"Error: {text}", file=sys.stderr, flush=True)
        self.problems.append(text)
        self.save()
        os._exit(2)  # the main thread may be the one that hangs

    def save(self):
        """Write the results; if that fails, print why and end this process."""
        if self.rank != 0:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self.found, indent=1) + "\n")
        except OSError as error:
            text = (
                f"Error: cannot write {self.file} ({error}); use `--to FILE`, with"
            )
            print(text, "a file that you may write", file=sys.stderr, flush=True)
            os._exit(2)

    def print(self, text):
        if self.rank == 0:
            print(text, flush=True)


def check_processes(job):
    """Print each process's device, CPUs and TFLOP/s, and look for problems."""
    row = machine.describe_process(job.rank, job.device)
    row |= machine.matmul_tflops(job.device)  # of all devices at the same time
    rows = job.found["processes"] = job.gather("TFLOP/s", row)
    gpus, cpus = defaultdict(list), defaultdict(list)  # {(node, GPU): rows}
    for row in rows:
        speeds = [f"{k[:-7]} {v:.4g}" for k, v in row.items() if "_tflops" in k]
        text = f"Rank {row['rank']} on {row['node']}: {row['device']}, UUID "
        text += f"{row['uuid']}, {row['memory_gb']} GB, CPUs {row['cpus']}, "
        job.print(f"{text}{row['threads']} threads; TFLOP/s: {', '.join(speeds)}")
        gpus[row["node"], row["uuid"]].append(row)
        cpus[row["node"], row["cpus"]].append(row)
    check_gpu_sharing(job, gpus)
    for (node, cpu), sharing in cpus.items():
        threads = sum(row["threads"] for row in sharing)
        if threads > sharing[0]["cpu_count"]:
            text = f"on {node} {len(sharing)} processes with {threads} threads "
            text += f"compete for CPU {cpu}: request more (`--cpus-per-task`, also "
            job.warnings.append(f"{text}for srun) or `export OMP_NUM_THREADS=1`")
    for node, row in {row["node"]: row for row in rows}.items():
        if row["load"] > row["node_cpu_count"]:
            busy = f"a load of {row['load']:.1f} on {row['node_cpu_count']} CPUs"
            text = f"{node} is busy, with {busy}: check again when it is idle"
            job.warnings.append(text)
        if row["gpus_unseen"]:
            text = f"PyTorch sees none of this job's GPUs on {node}: install a"
            job.problems.append(f"{text} PyTorch for their driver (see line 1)")


def check_gpu_sharing(job, gpus):
    """Print which ranks share a GPU, and whether that was asked for.

    gpus: {(node, UUID): rows of describe_process()}; without a GPU a UUID is None.
    """
    asked = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    for (node, gpu), sharing in gpus.items():
        if not gpu or len(sharing) == 1:
            continue
        job.found["gpus_shared"] = len(gpus)
        ranks = ", ".join(str(row["rank"]) for row in sharing)
        text = f"ranks {ranks} on {node} share GPU {gpu}"
        if not asked:
            text += ": start one torchrun there, with a process for each GPU"
            job.problems.append(text)
        else:
            text += ", as NCCL_MULTI_RANK_GPU_ENABLE asks for: they take turns, so"
            job.print(f"{text} no speed below is that of a GPU of its own")


def longest(device, group, seconds):
    """Return the longest of the seconds of all processes of a group."""
    worst = torch.tensor(seconds, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group)
    return worst.item()


def bus_bandwidth(n, size, seconds):
    """Return an all-reduce's bus bandwidth in GB/s, as nccl-tests defines it.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    return size / seconds * 2 * (n - 1) / n / 1e9


def measure_all_reduce(job, group):
    """Return a row per message size; all processes of the group call this."""
    ranks, rows = dist.get_process_group_ranks(group), []
    n, nodes = len(ranks), len({job.nodes[rank] for rank in ranks})
    over = "all" if nodes > 1 else job.nodes[job.rank]
    slowest, expected = partial(longest, job.device, group), n * (n + 1) / 2
    seconds = before = 0
    for size in job.sizes:
        if before and 5 * seconds * size / before > 10:
            break  # it runs five times, and must not take minutes
        with job.deadline(f"all_reduce of {size} bytes over {over}"):
            # Every rank has a different number, so a lost or doubled one shows.
            mine = dist.get_rank(group) + 1.0
            x = torch.full((size // 4,), mine, device=job.device)
            dist.all_reduce(x, group=group)
            correct = not slowest(float((x != expected).any()))
            x.zero_()  # sums of sums would grow without end
            operation, before = partial(dist.all_reduce, x, group=group), size
            seconds = machine.median_seconds(operation, job.device, slowest)
        row = {"over": over, "nodes": nodes, "processes": n, "bytes": size}
        row |= {"seconds": seconds, "bus_gb_per_s": bus_bandwidth(n, size, seconds)}
        rows.append(row | {"correct": correct})
    return rows


def check_network(job):
    """Print the speed of all-reduces, within each node and over all nodes."""
    if job.size == 1:
        return job.print("No communication with one process: use run-2gpus.sh.")
    if job.problems:
        return job.print("No communication before this problem is solved.")
    backend = job.found["backend"] = dist.get_default_backend_for_device(job.device)
    nodes, groups, rows = job.found["nodes"], [], []
    with job.deadline(f"{backend} does not connect the processes"):
        # Longer than WAIT, or NCCL would abort before that.
        dist.init_process_group(timeout=2 * WAIT)
        ranks = [[r for r in range(job.size) if job.nodes[r] == n] for n in nodes]
        if len(nodes) > 1:
            groups.append(dist.new_subgroups_by_enumeration(ranks)[0])
        groups.append(dist.group.WORLD)
    for group in groups:
        if dist.get_world_size(group) > 1:
            mine = measure_all_reduce(job, group)
            rows += mine if dist.get_rank(group) == 0 else []
    rows = [row for part in job.gather("bandwidths", rows) for row in part]
    rows = job.found["all_reduce"] = sorted(rows, key=lambda row: row["nodes"])
    job.print(f"{backend} all_reduce: over, processes, bytes, ms, bus GB/s")
    for row in rows:
        over, size, ms = row["over"], row["bytes"], row["seconds"] * 1e3
        numbers = f"{row['processes']:>4} {size:>9} {ms:>9.4g}"
        job.print(f"{over:>10} {numbers} {row['bus_gb_per_s']:>9.4g}")
        if not row["correct"]:
            text = f"all_reduce of {size} bytes over {over} gives wrong numbers"
            job.problems.append(f"{text}: tell the administrators; {IOMMU_HINT}")
    largest = {row["over"]: row["bytes"] for row in rows}
    for over, size in largest.items():
        if size < job.sizes[-1]:
            text = f"messages of more than {size} bytes over {over} are too slow"
            job.warnings.append(f"{text}: {NETWORK_HINT}")


def check_data(job):
    """Print what is in DATADIR and how fast it is read, by node; look at TMPDIR."""
    root = Path(__file__).resolve().parent.parent / "data"
    root = Path(os.environ.get("DATADIR") or root)
    first = job.nodes.index(job.nodes[job.rank]) == job.rank  # of its node
    rows = job.gather("data", machine.read_data(root) if first else None)
    job.found["data"] = [row for row in rows if row]
    for row in job.found["data"]:
        text = f"{row['node']}: DATADIR {row['datadir']} has the data of "
        text += ", ".join(row["exercises"]) or "no lesson"
        if row["file"]:
            text += f", read at {row['read_gb_per_s']:.3g} GB/s"
        job.print(text)
        if row["error"]:
            text = f"{row['node']} cannot read DATADIR, {row['error']}: set DATADIR "
            job.problems.append(f"{text}to a folder that all nodes can read")
        for name in row["unprepared"]:
            text = f"{name} is not prepared data: run download_data.py again"
            job.problems.append(f"{row['node']}: {text}")
        if row["tmpdir"]:
            text = f"on {row['node']} TMPDIR {row['tmpdir']}: `export TMPDIR=FOLDER`"
            job.problems.append(f"{text} with a short path and some free space")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, metavar="FILE", help="JSON file to write")
    args = parser.parse_args()
    job = Job(args.to)
    for check in check_processes, check_network, check_data:
        check(job)
        job.save()
    job.found["finished"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    job.save()
    job.print(f"Saved {job.file}")
    for kind, texts in (("Warning", job.warnings), ("Problem", job.problems)):
        for text in texts:
            job.print(f"{kind}: {text}")
    if not job.problems + job.warnings:
        job.print("All is well.")
    job.gather("end", None)  # or torchrun ends all ranks at the first status 1
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(0.1)  # Gloo's threads must end before Python exits
    sys.exit(1 if job.problems else 0)


if __name__ == "__main__":
    main()
