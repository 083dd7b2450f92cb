"""A check of the machine: GPUs, CPUs, network and data. Any run script starts it:

    cd exercise8
    sbatch run-2nodes.sh ../tools/check.py
    sbatch run-2gpus.sh ../tools/check.py
    bash run-2gpus.sh ../tools/check.py      without Slurm; without GPUs on 2 cores
    bash run.sh ../tools/check.py            one process, without communication

Prints the devices of each process, the speed of communication, of matrix products
and of reading DATADIR. The last line says that all is well, or what is wrong and
what to do. It takes less than two minutes. logs/check-JOB.json, or `--to FILE`, has
all results. Ranks that do not answer within 60 seconds (`--wait 60`) are named.

Exit status: 0; 1 if something is wrong; 2 if the check had to stop.
"""

import argparse
import json
import os
import platform
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from common.data import data_dir
from common.device import get_device, get_ranks
from common.errors import UserError, run

MB = 2**20
SIZES = 2**12, 2**16, MB, 16 * MB, 64 * MB, 256 * MB  # CPUs stop at 16 MB
# The files that each exercise needs in DATADIR
REQUIRED_FILES = {
    "exercise8": [f"dogs-vs-cats/{s}.pt" for s in ("train", "validation", "test")],
    "mnist_multigpu": ["MNIST/train.pt", "MNIST/test.pt"],
    "cifar100_demo": ["CIFAR-100/train.pt", "CIFAR-100/test.pt"],
    "cinic_lab": [f"CINIC/{split}.pt" for split in ("train", "valid", "test")],
    "dp_ddp_intro": [],
}
NETWORK_HINT = (
    "find the interface between the nodes (`ip -brief address`), set "
    "GLOO_SOCKET_IFNAME to it (on GPUs NCCL_SOCKET_IFNAME), and open its ports; "
    "NCCL_DEBUG=INFO prints more"
)


class Job:
    """The processes of this job, and their results, which become the JSON file.

    They meet at torchrun's store, which needs neither Gloo nor NCCL, and so can name
    a missing rank, or a problem, before Gloo or NCCL would hang.

    Keys of `found`: backend; nodes (names); finished (the time, or null);
    processes (describe_process() and matmul_tflops() of each rank);
    all_reduce, broadcast (over a node or "all", nodes, processes, bytes, seconds,
    bus_gb_per_s, correct); pairs (processes of a node in pairs, bytes,
    alone_seconds, at_once_seconds); data (read_data() of each node); problems,
    warnings
    """

    def __init__(self, file, wait):
        self.rank, self.local_rank, self.size, self.wait = 0, None, 1, wait
        self.store, number = dist.HashStore(), os.environ.get("SLURM_JOB_ID")
        self.file = file or Path("logs", f"check-{number or int(time.time())}.json")
        lists = "nodes", "processes", "all_reduce", "broadcast", "pairs", "data"
        self.found = {name: [] for name in lists}
        self.problems, self.warnings = [], []
        self.found |= {"problems": self.problems, "warnings": self.warnings}
        self.found |= {"backend": None, "finished": None}
        if "RANK" in os.environ:
            self.rank, self.local_rank, self.size = get_ranks()
        self.save()
        self.print(describe_versions())  # explains it if get_device() finds no GPU
        if self.size > 1:
            soon = timedelta(seconds=wait)
            store, *_ = next(dist.rendezvous("env://", timeout=soon))
            self.store = dist.PrefixStore("check", store)
        unknown = f"a node of {os.environ.get('SLURM_JOB_NODELIST', 'this job')}"
        self.nodes = [unknown] * self.size
        self.nodes = self.gather("answer", node_name())
        self.found["nodes"] = list(dict.fromkeys(self.nodes))
        self.device = get_device(self.local_rank)
        self.sizes = SIZES[:4] if self.device.type == "cpu" else SIZES

    def gather(self, what, value):
        """Return the value of each rank, by rank, and wait for all of them.

        what: names the value in the error if a rank does not answer.
        """
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(value))
        try:
            self.store.wait(keys, timedelta(seconds=self.wait))
        except dist.DistStoreError:
            there, lost = set(), []
            for rank, key in enumerate(keys):
                if self.store.check([key]):
                    there.add(json.loads(self.store.get(f"answer/{rank}")))
                else:
                    lost.append(f"rank {rank} on {self.nodes[rank]}")
            self.give_up(
                f"{', '.join(lost)}: no {what} within {self.wait} s; ranks on "
                f"{', '.join(sorted(there))} answered. Look for what hangs there "
                "(`ssh NODE top`), or avoid that node (`sbatch --exclude=NODE`)"
            )
        return [json.loads(self.store.get(key)) for key in keys]

    @contextmanager
    def deadline(self, what):
        """Give up if the block fails, or hangs, as NCCL may for ever."""
        late = f"{what}: timed out after {self.wait} s; {NETWORK_HINT}"
        timer = threading.Timer(self.wait, self.give_up, [late])
        timer.start()
        try:
            yield
        except RuntimeError as error:
            why = str(error).splitlines()[0].split("] ")[-1]  # without the file
            self.give_up(f"{what}: {why} (on {node_name()}); {NETWORK_HINT}")
        finally:
            timer.cancel()

    def give_up(self, text):
        """Print the error and end this process; torchrun then ends the job."""
        time.sleep(min(self.rank, 5))  # only the first rank prints it
        self.problems.append(text)
        try:
            self.save()
        finally:
            print(f"Error: {text}", file=sys.stderr, flush=True)
            os._exit(2)  # the main thread may be the one that hangs

    def save(self):
        if self.rank == 0:
            part = self.file.with_name(f"{self.file.name}.part")
            try:
                self.file.parent.mkdir(exist_ok=True)
                part.write_text(json.dumps(self.found, indent=1) + "\n")
                part.replace(self.file)
            except OSError as error:
                text = f"cannot write {self.file}: {error.strerror}"
                raise UserError(f"{text}; add --to FILE") from None

    def print(self, text):
        if self.rank == 0:
            print(text, flush=True)


