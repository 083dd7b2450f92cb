"""Run scripts, check.py and rehearsals under a real Slurm."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import QUICK, REPOSITORY, copy_exercise, run
from test_run_scripts import RUN_SCRIPTS, WORDS, shows

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip")
NO_SLURM = "no Slurm: docs/CLUSTER.md says how to install it"
pytestmark = [
    pytest.mark.skipif(not all(map(shutil.which, PROGRAMS)), reason=NO_SLURM),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a Slurm"),
    pytest.mark.cluster,
]
NAME = "pytorch_dvc_cnn_pretrained"
# PyTorch takes seconds to import; torchrun alone makes the processes meet.
WHO = """
import os, socket, sys
names = "RANK", "LOCAL_RANK", "WORLD_SIZE"
me = [socket.gethostname(), *map(os.environ.get, names)]
sys.stdout.write(" ".join(me) + "\\n")
"""
MISTAKE = """
import os, sys, time
from common.errors import UserError, run
def main():
    if os.environ.get("RANK", "0") in sys.argv:
        raise UserError("a mistake: type this")
    time.sleep(600)
run(main)
"""


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Start a cluster with typed GPUs, as on LUMI; yield its SLURM_CONF."""
    script = REPOSITORY / "tests/slurm/cluster.sh"
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    try:
        done = run(["bash", script, "up", folder], "/", GPU_TYPE="mi250")
        assert done.returncode == 0, done.stderr
        yield folder / "slurm.conf"
    finally:
        done = run(["bash", script, "down", folder], "/")
        assert done.returncode == 0 and not folder.exists(), done.stderr


@pytest.fixture
def sbatch(slurm, sample, monkeypatch):
    """Return a function that submits from a folder and returns the job id."""
    monkeypatch.setenv("SLURM_CONF", str(slurm))

    def submit(folder, *command, **env):
        done = run(["sbatch", *command], folder, sample, **env)
        assert done.returncode == 0, done.stderr
        return int(re.fullmatch(r"Submitted batch job (\d+)\n", done.stdout)[1])

    return submit


def info(job):
    done = run(["scontrol", "--oneliner", "show", "job", job], "/")
    return dict(re.findall(r"(\w+)=(\S*)", done.stdout))


def finish(job, seconds=120):
    """Wait for a job; return Slurm's fields and its output."""
    deadline = time.monotonic() + seconds
    while (state := info(job))["JobState"] in ("PENDING", "RUNNING", "COMPLETING"):
        assert time.monotonic() < deadline, state
        time.sleep(0.2)
    files = dict.fromkeys([state["StdErr"], state["StdOut"]])  # usually one file
    return state, "".join(Path(file).read_text() for file in files)


def ends_as(job, state, code, seconds=120):
    """Return the output of a job, which must end in this state with this code."""
    found, output = finish(job, seconds)
    assert (found["JobState"], found["ExitCode"]) == (state, f"{code}:0"), output
    slurm = r"^(Nodes|srun|slurmstepd-n\d|torchrun): .*\n"
    return re.sub(slurm, "", output, flags=re.M)


