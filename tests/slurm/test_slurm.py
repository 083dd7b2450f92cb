"""The run scripts, submitted by sbatch as students do, to a real Slurm."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import QUICK, REPOSITORY, copy_room, run

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip")
pytestmark = [
    pytest.mark.skipif(
        not all(map(shutil.which, PROGRAMS)),
        reason="no Slurm: type "
        "sudo apt-get install slurm-wlm slurmd slurmctld munge iproute2",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a Slurm"),
    pytest.mark.cluster,
]

# What students submit with each run script.
DIGITS = ["--epochs", "1"]
PIXELS = ["--arch", "resnet18", "--image-size", "40", "--steps", "2", *DIGITS]
NAME = "pytorch_dvc_cnn_pretrained"
SMALL = ["--layers", "1", "--width", "32", "--heads", "2", "--length", "16"]
SMALL += ["--sequences", "64", "--epochs", "2"]
INTRO, TENSORFLOW = "dp_ddp_intro/jobscript", "tensorflow/mirrored_strategy.py"
WORKERS = "tensorflow/multi_worker_mirrored.py"
WHAT = {
    "exercise8/run.sh": [f"{NAME}.py", *QUICK],
    "exercise8/run-2gpus.sh": [f"{NAME}_multigpu.py", *QUICK],
    "exercise8/run-8gpus.sh": [f"{NAME}_largedata_multigpu.py", *QUICK],
    "exercise8/run-2nodes.sh": [f"{NAME}_multigpu.py", *QUICK],
    "mnist_multigpu/slurm_singlegpu.sh": DIGITS,
    "mnist_multigpu/slurm_multigpu.sh": DIGITS,
    "mnist_multigpu/slurm_ddp.sh": DIGITS,
    "mnist_multigpu/slurm_ddp_2nodes.sh": DIGITS,
    "cifar100_demo/run_single_cifar.sh": PIXELS,
    "cifar100_demo/run_data_parallel_cifar100.sh": PIXELS,
    "cifar100_demo/run_ddp_cifar100.sh": PIXELS,
    "cinic_lab/run.sh": ["cinic.py", *DIGITS],
    "cinic_lab/run-2gpus.sh": ["cinic_dp.py", *DIGITS],
    "cinic_lab/run-2nodes.sh": ["cinic_ddp.py", *DIGITS],
    "cinic_lab/run-requeue.sh": ["cinic_requeue.py", *DIGITS],
    "clinic/run-2gpus.sh": ["checkup.py", "solutions/patient1.py"],
    "clinic/run-2nodes.sh": ["checkup.py", "solutions/patient1.py"],
    f"{INTRO}.sh": ["single.py", *SMALL],
    f"{INTRO}_dp.sh": ["dp.py", *SMALL],
    f"{INTRO}_ddp.sh": ["ddp.py", *SMALL],
    f"{INTRO}_ddp_2nodes.sh": ["ddp.py", *SMALL],
    f"{INTRO}_tensorflow.sh": [TENSORFLOW, *SMALL],
    f"{INTRO}_tensorflow_2nodes.sh": [WORKERS, *SMALL],
}
# On two nodes: GPUs of each, a script of beyond_ddp/, options of its own.
BEYOND = [
    (2, "hsdp", []),
    (2, "fsdp_tp", []),
    (1, "accumulate", []),
    (1, "checkpointing", []),
    (1, "compiled", []),
    (1, "fsdp", []),
    (1, "fsdp_checkpoint", []),
    (1, "pipeline", ["--layers", "2"]),
    (1, "tensor_parallel", []),
    (1, "zero", []),
]
# Without a GPU a process of DataParallel, or a worker of TensorFlow, plays one.
PLAYED = {"mnist_multigpu": 1, "train_data_parallel": 1, "cinic_dp": 1, "dp": 1}
PLAYED |= {"multi_worker_mirrored": 2}
RUN_SCRIPTS = {
    str(file.relative_to(REPOSITORY)): file.read_text()
    for folder in REPOSITORY.glob("[!.]*/")
    for file in folder.rglob("*.sh")
    if re.search("^#SBATCH", file.read_text(), re.M)
}
# PyTorch takes seconds to import; torchrun alone makes the processes meet.
WHO = """
import os, socket, sys
names = "RANK", "LOCAL_RANK", "WORLD_SIZE"
me = [socket.gethostname(), *map(os.environ.get, names)]
sys.stdout.write(" ".join(me) + "\\n")
"""
MISTAKE = "import common.cli; raise common.cli.UserError('a mistake: type this')"
FAILS = """
import common.cli, torch, torch.distributed as dist
dist.init_process_group()
dist.all_reduce(torch.ones(1, device="cpu"))
if dist.get_rank() == dist.get_world_size() - 1:
    raise ValueError("this is it")
