"""The checkup: nothing is said of healthy scripts, and each bug has its own row.

tests/programs/ holds healthy programs in many styles. If the line after a comment
`# BUG name: replacement` is replaced, the program has a bug that the check finds.
"""

import importlib
import json
import re
import shutil
import sys
import sysconfig

import pytest
import torch
from conftest import REPOSITORY, copy_exercise, free_port, make_data, run, slow
from fork_ranks import Run
from test_readmes import blocks

PROGRAMS = REPOSITORY / "tests/programs"
IMPATIENT = "local_sgd.py", "sharded.py"


def cases(frameworks):
    """Yield (name, bug, number of a line, what replaces it) for each program."""
    for file in sorted(PROGRAMS.glob("**/*.py")):
        name, bugs = str(file.relative_to(PROGRAMS)), []
        if name.startswith("frameworks") != frameworks or "__init__" in name:
            continue
        if file.name != "engine.py":
            seldom = [pytest.mark.slow] * (name == "spawned.py")
            title = f"{file.stem}-healthy"
            yield pytest.param(name, "", 0, "", id=title, marks=seldom)
        for i, line in enumerate(file.read_text().splitlines(), start=1):
            mark = re.match(r"( *)# BUG ([\w -]+): (.*)", line)
            if mark:
                # One bug of each program is enough for every day.
                seldom = [pytest.mark.slow] * bool(bugs)
                bugs.append(f"{file.stem}-{len(bugs) + 1}-{mark[2].split()[0]}")
                case = name, mark[2], i, mark[1] + mark[3]
                yield pytest.param(*case, id=bugs[-1], marks=seldom)


def write_programs(folder, name, number, replacement):
    """Copy all programs, with this line of one of them replaced."""
    shutil.copytree(PROGRAMS, folder, dirs_exist_ok=True)
    if replacement:
        lines = (PROGRAMS / name).read_text().splitlines()
        lines[number] = replacement
        (folder / name).write_text("\n".join(lines) + "\n")


def read_report(folder):
    """Return {name of a check: its state}."""
    file = folder / "rows.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    return {row["name"]: row["state"] for row in rows}


def names(states, *wanted):
    return {name for name, state in states.items() if state in wanted}


def checkup(folder, *words, ranks=2, **job):
    """Return (states, output, status) of a script under the checkup."""
    path = "clinic/../tools/checkup/__main__.py"  # as in ../tools/checkup
    command = path, "--json=rows.json", *words
    job = Run(folder, "", *command, ranks=ranks, **job)
    status = max(job.join())
    return read_report(folder), job.output(0) + job.output(1), status


@pytest.mark.parametrize("name, bug, number, replacement", [*cases(False)])
def test_foreign_programs(name, bug, number, replacement, tmp_path):
    write_programs(tmp_path, name, number, replacement)
    words = ["-m", "trainer.main", "lr=0.1"] if "trainer" in name else [name]
    words = [*["--hang-timeout=2"] * (name in IMPATIENT), *words]
    job = {"PORT": free_port(), "ranks": 0 if name == "spawned.py" else 2}
    states, output, status = checkup(tmp_path, *words, **job)
    assert states and names(states, "error", "warning") == {*bug.split()}, output
    assert status == ("error" in states.values()), output


@pytest.mark.slow
@pytest.mark.parametrize("name, bug, number, replacement", [*cases(True)])
def test_frameworks(name, bug, number, replacement, tmp_path):
    python = REPOSITORY / ".venv-frameworks/bin/python"
    if not python.exists():
        pytest.skip("run `make venv-frameworks`")
    write_programs(tmp_path, name, number, replacement)
    command = [python, REPOSITORY / "tools/checkup", "-n2", "--json=rows.json", name]
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done, states = run(command, tmp_path, **env), read_report(tmp_path)
    bad = names(states, "error", "warning")
    assert states and bad == {*bug.split()}, done.stdout + done.stderr
    assert done.returncode == ("error" in states.values())