def processes(job):
    """Return the processes with this job id in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"SLURM_JOB_ID={job}\0".encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
        except OSError:
            pass  # it has ended
    return found


def test_each_run_script_starts_the_right_processes(sbatch, tmp_path):
    """On each node, with one process per GPU."""
    jobs = {}
    for script in RUN_SCRIPTS:
        folder = tmp_path / f"{script.parent.name}-{script.stem}"
        folder.mkdir()
        exercise = shows(script.parent.name, folder)
        jobs[script] = sbatch(exercise, script.name, *WORDS, SITE="own", GPUS="7")
    for script, job in jobs.items():
        output = ends_as(job, "COMPLETED", 0)
        calls = [json.loads(li)[0] for li in output.splitlines() if li[0] == "["]
        launches = [call for call in calls if call[-3:] == WORDS[1:]]
        text = script.read_text()
        nodes = int(re.search(r"^#SBATCH --nodes=(\d)", text, re.M)[1])
        assert len(launches) == nodes == int(info(job)["NumNodes"]), script
        gpus = re.search(r"^#SBATCH --g\S+=(?:gpu:)?(\d)", text, re.M)[1]
        if "common.torchrun" in launches[0]:
            assert f"--nproc-per-node={gpus}" in launches[0]
        if nodes == 2 and "tensorflow" not in script.name:
            assert "--nnodes=2" in launches[0] and launches[0] == launches[1]


def test_processes_are_on_their_nodes_and_jobs_do_not_collide(sbatch, exercise):
    """Also with another number of nodes, and with typed GPUs."""
    (exercise / "who.py").write_text(WHO)
    jobs = []
    for nodes, *command in (
        (2, "run-2nodes.sh"),
        (2, "run-2nodes.sh"),
        (1, "--nodes=1", "--nodelist=n1", "run-2nodes.sh"),
        (1, "--nodelist=n1", "--gpus-per-node=mi250:2", "run-2gpus.sh"),
        (1, "--nodelist=n1", "run-2gpus.sh"),
    ):
        jobs.append((nodes, sbatch(exercise, *command, "who.py")))
    for nodes, job in jobs:
        lines, size = ends_as(job, "COMPLETED", 0).splitlines(), 2 * nodes
        ranks = [
            f"n{rank // 2 + 1} {rank} {rank % 2} {size}" for rank in range(size)
        ]
        assert sorted(lines) == ranks


def test_torchrun_of_other_peoples_scripts(sbatch, exercise):
    """The page's lines, in a job script of one's own."""
    text = (REPOSITORY / "docs/TROUBLESHOOTING.md").read_text()
    lines = re.search(r"```bash\n(export HOST=.*?)```", text, re.S)[1]
    (exercise / "train.py").write_text(WHO)
    header = "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=2\n"
    (exercise / "job.sh").write_text(f"#!/bin/bash\n{header}{lines}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # has torchrun
    found = ends_as(sbatch(exercise, "job.sh", PATH=path), "COMPLETED", 0)
    for rank in range(4):
        assert f"n{rank // 2 + 1} {rank} {rank % 2} 4\n" in found


def test_a_run_script_works_within_a_step(slurm, exercise, monkeypatch):
    """As in `srun --pty bash`: the inner step shares the outer one's resources."""
    monkeypatch.setenv("SLURM_CONF", str(slurm))
    (exercise / "who.py").write_text(WHO)
    options = "--quiet --nodes=1 --ntasks=1 --gpus-per-node=2 --cpus-per-task=2"
    command = ["bash", "run-2nodes.sh", "who.py"]
    done = run(["srun", *options.split(), *command], exercise, timeout=60)
    assert sorted(done.stdout.splitlines()[1:]) == ["n1 0 0 2", "n1 1 1 2"], (
        done.stderr
    )


@pytest.mark.parametrize("nodes", [1, 2])
def test_srun_starts_the_checkup(nodes, slurm, tmp_path, monkeypatch):
    """The script has its ranks from Slurm, and all meet at the first node."""
    monkeypatch.setenv("SLURM_CONF", str(slurm))
    text = (REPOSITORY / "checkup/example.py").read_text()
    ranks = 'int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])'
    start = f"""    rank, world_size = {ranks}
    meet = f"file://{tmp_path}/meet"
    dist.init_process_group("gloo", meet, rank=rank, world_size=world_size)"""
    text = text.replace('    dist.init_process_group("gloo")', start)
    (tmp_path / "train.py").write_text(f"import os\n{text}")
    command = [
        sys.executable,
        REPOSITORY / "checkup",
        "--json=rows.json",
        "train.py",
    ]
    srun = "srun", "--quiet", f"--nodes={nodes}", "--ntasks=2"
    done = run([*srun, *command], tmp_path, timeout=120)
    assert "Checkup of train.py: 2 ranks, 24 steps" in done.stdout, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["checks"]
    assert [r["name"] for r in rows if r["state"] == "error"] == ["set-epoch"]