dist.all_reduce(torch.ones(1, device="cpu"))
"""


def asked(run_script):
    """Return how many (nodes, GPUs on each) a run script asks Slurm for."""
    text = RUN_SCRIPTS[run_script]
    nodes = re.search(r"^#SBATCH --nodes=(\d+)", text, re.M)[1]
    gpus = re.search(r"^#SBATCH --(?:gpus-per-node=|gres=gpu:)(\d+)", text, re.M)[1]
    return int(nodes), int(gpus)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Return a function that starts a cluster and returns its SLURM_CONF."""
    script, folders = REPOSITORY / "tests/slurm/cluster.sh", []

    def start(**env):
        folders.append(tmp_path_factory.mktemp("slurm") / "cluster")
        done = run(["bash", script, "up", folders[-1]], "/", **env)
        assert done.returncode == 0, done.stderr
        return folders[-1] / "slurm.conf"

    yield start
    for folder in folders:
        done = run(["bash", script, "down", folder], "/")
        assert done.returncode == 0 and not folder.exists(), done.stderr


@pytest.fixture(scope="session")
def slurm(cluster):
    return cluster()


@pytest.fixture
def sbatch(slurm, sample, monkeypatch):
    """Return a function that submits from a folder, and returns the job's number."""
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
    """Wait for a job; return what Slurm says of it, and what it has printed."""
    deadline = time.monotonic() + seconds
    while (state := info(job))["JobState"] in ("PENDING", "RUNNING", "COMPLETING"):
        assert time.monotonic() < deadline, state
        time.sleep(0.2)
    files = dict.fromkeys([state["StdErr"], state["StdOut"]])  # mostly one file
    return state, "".join(Path(file).read_text() for file in files)