def node_name():
    return os.environ.get("SLURMD_NODENAME") or platform.node().split(".")[0]


def find_in(file, pattern):
    """Return what a pattern's group matches in a file, or None."""
    try:
        found = re.search(pattern, Path(file).read_text())
    except OSError:
        return None
    return found[1] if found else None


def describe_versions():
    """Return the versions of PyTorch, CUDA, ROCm, NCCL and the driver."""
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else None
    driver = find_in("/proc/driver/nvidia/version", r"\s(\d+\.[\d.]+)\s")
    driver = driver or find_in("/sys/module/amdgpu/version", "(.*)")
    built = f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, ROCm "
    return f"{built}{torch.version.hip}, NCCL {nccl}, driver {driver}"


def describe_process(rank, device):
    """Return the device, GPUs, CPUs, threads and versions of this process."""
    name, uuid, seen = find_in("/proc/cpuinfo", "model name.*: (.*)"), None, []
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type != "cpu":
        look_up = torch.get_device_module(device).get_device_properties
        gpus = [look_up(index) for index in range(torch.accelerator.device_count())]
        seen = [str(gpu.uuid) for gpu in gpus if hasattr(gpu, "uuid")]
        gpu, uuid = gpus[device.index], seen[device.index] if seen else None
        name, memory = gpu.name, gpu.total_memory
    found = {"rank": rank, "node": node_name(), "device": name or "CPU"}
    found |= {"memory_gb": round(memory / 1e9, 1), "uuid": uuid, "gpus_seen": seen}
    found["cpus"] = find_in("/proc/self/status", "Cpus_allowed_list:\t(.*)")
    found["cpu_count"] = len(os.sched_getaffinity(0))
    found["threads"] = torch.get_num_threads()
    found["load"], found["node_cpu_count"] = os.getloadavg()[0], os.cpu_count()
    found["versions"] = describe_versions()
    return found


def check_processes(job):
    """Print the devices and CPUs of each process, and look for problems."""
    rows = job.gather("description", describe_process(job.rank, job.device))
    job.found["processes"] = rows
    form = "Rank {rank} on {node}: {device}, {memory_gb} GB, UUID {uuid}, "
    form += "CPUs {cpus}, {threads} threads"
    for row in rows:
        job.print(form.format(**row))
    versions = sorted({row["versions"] for row in rows})
    if len(versions) > 1:
        job.warnings.append(f"mixed versions, which may hang: {'; '.join(versions)}")
    for node in job.found["nodes"]:
        here = [row for row in rows if row["node"] == node]
        check_gpu_sharing(job, node, here)
        check_load(job, node, here[0])


