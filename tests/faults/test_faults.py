"""Faults, over all training and run scripts that the tree has: none is left out."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from conftest import EXERCISES, REPOSITORY, copy_room, load, mistake, run

# What hangs or fails in the clinic is meant to: test_clinic.py.
ROOMS = [exercise for exercise in EXERCISES if exercise != "clinic"]
SCRIPTS = sorted(
    file.relative_to(REPOSITORY)
    for exercise in ROOMS
    for file in (REPOSITORY / exercise).rglob("*.py")
    if re.search(r"\b(RunLog|Report)\(args", file.read_text())
)
# In beyond_ddp/ these talk, step and write as ddp.py does, or fsdp.py.
ALIKE = "accumulate", "checkpointing", "compiled", "fsdp_tp", "hsdp", "zero"
DDP = [s for s in SCRIPTS if "init_process_group" in (REPOSITORY / s).read_text()]
DDP = [s for s in DDP if s.stem not in ALIKE]
# With TensorFlow: test_tensorflow.py.
WRITE = [s for s in SCRIPTS if "finish(" in (REPOSITORY / s).read_text()]
WRITE = [s for s in WRITE if "tensorflow" not in s.parts and s.stem not in ALIKE]
RUN_SCRIPTS = [
    file.relative_to(REPOSITORY)
    for exercise in EXERCISES
    for file in sorted((REPOSITORY / exercise).glob("*.sh"))
]
# In the process of this rank: a signal when this function is first called.
SPY = """
import os, signal, sys
rank, name, number = os.environ["FAULT"].split()

def spy(frame, event, arg):
    if event == "call" and frame.f_code.co_name == name:
        sys.setprofile(None)
        os.kill(os.getpid(), int(number))

if os.environ.get("RANK") == rank:
    sys.setprofile(spy)
"""


def text_of(script):
    return (REPOSITORY / script).read_text()


def launchers(exercise, words):
    """Return the run scripts of an exercise that have these words."""
    found = [
        s for s in RUN_SCRIPTS if s.parts[0] == exercise and words in text_of(s)
    ]
    return [
        s.name for s in found if "tensorflow" not in s.name and "8gpus" not in s.name
    ]


def small(exercise):
    """Return what its README types to train in short."""
    text = (REPOSITORY / exercise / "README.md").read_text()
    return re.search(r'^SMALL="(.*)"', text, re.M)[1].split()


def words(script, exercise, launcher):
    """Return what to type behind a run script; two rooms' know their script."""
    knows = "need_script" not in text_of(Path(exercise, launcher))
    return [script] * (not knows) + small(exercise)


def functions(script):
    names = (
        n.name for n in ast.walk(ast.parse(text_of(script))) if hasattr(n, "name")
    )
    return {*names}


