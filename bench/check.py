"""Is it me or the machine? Checks a site. Every run script starts it:

    cd exercise8
    sbatch run-2nodes.sh ../bench/check.py
    sbatch run-2gpus.sh ../bench/check.py
    bash run-2gpus.sh ../bench/check.py      without Slurm; without GPUs: on 2 cores
    bash run.sh ../bench/check.py            one process, which has none to talk to

Prints what each process got, how fast they talk, what the devices reach, how fast
DATADIR is read; and in the last line that all is well, or what is wrong and what to
do. It takes less than two minutes. logs/check-JOB.json, or `--to FILE`, keeps all.
Who does not answer within 60 seconds (`--wait 60`) is named.

Exit status: 0; 1 if something is wrong; 2 if it had to stop.
"""

import ctypes
import json
import os
import platform
import re
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from common.cli import OptionParser, UserError, at_least
from common.data import data_root
from common.device import get_device, get_ranks

MB = 2**20
SIZES = 2**12, 2**16, MB, 16 * MB, 64 * MB, 256 * MB  # CPUs stop at 16 MB
# What each exercise needs in DATADIR.
NEEDS = {
    "exercise8": [f"dogs-vs-cats/{s}-*.pt" for s in ("train", "validation", "test")],
    "mnist_multigpu": ["MNIST/raw"],
    "cifar100_demo": ["cifar-100-python"],
    "cinic_lab": [f"CINIC/{split}-*.pt" for split in ("train", "valid", "test")],
    "dp_ddp_intro": [],
}
NETWORK = (
    "take the network that joins the nodes (`ip -brief address` lists all), `export "
    "GLOO_SOCKET_IFNAME=` it, on GPUs NCCL_SOCKET_IFNAME, and have its ports open; "
    "NCCL_DEBUG=INFO says more"
)


