"""The command line: ways to start it, how it ends, everyday mistakes, the report."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import COMMAND, finish, start

HEAD = """
import os, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
"""
GROUP = """
dist.init_process_group("gloo")
rank = dist.get_rank()
"""
TRAIN = """
torch.manual_seed(0)
model = DDP(nn.Linear(8, 2))
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(8):
    optimizer.zero_grad()
    model(torch.randn(8, 8)).square().mean().backward()
    optimizer.step()
"""
HEALTHY = HEAD + GROUP + TRAIN
OWN_ERROR = "raise ValueError('its own error')"
TITLE = "Checkup of script.py: 2 ranks, 8 steps"

MISTAKES = [
    ("", {}, "name a script, or -m MODULE"),
    ("none.py", {}, "no script none.py; give a file's path, or -m MODULE"),
    ("-m empty", {}, "no script empty; give a file's path, or -m MODULE"),
    ("-n 1 a.py", {}, "-n 1: use 2 or more"),
    ("-n -1 a.py", {}, "-n -1: use 2 or more"),
    ("--ignore sedes a.py", {}, "no check sedes; there are "),
    ("--reference no.py a.py", {}, "--reference: no script no.py"),
    ("--reference a.py'x a.py", {}, "--reference: No closing quotation"),
    ("--json none/x.json a.py", {}, "--json: [Errno 2] No such"),
    ("a.py", {"RANK": "0"}, "WORLD_SIZE is not: add -n 2, or run `unset RANK`"),
    (
        "a.py",
        {"RANK": "0", "WORLD_SIZE": "two"},
        "no number; run `unset WORLD_SIZE`",
    ),
    (
        "a.py",
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
        "use -n 2 without torchrun, or GPUS=2",
    ),
    (
        "a.py",
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "PATH": ""}
        | {"SLURM_JOB_NODELIST": "n[1-2]"},
        "cannot find the host of rank 0: set MASTER_ADDR",
    ),
    # The script runs, in the process that was started.
    ("rank.py", {}, "rank.py reads 'SLURM_PROCID', which a launcher sets; add -n 2"),
    ("group.py", {}, "calls init_process_group() but starts no ranks; put -n 2"),
    ("-m space.module", {}, "space.module made no process group; put -n 2 before"),
    ("ends.py", {}, "Error: ends.py ended before it made a process group"),
]


@pytest.mark.parametrize("words, env, line", MISTAKES)
def test_an_everyday_mistake_is_one_line(words, env, line, tmp_path, write, checkup):
    write("", "a.py")
    (tmp_path / "empty").mkdir()
    write("print('runs')", "space/module.py")
    write("import os; os.environ['SLURM_PROCID']", "rank.py")
    write(HEAD + "dist.init_process_group()\nprint('unwatched')", "group.py")
    write("import sys; sys.exit('give --data')", "ends.py")
    done = checkup(*words.split(), **env)
    assert done.status == 2 and "Traceback" not in done.all, done.all
    assert line in done.err.splitlines()[-1] and "unwatched" not in done.out
    assert ("give --data" in done.err) == (words == "ends.py")


@pytest.mark.parametrize("text", ["def f(:\n", "\x7fELF\0\0"])
def test_a_syntax_error_is_shown_once(text, check):
    done = check(text)
    assert done.status == 1 and done.err.count("SyntaxError") == 1, done.err
    assert "ddp_checkup" not in done.err and "Traceback" not in done.err


def test_it_explains_a_check(checkup):
    done = checkup("--explain", "set-epoch")
    words = "set-epoch (error): ", "Seen by: ", "Fix: Call sampler.set_epoch(epoch)"
    assert done.status == 0 and all(word in done.out for word in words), done.all


NUMBERS = "RANK SLURM_PROCID SLURM_LOCALID OMPI_COMM_WORLD_RANK PMI_RANK"
SIZES = "WORLD_SIZE SLURM_NTASKS SLURM_NPROCS OMPI_COMM_WORLD_SIZE DDP_CHECKUP"


@pytest.mark.parametrize("words", [["script.py"], ["-m", "space.script"]])
def test_each_rank_has_its_own_numbers(words, write, checkup):
    """Not those of the shell in which it is started, for example in a Slurm job."""
    text = f"import os, sys\nnames = '{NUMBERS} {SIZES}'.split()\n"
    text += "sys.stdout.write(' '.join(os.environ[n] for n in names) + '\\n')"
    write(text)
    write(text, "space/script.py")  # a package without __init__.py
    env = {"RANK": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "PMI_RANK": "0"}
    done = checkup("-n2", *words, SLURM_NPROCS="1", **env)
    for rank in "01":
        assert f"{5 * (rank + ' ')}2 2 2 2 1" in done.out.splitlines(), done.all
    line = "made no process group, so it is no DDP script yet."
    assert done.status == 1 and line in done.out and "Traceback" not in done.err


LAUNCHERS = {
    "torchrun": "RANK={} LOCAL_RANK={} WORLD_SIZE=2 MASTER_ADDR=localhost",
    "srun": "SLURM_PROCID={} SLURM_LOCALID={} SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 "
    "SLURM_JOB_ID={job} SLURM_STEP_ID=0 SLURM_JOB_NODELIST=n1",
    "mpirun": "OMPI_COMM_WORLD_RANK={} OMPI_COMM_WORLD_LOCAL_RANK={} "
    "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2",
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_a_launcher(launcher, tmp_path, write):
    """They meet where init_process_group() does as well; the next port is taken."""
    with socket.socket() as bound, socket.socket() as taken:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        taken.bind(("127.0.0.1", port + 1))
        taken.listen()
        job = port - 10_000
        name = {"torchrun": "RANK", "srun": "SLURM_PROCID"}.get(launcher)
        name = name or "OMPI_COMM_WORLD_RANK"
        group = f"rank = int(os.environ['{name}'])\ndist.init_process_group('gloo', "
        group += f"'tcp://127.0.0.1:{port}', rank=rank, world_size=2)"
        write(HEAD + group + TRAIN)
        ranks = []
        for rank in range(2):
            text = LAUNCHERS[launcher].format(rank, rank, job=job)
            env = dict(pair.split("=") for pair in text.split())
            if launcher != "srun" or port >= 30_000 or port % 10:
                env |= {"MASTER_PORT": str(port)}
            words = "--json=report.json", "script.py"
            ranks.append(start(tmp_path, *words, **env))
        done, other = [finish(tmp_path, rank) for rank in ranks]
    assert done.status == other.status == 0 and TITLE in done.out, (
        done.all + other.all
    )
    assert "Checkup" not in other.out


SAME = "dist.init_process_group('gloo', rank=0, world_size=2)"
LARGER = "rank = int(os.environ['RANK'])\n"
LARGER += "dist.init_process_group('gloo', rank=rank, world_size=3)"


def test_ranks_that_pass_wrong_numbers(check):
    """PyTorch says that the port is in use; the checkup, what the ranks passed."""
    done = check(f"{HEAD}\n{SAME}")
    passed = "init_process_group(rank=0, world_size=2)"
    assert f"script.py ended in {passed} and {passed}" in done.out, done.all
    done = check(f"{HEAD}\n{LARGER}", "--hang-timeout=2")
    text = r"rank 1 is in init_process_group\(rank=1, world_size=3\) at script\.py:7"
    assert done.status == 1 and done.found == ["collectives"], done.all
    assert re.search(text, done.out), done.all
    assert "Fix: Pass every process its own rank, and" in done.out


LATE = "sleep = time.sleep\nif rank: time.sleep = lambda seconds: sleep(3)\n"
ENDS = {  # what a script does: (status, what is printed)
    OWN_ERROR: (1, "script.py ended before it made a process group (rank"),
    "sys.exit('give --data')": (1, "script.py ended before it made a process group"),
    "sys.exit()": (1, "script.py ended before it made a process group."),
    f"{GROUP}{OWN_ERROR}": (1, "ended before its first optimizer step (rank"),
    "dist.init_process_group('x')": (1, "script.py ended in init_process_group("),
    "os.environ['RANK'] == '1' and exit(3)\ntime.sleep(60)": (3, "(rank 1 failed)"),
    f"{GROUP}nn.Linear(2, 2)(torch.ones(2)).sum().backward()": (1, "no step of a"),
    GROUP: (1, "there was no optimizer step, and no loop over a DataLoader"),
    f"{GROUP}rank and os.kill(os.getpid(), 9)\ntime.sleep(60)": (137, "SIGKILL"),
    f"{GROUP}{TRAIN}{OWN_ERROR}": (
        1,
        "failed. The report is about the steps before.",
    ),
    f"{GROUP}{TRAIN}os._exit(0)": (0, TITLE),
    # Rank 0 has the store, from which another rank may be late to read the result.
    f"{GROUP}{LATE}{TRAIN}": (0, TITLE),
}


@pytest.mark.parametrize("script", ENDS)
def test_how_a_script_ends(script, check):
    status, text = ENDS[script]
    done = check(HEAD + script)
    assert done.status == status and text in done.all, done.all
    assert "frame #" not in done.err and "processes.py" not in done.err
    for own in ("ValueError: its own error\n", "give --data\n"):
        assert done.err.count(own) == (own[:4] in script), done.err
    if "its own error" in script:
        assert "ddp_checkup" not in done.err and "made no process" not in done.all


ON_A_LAPTOP = (
    "dist.init_process_group('nccl')",
    "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
    f"{GROUP}DDP(nn.Linear(2, 2), device_ids=[rank])",
    f"{GROUP}nn.Linear(2, 2).to(f'cuda:{{rank}}')",
)


@pytest.mark.parametrize("line", ON_A_LAPTOP)
def test_a_gpu_script_without_a_gpu(line, check):
    done = check(HEAD + line)
    text = "No GPU here: README.md lists four edits: 'A GPU script on a laptop'."
    assert done.status == 1 and done.err.count(text) == 1, done.err
    assert "Error: nothing was checked: script.py ended" in done.out, done.out


SPAWN = """
import socket
import torch.multiprocessing as mp
def work(rank, port):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    train(rank)
def train(rank):
    TRAIN
