"""Measures DDP over slow networks, to hold predict.py against: on Linux, as root.

    sudo --preserve-env=PATH,DATADIR python network.py
    python held.py

Each node is a network namespace, with a core of its own; tc makes their network
slow. For each of MODELS: one process with two batch sizes, two on one node, and two
on two nodes over each of NETWORKS, each with the batch of one (weak scaling) or half
of it (strong). Then four nodes, whose steps sleep where others compute: two
cores could not compute four times. All goes to network.json as it comes.
"""

import fcntl
import heapq
import json
import os
import platform
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from compare import read_runs
from predict import step_seconds

from common.cli import OptionParser

FILE = Path(__file__).parent / "network.json"
REPOSITORY = Path(__file__).resolve().parent.parent
# where the scripts are, for one process and for several, batch of one, options
SMALL = "--layers 4 --width 256 --heads 4 --length 128 --sequences 192 --epochs 2"
PIXELS = "--arch resnet18 --image-size 64 --no-profile --steps 6 --epochs 2"
MODELS = {
    "digits": ("mnist_multigpu/mnist_", "singlegpu.py", "ddp.py", 64, "--epochs 2"),
    "transformer": ("dp_ddp_intro/", "single.py", "ddp.py", 16, SMALL),
    "resnet18": (
        "cifar100_demo/train_",
        "cifar100.py",
        "ddp_cifar100.py",
        32,
        PIXELS,
    ),
}
# Mb/s, and milliseconds that a message takes longer
NETWORKS = [(50, 0), (50, 5), (200, 0), (200, 1), (1000, 0), (2000, 0)]
RINGS = [(200, 0), (200, 1), (1000, 0)]
SLEEPS = [(0.3, 16), (1, 64)]  # seconds of a step, MB of gradients


def do(command):
    subprocess.run(command.split(), check=True)


@contextmanager
def nodes(count, megabits, delay):
    """Join namespaces by slow links; give what to type before a command in each.

    tc's tbf makes a link narrow; a delay is made by relay(), as not each kernel has
    tc's netem.
    """
    names = [f"net{os.getpid()}-{i}" for i in range(1, count + 1)]
    bridge, process = f"br{os.getpid()}", None
    try:
        do(f"ip link add {bridge} type bridge")
        do(f"ip link set {bridge} up")
        for name in names:
            do(f"ip netns add {name}")
        if delay:
            command = [sys.executable, __file__, "relay", str(megabits), str(delay)]
            process = subprocess.Popen([*command, *names], stdout=subprocess.PIPE)
            process.stdout.readline()  # the links are there
        for i, name in enumerate(names, start=1):
            if not delay:
                do(f"ip link add eth0 netns {name} type veth peer name {name}")
                do(f"ip link set {name} master {bridge} up")
                slow = f"rate {megabits}mbit burst 128kb latency 100ms"
                do(f"tc -n {name} qdisc add dev eth0 root tbf {slow}")
            do(f"ip -n {name} address add 10.79.0.{i}/24 dev eth0")
            do(f"ip -n {name} link set lo up")
            do(f"ip -n {name} link set eth0 up")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        if process:
            process.kill()
            process.wait()
        quiet = {"check": False, "stderr": subprocess.DEVNULL}
        for name in names:  # with the netns alone a link would go a moment later
            subprocess.run(["ip", "link", "delete", name], **quiet)
            subprocess.run(["ip", "netns", "delete", name], **quiet)
        subprocess.run(["ip", "link", "delete", bridge], **quiet)