# Plain PyTorch. The cases below change some of its lines.
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
# On CPUs, without DTensors and without clipping.
UNSEEN = {"own-gpu", "shards", "clipping"}
# Of each: the check that fails, its level, what is replaced (-), and by what (+).
BUGS = """
start
-ddp_model = DDP(model)
+ddp_model = model
-torch.manual_seed(0)
+torch.manual_seed(rank)
-        loss.backward()
+        loss.backward()
+        for p in model.parameters(): dist.all_reduce(p.grad, dist.ReduceOp.AVG)

gradients
-ddp_model = DDP(model)
+model[0].requires_grad_(False)
+ddp_model = DDP(model)
+model[0].requires_grad_(True)

gradients
-cross_entropy(ddp_model(x), y)
+cross_entropy(model(x), y)

unused-parameters
-model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
+class Net(nn.Sequential):
+    def forward(self, x): return self[2](self[0](x).relu())
+model = Net(nn.Linear(8, 16), nn.Linear(1, 1), nn.Linear(16, 2))

weights
-0.1, 0.9
+0.1 + rank, 0.9

coverage
-DistributedSampler(train_set)
+DistributedSampler(train_set, world_size, 0)

coverage
-8, sampler=sampler
+8, shuffle=True

set-epoch
-    sampler.set_epoch(epoch)

split
-manual_seed(2)
+manual_seed(rank)

seeds warning
-torch.manual_seed(rank)
+torch.manual_seed(0)

eval-coverage warning
-Subset(val_set, range(rank, 29, world_size)), 8
+val_set, 8, sampler=DistributedSampler(val_set)

eval-coverage warning
-world_size)), 8
+world_size)), 8, drop_last=True

collectives
-    accuracy = evaluate()
-    if rank == 0:
+    if rank == 0:
+        accuracy = evaluate()

collectives
-    dist.all_reduce(total)
+    dist.broadcast(total, rank)

files
-if rank == 0:
-    torch.save
+if True:
+    torch.save

files warning
-sampler = DistributedSampler
+log = open("log.txt", "a")
+sampler = DistributedSampler

host-sync advice
-        total +=
+        loss.item()
+        total +=

own-number
-    dist.all_reduce(sums)

own-number warning
-    dist.all_reduce(total)

destroy-group advice
-dist.destroy_process_group()
"""
# Of each: what is another style, and which checks cannot be seen then (?).
HEALTHY = """
each has a set of its own, which it shuffles
?coverage
?split
-DataLoader(train_set, 8, sampler=sampler)
+DataLoader(TensorDataset(*[t[rank:100:2] for t in train_set[:]]), 8, shuffle=True)

workers draw the items, and nothing is shuffled
?set-epoch
-sampler = DistributedSampler
+class Noise(TensorDataset):
+    def __getitem__(self, i): return torch.randn(8), super().__getitem__(i)[1]
+train_set = Noise(*train_set[:])
+sampler = DistributedSampler
-DistributedSampler(train_set)
+DistributedSampler(train_set, shuffle=False)
-0.1 * torch.randn_like(x)
+0
-8, sampler
+8, num_workers=1, sampler

collectives of other kinds and of one rank; a scaler, two passes, a batch sampler
-    total = (
+    if rank == 0: dist.gather(total, [torch.zeros(2), torch.zeros(2)])
+    else: dist.gather(total, dst=0)
+    alone = dist.new_group([0])
+    if rank == 0: dist.all_reduce(total.clone(), group=alone)
+    dist.all_gather_object([None] * 2, torch.ones(rank))
+    if rank == 0: dist.broadcast(total, 0)
+    else: dist.broadcast(total, 0)
+    dist.barrier()
+    total = (
-loss {total:.4f}, accuracy {accuracy:.3f}
+12.345 s
-        loss.backward()
+        with ddp_model.no_sync(): (ddp_model(x).sum() * 0).backward()
+        scaler.scale(0 * ddp_model(x).sum() + loss).backward()
-optimizer.step()
+scaler.step(optimizer); scaler.update()
-optimizer =
+scaler = torch.GradScaler("cpu")
+optimizer =
-sampler = DistributedSampler(train_set)
+sampler = DistributedSampler(train_set, drop_last=True)
-8, sampler=sampler
+batch_sampler=BatchSampler(sampler, 8, True)

a sampler that goes on for ever
-loader = DataLoader(train_set, 8, sampler=sampler)
+class Forever(Sampler):
+    def __iter__(self):
+        sampler.set_epoch(epoch)
+        while True: yield from sampler
+loader = DataLoader(train_set, 8, sampler=Forever())
-    for x, y in loader:
+    for x, y in __import__("itertools").islice(loader, 7):

items are drawn again and again
?coverage
-8, sampler=sampler
+8, sampler=WeightedRandomSampler(torch.ones(101), 50)
"""