def processes(job):
    """Return the processes that have this job's number in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"SLURM_JOB_ID={job}\0".encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
        except OSError:
            pass  # it has ended
    return found


@pytest.mark.parametrize("run_script", sorted(RUN_SCRIPTS))
def test_each_run_script(run_script, sbatch, tmp_path):
    assert run_script in WHAT, f"say in WHAT what students submit with {run_script}"
    exercise, name = run_script.split("/", 1)
    if "tensorflow" in name and not (REPOSITORY / ".venv-tensorflow").exists():
        pytest.skip("no TensorFlow: type make venv-tensorflow")
    room, (nodes, gpus) = copy_room(exercise, tmp_path), asked(run_script)
    job, output = finish(sbatch(room, name, *WHAT[run_script]))
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), output
    assert job["NumNodes"] == str(nodes)
    (result,) = map(json.loads, (room / "logs/results.jsonl").open())
    assert result["gpus"] == PLAYED.get(result["script"], nodes * gpus)
    error = "rror:" if "tensorflow" in name else "rror"  # TensorFlow says Mirrored
    assert error not in output and "Warning" not in output, output


def test_beyond_ddp_on_two_nodes(sbatch, tmp_path):
    """All at once: there are 8 GPUs in each node."""
    room, jobs = copy_room("dp_ddp_intro", tmp_path), {}
    for gpus, name, more in BEYOND:
        if name == "compiled" and not shutil.which("g++"):
            continue
        command = ["jobscript_ddp_2nodes.sh", f"beyond_ddp/{name}.py", *SMALL, *more]
        jobs[name, gpus] = sbatch(room, f"--gpus-per-node={gpus}", *command)
    for (name, gpus), job in jobs.items():
        state, output = finish(job, 300)  # one of them compiles
        assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), output
        assert "rror" not in output and "Warning" not in output, output
        assert f"\n{name} on {2 * gpus} x CPU core" in f"\n{output}"
    results = map(json.loads, (room / "logs/results.jsonl").open())
    found = {(result["script"], result["gpus"]) for result in results}
    assert found == {(name, 2 * gpus) for name, gpus in jobs}
    (saved,) = room.glob(f"logs/fsdp_checkpoint-{jobs['fsdp_checkpoint', 1]}-*")
    files = {file.name for file in (saved / "epoch2").iterdir()}
    assert files == {".metadata", "__0_0.distcp", "__1_0.distcp"}


def test_synchronised_batchnorm_on_two_nodes(sbatch, tmp_path):
    room = copy_room("cinic_lab", tmp_path)
    job = sbatch(
        room, "--gpus-per-node=1", "run-2nodes.sh", "cinic_syncbn.py", *DIGITS
    )
    state, output = finish(job)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), output
    (result,) = map(json.loads, (room / "logs/results.jsonl").open())
    assert (result["script"], result["nodes"], result["gpus"]) == (
        "cinic_syncbn",
        2,
        2,
    )


def test_processes_are_on_their_nodes_and_jobs_do_not_collide(sbatch, room):
    (room / "who.py").write_text(WHO)
    jobs = {}
    for run_script in (
        "run-2nodes.sh",
        "run-2nodes.sh",
        "run-2gpus.sh",
        "run-2gpus.sh",
    ):
        more = ["--nodelist=n1"] if run_script == "run-2gpus.sh" else []
        nodes = asked(f"exercise8/{run_script}")[0]
        jobs[sbatch(room, *more, run_script, "who.py")] = nodes
    for job, nodes in jobs.items():
        state, output = finish(job)
        assert state["JobState"] == "COMPLETED", output
        assert sorted(output.splitlines()) == [
            f"n{rank // 2 + 1} {rank} {rank % 2} {2 * nodes}"
            for rank in range(2 * nodes)
        ]


def test_any_number_of_nodes(cluster, sample, room, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(cluster(NODES="3")))
    (room / "who.py").write_text(WHO)
    for nodes in (1, 3):
        command = ["sbatch", f"--nodes={nodes}", "run-2nodes.sh", "who.py"]
        state, output = finish(int(run(command, room, sample).stdout.split()[-1]))
        assert state["JobState"] == "COMPLETED", output
        assert sorted(output.splitlines()) == [
            f"n{rank // 2 + 1} {rank} {rank % 2} {2 * nodes}"
            for rank in range(2 * nodes)
        ]


def test_the_processes_meet_by_slurms_name_of_a_node(sbatch, room):
    meet = "import os, sys; sys.stdout.write(os.environ['MASTER_ADDR'] + '\\n')"
    (room / "meet.py").write_text(meet)
    for run_script, name in (("run-2nodes.sh", "n1"), ("run-2gpus.sh", "localhost")):
        _, output = finish(sbatch(room, run_script, "meet.py"))
        assert set(output.splitlines()) == {name}, output


def test_a_step_within_a_step(slurm, room, monkeypatch):
    """As in `srun --pty bash`: the inner step shares what the outer one has."""
    monkeypatch.setenv("SLURM_CONF", str(slurm))
    (room / "who.py").write_text(WHO)
    asked = [
        "--quiet",
        "--nodes=1",
        "--ntasks=1",
        "--gpus-per-node=2",
        "--cpus-per-task=2",
    ]
    done = run(["srun", *asked, "bash", "run-2nodes.sh", "who.py"], room, timeout=60)
    assert sorted(done.stdout.splitlines()) == ["n1 0 0 2", "n1 1 1 2"], done.stderr


def test_a_node_that_does_not_come_is_named(sbatch, room):
    launch = (REPOSITORY / "common/nodes.sh").read_text()
    hang = "bash -c '[[ $SLURMD_NODENAME == n1 ]] || exec sleep 200; exec \"$@\"' -"
    late = launch.replace('1 "${launch[@]}"', f'1 {hang} "${{launch[@]}}"')
    assert late.count("sleep") == 1
    late = f"export PET_RDZV_CONF=join_timeout=20\n{late}"
    file = room / "run-2nodes.sh"
    file.write_text(file.read_text().replace("source common/nodes.sh", late))
    (room / "who.py").write_text(WHO)
    state, output = finish(sbatch(room, "run-2nodes.sh", "who.py"))
    assert state["JobState"] == "FAILED", output
    words = "still waiting for n2 after 10 s: does `srun --overlap --nodelist=n2 "
    assert output.count(words) == 1 and "Error: not all nodes have come" in output


def test_two_nodes_cannot_meet_at_localhost(sbatch, room):
    """The nodes are apart: what works on one machine only would fail here."""
    (room / "who.py").write_text(WHO)
    launch = (REPOSITORY / "common/nodes.sh").read_text()
    launch = launch.replace("$host:", "localhost:")
    assert launch.count("localhost") == 2
    launch = f"export PET_RDZV_CONF=join_timeout=5,read_timeout=5\n{launch}"
    file = room / "run-2nodes.sh"
    assert "source common/nodes.sh" in file.read_text()
    file.write_text(file.read_text().replace("source common/nodes.sh", launch))
    state, output = finish(sbatch(room, "run-2nodes.sh", "who.py"))
    assert state["JobState"] == "FAILED" and "n1 0" not in output, output
    assert "Error: not all nodes have come" in output


SHOWS = "import os, sys; sys.stdout.write(f'{os.getcwd()} {sys.argv}\\n')"


def test_names_with_spaces(sbatch, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    room = copy_room("exercise8", folder)
    (room / "my script.py").write_text(SHOWS)
    words = ["my script.py", "a b", "*", "/c/d"]
    for run_script in ("run.sh", "run-2gpus.sh"):
        log = f"--output={tmp_path}/out"
        state, output = finish(sbatch(room, log, run_script, *words))
        assert state["JobState"] == "COMPLETED", output
        assert set(output.splitlines()) == {f"{room} {words}"}


def test_submitted_from_elsewhere(sbatch, tmp_path):
    """One line says where to go: from above, and from another exercise."""
    room, other = (copy_room(name, tmp_path) for name in ("exercise8", "cinic_lab"))
    (room / "x.py").write_text(SHOWS)
    for folder, path in ((tmp_path, "exercise8"), (other, "../exercise8")):
        state, output = finish(sbatch(folder, f"{path}/run.sh", "cinic.py"))
        assert (state["JobState"], state["ExitCode"]) == ("FAILED", "2:0")
        assert output == "Error: type cd exercise8 first\n"


def test_in_an_interactive_job(slurm, room, monkeypatch):
    """salloc was typed elsewhere; what counts is where the shell is now."""
    monkeypatch.setenv("SLURM_CONF", str(slurm))
    (room / "x.py").write_text(SHOWS)
    shell = ["bash", "-c", f"cd '{room}' && bash run.sh x.py"]
    done = run(["salloc", "--quiet", "--gpus-per-node=1", *shell], "/")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{room} ['x.py']\n"


@pytest.mark.parametrize(
    "variable, value, field, shown",
    [
        ("SBATCH_ACCOUNT", "project_1234", "Account", "project_1234"),
        ("SBATCH_PARTITION", "other", "Partition", "other"),
        ("SBATCH_TIMELIMIT", "00:07:00", "TimeLimit", "00:07:00"),
    ],
)
def test_environment_of_sbatch(variable, value, field, shown, sbatch, room):
    for run_script in room.glob("run*.sh"):
        job = sbatch(room, "--hold", run_script.name, "x.py", **{variable: value})
        state = info(job)
        run(["scancel", job], "/")
        assert state[field] == shown and state["JobState"] == "PENDING"


def test_a_failing_rank_fails_the_job_and_is_shown_once(sbatch, room):
    (room / "fails.py").write_text(FAILS)
    state, output = finish(sbatch(room, "run-2nodes.sh", "fails.py"))
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "1:0"), output
    assert output.count("Traceback") == 1
    assert output.count("ValueError: this is it") == 1
    assert "peer" not in output and "torch/distributed" not in output


@pytest.mark.parametrize("run_script", ["run.sh", "run-2gpus.sh", "run-2nodes.sh"])
def test_a_mistake_fails_the_job_and_is_told_in_a_line(run_script, sbatch, room):
    (room / "mistake.py").write_text(MISTAKE)
    state, output = finish(sbatch(room, run_script, "mistake.py"))
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "2:0"), output
    lines = [line for line in output.splitlines() if not line.startswith("srun: ")]
    assert lines == ["Error: a mistake: type this"]


def test_scancel_ends_all_processes_and_results_stay_valid(sbatch, room):
    job = sbatch(room, "run.sh", f"{NAME}.py", *QUICK)
    assert finish(job)[0]["JobState"] == "COMPLETED"
    job = sbatch(
        room, "run-2nodes.sh", f"{NAME}_multigpu.py", *QUICK, "--epochs", "9999"
    )
    output, deadline = room / f"slurm-{job}.out", time.monotonic() + 120
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
    done = run([sys.executable, "../bench/compare.py", "logs/results.jsonl"], room)
    assert (
        done.returncode == 0
        and len((room / "logs/results.jsonl").open().readlines()) == 1
    )


def test_typed_gpus(cluster, sample, room, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(cluster(GPU_TYPE="mi250")))
    (room / "who.py").write_text(WHO)
    command = ["sbatch", "--gpus-per-node=mi250:2", "run-2gpus.sh", "who.py"]
    job = int(run(command, room, sample).stdout.split()[-1])
    state, output = finish(job)
    assert state["JobState"] == "COMPLETED", output
    assert state["TresPerNode"] == "gres:gpu:mi250:2"
    assert sorted(output.splitlines()) == ["n1 0 0 2", "n1 1 1 2"]


@pytest.fixture
def slow_link(slurm):
    """Let both nodes send no more than 200 Mbit/s; return that in GB/s."""
    bridge = "paper" + re.search(r"NodeAddr=10\.77\.(\d+)\.", slurm.read_text())[1]

    def shape(*how):
        for node in ("n1", "n2"):
            done = run(["tc", "-n", f"{bridge}-{node}", "qdisc", *how], "/")
            assert done.returncode == 0, done.stderr

    where = "dev", "eth0", "root"
    bucket = "tbf", "rate", "200mbit", "burst", "256kb", "latency", "100ms"
    shape("add", *where, *bucket)
    yield 200e6 / 8 / 1e9
    shape("delete", *where)


@pytest.fixture
def lab(tmp_path):
    return copy_room("cinic_lab", tmp_path)


def test_the_check_finds_out_how_fast_the_link_is(sbatch, lab, slow_link):
    job = sbatch(lab, "run-2nodes.sh", "../bench/check.py")
    state, output = finish(job)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), output
    assert output.splitlines()[-1] == "All is well."
    found = json.loads((lab / f"logs/check-{job}.json").read_text())
    assert found["nodes"] == ["n1", "n2"]
    assert [row["node"] for row in found["processes"]] == ["n1", "n2"]
    assert [row["node"] for row in found["data"]] == ["n1", "n2"]
    for what in ("all_reduce", "broadcast"):
        row = found[what][-1]
        assert (row["over"], row["nodes"], row["processes"]) == ("all", 2, 2)
        assert row["bytes"] == 2**24 and row["correct"]
        assert row["bus_gb_per_s"] == pytest.approx(slow_link, rel=0.1)


def test_the_check_names_the_node_that_does_not_answer(sbatch, lab):
    (lab / "late.py").write_text(
        "import os, sys, time\n"
        "time.sleep(99 * (os.environ['RANK'] == '1'))\n"
        "sys.path.insert(0, '../bench')\n"
        "import check\n"
        "check.main()\n"
    )
    state, output = finish(sbatch(lab, "run-2nodes.sh", "late.py", "--wait", "5"))
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "2:0"), output
    lines = [line for line in output.splitlines() if not line.startswith("srun: ")]
    assert len(lines) == 1, output
    assert lines[0].startswith("Error: rank 1 on n2: no sign of life within 5 s. ")


REHEARSAL = """
```bash
SMALL="--verbose"
sbatch run.sh shows.py $SMALL
LATER=1 sbatch run-2nodes.sh shows.py
sbatch --gpus-per-node=9 run-2gpus.sh shows.py
```

