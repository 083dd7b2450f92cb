"""A real Slurm of two nodes: run scripts, classes, rehearsals, and requeued jobs."""

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
from conftest import REPOSITORY, copy_exercise, fails, run
from run_ranks import Run
from test_checkpoint import load, same
from test_requeue import OPTIONS, SCRIPT, copy_that_sleeps
from test_run_scripts import RUN_SCRIPTS, WORDS, copy_common, shows

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip")
NO_SLURM = "no Slurm: docs/CLUSTER.md says how to install it"
pytestmark = [
    pytest.mark.skipif(not all(map(shutil.which, PROGRAMS)), reason=NO_SLURM),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a Slurm"),
    pytest.mark.cluster,
]
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
    script = REPOSITORY / "tools/cluster.sh"
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


def wait_until(holds, *args):
    """Wait until a function returns something true; return that."""
    deadline = time.monotonic() + 200
    while not (found := holds(*args)):
        assert time.monotonic() < deadline, (holds, args, [*map(info, args)])
        time.sleep(0.2)
    return found


def ended(job):
    """Return Slurm's fields of a job if it has ended."""
    fields = info(job)
    running = "PENDING", "RUNNING", "COMPLETING"
    return fields if fields["JobState"] not in running else None


def read_output(job):
    fields = info(job)
    files = dict.fromkeys([fields["StdErr"], fields["StdOut"]])  # usually one file
    return "".join(Path(file).read_text() for file in files if Path(file).exists())


def ends_as(job, state, code):
    """Return the output of a job, which must end in this state with this code."""
    fields = wait_until(ended, job)
    output = read_output(job)
    assert (fields["JobState"], fields["ExitCode"]) == (state, f"{code}:0"), output
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


def test_a_run_script_works_within_a_step(sbatch, exercise):
    """As in `srun --pty bash`. The folder is the shell's, not srun's."""
    (exercise / "who.py").write_text(WHO)
    options = "--quiet --nodes=1 --ntasks=1 --gpus-per-node=2 --cpus-per-task=2"
    typed = ["bash", "-c", f"cd '{exercise}' && bash run-2nodes.sh who.py"]
    done = run(["srun", *options.split(), *typed], "/", timeout=60)
    lines = sorted(done.stdout.splitlines()[1:])
    assert lines == ["n1 0 0 2", "n1 1 1 2"], done.stderr


def test_srun_starts_the_checkup(sbatch, tmp_path):
    """The script has its ranks from Slurm, and all meet at the first node."""
    text = (REPOSITORY / "checkup/example.py").read_text()
    ranks = 'int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])'
    start = f"""    rank, world_size = {ranks}
    meet = f"file://{tmp_path}/meet"
    dist.init_process_group("gloo", meet, rank=rank, world_size=world_size)"""
    text = text.replace('    dist.init_process_group("gloo")', start)
    (tmp_path / "train.py").write_text(f"import os\n{text}")
    checkup = sys.executable, REPOSITORY / "checkup", "--json=rows.json", "train.py"
    srun = "srun", "--quiet", "--nodes=2", "--ntasks=2"
    done = run([*srun, *checkup], tmp_path, timeout=120)
    assert "Checkup of train.py: 2 ranks, 24 steps" in done.stdout, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["checks"]
    assert [r["name"] for r in rows if r["state"] == "error"] == ["set-epoch"]


def test_the_nodes_wait_for_a_late_first_one(sbatch, tmp_path):
    """PyTorch's own limit for this is 60 s."""
    late = '[[ "$SLURM_PROCID $*" != "0 -m common.torchrun"* ]] || sleep 75\n'
    late += f'exec {sys.executable} "$@"\n'
    (tmp_path / "late.sh").write_text(late)
    copy_common(tmp_path, f"PYTHON=(bash {tmp_path}/late.sh)")
    exercise = copy_exercise("exercise8", tmp_path)
    (exercise / "who.py").write_text(WHO)
    job = sbatch(exercise, "run-2nodes.sh", "who.py", SITE="own")
    assert ends_as(job, "COMPLETED", 0).count("\n") == 4
    meet = r"^Nodes: n\[1-2\], which meet at n1:\d+$"
    assert re.search(meet, read_output(job), re.M)


def test_a_user_error_prints_one_line(sbatch, exercise):
    """Of all ranks, of the first node's and of the second's, while others wait."""
    (exercise / "mistake.py").write_text(MISTAKE)
    command = exercise, "run-2nodes.sh", "mistake.py"
    jobs = {ranks: sbatch(*command, *ranks) for ranks in ("0123", "0", "3")}
    for ranks, job in jobs.items():
        lines = ends_as(job, "FAILED", 2).splitlines()  # at most one of each rank
        assert {*lines} == {"Error: a mistake: type this"}, ranks
        assert len(lines) <= len(ranks)