def test_a_run_script_works_in_an_interactive_job(slurm, tmp_path, monkeypatch):
    """The shell's folder counts, not that of salloc."""
    monkeypatch.setenv("SLURM_CONF", str(slurm))
    exercise = shows("exercise8", tmp_path)
    shell = ["bash", "-c", f"cd '{exercise}' && bash run.sh x.py"]
    done = run(["salloc", "--quiet", "--gpus-per-node=1", *shell], "/", SITE="own")
    assert json.loads(done.stdout)[0] == ["x.py"], done.stderr


def test_the_nodes_wait_for_a_late_first_one(sbatch, exercise, tmp_path):
    """PyTorch's own limit for this is 60 s."""
    (tmp_path / "common").unlink()
    common = shutil.copytree(REPOSITORY / "common", tmp_path / "common")
    late = '[[ "$SLURM_PROCID $*" != "0 -m common.torchrun"* ]] || sleep 100\n'
    late += f'exec {sys.executable} "$@"\n'
    (tmp_path / "late.sh").write_text(late)
    (common / "sites/late.sh").write_text(f"PYTHON=(bash {tmp_path}/late.sh)")
    (exercise / "who.py").write_text(WHO)
    job = sbatch(exercise, "run-2nodes.sh", "who.py", SITE="late")
    state, output = finish(job, 300)
    assert state["JobState"] == "COMPLETED", output
    assert re.search(r"^Nodes: n\[1-2\], which meet at n1:\d+$", output, re.M)
    assert output.count("\n") == 5


def test_a_user_error_prints_one_line(sbatch, exercise):
    (exercise / "mistake.py").write_text(MISTAKE)
    for run_script, ranks in (
        ("run.sh", "0"),
        ("run-2nodes.sh", "0123"),
        ("run-2nodes.sh", "0"),
        ("run-2nodes.sh", "3"),
    ):
        job = sbatch(exercise, run_script, "mistake.py", *ranks)
        lines = ends_as(job, "FAILED", 2).splitlines()  # at most one of each rank
        assert {*lines} == {"Error: a mistake: type this"}, (run_script, ranks)
        assert len(lines) <= len(ranks)