def check_gpu_sharing(job, node, rows):
    """Look for shared and unused GPUs of a node, and for too few CPUs."""
    gpus, cpus, seen = defaultdict(list), defaultdict(list), set()  # {GPU: rows}
    for row in rows:
        gpus[row["uuid"]].append(row)
        cpus[row["cpus"]].append(row)
        seen.update(row["gpus_seen"])
    for gpu in sorted(seen & gpus.keys()):
        if len(gpus[gpu]) > 1:
            ranks = ", ".join(str(row["rank"]) for row in gpus[gpu])
            job.problems.append(
                f"ranks {ranks} on {node} share GPU {gpu}: start one torchrun "
                "there, with `--nproc-per-node=` the number of its GPUs"
            )
    if unused := seen - gpus.keys():
        text = f"{node} has {len(unused)} unused GPUs of {len(seen)}: "
        job.warnings.append(f"{text}start a process for each, or request fewer")
    for cpu, sharing in cpus.items():
        threads = sum(row["threads"] for row in sharing)
        if threads > sharing[0]["cpu_count"]:
            job.warnings.append(
                f"on {node} {len(sharing)} processes with {threads} threads compete "
                f"for CPU {cpu}: request more (`--cpus-per-task`, also for srun) or "
                "`export OMP_NUM_THREADS=1`"
            )


def check_load(job, node, row):
    """Warn if other work keeps a node busy; row: one of its processes."""
    if row["load"] > row["node_cpu_count"]:
        job.warnings.append(
            f"{node} is busy, with a load of {row['load']:.1f} on "
            f"{row['node_cpu_count']} CPUs, and these figures are too low: check "
            "again when it is idle"
        )


def median_seconds(operation, device, slowest=float):
    """Return the median of the seconds that operation() takes, after a warm-up.

    slowest: returns the longest time of all processes, so that all repeat equally
    often. A fast operation runs many times between two readings of the clock.
    """

    def measure(times=1):
        start = time.perf_counter()
        for _ in range(times):
            operation()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return (time.perf_counter() - start) / times

    measure()
    times = max(1, min(round(0.1 / slowest(measure())), 1000))
    return slowest(median(measure(times) for _ in range(5 if times > 1 else 3)))


def longest(device, group, seconds):
    """Return the longest of the seconds of all processes of a group."""
    worst = torch.tensor(seconds, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group)
    return worst.item()