def left(mark):
    """Return {process: command} of those with this text in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                words = (folder / "cmdline").read_text().replace("\0", " ")
                found[int(folder.name)] = words
        except OSError:  # it has ended meanwhile
            pass
    return found


def with_fault(launcher, script, rank, function, number, tmp_path, sample, **env):
    """Start it; return its exit status and output, when no process is left."""
    exercise, *rest = Path(script).parts
    room = copy_room(exercise, tmp_path)
    (tmp_path / "spy").mkdir()
    (tmp_path / "spy/sitecustomize.py").write_text(SPY)
    mark = f"MARK={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    env = {"FAULT": f"{rank} {function} {int(number)}", name: value, **env}
    (tmp_path / "tmp").mkdir()
    env |= {"PYTHONPATH": str(tmp_path / "spy"), "TMPDIR": str(tmp_path / "tmp")}
    command = ["bash", launcher, *words("/".join(rest), exercise, launcher)]
    done = run(command, room, sample, timeout=200, **env)
    deadline = time.monotonic() + 40
    while left(mark):
        assert time.monotonic() < deadline, left(mark)
        time.sleep(0.2)
    assert not [*room.rglob("*.part")]
    assert not (room / "logs/results.jsonl").exists()
    assert not [*(tmp_path / "tmp").glob("torch[er]*")]  # torchrun's, not a cache
    return done.returncode, done.stdout + done.stderr


def test_the_tree_has_been_walked():
    assert len(SCRIPTS) >= 28 and len(DDP) >= 12 and len(RUN_SCRIPTS) >= 21
    assert {s.parts[0] for s in SCRIPTS} == {*ROOMS}
    assert all(launchers(s.parts[0], "--standalone") for s in DDP)


def kills():
    for script in DDP:
        yield script, 1, "train" if "train" in functions(script) else "main"
    for script in DDP:  # rank 0 saves; others evaluate
        if script.name in ("cinic_ddp.py", "cinic_requeue.py"):
            yield script, 0, "save"
    done = set()
    for script in DDP:
        if "evaluate" in functions(script) and script.parts[0] not in done:
            done.add(script.parts[0])
            yield script, 1, "evaluate"


@pytest.mark.slow
@pytest.mark.parametrize("script, rank, function", [*kills()], ids=str)
def test_a_killed_rank_ends_the_job(script, rank, function, tmp_path, sample):
    (launcher, *_) = launchers(script.parts[0], "--standalone")
    fault = rank, function, signal.SIGKILL
    status, output = with_fault(launcher, script, *fault, tmp_path, sample)
    assert status == 137, output
    assert f"Error: rank {rank} was ended by SIGKILL" in output
    assert "Traceback" not in output, output


TORCHRUN = [
    s for s in RUN_SCRIPTS if re.search(r"common[./](torchrun|nodes)\b", text_of(s))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [s for s in TORCHRUN if s.parts[0] in ROOMS], ids=str
)
def test_no_rank_outlives_a_killed_launcher(script, tmp_path, sample):
    exercise, name = script.parts[0], str(uuid.uuid4())
    room = copy_room(exercise, tmp_path)
    trains = next(s for s in DDP if s.parent.name == exercise).name
    if "requeue" in script.name:
        trains = "cinic_requeue.py"
    options = [*words(trains, exercise, script.name), "--epochs", "1000"]
    env = {**os.environ, "DATADIR": str(sample), "MARK": name}
    said = tmp_path / "out"
    with said.open("w") as out:
        command = ["bash", script.name, *options]
        job = subprocess.Popen(command, cwd=room, env=env, stdout=out, stderr=out)
        while "Batch size: " not in said.read_text():
            assert job.poll() is None, said.read_text()
            time.sleep(0.1)
        pids = left(f"MARK={name}")
        launcher = next(p for p, words in pids.items() if "common.torchrun" in words)
        os.kill(launcher, signal.SIGKILL)
        assert job.wait(timeout=40) != 0
    deadline = time.monotonic() + 20
    while left(f"MARK={name}"):
        assert time.monotonic() < deadline, left(f"MARK={name}")
        time.sleep(0.1)
    assert not (room / "logs/results.jsonl").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a full disk needs root, to mount one")
@pytest.mark.parametrize("script", WRITE, ids=str)
def test_a_full_disk_is_said_in_a_line(script, tmp_path, sample):
    exercise, path = script.parts[0], "/".join(script.parts[1:])
    room = copy_room(exercise, tmp_path)
    command = [sys.executable, path, *small(exercise)]
    if script in DDP:
        launcher = launchers(exercise, "--standalone")[0]
        command = ["bash", launcher, *words(path, exercise, launcher)]
    (room / "logs").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "none", room / "logs"]
    if subprocess.run(mount).returncode != 0:
        pytest.skip("no disk may be mounted here")
    try:
        command += ["--epochs", "1"]
        env = {"KINETO_LOG_LEVEL": "6", "WANDB_MODE": "offline"}
        done = run(command, room, sample, **env)
    finally:
        subprocess.run(["umount", room / "logs"])
    assert done.returncode == 2, done.stderr
    # wandb adds one to all errors.
    assert "Traceback" not in done.stderr or "wandb" in script.name
    (line,) = [li for li in done.stderr.splitlines() if li.startswith("Error: ")]
    assert re.search("disk (is )?full|No space|no room", line)


PATIENTS = [
    file.relative_to(REPOSITORY)
    for file in sorted((REPOSITORY / "clinic").rglob("patient*.py"))
    if "OptionParser" in file.read_text()
]


@pytest.mark.parametrize("script", [*SCRIPTS, *PATIENTS], ids=str)
def test_numbers_that_are_none(script, monkeypatch):
    """Each option that takes a number refuses each of these in one line."""
    if "tensorflow" in script.parts:
        pytest.skip("with TensorFlow: test_tensorflow.py")
    folder, name = REPOSITORY / script.parts[0], script.stem
    if len(script.parts) > 2:
        monkeypatch.syspath_prepend(REPOSITORY / script.parent)
    module = load(folder.name, name)
    options = re.findall(
        r'(?:add|add_argument)\(\s*"(--[\w-]+)",\s*type=(?:int|float|at_least)',
        text_of(script),
    )
    assert options
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    for option in options:
        for value in ("nan", "inf", "-inf", "-1", str(10**30), str(2**64), "x", ""):
            monkeypatch.setattr(sys, "argv", [name, f"{option}={value}"])
            with mistake(rf"{option}\b(?!.*one process)"):
                module.main()


@pytest.mark.parametrize(
    "setting",
    [
        "RANK=two",
        "LOCAL_RANK=x",
        "WORLD_SIZE=0",
        "WORLD_SIZE=x",
        "MASTER_PORT=99999",
    ],
)
def test_variables_of_torchrun_that_cannot_be(setting, tmp_path, sample):
    room, (name, value) = copy_room("dp_ddp_intro", tmp_path), setting.split("=")
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29501"}
    env |= {"MASTER_ADDR": "localhost", name: value}
    done = run(
        [sys.executable, "ddp.py", *small("dp_ddp_intro")], room, sample, **env
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert f"Error: {setting} is odd: type `unset {name}`" in done.stderr


@pytest.mark.parametrize(
    "name, value",
    [("GPUS", "two"), ("SLURM_GPUS_ON_NODE", "0"), ("DDP_TIMEOUT", "-1")],
)
@pytest.mark.parametrize("script", RUN_SCRIPTS, ids=str)
def test_variables_of_the_run_scripts_that_are_no_numbers(script, name, value):
    done = run(
        ["bash", script.name, "x.py"], REPOSITORY / script.parent, **{name: value}
    )
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: {name}={value}")


OTHERS = {
    "torch.empty(10**15)": "out of memory: type a smaller --batch-size (",
    "torch.nn.BatchNorm1d(3)(torch.ones(1, 3))": "BatchNorm needs a last batch of",
    "raise OSError(28, os.strerror(28))": "the disk is full: make room (",
    "next(iter(DataLoader(torch.ones(4, 10**6), 4, num_workers=1)))": "no shared",
}


@pytest.mark.parametrize("code", OTHERS)
def test_errors_of_others_are_told_in_a_line(code):
    imports = "import os, common.cli, torch\nfrom torch.utils.data import DataLoader"
    code = f"{imports}\n{code}"
    command = [sys.executable, "-c", code]
    if "workers" in code:
        if os.geteuid() != 0:
            pytest.skip("a full /dev/shm needs root, to mount one")
        full = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", full, "-", *command]
    done = run(command, REPOSITORY)
    assert done.returncode == 2, done.stderr
    # A worker that is killed says so itself (with Python 3.10 after a zero byte).
    said = done.stderr.replace("\0", "").splitlines()
    (line,) = [li for li in said if not li.startswith("ERROR: Unexpected bus error")]
    assert line.startswith("Error: " + OTHERS[code.splitlines()[-1]])


@pytest.mark.parametrize("script", RUN_SCRIPTS, ids=str)
def test_a_checkout_without_links(script, tmp_path):
    """A zip file and Windows make a file of a link; Python's error says less."""
    room = copy_room(script.parts[0], tmp_path)
    (room / "common").unlink()
    (room / "common").write_text("../common")
    done = run(["bash", script.name, "x.py"], room)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "Error: type rm common; ln -s ../common common\n"
    run(["bash", "-c", "rm common; ln -s ../common common"], room)
    assert (room / "common").readlink() == (
        REPOSITORY / "exercise8/common"
    ).readlink()