class Job:
    """The processes of this job, and what they find out: that is the JSON file.

    They meet at torchrun's store, which needs neither Gloo nor NCCL. So they can say
    who is missing, and what is wrong, before these hang.

    torch, built_for, backend, nodes (names), finished (when; null until then)
    processes: of each rank what place(), products() and copies() return
    all_reduce, broadcast: over (a node or "all"), nodes, processes, bytes, seconds,
        bus_gb_per_s, correct; barrier: over, nodes, processes, seconds
    data: of each node what read_data() returns
    problems, warnings: a line each
    """

    def __init__(self, file, wait):
        self.rank, self.local_rank, self.size, self.wait = 0, None, 1, wait
        if "RANK" in os.environ:
            self.rank, self.local_rank, self.size = get_ranks()
        number = os.environ.get("SLURM_JOB_ID") or f"{time.time():.0f}"
        self.file = file or Path("logs", f"check-{number}.json")
        lists = "nodes processes all_reduce broadcast barrier data problems warnings"
        self.found = {"torch": torch.__version__, "built_for": built_for()}
        self.found |= {"backend": None, "finished": None}
        self.found |= {name: [] for name in lists.split()}
        self.save()
        self.store = dist.HashStore()
        if self.size > 1:
            # TCPStore tries again within this time. It is a quarter of the others',
            # so that this process says what is wrong before they miss it.
            soon = timedelta(seconds=wait / 4)
            at = "torchrun at {MASTER_ADDR} port {MASTER_PORT}".format(**os.environ)
            with self.at_most(f"{node_name()} does not reach {at}"):
                store, *_ = next(dist.rendezvous("env://", timeout=soon))
            self.store = dist.PrefixStore("check", store)
        self.nodes = self.gather("sign of life", node_name())
        self.found["nodes"] = list(dict.fromkeys(self.nodes))
        self.device = get_device(self.local_rank)
        self.sizes = SIZES[:4] if self.device.type == "cpu" else SIZES

    def gather(self, what, value):
        """Return what each rank gives, by rank. All wait here for each other."""
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(value))
        try:
            self.store.wait(keys, timedelta(seconds=self.wait))
        except dist.DistStoreError:
            there = [r for r, key in enumerate(keys) if self.store.check([key])]
            self.give_up(self.missing(what, there), there[0])
        return [json.loads(self.store.get(key)) for key in keys]

    def missing(self, what, there):
        """Return a line about the ranks that are not there, and their nodes."""
        size, nodes, missing = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), {}, []
        for rank in range(self.size):  # a node's ranks are neighbours
            if self.store.check([key := f"sign of life/{rank}"]):
                nodes[rank // size] = json.loads(self.store.get(key))
        names = os.environ.get("JOB_NODES", "").split()  # of common/nodes.sh
        others = " or ".join(name for name in names if name not in nodes.values())
        for rank in sorted({*range(self.size)} - {*there}):
            node = nodes.get(rank // size) or others or "another node"
            missing.append(f"rank {rank} on {node}")
        return (
            f"{', '.join(missing)}: no {what} within {self.wait} s. See what hangs "
            "there (`ssh NODE top`), or do without it (`sbatch --exclude=NODE`)"
        )

    @contextmanager
    def at_most(self, what, speaker=0):
        """Give up if what is done inside fails, or hangs, as NCCL may for ever."""
        late = f"{what}, no end after {self.wait} s: {NETWORK}"
        timer = threading.Timer(self.wait, self.give_up, [late, speaker])
        timer.daemon = True
        timer.start()
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = str(error).splitlines()[0].split("] ")[-1]  # not in which file
            self.give_up(f"{what}, {node_name()} says {why}: {NETWORK}", speaker)
        finally:
            timer.cancel()

    def give_up(self, text, speaker):
        """End this process, and so the job. The speaker tells why, before others."""
        time.sleep(0 if self.rank == speaker else 5)
        self.found["problems"].append(text)
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
                raise UserError(f"{text}; --to FILE says where") from None

    def say(self, *lines):
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)

    def now(self, text=""):
        """Say on a terminal what is measured, in a row that the next replaces."""
        if self.rank == 0 and sys.stdout.isatty():
            print(f"\r\033[K{text}", end="", flush=True)

    def table(self, rows, columns):
        """Print rows of the JSON file; columns: "KEY KEY:HEAD", of them the full."""
        heads = [column.partition(":")[::2] for column in columns.split()]
        heads = [h for h in heads if any(row.get(h[0]) is not None for row in rows)]
        lines = [[(head or key).replace("_", " ") for key, head in heads]]
        lines += [[figure(row.get(key)) for key, _ in heads] for row in rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        self.say(*("  ".join(map(str.rjust, line, widths)) for line in lines), "")


def figure(x):
    if isinstance(x, float):
        return f"{x:.0f}" if x >= 1000 else f"{x:.3g}"
    return "-" if x is None else " ".join(x) if isinstance(x, list) else str(x)


def node_name():
    return os.environ.get("SLURMD_NODENAME") or platform.node().split(".")[0]


def content(file):
    try:
        return Path(file).read_text().strip()
    except OSError:
        return ""


def ranges(numbers):
    """Return "0-2,8" for 0, 1, 2, 8, as Linux and Slurm write lists of CPUs."""
    runs = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)


def numbers(text):
    """Return {0, 1, 2, 8} for "0-2,8"."""
    parts = [part.partition("-") for part in text.split(",")]
    return {n for a, _, b in parts for n in range(int(a), int(b or a) + 1)}


def describe(device, index):
    """Return what a GPU is; uuid and pci tell it from all others."""
    its, pci = torch.get_device_module(device).get_device_properties(index), None
    if hasattr(its, "pci_bus_id"):
        bus = its.pci_domain_id, its.pci_bus_id, its.pci_device_id
        pci = "{:04x}:{:02x}:{:02x}.0".format(*bus)
    numa = content(f"/sys/bus/pci/devices/{pci}/numa_node")
    return {
        "device": its.name,
        "memory_gb": its.total_memory / 1e9,
        "uuid": str(its.uuid) if hasattr(its, "uuid") else None,
        "pci": pci,
        "gpu_numa_node": int(numa) if numa.isdigit() else None,
    }


def built_for():
    """Return what this PyTorch is built for, such as "CUDA 12.8"."""
    names = {"CUDA": "cuda", "ROCm": "hip", "XPU": "xpu"}
    versions = {name: getattr(torch.version, v, None) for name, v in names.items()}
    return next((f"{name} {v}" for name, v in versions.items() if v), "CPUs alone")


def driver():
    """Return which CUDA NVIDIA's driver here can do, such as "CUDA 12.8", or "none".

    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VERSION.html
    """
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return "none"
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def place(rank, device):
    """Return what this process got. nccl: on AMD it is RCCL."""
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))
    cpus, system = affinity(0), Path("/sys/devices/system/cpu")
    numa = {f.name for n in cpus for f in system.glob(f"cpu{n}/node[0-9]*")}
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else ()
    nvidia = re.search(r"\s(\d+\.[\d.]+)\s", content("/proc/driver/nvidia/version"))
    version = nvidia[1] if nvidia else content("/sys/module/amdgpu/version")
    drivers = [text for text in (version, driver()) if text not in ("", "none")]
    if device.type == "cpu":
        name = re.search("model name.*: (.*)", content("/proc/cpuinfo"))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        mine, seen = {"device": name[1] if name else "CPU", "memory_gb": memory}, []
    else:
        count = torch.accelerator.device_count()
        seen = [describe(device, index) for index in range(count)]
        mine = seen[device.index]
    return {
        "rank": rank,
        "node": node_name(),
        **{"uuid": None, "pci": None, "gpu_numa_node": None, **mine},
        "gpus_seen": [[gpu["uuid"], gpu["pci"]] for gpu in seen],
        "cpus": ranges(cpus),
        "numa_nodes": ranges(int(name[4:]) for name in numa),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "built_for": built_for(),
        "nccl": ".".join(map(str, nccl)) or None,
        "driver": ", ".join(drivers) or None,
    }