@pytest.fixture
def slow_link(slurm):
    """Limit both nodes to 200 Mbit/s; return their network namespaces."""
    number = re.search(r"NodeAddr=10\.77\.(\d+)\.", slurm.read_text())[1]
    spaces = [f"paper{number}-{node}" for node in ("n1", "n2")]
    limit = "qdisc add dev eth0 root tbf rate 200mbit burst 256kb latency 100ms"
    for space in spaces:
        assert run(["tc", "-n", space, *limit.split()], "/").returncode == 0
    yield spaces
    for space in spaces:
        run(["tc", "-n", space, "qdisc", "delete", "dev", "eth0", "root"], "/")


def test_the_commands_for_two_machines(slow_link, slurm, sample, tmp_path):
    """Those of docs/TWO_MACHINES.md, without Slurm: check.py, then training."""
    text = (REPOSITORY / "docs/TWO_MACHINES.md").read_text()
    text = text.split("## The commands")[1]
    setup, check, train = re.findall("```bash\n(.*?)```", text, re.S)[:3]
    lab = copy_exercise("cinic_lab", tmp_path)
    machine = 'mount --bind "$1" /etc/hosts && hostname $2 && shift 2 && exec "$@"'
    enter = ["unshare", "--uts", "--mount", "sh", "-c", machine, "-"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env, outputs = {**os.environ, "DATADIR": str(sample)}, []
    for command in (check, f"{train.rstrip()} --epochs 1"):
        launchers = []
        for node, space in enumerate(slow_link):
            typed = f"source common/env.sh\n{setup}\nHOST=n1 NODE={node}\n{command}"
            node = ["ip", "netns", "exec", space, *enter, slurm.parent / "hosts"]
            node += [space[-2:], "bash", "-c", typed]
            launchers.append(subprocess.Popen(node, cwd=lab, env=env, **streams))
        outputs.append([child.communicate(timeout=180)[0] for child in launchers])
        assert [child.returncode for child in launchers] == [0, 0], outputs
    assert outputs[0][0].endswith("All is well.\n")
    assert outputs[0][1] == outputs[1][1] == ""  # the second machine says nothing
    assert '"gpus": 2' in (lab / "logs/results.jsonl").read_text()
    (file,) = lab.glob("logs/check-*.json")
    found = json.loads(file.read_text())
    assert found["nodes"] == [row["node"] for row in found["data"]] == ["n1", "n2"]
    row = found["all_reduce"][-1]
    assert (row["over"], row["nodes"], row["processes"]) == ("all", 2, 2)
    # More than the link's cannot be, and a busy machine may be slower.
    assert row["correct"] and 0.5 < row["bus_gb_per_s"] / (200e6 / 8 / 1e9) < 1.02


SETTINGS = """#!/bin/bash
#SBATCH --gpus-per-node=1
source common/env.sh
echo $DATADIR $TORCH_HOME; which python
"""


@pytest.fixture
def reservation(sbatch):
    reserve = "scontrol create reservation reservationname=monday users=root "
    reserve += "starttime=now duration=60 nodes=n2"
    assert run(reserve.split(), "/").returncode == 0
    yield
    run(["scontrol", "delete", "reservationname=monday"], "/")


def test_students_of_a_class_set_no_variable(reservation, tmp_path):
    """The teacher's file has the site's options; a student's own come first."""
    site = (REPOSITORY / "common/sites/class.sh").read_text()
    site = re.sub("(?m)^# (export )", r"\1", site).replace(":-gpu", ":-other")
    course = tmp_path / "course"
    copy_common(tmp_path, site.replace("/projects/course/multigpu", str(course)))
    exercise = copy_exercise("exercise8", tmp_path)
    course.mkdir()
    (course / ".venv").symlink_to(REPOSITORY / ".venv")
    (exercise / "settings.sh").write_text(SETTINGS)

    def submit(**env):
        typed = ["bash", "-c", "source common/env.sh; sbatch settings.sh"]
        done = run(typed, exercise, SITE="own", **env)
        assert done.returncode == 0, done.stderr
        job = re.search(r"Submitted batch job (\d+)$", done.stdout)[1]
        lines = ends_as(job, "COMPLETED", 0).splitlines()
        return info(job), lines

    job, (folders, python) = submit()
    assert folders == f"{course}/data {course}/data/torch"
    assert Path(python).parent.samefile(Path(sys.executable).parent)
    names = "Account", "Partition", "Reservation", "MemPerTres"
    values = "project_1234", "other", "monday", "gres:gpu:16384"
    assert tuple(job[name] for name in names) == values
    own = {"SBATCH_ACCOUNT": "mine", "SBATCH_PARTITION": "gpu", "TORCH_HOME": "/x"}
    own |= {"SBATCH_RESERVATION": "", "SBATCH_MEM_PER_NODE": "3G", "DATADIR": "/y"}
    job, (folders, _) = submit(**own)
    assert folders == "/y /x"
    assert (job["Account"], job["Partition"]) == ("mine", "gpu")
    assert job["MinMemoryNode"] == "3G"
    assert not {"MemPerTres", "Reservation"} & job.keys()  # sbatch takes one of them


REHEARSAL = """
```bash
MORE="--verbose"
cp shows.py copied.py
cp shows.py mistake.py
sbatch run.sh copied.py $MORE
LATER=1 sbatch run-2nodes.sh shows.py
sbatch --gpus-per-node=9 run-2gpus.sh shows.py
```

1. Takes long:

   <!-- takes long -->
   ```bash
   FROM=$(ls slurm-*.out | wc -l)
   sbatch run.sh shows.py \\
       --resume $FROM
   ```

<!-- needs a network -->
```bash
sbatch run.sh shows.py --skipped
```

<!-- needs Slurm -->
```bash
sbatch run.sh mistake.py 0
sbatch run.sh mistake.py 0  # 10 s, status 1, or 2 by NCCL
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
    assert rows.pop() == ["Skipped:", "sbatch", "run.sh", "shows.py", "--skipped"]
    states = ["completed", "completed", "refused", "completed", "failed", "expected"]
    assert [row[0] for row in rows] == states, done.stdout
    assert [row[5] for row in rows[:3]] == ["1", "4", "0"]  # GPUs of all nodes
    assert [row[7] for row in rows] == ["0", "0", "1", "0", "2", "2"]
    total = 0
    for row in rows:
        seconds, gpus, gpu_minutes = int(row[3]), int(row[5]), float(row[6])
        assert gpu_minutes == pytest.approx(seconds * gpus / 60, abs=0.01)
        total += gpu_minutes
    assert total > 0 and lines[-1] == "2 failed"
    shown = int(re.fullmatch(r"20 students: (\d+) GPU min", lines[-2])[1])
    assert shown == pytest.approx(20 * total, abs=1)
    files = exercise.glob("slurm-*.out")
    shown = [file.read_text().splitlines()[-1] for file in files]
    assert "['--resume', '2']" in shown and "['--verbose']" in shown
    assert "Requested node configuration is not available" in done.stdout
    assert re.search("^    see .*Error: a mistake: type this$", done.stdout, re.M)


def test_a_rehearsal_without_an_answer_from_slurm(rehearsal, exercise):
    done = run(rehearsal, exercise, SLURM_CONF="/dev/null")
    fails(done, "Slurm does not answer (sinfo: ", "run this where `sinfo` works")


def test_ctrl_c_ends_a_rehearsal_and_its_job(rehearsal, exercise):
    (exercise / "shows.py").write_text("import time; time.sleep(300)")
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # "&" may not
    child = subprocess.Popen(rehearsal, preexec_fn=heeds)
    name = f"--name=rehearsal-{child.pid}"
    queue = ["squeue", "--noheader", "--states=running", name, "--format=%i"]
    job = wait_until(lambda: run(queue, "/").stdout.strip())
    child.send_signal(signal.SIGINT)
    assert child.wait() != 0
    assert wait_until(ended, job)["JobState"] == "CANCELLED"


def start_again(job, times):
    """Wait until a job is back in the queue, and start it at once."""
    requeued = "PENDING", str(times)
    wait_until(lambda: (info(job)["JobState"], info(job)["Restarts"]) == requeued)
    # Or the old script's end is taken for the new one's.
    wait_until(lambda: not processes(job))
    time.sleep(2)
    now = "scontrol", "update", f"jobid={job}", "starttime=now"
    assert run(now, "/").returncode == 0  # it would wait two minutes


def test_a_job_is_stopped_in_two_ways(sbatch, sample, tmp_path):
    """By a signal, and by scontrol requeue, as after a node failure."""
    whole = tmp_path / "whole"
    whole.mkdir()
    undisturbed = Run(whole, sample, "cinic_lab/cinic_ddp.py", *OPTIONS, ranks=2)
    lab = copy_that_sleeps(tmp_path)
    job = sbatch(lab, "run-requeue.sh", SCRIPT, *OPTIONS)
    wait_until(lambda: "Epoch: [1][2/5]" in read_output(job))
    run(["scancel", "--signal=USR1", "--batch", job], "/")
    wait_until(lambda: "Stopped after epoch 1" in read_output(job))
    start_again(job, 1)
    wait_until(lambda: "Epoch: [2][1/5]" in read_output(job))
    run(["scontrol", "requeue", job], "/")
    start_again(job, 2)
    output = ends_as(job, "COMPLETED", 0)
    assert [output.count(f"Epoch: [{n}][1/5]") for n in (1, 2, 3, 4)] == [1, 2, 1, 1]
    assert "Traceback" not in output and undisturbed.join() == [0, 0]
    assert same(lab, load(whole))