def read_cases(text):
    """Return (title, promises that cannot be seen, changes) of each case.

    The first bug of each check is enough for every day.
    """
    cases, titles = [], set()
    for block in text.strip("\n").split("\n\n"):
        title, *lines = block.splitlines(keepends=True)
        unseen = {line[1:].strip() for line in lines if line[0] == "?"}
        rows = "".join(line for line in [*lines, "\n"] if line[0] != "?")
        found = re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)*)", rows, re.M)
        changes = [tuple(map(without_marks, change)) for change in found]
        title = title.strip()
        marks = [pytest.mark.slow] if title in titles else []
        titles.add(title)
        cases.append(pytest.param(title, unseen, changes, id=title, marks=marks))
    return cases


def without_marks(lines):
    return "\n".join(line[1:] for line in lines.splitlines())


def changed(changes):
    script = SCRIPT
    for old, new in changes:
        assert old in script, old
        script = script.replace(old, new)
    return script


def check(script, folder, *options):
    """Write a script, and return what checkup() does."""
    (folder / "script.py").write_text(script)
    (folder / "helper.py").write_text("")  # both ranks write its __pycache__
    return checkup(folder, *options, "script.py")


@pytest.mark.parametrize("title, unseen, changes", read_cases(BUGS))
def test_bugs(title, unseen, changes, tmp_path):
    name, level = f"{title} error".split()[:2]
    states, output, status = check(changed(changes), tmp_path)
    assert names(states, "error", "warning", "advice") == {name}, output
    assert (states[name], status) == (level, level == "error")
    line = r"script\.py:\d+|not destroyed|rank"
    assert re.search(rf" {name} .*\n +.*({line}).*\n +Fix: ", output), output


@pytest.mark.slow
@pytest.mark.parametrize("style, unseen, changes", read_cases(HEALTHY))
def test_healthy_styles(style, unseen, changes, tmp_path):
    states, output, status = check(changed(changes), tmp_path)
    assert status == 0 and not names(states, "error", "warning", "advice"), output
    assert names(states, "not seen") == {*UNSEEN, *unseen}, output


def test_it_changes_no_weights_and_can_stop_early(tmp_path):
    """A run under it has the weights of one without, to the bit."""
    states, output, status = check(SCRIPT, tmp_path)
    assert status == 0 and names(states, "not seen") == UNSEEN, output
    watched = torch.load(tmp_path / "model.pt")
    assert Run(tmp_path, "", tmp_path / "script.py", ranks=2).join() == [0, 0]
    alone = torch.load(tmp_path / "model.pt")
    assert all(torch.equal(alone[name], watched[name]) for name in alone)
    (tmp_path / "model.pt").unlink()
    states, output, status = check(SCRIPT, tmp_path, "--steps", 5)
    assert status == 0 and "2 ranks, 5 steps" in output, output
    assert not (tmp_path / "model.pt").exists()
    assert names(states, "not seen") > {"eval-coverage", "destroy-group"}, output


def test_a_script_that_fails(tmp_path):
    fails = ("    accuracy = evaluate()", "    accuracy = evaluate()[rank]")
    states, output, status = check(changed([fails]), tmp_path)
    assert status == 1 and not names(states, "error", "warning"), output
    assert "TypeError: 'float' object is not subscriptable" in output
    assert "failed: see its error" in output


def test_levels_change_the_status(tmp_path):
    no_seed = changed([("torch.manual_seed(rank)", "torch.manual_seed(0)")])
    _, output, status = check(no_seed, tmp_path, "--strict")
    assert status == 1 and "checked, 0 errors, 1 warning\n" in output, output
    assert "If torchrun reports it below, nothing crashed." in output
    states, _, status = check(no_seed, tmp_path, "--strict", "--ignore=seeds")
    assert status == 0 and states["seeds"] == "ignored"