def relay(megabits, delay, *names):
    """Carry packets between these namespaces, each as late as a slow link would."""
    ends, free, waiting = [], [0] * len(names), []
    for name in names:
        end = os.open("/dev/net/tun", os.O_RDWR)
        # TUNSETIFF, and IFF_TUN | IFF_NO_PI, of linux/if_tun.h
        fcntl.ioctl(end, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x1001))
        do(f"ip link set {name} netns {name} name eth0 mtu 65000")
        ends.append(end)
    print(flush=True)
    while True:
        until = waiting[0][0] - time.monotonic() if waiting else 60
        for end in select.select(ends, [], [], max(until, 0))[0]:
            packet, source = os.read(end, 70000), ends.index(end)
            target = packet[19] - 1  # the last number of an IPv4 address, from 0
            if packet[0] >> 4 == 4 and 0 <= target < len(ends):
                free[source] = max(time.monotonic(), free[source])
                free[source] += len(packet) * 8 / float(megabits) / 1e6
                due = free[source] + float(delay) / 1e3
                heapq.heappush(waiting, (due, target, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, packet = heapq.heappop(waiting)
            os.write(ends[target], packet)


def start(room, script, options="", prefixes=((),), here=1):
    """Run a script of a room on each node, on a core each; return where logs/ is.

    here: processes on a node.
    """
    folder = Path(tempfile.mkdtemp())
    for name in ("common", "bench"):
        (folder / name).symlink_to(REPOSITORY / name)
    ignored = shutil.ignore_patterns("logs", "__pycache__")
    shutil.copytree(REPOSITORY / room, folder / room, symlinks=True, ignore=ignored)
    running = []
    for rank, prefix in enumerate(prefixes):
        first = rank % os.cpu_count()
        command = (
            f"source common/env.sh; exec taskset -c {first}-{first + here - 1} "
        )
        command += '"${PYTHON[@]}" '
        if len(prefixes) * here > 1:
            address = "10.79.0.1" if prefix else "127.0.0.1"
            command += (
                f"-m common.torchrun --nnodes={len(prefixes)} --node-rank={rank} "
            )
            command += f"--nproc-per-node={here} --rdzv-endpoint={address}:29555 "
        command = ["bash", "-c", f"{command} {script} {options}"]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        if prefix:
            env |= {"SLURMD_NODENAME": f"10.79.0.{rank + 1}"}
            env |= {"GLOO_SOCKET_IFNAME": "eth0"}
        kind = {"cwd": folder / room, "env": env, "stdout": subprocess.DEVNULL}
        running.append(subprocess.Popen([*prefix, *command], **kind))
    try:
        while None in (status := {process.poll() for process in running}):
            if status - {0, None}:
                break
            time.sleep(0.2)
        if status != {0}:
            sys.exit(f"{script} {options} failed, in {folder}")
    finally:  # if one fails, or at Ctrl-C, nobody waits for the others
        for process in running:
            process.terminate()
            process.wait()
    return folder / room / "logs"


def trained(model, batch, alone=False, **how):
    """Return the seconds of a step, and the bytes of its gradients."""
    where, one, many, _, options = MODELS[model]
    room, _, prefix = where.partition("/")
    script = prefix + (one if alone else many)
    logs = start(room, script, f"{options} --batch-size {batch}", **how)
    (run,) = read_runs([logs / "results.jsonl"])
    shutil.rmtree(logs.parent.parent)
    return step_seconds(run), run["gradient_bytes"]


def checked(**how):
    """Return check.py's all-reduces: rows of bytes and seconds."""
    logs = start("exercise8", "../bench/check.py", "--to check.json", **how)
    found = json.loads((logs.parent / "check.json").read_text())
    shutil.rmtree(logs.parent.parent)
    return {key: found[key] for key in ("backend", "all_reduce")}


def slept(case, **how):
    logs = start("exercise8", "../bench/asleep.py", f"{case[0]} {case[1]}", **how)
    seconds = float((logs / "step").read_text())
    shutil.rmtree(logs.parent.parent)
    return seconds


def main():
    """Measure all, thrice in turns what needs no network; write it as it comes."""
    OptionParser(__doc__).parse_args()
    name = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
    found = {"machine": name[1] if name else platform.machine()}
    found |= {"cores": os.cpu_count(), "torch": torch.__version__}
    found |= {"began": time.strftime("%F"), "here": checked(here=2)}
    bases = {name: {"points": {}, "two": []} for name in MODELS}
    total = 2 * (len(NETWORKS) * len(MODELS) + len(RINGS) * len(SLEEPS))
    for turn in range(1, 4):
        print(f"without a network, {turn} of 3", flush=True)
        for name, (*_, batch, _) in MODELS.items():
            for size in batch, batch // 2:
                seconds, sent = trained(name, size, alone=True)
                bases[name]["points"].setdefault(size, []).append(seconds)
            bases[name]["two"].append(trained(name, batch, here=2)[0])
            bases[name]["gradient_bytes"] = sent
        print(json.dumps(bases), flush=True)
        found |= {"bases": bases, "networks": {}, "runs": []}
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    for megabits, delay in NETWORKS:
        with nodes(2, megabits, delay) as prefixes:
            network = f"{megabits} Mb/s, {delay} ms"
            found["networks"][network] = checked(prefixes=prefixes)
            for name, (*_, batch, _) in MODELS.items():
                for size in batch, batch // 2:
                    seconds, _ = trained(name, size, prefixes=prefixes)
                    run = {"network": network, "model": name, "n": 2}
                    found["runs"].append(run | {"batch": size, "seconds": seconds})
                    print(
                        len(found["runs"]),
                        "of",
                        total,
                        found["runs"][-1],
                        flush=True,
                    )
                    FILE.write_text(json.dumps(found, indent=1) + "\n")
    for megabits, delay in RINGS:
        network = f"{megabits} Mb/s, {delay} ms, ring"
        for n in 2, 4:
            with nodes(n, megabits, delay) as prefixes:
                if n == 2:
                    found["networks"][network] = checked(prefixes=prefixes)
                for case in SLEEPS:
                    run = {
                        "network": network,
                        "model": "asleep",
                        "n": n,
                        "case": case,
                    }
                    run["alone"] = slept(case)
                    run["seconds"] = slept(case, prefixes=prefixes)
                    found["runs"].append(run)
                    print(len(found["runs"]), "of", total, run, flush=True)
                    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["relay"]:
        relay(*sys.argv[2:])
    else:
        main()