def test_scancel_ends_all_processes(sbatch, exercise):
    options = [*QUICK, "--epochs", "9999"]
    job = sbatch(exercise, "run-2nodes.sh", f"{NAME}_multigpu.py", *options)
    output, deadline = exercise / f"slurm-{job}.out", time.monotonic() + 120
    while not (output.exists() and "Epoch 2" in output.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert len(processes(job)) > 4
    run(["scancel", job], "/")
    deadline = time.monotonic() + 30
    while left := processes(job):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    assert finish(job)[0]["JobState"] == "CANCELLED"
    assert not (exercise / "logs/results.jsonl").exists()


def node_names(slurm):
    """Return the names of the nodes' network namespaces."""
    number = re.search(r"NodeAddr=10\.77\.(\d+)\.", slurm.read_text())[1]
    return [f"paper{number}-{node}" for node in ("n1", "n2")]


@pytest.mark.parametrize("script", ["check.py", "cinic_ddp.py"])
def test_the_commands_for_two_machines_work(script, slurm, sample, tmp_path):
    """The commands of docs/TWO_MACHINES.md, without Slurm: check and training."""
    text = (REPOSITORY / "docs/TWO_MACHINES.md").read_text()
    text = text.split("## The commands")[1]
    setup, *commands = re.findall("```bash\n(.*?)```", text, re.S)
    (command,) = [command for command in commands if script in command]
    exercise = copy_exercise("cinic_lab", tmp_path)
    machine = 'mount --bind "$1" /etc/hosts && hostname $2 && shift 2 && exec "$@"'
    env = {**os.environ, "DATADIR": str(sample)}
    launchers = []
    for node, name in enumerate(node_names(slurm)):
        typed = f"source common/env.sh\n{setup}\nHOST=n1 NODE={node}\n{command}"
        typed = typed.rstrip() + " --epochs 1" * (script == "cinic_ddp.py")
        enter = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount"]
        enter += ["sh", "-c", machine, "-", slurm.parent / "hosts", name[-2:]]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        launch, options = [*enter, "bash", "-c", typed], streams | {"text": True}
        launchers.append(subprocess.Popen(launch, cwd=exercise, env=env, **options))
    outputs = [launcher.communicate(timeout=180)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    assert not outputs[1]
    if script == "check.py":
        assert outputs[0].splitlines()[-1] == "All is well."
    else:
        assert '"gpus": 2' in (exercise / "logs/results.jsonl").read_text()


@pytest.fixture
def slow_link(slurm):
    """Limit both nodes to 200 Mbit/s; yield that in GB/s."""

    def shape(*how):
        for name in node_names(slurm):
            done = run(["tc", "-n", name, "qdisc", *how], "/")
            assert done.returncode == 0, done.stderr

    where = "dev", "eth0", "root"
    bucket = "tbf", "rate", "200mbit", "burst", "256kb", "latency", "100ms"
    shape("add", *where, *bucket)
    yield 200e6 / 8 / 1e9
    shape("delete", *where)


def test_the_check_measures_the_link(sbatch, tmp_path, slow_link):
    lab = copy_exercise("cinic_lab", tmp_path)
    job = sbatch(lab, "run-2nodes.sh", "../tools/check.py")
    output = ends_as(job, "COMPLETED", 0)
    assert output.splitlines()[-1] == "All is well."
    found = json.loads((lab / f"logs/check-{job}.json").read_text())
    assert found["nodes"] == ["n1", "n2"]
    assert [row["node"] for row in found["data"]] == ["n1", "n2"]
    row = found["all_reduce"][-1]
    assert (row["over"], row["nodes"], row["processes"]) == ("all", 2, 2)
    assert row["bytes"] == 2**24 and row["correct"]
    # More than the link's cannot be, and a busy machine may be slower.
    assert 0.5 * slow_link < row["bus_gb_per_s"] < 1.02 * slow_link


REHEARSAL = """
```bash
MORE="--verbose"
sbatch run.sh shows.py $MORE
LATER=1 sbatch run-2nodes.sh shows.py
sbatch --gpus-per-node=9 run-2gpus.sh shows.py
FROM=$(ls slurm-*.out | wc -l)
sbatch run.sh shows.py --resume $FROM
sbatch run.sh mistake.py 0
sbatch run.sh mistake.py 0  # 10 s, status 2
```
"""


@pytest.fixture
def rehearsal(sbatch, exercise, sample, monkeypatch):
    """Return the command that rehearses an exercise with the README above."""
    (exercise / "shows.py").write_text("import sys; print(sys.argv[1:])")
    (exercise / "mistake.py").write_text(MISTAKE)
    (exercise / "README.md").write_text(REHEARSAL)
    monkeypatch.setenv("DATADIR", str(sample))
    return [sys.executable, exercise.parent / "tools/rehearse.py", exercise.name]


def test_a_rehearsal_runs_all_jobs(rehearsal, exercise):
    done = run([*rehearsal, "--students", "20"], exercise)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    rows = [li.split() for li in lines if ".sh" in li and "    see" not in li]
    states = ["completed", "completed", "refused", "completed", "failed", "expected"]
    assert [row[0] for row in rows] == states, done.stdout
    assert [row[5] for row in rows[:3]] == ["1", "4", "0"]  # GPUs of all nodes
    files = exercise.glob("slurm-*.out")
    shown = [file.read_text().splitlines()[-1] for file in files]
    assert "['--resume', '2']" in shown and "['--verbose']" in shown
    assert "Requested node configuration is not available" in done.stdout
    assert re.search("^    see .*Error: a mistake: type this$", done.stdout, re.M)


def test_ctrl_c_ends_a_rehearsal_and_its_job(rehearsal, exercise):
    (exercise / "shows.py").write_text("import time; time.sleep(300)")
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # "&" may not
    child = subprocess.Popen(rehearsal, preexec_fn=heeds)
    name = f"--name=rehearsal-{child.pid}"
    queue = ["squeue", "--noheader", "--states=running", name, "--format=%i"]
    deadline = time.monotonic() + 60
    while not (job := run(queue, "/").stdout.strip()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    assert child.wait() != 0
    assert finish(job)[0]["JobState"] == "CANCELLED"