def look_at_places(job):
    """Say what each process got, and what is wrong with that."""
    rows = job.found["processes"] = job.gather("facts", place(job.rank, job.device))
    job.table(rows, "rank node device memory_gb:GB uuid:UUID gpu_numa_node:NUMA")
    job.table(rows, "rank cpus numa_nodes:NUMA threads torch built_for nccl driver")
    if len({(row["torch"], row["nccl"], row["driver"]) for row in rows}) > 1:
        text = "not all run the same, see above: versions that are mixed may hang"
        job.found["warnings"].append(text)
    for node in job.found["nodes"]:
        judge_places(job, node, [row for row in rows if row["node"] == node])


def judge_places(job, node, here):
    seen = {tuple(gpu) for row in here for gpu in row["gpus_seen"]}
    owners = {}  # {GPU: ranks}
    for row in here:
        owners.setdefault((row["uuid"], row["pci"]), []).append(row["rank"])
    seen -= {(None, None)}  # not to be told from others
    for gpu in seen & owners.keys():
        if len(owners[gpu]) > 1:
            job.found["problems"].append(
                f"ranks {ranges(owners[gpu])} on {node} have one GPU, {gpu[0]}: "
                "start one torchrun there, with `--nproc-per-node=` its GPUs"
            )
    if unused := seen - owners.keys():
        job.found["warnings"].append(
            f"nobody uses {len(unused)} of the {len(seen)} GPUs seen on {node}: "
            "start a process for each (run-2gpus.sh: for two), or ask for fewer"
        )
    cpus = set().union(*(numbers(row["cpus"]) for row in here))
    if (threads := sum(row["threads"] for row in here)) > len(cpus):
        job.found["warnings"].append(
            f"on {node} {len(here)} processes with {threads} threads fight over CPU "
            f"{ranges(cpus)}: ask for more (`--cpus-per-task`, and again for srun), "
            "or `export OMP_NUM_THREADS=1`"
        )


def seconds_of(do, device, slowest=float):
    """Return the median of the seconds that do() takes, after it was done once.

    slowest: gives all processes the longest of their times, so that all repeat as
    often. What is fast is done many times between two looks at the clock.
    """

    def look(times=1):
        start = time.perf_counter()
        for _ in range(times):
            do()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return (time.perf_counter() - start) / times

    look()
    first = slowest(look())
    if first < 0.1:
        times = min(round(0.1 / first), 1000)
        return slowest(median(look(times) for _ in range(5)))
    return slowest(median([first, look(), look()]))


