"""Readings and measurements of one machine for check.py, no communication."""

import os
import platform
import re
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from zipfile import is_zipfile

import torch
import torch.distributed as dist

NODE = os.environ.get("SLURMD_NODENAME") or platform.node().split(".")[0]
# The files that each exercise needs in DATADIR
REQUIRED_FILES = {
    "exercise8": [f"dogs-vs-cats/{s}.pt" for s in ("train", "validation", "test")],
    "mnist_multigpu": ["MNIST/train.pt", "MNIST/test.pt"],
    "cifar100_demo": ["CIFAR-100/train.pt", "CIFAR-100/test.pt"],
    "cinic_lab": [f"CINIC/{split}.pt" for split in ("train", "valid", "test")],
    "dp_ddp_intro": [],
}


def pick_device():
    """Return the GPU of this process, by its local rank, or the CPU."""
    torch.set_float32_matmul_precision("high")  # TF32, as in the scripts
    gpus = torch.accelerator.device_count()
    if gpus == 0:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", 0)) % gpus  # GPUs may be shared
    torch.accelerator.set_device_index(index)
    return torch.device(torch.accelerator.current_accelerator().type, index)


def describe_versions():
    """Return the versions of PyTorch, CUDA, ROCm, NCCL and NVIDIA's driver."""
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else None
    driver = Path("/proc/driver/nvidia/version")
    driver = driver.read_text().split("\n")[0] if driver.exists() else None
    built = f"CUDA {torch.version.cuda}, ROCm {torch.version.hip}, NCCL {nccl}"
    return f"PyTorch {torch.__version__}, {built}, driver {driver}"


def find_tmpdir_problem():
    """Return what is wrong with the folder for temporary files, or None."""
    folder = os.environ.get("TMPDIR", "/tmp")
    if len(folder) + 40 > 108:  # AF_UNIX's limit; Python adds file names
        text = "too long for the sockets of DataLoader's workers"
        return f"has {len(folder)} characters, {text}"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**20))
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"


def describe_process(rank, device):
    """Return the device, CPUs, threads and versions of this process."""
    cpu = getattr(torch.cpu, "get_capabilities", dict)()  # from PyTorch 2.10 on
    name, uuid = cpu.get("cpu_name", "CPU"), None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type != "cpu":
        gpu = torch.get_device_module(device).get_device_properties(device)
        name, memory, uuid = gpu.name, gpu.total_memory, str(gpu.uuid)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    granted = os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0"
    found = {"rank": rank, "node": NODE, "device": name, "uuid": uuid}
    found["memory_gb"] = round(memory / 1e9, 1)
    found["gpus_unseen"] = device.type == "cpu" and granted and not hidden
    status = Path("/proc/self/status").read_text()
    found["cpus"] = re.search("Cpus_allowed_list:\t(.*)", status)[1]
    found["cpu_count"] = len(os.sched_getaffinity(0))
    found["threads"] = torch.get_num_threads()
    found["load"], found["node_cpu_count"] = os.getloadavg()[0], os.cpu_count()
    return found | {"versions": describe_versions()}


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


def matmul_tflops(device):
    """Return the TFLOP/s of matrix products, 2 n^3 / s, by dtype."""
    n, dtypes = 1024, [torch.float32, torch.bfloat16]
    if device.type != "cpu":
        n, dtypes = 8192, [*dtypes, torch.float16]
    found = {}
    for dtype in dtypes:
        a = torch.randn(n, n, device=device).to(dtype)
        seconds = median_seconds(partial(torch.mm, a, a), device)
        found[f"{str(dtype)[6:]}_tflops"] = 2 * n**3 / seconds / 1e12
    return found


def is_prepared(file):
    """Return whether a file contains images as the scripts need them."""
    if not is_zipfile(file):
        return False
    try:
        saved = torch.load(file, mmap=True, weights_only=True)
    except RuntimeError:  # this file system has no mmap
        saved = torch.load(file, weights_only=True)
    images = saved.get("images")
    return images is not None and images.dtype == torch.uint8 and images.ndim == 4


def read_data(root):
    """Return which exercises have their data in root, and how fast it is read."""
    found = {"node": NODE, "datadir": str(root), "exercises": [], "error": None}
    found |= {"file": None, "unprepared": [], "tmpdir": find_tmpdir_problem()}
    files = []
    try:
        os.listdir(root)  # raises an error, where is_file() returns False
        for exercise, names in REQUIRED_FILES.items():
            there = [root / name for name in names if (root / name).is_file()]
            if len(there) == len(names):
                found["exercises"].append(exercise)
            files += there
        if files:
            found["file"] = str(max(files, key=os.path.getsize))
            with open(found["file"], "rb", buffering=0) as file:
                # So the timed read comes from the disk, not from the page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                start = time.perf_counter()
                size = len(file.read(128 * 2**20))
            found["read_gb_per_s"] = size / (time.perf_counter() - start) / 1e9
        found["unprepared"] = [str(file) for file in files if not is_prepared(file)]
    except (OSError, RuntimeError) as error:
        found["error"] = str(error).splitlines()[0]
    return found