```bash
FROM=$(ls slurm-*.out | wc -l)
sbatch run.sh shows.py --resume $FROM
sbatch run-2gpus.sh shows.py  # 5 s
sbatch run.sh mistake.py
sbatch run.sh mistake.py  # 10 s, status 2
```
"""


@pytest.fixture
def rehearsal(sbatch, room, sample, monkeypatch):
    """Return the command that rehearses a room of this README."""
    (room / "shows.py").write_text(SHOWS)
    (room / "mistake.py").write_text(MISTAKE)
    (room / "README.md").write_text(REHEARSAL)
    monkeypatch.setenv("DATADIR", str(sample))
    return [sys.executable, room.parent / "bench/rehearse.py", room.name]


def test_a_lesson_is_rehearsed(rehearsal, room):
    done = run([*rehearsal, "--students", "20"], room)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines if ".sh" in line and " x " in line]
    states = ["completed", "completed", "refused", "completed", "completed"]
    assert [row[0] for row in rows] == [*states, "failed", "as"], done.stdout
    assert " 2 x 2 " in done.stdout
    shown = [file.read_text() for file in room.glob("slurm-*.out")]
    assert f"{room} ['shows.py']\n" in shown  # --verbose is for --small
    assert f"{room} ['shows.py', '--resume', '2']\n" in shown
    failed = lines.index("Failed: --gpus-per-node=9 run-2gpus.sh shows.py")
    assert "Requested node configuration is not available" in lines[failed + 1]
    (log,) = [line for line in lines if line.endswith("Error: a mistake: type this")]
    assert log.startswith(f"    see {room}/slurm-") and lines[-1] == "2 of 7 failed"
    assert re.fullmatch(r"20 students: at least \d+ GPU min", lines[-3])
    assert re.fullmatch(r"With 16 GPUs: \d+ min at least", lines[-2])


def test_ctrl_c_ends_a_rehearsal_and_its_jobs(rehearsal, room):
    (room / "shows.py").write_text("import time; time.sleep(300)")
    child = subprocess.Popen(rehearsal, stdout=subprocess.PIPE, text=True)
    for line in child.stdout:
        if " running" in line:
            child.send_signal(signal.SIGINT)
            break
    said = child.stdout.read()
    jobs = re.search(r"^Stopped by Ctrl-C\nCancelled jobs (\d+) (\d+)$", said, re.M)
    assert child.wait() == 1 and "Traceback" not in said
    assert {info(job)["JobState"] for job in jobs.groups()} == {"CANCELLED"}, said