if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("", 0))
        port = s.getsockname()[1]
    mp.spawn(work, (port,), nprocs=2)
"""
SPAWN = HEAD + SPAWN.replace("TRAIN", TRAIN.strip().replace("\n", "\n    "))
SPAWNED = [
    ("", "", 0, TITLE),
    ("    train", "    1 / 0; train", 1, "ZeroDivisionError"),
    ("    os.", "    1 / 0; os.", 2, "Error: script.py ended before it made a proc"),
]


@pytest.mark.parametrize("old, new, status, text", SPAWNED)
def test_ranks_that_a_script_spawns(old, new, status, text, write, checkup):
    write(SPAWN.replace(old, new))
    done = checkup("script.py")
    assert done.status == status and text in done.all, done.all
    assert done.err.count("Traceback") == (new.startswith("    1 / 0")), done.err
    assert "ProcessExitedException" not in done.err


def test_a_script_that_spawns_needs_no_number(write, checkup):
    spawn = "import torch.multiprocessing as mp\ndef work(rank): pass\n"
    write(spawn + "if __name__ == '__main__': mp.spawn(work, nprocs=2)")
    done = checkup("-n2", "script.py")
    assert done.status == 1 and "if they are its ranks, leave out -n" in done.out


def test_a_hang_names_both_sides(check):
    wait = "dist.recv(torch.ones(1)) if rank else dist.barrier()\n"
    done = check(HEALTHY + wait, "--hang-timeout=2")
    text = (
        r"rank 0 is in barrier at script.py:\d+, rank 1 is in recv at script.py:\d+"
    )
    assert done.status == 1 and done.found == ["collectives"], done.all
    assert re.search(text, done.out), done.all


@pytest.mark.slow
def test_a_rank_that_computes_for_long_is_named(check):
    """It may be right: another job is not ended for that."""
    wait = (
        "end = time.time() + 9\nwhile rank and time.time() < end: sum(range(999))\n"
    )
    done = check(f"{HEALTHY}{wait}dist.barrier()", "--hang-timeout=2")
    text = r"Checkup: rank 0 is in barrier at script.py:\d+, rank 1 is at script.py"
    assert done.status == 0 and re.search(text, done.err), done.all


@pytest.mark.slow
def test_ctrl_c(tmp_path, write):
    """One word, soon, also where a rank waits in PyTorch's C++ code."""
    begun = "open(f'{rank}.started', 'w').close()\ntime.sleep(300 * rank)\n"
    write(f"{HEAD}{GROUP}{begun}dist.barrier()")
    # A shell ignores Ctrl-C for what it runs in the background.
    command = ["env", "--default-signal=INT", *COMMAND]
    job = start(tmp_path, "-n2", "script.py", command=command)
    while len([*tmp_path.glob("*.started")]) < 2:
        time.sleep(0.5)
        assert job.poll() is None, job.communicate()
    time.sleep(1)
    begin = time.monotonic()
    os.killpg(job.pid, signal.SIGINT)
    output = "".join(job.communicate(timeout=100)).strip()
    assert (output, job.returncode) == ("Stopped.", 130)
    assert time.monotonic() - begin < 25