def bus_bandwidth(what, processes, size, seconds):
    """Return the bus bandwidth in GB/s, as nccl-tests defines it.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    factor = 2 * (processes - 1) / processes if what == "all_reduce" else 1
    return size / seconds * factor / 1e9


def measure_collectives(job, group):
    """Return a row per collective and size; all processes of the group call this."""
    device, ranks, rows = job.device, dist.get_process_group_ranks(group), []
    n, nodes = len(ranks), len({job.nodes[rank] for rank in ranks})
    over = "all" if nodes > 1 else job.nodes[job.rank]
    slowest = partial(longest, device, group)
    for what, operation, expected in (
        ("all_reduce", partial(dist.all_reduce, group=group), n * (n + 1) / 2),
        ("broadcast", partial(dist.broadcast, group_src=0, group=group), 1),
    ):
        seconds = before = 0
        for size in job.sizes:
            if before and 5 * seconds * size / before > 10:
                break  # it runs five times, and must not take minutes
            with job.deadline(f"{what} of {size} bytes over {over}"):
                # Each rank has another number: a lost or a doubled one shows.
                mine = dist.get_rank(group) + 1.0
                x = torch.full((size // 4,), mine, device=device)
                operation(x)
                correct = not slowest(float((x != expected).any()))
                x.zero_()  # sums of sums would grow without end
                call, before = partial(operation, x), size
                seconds = median_seconds(call, device, slowest)
            row = {"what": what, "over": over, "nodes": nodes, "processes": n}
            row |= {"bytes": size, "seconds": seconds, "correct": correct}
            row["bus_gb_per_s"] = bus_bandwidth(what, n, size, seconds)
            rows.append(row)
    return rows


def make_pairs(nodes):
    """Return the pairs of neighbouring ranks of each node; nodes: of each rank."""
    pairs = []
    for node in dict.fromkeys(nodes):
        ranks = [rank for rank, name in enumerate(nodes) if name == node]
        pairs += [list(pair) for pair in zip(ranks[::2], ranks[1::2], strict=False)]
    return pairs


def check_pairs(job):
    """Print how fast pairs of a node's ranks all-reduce: one alone, and all at once.

    Pairs that are slower at once share a link, such as the one of a PCIe switch, or
    the host's memory. The slowest pair of all nodes counts.
    """
    pairs, nodes = make_pairs(job.nodes), Counter()
    for first, _ in pairs:
        nodes[job.nodes[first]] += 1
    if max(nodes.values(), default=0) < 2:
        return
    size = job.sizes[:5][-1]
    slowest = partial(longest, job.device, dist.group.WORLD)

    def time_pairs(ranks):
        """Return the seconds of these ranks' all-reduces; the other ranks wait."""
        operation = partial(dist.all_reduce, x, group=groups.get(job.rank))
        if job.rank not in ranks:
            operation = dist.get_rank  # does nothing
        return median_seconds(operation, job.device, slowest)

    with job.deadline(f"all_reduce of {size} bytes by pairs"):
        x = torch.zeros(size // 4, device=job.device)
        groups = {}
        for pair in pairs:
            groups |= dict.fromkeys(pair, dist.new_group(pair))
        first_pairs = {job.nodes[pair[0]]: pair for pair in reversed(pairs)}
        alone = time_pairs([rank for pair in first_pairs.values() for rank in pair])
        at_once = time_pairs([rank for pair in pairs for rank in pair])
    row = {"processes": 2 * max(nodes.values()), "bytes": size}
    row |= {"alone_seconds": alone, "at_once_seconds": at_once}
    job.found["pairs"].append(row)
    speeds = [bus_bandwidth("all_reduce", 2, size, t) for t in (alone, at_once)]
    job.print(
        f"{row['processes'] // 2} pairs of a node, all_reduce of {size} bytes, bus "
        f"GB/s: one alone {speeds[0]:.4g}, each of all at once {speeds[1]:.4g}"
    )


def check_network(job):
    """Print the speed of collectives, within each node and over all nodes."""
    if job.size == 1:
        return job.print("No communication with one process: use run-2gpus.sh.")
    if job.problems:
        return job.print("No communication: each process needs its own GPU.")
    job.found["backend"] = dist.get_default_backend_for_device(job.device)
    nodes, groups = job.found["nodes"], []
    with job.deadline(f"{job.found['backend']} does not connect the processes"):
        # Longer than job.wait, or NCCL would abort before that.
        dist.init_process_group(timeout=timedelta(seconds=2 * job.wait))
        ranks = [[r for r in range(job.size) if job.nodes[r] == n] for n in nodes]
        if len(nodes) > 1:
            groups.append(dist.new_subgroups_by_enumeration(ranks)[0])
        groups.append(dist.group.WORLD)
    rows = []
    for group in groups:
        if dist.get_world_size(group) > 1:
            mine = measure_collectives(job, group)
            if dist.get_rank(group) == 0:
                rows += mine
    job.print(f"{job.found['backend']}: what, over, processes, bytes, ms, bus GB/s")
    rows = [row for part in job.gather("bandwidths", rows) for row in part]
    for row in sorted(rows, key=lambda row: row["nodes"]):
        what, over, size = row.pop("what"), row["over"], row["bytes"]
        job.found[what].append(row)
        ms, speed = row["seconds"] * 1e3, row["bus_gb_per_s"]
        numbers = f"{row['processes']:>4} {size:>9} {ms:>9.4g} {speed:>9.4g}"
        job.print(f"{what:>10} {over:>8} {numbers}")
        if not row["correct"]:
            job.problems.append(
                f"{what} of {size} bytes over {over} gives wrong numbers: tell the "
                "administrators; if NCCL_P2P_DISABLE=1 helps, the cause is the IOMMU"
            )
    check_pairs(job)
    largest = {row["over"]: row["bytes"] for row in job.found["all_reduce"]}
    for over, size in largest.items():
        if size < job.sizes[-1]:
            text = f"messages of more than {size} bytes over {over} are too slow"
            job.warnings.append(f"{text}: {NETWORK_HINT}")


def matmul_tflops(device):
    """Return the TFLOP/s of matrix products, 2 n^3 / s, by dtype.

    float32 is TF32 where the GPU has it, as in the scripts: see get_device().
    """
    n, dtypes = 1024, [torch.float32, torch.bfloat16]
    if device.type != "cpu":
        n, dtypes = 8192, [*dtypes, torch.float16]
    found = {}
    for dtype in dtypes:
        a = torch.randn(n, n, device=device).to(dtype)
        seconds = median_seconds(partial(torch.mm, a, a), device)
        found[f"{str(dtype)[6:]}_tflops"] = 2 * n**3 / seconds / 1e12
    return found


def check_devices(job):
    """Print the TFLOP/s of all devices, which compute at the same time."""
    rows = job.gather("TFLOP/s", matmul_tflops(job.device))
    for rank, row in enumerate(rows):
        job.found["processes"][rank] |= row
        speeds = [f"{name[:-7]} {speed:.4g}" for name, speed in row.items()]
        job.print(f"Rank {rank}, TFLOP/s: {', '.join(speeds)}")


def read_data(root):
    """Return which exercises have their data in root, and the reading speed.

    Up to 128 MB of their largest file are read.
    """
    found = {"node": node_name(), "datadir": str(root), "error": None}
    found |= {"exercises": [], "file": None, "bytes_read": 0, "read_gb_per_s": None}
    paths = []
    try:
        os.listdir(root)  # raises; glob() would just find nothing
        for exercise, patterns in REQUIRED_FILES.items():
            there = [list(root.glob(pattern)) for pattern in patterns]
            if all(there):
                found["exercises"].append(exercise)
            paths += [path for some in there for path in some]
        if files := [path for path in paths if path.is_file()]:
            found["file"] = str(max(files, key=os.path.getsize))
            with open(found["file"], "rb", buffering=0) as file:
                # Read from the disk, not from this node's page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                start = time.perf_counter()
                found["bytes_read"] = size = len(file.read(128 * MB))
            found["read_gb_per_s"] = size / (time.perf_counter() - start) / 1e9
    except OSError as error:
        found["error"] = f"{error.strerror}: {error.filename}"
    return found


def check_data(job):
    """Print what is in DATADIR on each node, and how fast it is read."""
    first = job.nodes.index(job.nodes[job.rank]) == job.rank  # of its node
    rows = job.gather("data", read_data(data_dir("")) if first else None)
    rows = job.found["data"] = [row for row in rows if row]
    for row in rows:
        whose = ", ".join(row["exercises"])
        text = f"{row['node']}: DATADIR {row['datadir']} has the data of {whose}"
        if row["file"]:
            text += f", read at {row['read_gb_per_s']:.3g} GB/s"
        job.print(text)
        if row["error"]:
            text = f"{row['node']} cannot read DATADIR, {row['error']}: "
            job.problems.append(
                f"{text}set DATADIR to a folder that all nodes can read"
            )
        elif row["exercises"] != rows[0]["exercises"]:
            text = f"{row['node']} and {rows[0]['node']} have different data: "
            job.warnings.append(f"{text}set DATADIR to a folder that they share")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--to",
        type=Path,
        metavar="FILE",
        help="output (default: logs/check-JOB.json)",
    )
    parser.add_argument(
        "--wait",
        type=int,
        metavar="SECONDS",
        default=60,
        help="seconds to wait for each rank",
    )
    args = parser.parse_args()
    job = Job(args.to, args.wait)
    for check in check_processes, check_network, check_devices, check_data:
        check(job)
        job.save()
    job.found["finished"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    job.save()
    job.print(f"Saved {job.file}")
    for text in job.warnings:
        job.print(f"Warning: {text}")
    for text in job.problems:
        job.print(f"Problem: {text}")
    if not job.problems + job.warnings:
        job.print("All is well.")
    job.gather("end", None)  # or torchrun ends all ranks at the first status 1
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(1 if job.problems else 0)


if __name__ == "__main__":
    run(main)