def test_another_package_of_the_name_common(tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "common/__init__.py").write_text("raise SystemExit('the other one')")
    room = REPOSITORY / "exercise8"
    command = [sys.executable, "pytorch_dvc_cnn_pretrained.py", "--help"]
    done = run(command, room, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_a_safe_path_and_a_closed_stdout(tmp_path, sample):
    room = copy_room("dp_ddp_intro", tmp_path)
    options = [*small("dp_ddp_intro"), "--epochs", "1", "--sequences", "16"]
    command = [
        "bash",
        "-c",
        'exec bash jobscript.sh single.py "$@" >&-',
        "-",
        *options,
    ]
    done = run(command, room, sample, PYTHONSAFEPATH="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert len((room / "logs/results.jsonl").read_text().splitlines()) == 1


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, sample):
    room = copy_room("dp_ddp_intro", tmp_path)
    options = [*small("dp_ddp_intro"), "--lr", "1000000000", "--sequences", "64"]
    done = run([sys.executable, "single.py", *options], room, sample)
    assert done.returncode == 2 and not (room / "logs/results.jsonl").exists()
    assert re.fullmatch(r"Error: the loss is (nan|inf): type a .*\n", done.stderr)


@pytest.mark.slow
def test_two_jobs_in_one_folder(tmp_path, sample):
    """Each has a result and checkpoints of its own; the links lead to the last."""
    room = copy_room("cinic_lab", tmp_path)
    command = [sys.executable, "cinic.py", *small("cinic_lab"), "--epochs", "1"]
    env = {**os.environ, "DATADIR": str(sample)}
    jobs = [subprocess.Popen(command, cwd=room, env=env) for _ in range(2)]
    assert [job.wait(timeout=200) for job in jobs] == [0, 0]
    assert len((room / "logs/results.jsonl").read_text().splitlines()) == 2
    assert len([*room.glob("logs/cinic-*/checkpoint.pth.tar")]) == 2
    assert (room / "checkpoint.pth.tar").resolve().parent.parent == room / "logs"
    shutil.copy(room / "checkpoint.pth.tar", tmp_path / "kept")
    (room / "checkpoint.pth.tar").unlink()
    (tmp_path / "kept").rename(room / "checkpoint.pth.tar")  # somebody's own file
    assert run(command, room, sample).returncode == 0
    assert len([*room.glob("[0-9]*_checkpoint.pth.tar")]) == 1
