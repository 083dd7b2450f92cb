"""Finds what is wrong with a DDP script that gives no error. It runs it unchanged.

    bash run-2gpus.sh checkup.py SCRIPT.py [OPTIONS]    # any DDP script, or yours
    sbatch run-2nodes.sh checkup.py SCRIPT.py [OPTIONS]
    bash run-2gpus.sh checkup.py --against "SINGLE.py --batch-size 32" SCRIPT.py ...

Its own options stand before SCRIPT.py. It watches each process from outside
(hooks.py), and says which promises of a DDP script (promises.py) were kept, which
were broken, and which it could not see. The exit status is 1 if one is broken.
"""

import argparse
import json
import os
import pickle
import random
import re
import runpy
import shlex
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from types import SimpleNamespace as Record

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.data import DistributedSampler

import hooks
import promises
from hooks import RANK, WORLD, me, now, stop


def watch(args, main):
    """In a thread: hand in what was seen when the script ends, or cannot go on."""
    seen, since, store = None, time.monotonic(), now.store
    while not now.ended and not store.check(["stop"]):
        time.sleep(0.2)
        frame = sys._current_frames()[main]  # it goes on, also without any event
        store.set(f"events{RANK}", f"{now.events} {frame.f_code} {frame.f_lasti}")
        every = [f"events{r}" for r in range(WORLD)]
        last, seen = seen, store.check(every) and store.multi_get(every)
        since = since if last == seen else time.monotonic()
        done = [f"report{r}" for r in range(WORLD) if store.check([f"report{r}"])]
        fewer = any(
            int(store.get(key).split()[1]) < me.counts.total() for key in done
        )
        if time.monotonic() - since > (5 if fewer else args.wait):
            left = " for one that has left" * fewer
            stop(
                f"{hooks.here(sys._current_frames()[main])}: rank {RANK} waits{left}"
            )
    blob = report(now.ended == "well" and not store.check(["stop"]))
    parts = range(0, len(blob), 1 << 20)  # the store takes no more at a time
    for i in parts:
        store.set(f"report{RANK}/{i >> 20}", blob[i : i + (1 << 20)])
    store.set(f"report{RANK}", f"{len(parts)} {me.counts.total()}")
    if RANK == 0:
        store.set("status", str(tell(args, *gather(store))))
    while not store.check(["status"]):
        time.sleep(0.1)
    now.status = int(store.get("status"))
    time.sleep(0.5 * (RANK == 0))  # the store may be this process's
    if not now.ended:  # it hangs
        if store.get("stop")[:1] == b"!":
            time.sleep(10)  # who has failed tells why, and torchrun ends this one
        os._exit(now.status)