@pytest.mark.slow
def test_a_host_name_without_an_address(tmp_path, write):
    shell = ["unshare", "--uts", "sh", "-c"]
    name = "hostname nobody-knows-me"
    if not shutil.which("unshare") or subprocess.run([*shell, name]).returncode:
        pytest.skip("needs root")
    command = f"{name}; exec {' '.join(COMMAND)} -n2 {write(HEALTHY)}"
    done = finish(tmp_path, start(tmp_path, command=[*shell, command]))
    assert done.status == 0 and TITLE in done.out, done.all


def test_the_report_for_programs(check, write, checkup, tmp_path):
    bug = HEALTHY.replace("DDP(nn.Linear(8, 2))", "nn.Linear(8, 2)")
    write(bug, "k fold.py")
    done = checkup("-n2", "--json=report.json", "k fold.py")
    head = [done.report[n] for n in ("format", "script", "ranks", "steps", "status")]
    assert head == [2, "k fold.py", 2, 8, 1], done.all
    row = done.rows[done.found[0]]
    assert (row["file"], row["state"]) == ("k fold.py", "error")
    assert row["text"].startswith(f"k fold.py:{row['line']}: ") and row["fix"]
    assert re.search(
        rf"\n  error +{done.found[0]} +k fold.py:\d+: .*\n +Fix: ", done.out
    )
    assert re.search(
        r"Errors: \d, warnings: \d; \d+ checks ok, \d+ not seen", done.out
    )