def bus_bandwidth(what, processes, size, seconds):
    """Return GB/s of the links, in nccl-tests' terms: the same for all world sizes.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    factor = 2 * (processes - 1) / processes if what == "all_reduce" else 1
    return size / seconds * factor / 1e9


def connect(job):
    """Start Gloo or NCCL. Return [(ranks, group)]: of this node, and of all.

    The first is left out if it would be one process, or the same as all.
    """
    groups, everybody = [], list(range(job.size))
    with job.at_most(f"{job.found['backend']} does not connect the processes"):
        # Longer than job.wait, or NCCL would abort before that.
        dist.init_process_group(timeout=timedelta(seconds=2 * job.wait))
        for node in job.found["nodes"]:
            ranks = [rank for rank in everybody if job.nodes[rank] == node]
            if 1 < len(ranks) < job.size:
                group = dist.new_group(ranks)  # all call this, for each group
                groups += [(ranks, group)] * (job.rank in ranks)
        groups.append((everybody, None))
        for _, group in groups:
            one = torch.ones(1, device=job.device)
            dist.all_reduce(one, group=group)
            one.item()  # NCCL has connected
    return groups


def collectives(job, ranks, group):
    """Return the rows of a group for the JSON file. All its processes call this."""

    def slowest(seconds):
        worst = torch.tensor(seconds, device=device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group)
        return worst.item()

    device, n, nodes = job.device, len(ranks), {job.nodes[rank] for rank in ranks}
    over = "all" if len(nodes) > 1 else job.nodes[job.rank]
    rows, head = [], {"over": over, "nodes": len(nodes), "processes": n}
    for what, do, expected in (
        ("all_reduce", partial(dist.all_reduce, group=group), n * (n + 1) / 2),
        ("broadcast", partial(dist.broadcast, src=ranks[0], group=group), 1),
    ):
        seconds = before = 0
        for size in job.sizes:
            if before and 5 * seconds * size / before > 10:
                break  # it is done five times, and must not take minutes
            far = f"{len(rows) + 1} of {2 * len(job.sizes)}"
            job.now(f"{far}: {what} of {size} bytes over {over}")
            with job.at_most(f"{what} of {size} bytes over {over}", ranks[0]):
                # Each gives another number, so that a lost or a doubled one shows.
                mine = ranks.index(job.rank) + 1.0
                x = torch.full((size // 4,), mine, device=device)
                do(x)
                correct = not slowest(float((x != expected).any()))
                x.zero_()  # sums of sums would grow without end
                seconds, before = seconds_of(partial(do, x), device, slowest), size
            bus = bus_bandwidth(what, n, size, seconds)
            rows.append({"what": what, **head, "bytes": size, "seconds": seconds})
            rows[-1] |= {"bus_gb_per_s": bus, "correct": correct}
    job.now()
    own = {} if device.type == "cpu" else {"device_ids": [device.index]}
    with job.at_most(f"barrier over {over}", ranks[0]):
        seconds = seconds_of(partial(dist.barrier, group, **own), device, slowest)
    return [*rows, {"what": "barrier", **head, "seconds": seconds}]


def talk(job):
    """Say how fast the processes talk, within the nodes and over all."""
    if job.size == 1:
        return job.say("One process has none to talk to: run-2gpus.sh has two.", "")
    if job.found["problems"]:
        return job.say("Nothing was sent: each process needs a GPU of its own.", "")
    job.found["backend"] = dist.get_default_backend_for_device(job.device)
    job.say(f"How fast they talk by {job.found['backend']}")
    rows = []
    for ranks, group in connect(job):
        mine = collectives(job, ranks, group)
        rows += mine if job.rank == ranks[0] else []  # one of a group tells
    rows = [row for part in job.gather("bandwidths", rows) for row in part]
    rows.sort(key=lambda row: row["nodes"])
    shown = [{**row, "ms": row["seconds"] * 1e3} for row in rows]
    job.table(shown, "what: over processes bytes ms bus_gb_per_s:bus_GB/s")
    for row in rows:
        what, over, size = row.pop("what"), row["over"], row.get("bytes")
        job.found[what].append(row)
        if not row.get("correct", True):
            job.found["problems"].append(
                f"{what} of {size} bytes over {over} gives wrong numbers: tell who "
                "runs the machine; if NCCL_P2P_DISABLE=1 helps, it is the IOMMU"
            )
    largest = {row["over"]: row["bytes"] for row in job.found["all_reduce"]}
    for over, size in largest.items():
        if size < job.sizes[-1]:
            text = f"too slow for more than {size} bytes over {over}: {NETWORK}"
            job.found["warnings"].append(text)


def products(device):
    """Return what the device reaches in a matrix product, in TFLOP/s: 2 n^3 / s."""
    n, found = 1024 if device.type == "cpu" else 8192, {}
    cuda = device.type == "cuda" and torch.version.cuda
    tf32 = cuda and torch.cuda.get_device_capability(device) >= (8, 0)
    before = torch.get_float32_matmul_precision()
    for name, dtype, precision in (
        ("float32", torch.float32, "highest"),
        ("tf32", torch.float32, "high"),
        ("bfloat16", torch.bfloat16, "highest"),
        *([("float16", torch.float16, "highest")] if device.type != "cpu" else ()),
    ):
        torch.set_float32_matmul_precision(precision)
        for size in (n // 8, n) if tf32 or name != "tf32" else ():
            a = torch.randn(size, size, device=device).to(dtype)
            seconds = seconds_of(partial(torch.mm, a, a), device)
            found[f"{name}_tflops"] = 2 * size**3 / seconds / 1e12
            if 8**3 * seconds > 1:  # no time for more: bfloat16 may be emulated
                break
    torch.set_float32_matmul_precision(before)
    return found


def copies(device):
    """Return GB/s from the host's memory to the device, and back."""
    found, size = {}, 256 * MB
    if device.type != "cpu":
        host = torch.ones(size, dtype=torch.uint8)  # zeros may be no memory yet
        there = host.to(device)
        for kind, here in (("", host.pin_memory()), ("pageable_", host)):
            for way, to, source in (("to", there, here), ("from", here, there)):
                copy = partial(to.copy_, source, non_blocking=True)
                speed = size / seconds_of(copy, device) / 1e9
                found[f"{way}_device_{kind}gb_per_s"] = speed
    return found