def fingerprint(epoch, seed, other):
    """Return sums of some items, drawn with these seeds (torch's, and others').

    None if the data set gives none any more, or never the same ones.
    """
    data, found = epoch.data, []
    try:
        for i in [*range(0, epoch.length, epoch.length // 8 + 1)] * 2:
            torch.manual_seed(seed)
            random.seed(other)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(other)
            many = hasattr(data, "__getitems__")
            for leaf in tree_leaves(data.__getitems__([i]) if many else data[i]):
                if isinstance(leaf, torch.Tensor):
                    leaf = hooks.sums([leaf]).tolist()
                found.append(pickle.dumps(leaf))
    except Exception:  # it may be closed, or not for pickle
        return None
    half = len(found) // 2
    return found[:half] if found[:half] == found[half:] else None


def report(came_to_end):
    """Return what this process saw, as bytes; came_to_end: the script has."""
    epochs, me.epochs, keys, trained = me.epochs, [], Counter(), set()
    for old in epochs:
        trains = old.steps > 0 or old.last > old.first
        keys[old.key, trains] += 1
        loader = vars(old).pop("loader")  # else its workers would wait at the end
        trained |= {id(loader)} if trains else set()
        if not old.length or keys[old.key, trains] > 3:  # three epochs tell enough
            continue
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        try:
            dealt = [torch.as_tensor(b).flatten().tolist() for b in old.dealt]
            dealt = dealt[: int(min(old.most, len(dealt)))]  # some go on for ever
        except (TypeError, ValueError, RuntimeError):  # no numbers
            continue
        order = [i for batch in dealt for i in batch]
        new = Record(key=old.key, trains=trains, order=order, items=order, sets=[])
        for level in old.chain:
            new.items = [int(level[i]) for i in new.items]
            new.sets = [{int(level[i]) for i in s} for s in new.sets]
            new.sets.append({*map(int, level)})
        new.sets.append({*range(old.length)})
        new.whole, new.batch = old.batches >= old.most, max([1, *map(len, dealt)])
        droppers = loader, loader.batch_sampler, sampler
        new.drops = any(getattr(one, "drop_last", False) for one in droppers)
        weighted = type(sampler).__name__ == "WeightedRandomSampler"
        new.free = weighted or getattr(sampler, "replacement", False)
        new.shares = isinstance(sampler, DistributedSampler)
        new.also_trains = id(loader) in trained and not trains
        new.sample = fingerprint(old, 0, 0) if came_to_end and trains else None
        workers = (
            loader.num_workers > 0
        )  # their seeds come from torch's, or from these
        own = workers and (loader.worker_init_fn or loader.generator)
        again = new.sample and not own and fingerprint(old, 1, int(workers))
        new.drawn = bool(again) and again != new.sample
        me.epochs.append(new)
    me.reads = {line: len(b & now.trained) for line, b in me.reads.items()}
    me.trained, me.steps, me.came_to_end = len(now.trained), now.steps, came_to_end
    hangs = now.ended in ("", "failed") and me.device not in (None, "cpu")
    for part in (me.start, me.grads, me.weights):  # a GPU that waits cannot be read
        part[:] = [] if hangs else [step.tolist() for step in part]
    inodes = {f: os.stat(f).st_ino for f in me.files if os.path.exists(f)}
    me.files = {(f, inodes.get(f)): line for f, line in me.files.items()}
    return pickle.dumps(me)


def watch_or_end(*args):
    try:
        watch(*args)
    except BaseException:  # the main thread may wait for ever
        traceback.print_exc()
        os._exit(3)


def gather(store):
    """Return what all processes saw, and why the job was stopped, if it was."""
    every, deadline = [], float("inf")
    while len(every) < WORLD and time.monotonic() < deadline:
        if store.check(["stop"]):
            deadline = min(deadline, time.monotonic() + 10)
        rank = len(every)
        if store.check([f"report{rank}"]):
            parts = range(int(store.get(f"report{rank}").split()[0]))
            blob = b"".join(store.get(f"report{rank}/{i}") for i in parts)
            every.append(pickle.loads(blob))
        else:
            time.sleep(0.05)
    return every, store.get("stop").decode() if store.check(["stop"]) else ""


def tell(args, every, trouble):
    """Print the table; return the exit status."""
    failed = trouble[:1] == "!"
    rows = [*promises.judge(every, "" if failed else trouble)]
    if args.against and not trouble:
        rows.append(against(args))
    lines = [f"\nCheckup of {args.script}: {WORLD} processes, {now.steps} steps"]
    for promise, state, why, remedy in rows:
        if state == "broken":
            state, why = f"broken\n    {why}", f"\n    {remedy}."
        lines.append(f"{promise:<50}{state:<10}{why}".rstrip())
    print("\n".join(lines), flush=True)
    if args.json:
        keys = "promise", "state", "why", "remedy"
        with open(args.json, "w") as out:
            json.dump(
                [dict(zip(keys, row, strict=True)) for row in rows], out, indent=1
            )
    return int(failed or any(state == "broken" for _, state, _, _ in rows))


def against(args):
    """Return a row: whether the losses are those of the script for one GPU."""
    script, *own = shlex.split(args.against)
    env = {
        k: v for k, v in os.environ.items() if "RANK" not in k and k != "WORLD_SIZE"
    }
    env["LOCAL_WORLD_SIZE"] = "1"
    command = [sys.executable, script, *args.options, *own]
    print(f"\nNow alone, to compare: {script} {' '.join(command[2:])}", flush=True)
    # What it says of errors is seen, and so is its bar.
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        why = f"{script} failed, see above"
        return "the losses are those of one GPU", "broken", why, "Start it alone"
    found = [
        re.findall(r"loss\W+(\d+\.\d+)", t)
        for t in (done.stdout, "\n".join(now.said))
    ]
    theirs, ours = ([float(number) for number in numbers] for numbers in found)
    state, why = "broken", f"{len(ours)} losses, and {script} has {len(theirs)}"
    if theirs and len(theirs) == len(ours):
        far = max(abs(a - b) for a, b in zip(theirs, ours, strict=True)) / theirs[0]
        why = f"{far:.2%} of its first loss apart at most"
        state = "kept" if far <= args.tolerance else "broken"
    remedy = f"Compare batch, learning rate and seed with those of {script}"
    return "the losses are those of one GPU", state, why, remedy


def main():
    form = argparse.RawDescriptionHelpFormatter
    about = f"{__doc__}\n{promises.__doc__}"
    parser = argparse.ArgumentParser(description=about, formatter_class=form)
    add = parser.add_argument
    add("--steps", type=int, default=0, help="end after so many training steps")
    add(
        "--wait",
        type=float,
        default=60,
        help="it hangs if nothing happens for so long",
    )
    add("--json", metavar="FILE", help="write the table to this file, too")
    add(
        "--against",
        metavar="COMMAND",
        help="compare losses with a script for one GPU",
    )
    add(
        "--tolerance",
        type=float,
        default=0.05,
        help="of them, relative to the first",
    )
    add("script", help="any DDP script")
    add("options", nargs=argparse.REMAINDER, help="its options")
    args = parser.parse_args()
    if not os.path.isfile(args.script) or "RANK" not in os.environ:
        print("Error: run bash run-2gpus.sh checkup.py SCRIPT.py", file=sys.stderr)
        sys.exit(2)
    # torchrun has a store for this and for the script's init_process_group.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + (not agent)
    store = dist.TCPStore(*place, None, RANK == 0 and not agent)
    now.store, now.ended = dist.PrefixStore("checkup", store), ""
    now.script, now.limit = args.script, args.steps
    sys.argv = [args.script, *args.options]
    sys.path[0] = os.path.dirname(os.path.abspath(args.script))
    thread = threading.Thread(
        target=watch_or_end, args=[args, threading.get_ident()]
    )
    thread.daemon = True
    thread.start()
    hooks.start()
    for name in ("hooks", "promises"):  # the script may have some of these names
        del sys.modules[name]
    try:
        runpy.run_path(args.script, run_name="__main__")
        now.ended = "well"
    except hooks.Enough:
        now.ended = "early"
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            now.ended = "well"
        elif (
            re.search("CUDA|NVIDIA|NCCL", str(error))
            and not torch.cuda.is_available()
        ):
            line = str(error).splitlines()[0]
            why = "no GPU is here, and it asks for one by name"
            print(f"Error: {args.script}: {why} ({line})", file=sys.stderr)
            os._exit(2)
        else:
            if now.steps:  # there is something to tell
                stop(f"!rank {RANK} failed")
                now.ended = "failed"
                thread.join()
            raise
    thread.join()
    sys.stdout.flush()
    if now.ended == "early":  # the group is not closed, and would complain
        os._exit(now.status)
    sys.exit(now.status)


if __name__ == "__main__":
    main()