def test_options_change_the_status_and_the_end(check, tmp_path):
    script = HEALTHY.replace("torch.manual_seed(rank)", "")
    script += "torch.save(model.state_dict(), f'{rank}.pt')"
    script = script.replace("torch.randn(8, 8)", "torch.randn(8, 8) + rank")
    done = check(script, "--strict")
    assert (done.found, done.status) == (["seeds"], 1), done.all
    done = check(script, "--strict", "--ignore=seeds")
    assert (done.rows["seeds"]["state"], done.status) == ("ignored", 0), done.all
    watched = (tmp_path / "1.pt").read_bytes()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    start(tmp_path, "script.py", command=torchrun).communicate(timeout=200)
    assert (tmp_path / "1.pt").read_bytes() == watched  # it changes no numbers
    (tmp_path / "1.pt").unlink()
    done = check(script, "--steps=5")
    assert done.status == 0 and "2 ranks, 5 steps" in done.out, done.all
    assert not (tmp_path / "1.pt").exists()


LOSSES = "loss -0.50000", "train loss: 1.2e-05", "Loss=0.25", "loss 12 of 30"


def test_a_reference(check, write):
    """Negative numbers and exponents are read, and whole numbers are no losses."""
    prints = "\n".join(f"if rank == 0: print('{loss}')" for loss in LOSSES)
    other = prints.replace("-0.5", "-0.51").replace("1.2e-05", "0.000012")
    write("rank = 0\n" + other, "single.py")
    done = check(HEALTHY + prints, "--reference=single.py")
    assert done.rows["reference"]["state"] == "ok" and done.status == 0, done.all
    assert "(at most 1.96% of its first loss apart)" in done.out
    done = check(HEALTHY + prints, "--reference=single.py", "--tolerance=0.01")
    assert done.rows["reference"]["state"] == "error" and done.status == 1, done.all


def test_the_fixture_for_pytest(tmp_path, write):
    write(HEALTHY, "healthy.py")
    write(OWN_ERROR, "fails.py")
    write(HEALTHY.replace("DDP(nn.Linear(8, 2))", "nn.Linear(8, 2)"), "bug.py")
    write("def test(checkup): checkup('healthy.py'); checkup('bug.py')", "test_a.py")
    write("def test(checkup): checkup('fails.py')", "test_b.py")
    plugin = [sys.executable, "-m", "pytest", "-p", "ddp_checkup.pytest_plugin"]
    done = finish(
        tmp_path, start(tmp_path, "test_a.py", "test_b.py", command=plugin)
    )
    assert "Failed: error " in done.out and "Checkup of bug.py" in done.out, done.out
    assert "ValueError: its own error" in done.out and "healthy" not in done.out