@pytest.mark.slow
def test_a_rank_that_is_killed(tmp_path):
    """The others' table says so, though rank 0 waits for it within a collective."""
    kill = "    dist.barrier()\n    if rank and epoch: os.kill(os.getpid(), 9)"
    changes = ("    accuracy = evaluate()", kill), ("accuracy {accuracy:.3f}", "")
    script = changed(changes)
    states, output, status = check(script, tmp_path)
    assert status == 1 and "Rank 1 was killed: see its error." in output, output


@pytest.mark.slow
def test_the_highest_status_counts(tmp_path):
    text = (
        "import os, time\nexit(3) if os.environ['RANK'] == '1' else time.sleep(60)"
    )
    (tmp_path / "exits.py").write_text(text)
    command = [sys.executable, REPOSITORY / "tools/checkup", "-n2", "exits.py"]
    done = run(command, tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 3, done.stderr  # rank 0, which has no partner, has 1


def test_one_line_for_what_cannot_be_run(tmp_path):
    (tmp_path / "script.py").write_text("print('bye')")
    for script, line in (
        ("no.py", "error: no script no.py; give a file's path, or -m MODULE"),
        ("script.py", "Error: script.py made no process group; start it with -n 2"),
    ):
        job = Run(tmp_path, "", "tools/checkup/__main__.py", script)
        assert job.join() == [2] and line in job.output()


def test_it_explains_each_check(tmp_path, monkeypatch):
    """--explain, and the table of its README."""
    monkeypatch.syspath_prepend(REPOSITORY / "tools/checkup")
    checks = importlib.import_module("ddp_checkup.checks").CHECKS
    readme = (REPOSITORY / "tools/checkup/README.md").read_text()
    rows = re.findall(
        r"^\| `([\w-]+)` \| (\w+) \| (.*) \| (.*) \| (.*) \|$", readme, re.M
    )
    assert rows == [(c.name, c.level, c.promise, c.seen, c.fix) for c in checks]
    job = Run(tmp_path, "", "tools/checkup/__main__.py", "--explain", "start")
    assert job.join() == [0] and f"Fix: {checks[1].fix}" in job.output()


@pytest.mark.slow
def test_a_stranger_installs_it(tmp_path):
    """The first commands of its README, in an environment that has PyTorch alone."""
    folder = shutil.copytree(REPOSITORY / "tools/checkup", tmp_path / "checkup")
    run([sys.executable, "-m", "venv", "--without-pip", "env"], tmp_path)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "pytorch.pth").write_text(sysconfig.get_path("purelib"))
    python = tmp_path / "env/bin/python"
    done = run([python, "-m", "pip", "install", "."], folder)
    assert done.returncode == 0, done.stderr
    command = tmp_path / "env/bin/ddp-checkup", "-n", 2, "example.py"
    done = run(command, folder, OMP_NUM_THREADS="1")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "example.py:22: epoch 2 has the order of epoch 1" in done.stdout
    assert "checked, 1 error, 0 warnings" in done.stdout


@pytest.mark.parametrize(
    "script, status",
    [
        ("cinic_lab/cinic_ddp.py", 0),
        slow("dp_ddp_intro/ddp.py", 0),
        slow("dp_ddp_intro/ddp_unfinished.py", 1),
        slow("exercise8/solutions/strong_scaling.py", 0),
    ],
)
def test_the_command_of_a_lesson_grades_a_script(script, status, sample, tmp_path):
    """The solution passes, and the unchanged copy does not."""
    lesson = script.split("/")[0]
    exercise = copy_exercise(lesson, tmp_path)
    if lesson == "exercise8":  # as many photos as its reader has
        sample = make_data(tmp_path / "data", 1, [lesson])
    commands = [c for _, block in blocks(f"{lesson}/README.md") for c in block]
    (command,) = [c for c in commands if "tools/checkup" in c]
    shutil.copy(tmp_path / script, exercise / re.search(r"my_\w+\.py", command)[0])
    command = command.replace("sbatch", "bash").replace("$SMALL", "$(cat small.txt)")
    if lesson == "cinic_lab":  # its sample is a tenth, too
        command += " --batch-size 24"
    done = run(["bash", "-c", command], exercise, sample)
    assert done.returncode == status, done.stdout + done.stderr
    row = "ok" if status == 0 else "error"
    assert lesson == "cinic_lab" or re.search(f"{row} +reference ", done.stdout)