def measure_devices(job):
    """Say what the devices reach, all at the same time, as they train."""
    job.say("Matrix products, TFLOP/s")
    speeds, rows = products(job.device) | copies(job.device), job.found["processes"]
    for row, speed in zip(rows, job.gather("speeds", speeds), strict=True):
        row |= speed
    columns = "rank float32_tflops:float32 tf32_tflops:TF32 bfloat16_tflops:bfloat16"
    columns += " float16_tflops:float16"
    job.table(rows, columns)
    if job.device.type == "cpu":
        return job.say("No copies between host and device: it is the CPU.", "")
    job.say("Copies to and from the device, GB/s: pinned memory, then pageable")
    columns = "rank to_device_gb_per_s:to from_device_gb_per_s:from"
    columns += " to_device_pageable_gb_per_s:to from_device_pageable_gb_per_s:from"
    job.table(rows, columns)


def read_data(root):
    """Return which exercises have their data in root, and how fast that is read.

    It is read from the largest file of theirs, for three seconds at most, or a GiB.
    """
    found = {"node": node_name(), "datadir": str(root), "error": None}
    found |= {"exercises": [], "file": None, "bytes_read": 0, "read_gb_per_s": None}
    try:
        os.listdir(root)  # glob() would find nothing, and not say why
        files = []
        for exercise, needs in NEEDS.items():
            there = [list(root.glob(what)) for what in needs]
            found["exercises"] += [exercise] * all(there)
            files += [f for paths in there for p in paths for f in (p, *p.glob("*"))]
        if files := [file for file in files if file.is_file()]:
            found["file"] = str(max(files, key=os.path.getsize))
            with open(found["file"], "rb", buffering=0) as file:
                if hasattr(os, "posix_fadvise"):  # not from this node's memory
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                part, size, seconds = bytearray(16 * MB), 1, 0
                start = time.perf_counter()
                while size and seconds < 3 and found["bytes_read"] < 2**30:
                    found["bytes_read"] += (size := file.readinto(part))
                    seconds = time.perf_counter() - start
                found["read_gb_per_s"] = found["bytes_read"] / seconds / 1e9
    except OSError as error:
        found["error"] = f"{error.strerror}: {error.filename}"
    return found


def look_at_data(job):
    """Say what is in DATADIR on each node, and how fast that is read."""
    job.say(f"DATADIR {data_root()}: how fast it is read, and whose data are there")
    first = job.nodes.index(job.nodes[job.rank]) == job.rank  # one for each node
    rows = job.gather("data", read_data(data_root()) if first else None)
    rows = job.found["data"] = [row for row in rows if row]
    job.table(rows, "node read_gb_per_s:GB/s bytes_read:bytes exercises")
    for row in rows:
        if row["error"]:
            job.found["problems"].append(
                f"{row['node']} cannot read DATADIR, {row['error']}: `export "
                "DATADIR=` a folder that all nodes can read"
            )
        elif row["exercises"] != rows[0]["exercises"]:
            job.found["warnings"].append(
                f"{row['node']} has other data than {rows[0]['node']}: `export "
                "DATADIR=` a folder that they share"
            )


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--to", type=Path, metavar="FILE", help="default: logs/check-JOB.json")
    text = "for a process that does not answer"
    add("--wait", type=at_least(1), metavar="SECONDS", default=60, help=text)
    args = parser.parse_args()
    job = Job(args.to, args.wait)
    for section in (look_at_places, talk, measure_devices, look_at_data):
        section(job)
        job.save()
    job.found["finished"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    job.save()
    lines = [f"Wrong: {text}" for text in job.found["problems"]]
    lines += [f"Warning: {text}" for text in job.found["warnings"]]
    job.say(f"All this is in {job.file}", *lines[1:])
    more = f" (and {len(lines) - 1} more, above)" if lines[1:] else ""
    job.say(lines[0] + more if lines else "All is well.")
    job.gather("farewell", None)  # or torchrun ends all at the first status 1
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(1 if job.found["problems"] else 0)


if __name__ == "__main__":
    main()
