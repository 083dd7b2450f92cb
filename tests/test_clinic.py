"""The checkup: what is healthy is well; what is sick has its own promise broken."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import REPOSITORY, copy_room, free_port, run, torchrun, without_gloo

sys.path.append(str(REPOSITORY / "clinic"))
import promises

(
    DEVICE,
    START,
    GRADIENTS,
    WEIGHTS,
    IMAGES,
    ORDER,
    SPLIT,
    RANDOM,
    EVALUATION,
    COLLECTIVES,
    FILES,
    WAITS,
    PRINTED,
    GROUP,
) = NAMES = [name for name, _, _ in promises.TEXTS]

# In plain PyTorch, as people write it; what is sick or odd changes some of its rows.
SCRIPT = """
import os, random, helper, numpy as np
import torch, torch.distributed as dist
from contextlib import nullcontext
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import *
rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
dist.init_process_group()
world_size = dist.get_world_size()
torch.manual_seed(0)
images = torch.randn(130, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(images, (images.sum(1) > 0).long())
train_set, val_set = random_split(data, [101, 29], torch.Generator().manual_seed(2))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
ddp_model = DDP(model)
torch.manual_seed(rank)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, 8, sampler=sampler)
val_loader = DataLoader(Subset(val_set, range(rank, 29, world_size)), 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
def evaluate():
    sums = torch.zeros(2)
    with torch.no_grad():
        for x, y in val_loader:
            right = (model(x).argmax(1) == y).sum()
            sums += torch.stack([right, torch.tensor(len(y))])
    dist.all_reduce(sums)
    return sums[0].item() / sums[1].item()
for epoch in range(3):
    sampler.set_epoch(epoch)
    total = torch.zeros(2)
    for x, y in loader:
        x = x + 0.1 * torch.randn_like(x)
        loss = nn.functional.cross_entropy(ddp_model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += torch.stack([loss.detach() * len(y), torch.tensor(len(y))])
    dist.all_reduce(total)
    total = (total[0] / total[1]).item()
    accuracy = evaluate()
    if rank == 0:
        print(f"Epoch {epoch}: loss {total:.4f}, accuracy {accuracy:.3f}")
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
"""
HAND = "[dist.all_reduce(p.grad, dist.ReduceOp.AVG) for p in model.parameters()]"
FROZEN = "model[0].requires_grad_(False)\nddp_model = DDP(model)\n"
ALONE = "    if rank == 0:\n        accuracy = evaluate()\n"
# What is replaced by what, and the promise that this breaks.
SICK = [
    (
        START,
        "DDP(model)",
        "model",
        "(0)",
        "(rank)",
        "loss.backward()",
        f"loss.backward(); {HAND}",
    ),
    (GRADIENTS, "DDP(model)", "model"),
    (GRADIENTS, "ddp_model = DDP(model)", f"{FROZEN}model[0].requires_grad_(True)"),
    (GRADIENTS, "ddp_model(x)", "model(x)"),
    (GRADIENTS, "        loss = nn", "        with ddp_model.no_sync(): loss = nn"),
    (WEIGHTS, "0.1, 0.9", "0.1 + rank, 0.9"),
    (IMAGES, "Sampler(train_set)", "Sampler(train_set, world_size, 0)"),
    (IMAGES, "8, sampler=sampler", "8, shuffle=True"),
    (ORDER, "    sampler.set_epoch(epoch)", ""),
    (SPLIT, "manual_seed(1)", "manual_seed(rank)"),
    (SPLIT, "manual_seed(2)", "manual_seed(rank)"),
    (RANDOM, "manual_seed(rank)", "manual_seed(0)"),
    (
        EVALUATION,
        "Subset(val_set, range(rank, 29, world_size)), 8",
        "val_set, 8, sampler=DistributedSampler(val_set)",
    ),
    (EVALUATION, "world_size)), 8", "world_size)), 8, drop_last=True"),
    (COLLECTIVES, "    accuracy = evaluate()\n    if rank == 0:\n", ALONE),
    (
        COLLECTIVES,
        "    dist.all_reduce(total)",
        "    if rank == 0 or epoch < 2: dist.all_reduce(total)",
    ),
    (COLLECTIVES, "    dist.all_reduce(total)", "    dist.broadcast(total, rank)"),
    (FILES, "if rank == 0:\n    torch", "if True:\n    torch"),
    (FILES, "sampler =", "log = open('log.txt', 'a')\nsampler ="),
    (WAITS, "        total +=", "        loss.item(); total +="),
    (PRINTED, "    dist.all_reduce(sums)\n", ""),
    (PRINTED, "    dist.all_reduce(total)\n", ""),
    (GROUP, "dist.destroy_process_group()", ""),
]
LOADER = "DataLoader(train_set, 8, sampler=sampler)"
NOISE = """class Noise(TensorDataset):
    def __getitem__(self, i): return torch.randn(8), super().__getitem__(i)[1]
train_set = Noise(*train_set[:])
sampler ="""
STREAM = """
class Stream(IterableDataset):
    def __iter__(self): return iter([train_set[i] for i in range(rank, 100, 2)])
loader ="""
OWN = "DataLoader(TensorDataset(*[t[rank:100:2] for t in train_set[:]]), 8,"
OWN += " shuffle=True)"
NUMPY = NOISE.replace("torch.randn(8)", "torch.tensor(np.random.randn(8)).float()")
FOREVER = """class Forever(Sampler):
    def __iter__(self):
        sampler.set_epoch(epoch)
        while True: yield from sampler
loader ="""
GATHER = """    if rank == 0: dist.gather(total, [torch.zeros(2), torch.zeros(2)])
    else: dist.gather(total, dst=0)
    alone = dist.new_group([0])
    if rank == 0: dist.all_reduce(total.clone(), group=alone)
    dist.all_gather_object([None] * 2, torch.ones(rank))
    total = ("""
# The same in other styles; and which promises cannot be seen then, besides DEVICE.
HEALTHY = [
    ((IMAGES, SPLIT), LOADER, OWN),
    ((), "sampler =", NUMPY),
    ((), "    total = (", GATHER),
    (
        (IMAGES,),
        "\nloader =",
        "\n" + FOREVER,
        "8, sampler=sampler",
        "8, sampler=Forever()",
        "    for x, y in loader:",
        "    for x, y in __import__('itertools').islice(loader, 7):",
    ),
    ((),),
    (
        (),
        "init_process_group()",
        'init_process_group(backend="gloo")',
        "DDP(model)",
        "DDP(model, device_ids=None)",
    ),
    (
        (),
        LOADER,
        "DataLoader(train_set, 8, sampler=sampler, num_workers=1, "
        "persistent_workers=True)",
    ),
    (
        (),
        LOADER,
        "DataLoader(train_set, batch_sampler=BatchSampler(sampler, 8, False))",
    ),
    (
        (),
        LOADER,
        "DataLoader(Subset(train_set, range(rank, 101, 2)), 8, shuffle=True)",
    ),
    ((), "8, sampler=sampler", "8, sampler=sampler, drop_last=True"),
    (
        (),
        "sampler =",
        NOISE,
        "0.1 * torch.randn_like(x)",
        "0",
        "8, sampler",
        "8, num_workers=1, sampler",
    ),
    ((ORDER,), "Sampler(train_set)", "Sampler(train_set, shuffle=False)"),
    ((ORDER,), "range(3)", "range(1)"),
    (
        (RANDOM,),
        "0.1 * torch.randn_like(x)",
        "0",
        "manual_seed(rank)",
        "manual_seed(0)",
    ),
    (
        (IMAGES,),
        LOADER,
        "DataLoader(train_set, 8, "
        "sampler=WeightedRandomSampler(torch.ones(101), 50))",
    ),
    (
        (IMAGES, ORDER, SPLIT),
        "\nloader =",
        STREAM,
        LOADER,
        "DataLoader(Stream(), 8)",
    ),
    ((), "loss {total:.4f}, accuracy {accuracy:.3f}", "12.345 s"),
    (
        (PRINTED,),
        "Subset(val_set, range(rank, 29, world_size))",
        "val_set",
        "    dist.all_reduce(sums)\n",
        "",
    ),
    (
        (),
        "        loss.backward()\n",
        "        scaler.scale(loss).backward()\n",
        "optimizer.step()",
        "scaler.step(optimizer); scaler.update()",
        "sampler =",
        "scaler = torch.GradScaler('cpu')\nsampler =",
    ),
    (
        (),
        "        loss.backward()\n",
        "        with ddp_model.no_sync(): (ddp_model(x).sum() * "
        "0).backward()\n        (0 * ddp_model(x).sum() + loss).backward()\n",
    ),
    (
        (),
        "total += torch",
        "if loader.batch_size and epoch == 1: loss.item()\n        total += torch",
    ),
    (
        (),
        "    total = (",
        "    if rank == 0: dist.broadcast(total, 0)\n    else: "
        "dist.broadcast(total, 0)\n    dist.barrier()\n    total = (",
    ),
    ((), "sampler =", "open(f'log{rank}.txt', 'w')\nsampler ="),
    ((), "DDP(model)", "model", "loss.backward()", f"loss.backward(); {HAND}"),
]


def changed(*pairs):
    script = SCRIPT
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in script, old
        script = script.replace(old, new)
    return script


def checkup(script, folder, *options, start="checkup.py"):
    """Run it in two processes, without torchrun; return what they said, and more."""
    (folder / "script.py").write_text(script)
    (folder / "helper.py").write_text("")  # both processes write its __pycache__
    env = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    del env["PYTHONPATH"]  # tests/rules are for our scripts, not for these
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, REPOSITORY / "clinic" / start]
    command = [*command, "--json=rows.json", *options] if start else [sys.executable]
    jobs = [
        subprocess.Popen(
            [*map(str, command), "script.py"],
            cwd=folder,
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [without_gloo(job.communicate(timeout=120)[0]) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    file = folder / "rows.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    states = {row["promise"]: row["state"] for row in rows}
    return max(job.returncode for job in jobs), states, "".join(said)


def those(states, state):
    return {name for name, found in states.items() if found == state}


@pytest.mark.slow
@pytest.mark.parametrize("case", SICK, ids=range(len(SICK)))
def test_what_is_sick(case, tmp_path):
    promise, *pairs = case
    status, states, said = checkup(changed(*pairs), tmp_path)
    assert those(states, "broken") == {promise}, said
    assert status == 1
    line = r"script\.py:\d+|no process|rank"
    assert re.search(f"{re.escape(promise)} +broken\n    .*({line})", said), said


@pytest.mark.slow
@pytest.mark.parametrize("case", HEALTHY, ids=range(len(HEALTHY)))
def test_what_is_healthy(case, tmp_path):
    unseen, *pairs = case
    status, states, said = checkup(changed(*pairs), tmp_path)
    assert (status, those(states, "broken")) == (0, set()), said
    assert those(states, "not seen") == {DEVICE, *unseen}, said


def test_it_changes_nothing_and_ends_early(tmp_path):
    """A run under it has the weights of one without, to the bit."""
    assert checkup(SCRIPT, tmp_path, start="")[0] == 0
    alone = torch.load(tmp_path / "model.pt")
    (tmp_path / "model.pt").unlink()
    status, states, said = checkup(SCRIPT, tmp_path)
    assert status == 0 and those(states, "kept") == {*NAMES} - {DEVICE}, said
    watched = torch.load(tmp_path / "model.pt")
    assert all(torch.equal(alone[name], watched[name]) for name in alone)
    (tmp_path / "model.pt").unlink()
    status, states, said = checkup(SCRIPT, tmp_path, "--steps", 5)
    assert status == 0 and "2 processes, 5 steps" in said, said
    assert not (tmp_path / "model.pt").exists()
    assert those(states, "not seen") >= {GROUP, ORDER, EVALUATION}, said


def test_a_script_that_fails_or_needs_a_gpu(tmp_path):
    fails = ("    accuracy = evaluate()", "    accuracy = evaluate()[rank]")
    status, states, said = checkup(changed(*fails), tmp_path)
    assert status == 1 and not those(states, "broken"), said
    assert "TypeError: 'float' object is not subscriptable" in said
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    for by_name in (
        'init_process_group("nccl")',
        # Both are connected: else the one that ends first resets the other.
        "init_process_group(); dist.barrier(); torch.ones(1).cuda()",
    ):
        status, _, said = checkup(changed("init_process_group()", by_name), tmp_path)
        line = "Error: script.py: no GPU is here, and it asks for one by name ("
        assert status == 2 and said.startswith(line) and "Traceback" not in said, (
            said
        )


def test_it_is_started_by_the_run_script(tmp_path):
    room = copy_room("clinic", tmp_path)
    for command in (
        ["python", "checkup.py"],
        ["bash", "run-2gpus.sh", "checkup.py", "x.py"],
    ):
        command[0] = sys.executable if command[0] == "python" else command[0]
        done = run([*command, "no.py"], room)
        assert done.returncode == 2, done.stderr
        line = "Error: type bash run-2gpus.sh checkup.py SCRIPT.py\n"
        assert set(done.stderr.splitlines(keepends=True)) == {line}
    done = run([sys.executable, "checkup.py", "--help"], room)
    assert all(name in " ".join(done.stdout.split()) for name in NAMES)


@pytest.mark.slow
def test_it_is_started_from_another_folder(tmp_path):
    room = copy_room("dp_ddp_intro", tmp_path)
    copy_room("clinic", tmp_path)
    options = [
        "--layers=1",
        "--width=16",
        "--heads=2",
        "--length=8",
        "--sequences=64",
    ]
    command = [
        "bash",
        "jobscript_ddp.sh",
        "../clinic/checkup.py",
        "ddp.py",
        *options,
    ]
    done = run([*command, "--batch-size=8", "--epochs=2"], room)
    assert done.returncode == 0, done.stderr
    assert "Checkup of ddp.py: 2 processes, 8 steps" in done.stdout


BREAKS = [ORDER, RANDOM, GRADIENTS, SPLIT, IMAGES, FILES, COLLECTIVES, COLLECTIVES]


@pytest.mark.slow
@pytest.mark.parametrize("number, promise", [*enumerate(BREAKS, start=1)])
def test_patients(number, promise, tmp_path):
    """Each has one promise broken, and its healthy twin has none."""
    room = copy_room("clinic", tmp_path)
    launcher = "run-2nodes.sh" if promise == IMAGES else "run-2gpus.sh"
    for folder, broken in (("", {promise}), ("solutions/", set())):
        script = f"{folder}patient{number}.py"
        done = run(
            ["bash", launcher, "checkup.py", "--json=rows.json", script], room
        )
        rows = json.loads((room / "rows.json").read_text())
        assert {r["promise"] for r in rows if r["state"] == "broken"} == broken
        assert done.returncode == len(broken), done.stderr
    if promise == IMAGES:  # well on one node
        done = run(["bash", "run-2gpus.sh", "checkup.py", "patient5.py"], room)
        assert done.returncode == 0, done.stdout


SMALL = {
    "cifar100_demo": [
        "--arch=resnet18",
        "--image-size=40",
        "--epochs=2",
        "--steps=10",
    ],
    "cinic_lab": ["--arch=resnet18", "--epochs=2", "--batch-size=64"],
    "dp_ddp_intro": [
        "--layers=2",  # one for each stage of a pipeline
        "--width=32",
        "--heads=2",
        "--length=16",
        "--epochs=2",
    ],
    "exercise8": ["--backbone=tinyvgg", "--epochs=2", "--finetune-epochs=2"],
    "mnist_multigpu": ["--epochs=2"],
}
HOUSE = sorted(
    file.relative_to(REPOSITORY)
    for exercise in SMALL
    for file in (REPOSITORY / exercise).rglob("*.py")
    if "init_process_group" in file.read_text()
    and "tensorflow" not in file.parts
    and not file.stem.startswith("measure_")  # no training: a step of each way
)


@pytest.mark.slow
@pytest.mark.parametrize("script", HOUSE, ids=str)
def test_our_scripts(script, sample, tmp_path):
    exercise, path = script.parts[0], "/".join(script.parts[1:])
    room = copy_room(exercise, tmp_path)
    command = [REPOSITORY / "clinic/checkup.py", path, *SMALL[exercise]]
    done = torchrun(2, command, room, sample)
    broken = re.findall(r"^(.*?) +broken$", done.stdout, re.M)
    assert broken == [IMAGES] * (script.stem == "ddp_no_sampler"), done.stdout
    assert done.returncode == len(broken), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "exercise, single, mine, status",
    [
        (
            "dp_ddp_intro",
            "single.py --batch-size 32",
            "solutions/ddp_with_sampler.py",
            0,
        ),
        (
            "dp_ddp_intro",
            "single.py --lr 0.01",
            "solutions/ddp_with_sampler.py",
            1,
        ),
        (
            "exercise8",
            "pytorch_dvc_cnn_pretrained.py --batch-size 24",
            "solutions/strong_scaling.py",
            0,
        ),
    ],
)
def test_losses_against_those_of_one_gpu(
    exercise, single, mine, status, sample, tmp_path
):
    room = copy_room(exercise, tmp_path)
    command = [REPOSITORY / "clinic/checkup.py", "--against", single]
    command += ["--tolerance", 0.1, mine]
    done = torchrun(2, [*command, *SMALL[exercise]], room, sample)
    assert done.returncode == status, done.stdout
    state = "broken" if status else "kept"
    assert re.search(
        rf"^the losses are those of one GPU +{state}", done.stdout, re.M
    )


@pytest.mark.slow
def test_the_script_for_one_gpu_tells_why_it_failed(sample, tmp_path):
    room = copy_room("dp_ddp_intro", tmp_path)
    command = [REPOSITORY / "clinic/checkup.py", "--against", "single.py --heads 3"]
    done = torchrun(2, [*command, "ddp.py", *SMALL["dp_ddp_intro"]], room, sample)
    assert done.returncode == 1 and "heads" in done.stderr
    assert "broken\n    single.py failed, see above" in done.stdout
