"""env.sh, sites, sbatch without Slurm, and the processes that run scripts start."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import (
    EXERCISES,
    REPOSITORY,
    copy_exercise,
    fails,
    path_without_sbatch,
    run,
)

SITES = sorted(path.stem for path in REPOSITORY.glob("common/sites/*.sh"))
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
# What a cluster has, and what here only says that it ran.
STUBS = """
module() { echo "module $*" >&2; }
[[ ${CONDA:-} ]] || conda() { [[ $1 == shell.bash ]] || echo "conda $*" >&2; }
singularity() { shift 2; WITH_CONDA=: "$@"; }
"""


def copy_common(folder, site=""):
    """Copy common/, with the site "own" in it; return the copy."""
    copied = shutil.copytree(REPOSITORY / "common", folder / "common")
    (copied / "sites/own.sh").write_text(site)
    return copied


def source(folder, show="", before="set -euo pipefail", shell=(), **env):
    """Source env.sh where a cluster's commands are stubs; return the process."""
    common = folder if (folder / "env.sh").exists() else REPOSITORY / "common"
    env = {"PATH": PATH, "SIF": "image.sif", "USER": "me", **env}
    env.setdefault("SBATCH_ACCOUNT", "project_1")
    script = f"{STUBS}\n{before}\nsource '{common}/env.sh'\n{show}"
    return run(["bash", *shell, "-c", script], folder, **env)


@pytest.mark.parametrize("site", SITES)
def test_every_site_gives_a_python(site, tmp_path):
    """With the lines for a class uncommented as well: what you set counts."""
    common = copy_common(tmp_path)
    file = common / f"sites/{site}.sh"
    file.write_text(re.sub("(?m)^# (export )", r"\1", file.read_text()))
    show = '"${PYTHON[@]}" -c "import sys; print(sys.argv)" "a b"; '
    show += "echo ${SBATCH_RESERVATION-mine}"
    done = source(common, show, SITE=site, SBATCH_RESERVATION="mine")
    assert done.stdout == "['-c', 'a b']\nmine\n", done.stderr


@pytest.mark.parametrize(
    "env, words",
    [
        ({"SITE": "lumi"}, "data=/scratch/project_1/me/data"),
        ({"SITE": "lumi", "DATADIR": "/mine"}, "data=/mine"),
        ({"SITE": "conda"}, "conda activate multigpu\n"),
        ({"SITE": "alvis", "FRAMEWORK": "tensorflow"}, "module load TensorFlow"),
        ({"SITE": "nowhere"}, "common/sites/nowhere.sh: No such file"),
        ({"SITE": "conda", "CONDA": "none"}, "Error: no conda: load its module in"),
        ({"SITE": "lumi", "SBATCH_ACCOUNT": ""}, "run export SBATCH_ACCOUNT="),
    ],
)
def test_sites_set_variables_and_say_what_is_missing(env, words, tmp_path):
    done = source(tmp_path, "echo data=$DATADIR", **env)
    assert words in done.stdout + done.stderr, done.stdout + done.stderr


def test_a_login_node_finds_its_site(tmp_path):
    conf = tmp_path / "slurm.conf"
    conf.write_text("# ClusterName=lumi\nclustername = Alvis # ours\nX=1\n")
    assert "load PyTorch" in source(tmp_path, SLURM_CONF=str(conf)).stderr
    job = {"SLURM_CONF": str(conf), "SLURM_CLUSTER_NAME": "lumi"}
    assert "singularity" in source(tmp_path, **job).stderr


@pytest.mark.parametrize("site", ["alvis", "lumi", "roihu"])
def test_a_virtual_environment_adds_to_modules_and_containers(site, tmp_path):
    python = tmp_path / f".venv-{site}/bin/python"
    make = [f"{sys.base_prefix}/bin/python3", "-m", "venv", "--without-pip"]
    run([*make, "--system-site-packages", python.parent.parent], tmp_path)
    show = '"${PYTHON[@]}" -c "import sys; print(sys.prefix)"'
    path = f"{sys.base_prefix}/bin:{os.environ['PATH']}"
    packages = str(Path(torch.__file__).parent.parent)  # as modules give theirs
    env = {"SITE": site, "PATH": path, "PYTHONPATH": packages}
    done = source(copy_common(tmp_path), show, **env)
    assert done.stdout == f"{python.parent.parent}\n", done.stderr


def test_a_python_without_pytorch_is_an_error(tmp_path):
    common = copy_common(tmp_path, f"PYTHON=('{sys.executable}' -S)")
    fails(source(common, SITE="own"), "no torch for", "make venv", "sites/own.sh")
    other = source(common, SITE="own", FRAMEWORK="tensorflow")
    fails(other, "no tensorflow for", "make venv-tensorflow")


def test_python_is_a_function_only_in_a_shell(tmp_path):
    """A script that starts a function would not get the process id.

    And what processes on CPU cores get is not for the shell.
    """
    common = copy_common(tmp_path, f"PYTHON=('{sys.executable}' -X dev)")
    show = 'python -c "import sys; print(sys.flags.dev_mode)"; type -t python\n'
    show += "echo ${MALLOC_MMAP_MAX_-not set}"
    interactive = source(common, show, shell=["--norc", "-i"], SITE="own")
    assert interactive.stdout == "True\nfunction\nnot set\n"
    assert source(common, show, SITE="own").stdout == "False\nfile\n0\n"


JOB = """#!/bin/bash
printf '<%s>' "$GPUS" "$NODES" "$@"
exit 3
"""
TYPED = {  # and what the run script gets: GPUS, NODES, arguments
    "GPUS=5 NODES=6 sbatch job.sh x.py -N2": "<5><6><x.py><-N2>",
    "sbatch --gpus-per-node=a100:4 --nodes=3 --wait job.sh": "<4><3>",
    "sbatch -W --gres=gpu:A100:8 job.sh 'a  b' \"c'd\" '*'": "<8><><a  b><c'd><*>",
}


def test_without_slurm_sbatch_is_a_function_that_runs_the_script(tmp_path):
    """Also in a strict shell."""
    common = copy_common(tmp_path, f"PYTHON=('{sys.executable}')")
    (tmp_path / "job.sh").write_text(JOB)
    show = "set +e; type -t sbatch\n"
    show += "".join(f"{typed}; echo ' '$?\n" for typed in TYPED)
    show += "sbatch x.py; echo $?; sbatch; echo $?"
    env = {"PATH": path_without_sbatch(tmp_path / "bin"), "SITE": "own"}
    before = "cd ..; set -euo pipefail"
    done = source(common, show, before, ["--norc", "-i"], **env)
    jobs = [f"{shown} 3" for shown in TYPED.values()]
    assert done.stdout.splitlines() == ["function", *jobs, "2", "2"], done.stderr
    missing = "Error: name a run script before the Python script, here one of job.sh"
    assert done.stderr.count(missing) == 2


def test_slurms_own_sbatch_is_kept(tmp_path):
    """Also where Slurm does not answer: nothing trains on a login node."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 1")
    (tmp_path / "sbatch").chmod(0o755)
    env = {"shell": ["--norc", "-i"], "PATH": f"{tmp_path}:{PATH}"}
    assert source(tmp_path, "type -t sbatch", **env).stdout == "file\n"


def test_another_shell_than_bash_is_an_error():
    done = run(["sh", "-c", ". common/env.sh; echo $?"], REPOSITORY)
    if "bash" not in os.path.realpath("/bin/sh"):
        assert done.stdout == "2\n" and "run `bash` first" in done.stderr


SMALL_RUN = """#!/bin/bash
set -euo pipefail
source common/env.sh
set_gpus 2
printf '<%s>' $small "$@"
"""


@pytest.mark.parametrize(
    "typed, env, launched",
    [
        ("own.py --lr 2", {}, "<--epochs><1><own.py><--lr><2>"),
        ("own.py", {"SMALL": "0"}, "<own.py>"),
        ("own.py", {"HERE": "2"}, "<own.py>"),  # two GPUs
        ("own.py", {"HERE": "1"}, "<--epochs><1><own.py>"),  # one is too few
        ("plain.py --lr 2", {}, "<plain.py><--lr><2>"),  # does not mention small.txt
        ("--lr 2", {}, "<--epochs><1><--lr><2>"),  # the run script names the script
        ("", {}, "<--epochs><1>"),
    ],
)
def test_cpu_cores_get_small_options(typed, env, launched, tmp_path):
    site = "has_driver() { [[ ${HERE:-} && ${CUDA_VISIBLE_DEVICES:-} != -1 ]]; }"
    site += '; count() { echo "${HERE:-}"; }; PYTHON=(count)'
    copy_common(tmp_path, site)
    (tmp_path / "job.sh").write_text(SMALL_RUN)
    (tmp_path / "small.txt").write_text("--epochs 1\n")
    (tmp_path / "own.py").write_text('"""Without a GPU: small.txt."""')
    (tmp_path / "plain.py").touch()
    own = {"SITE": "own", "CUDA_VISIBLE_DEVICES": "0", "PATH": PATH, "SMALL": ""}
    env = own | env
    done = run(["bash", "job.sh", *typed.split()], tmp_path, **env)
    assert done.stdout.splitlines()[-1] == launched, done.stderr
    said = "No GPU here: adding --epochs 1 (small.txt; SMALL=0 leaves them out)"
    assert done.stderr.count(said) == ("--epochs" in launched)


def test_env_sh_sets_the_environment_of_processes(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    show = "echo $OMP_NUM_THREADS $PYTHONUNBUFFERED"
    assert source(tmp_path, show).stdout == "1 1\n"
    assert source(tmp_path, show, OMP_NUM_THREADS="4").stdout == "4 1\n"


def test_malloc_is_tuned_only_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    has_gpu = {("nvidia0", "0"), ("kfd", "0")}
    for driver, hidden in [("null", "0"), ("nvidia0", "-1"), ("kfd", ""), *has_gpu]:
        before = f"compgen() {{ echo /dev/{driver}; }}"
        show = 'echo "${MALLOC_MMAP_MAX_-no}"'
        done = source(tmp_path, show, before, CUDA_VISIBLE_DEVICES=hidden)
        assert done.stdout == ("no\n" if (driver, hidden) in has_gpu else "0\n")


SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


@pytest.mark.parametrize(
    "call, here, env, last",
    [
        ("set_gpus 2", 0, {}, "2 -1 -1"),
        ("set_gpus 1 2", 1, {}, "1 -1 -1"),
        ("set_gpus 2", 1, {"GPUS": "1"}, "1 0"),
        ("set_gpus 2", 0, {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "3"}, "3 0"),
        ("set_gpus 2", 1, SHARED, "2 0"),
        ("set_gpus 2", 1, SHARED | {"SLURM_GPUS_ON_NODE": "1"}, "2 0"),
    ],
)
def test_gpus_are_hidden_if_too_few(call, here, env, last, tmp_path):
    """AMD's as well: https://github.com/ROCm/hip/issues/3001"""
    show = f"count() {{ echo {here}; }}; PYTHON=(count); has_driver() {{ true; }}"
    show += f"; CUDA_VISIBLE_DEVICES=0; unset HIP_VISIBLE_DEVICES; {call}"
    show += "; echo $GPUS $CUDA_VISIBLE_DEVICES ${HIP_VISIBLE_DEVICES-}"
    done = source(tmp_path, show, **env)
    assert done.stdout == f"{last}\n", done.stderr
    too_few = "-1" in last
    assert (f"GPUs here: {here}, wanted: 2." in done.stderr) == too_few
    assert ("put NCCL_MULTI_RANK_GPU" in done.stderr) == (too_few and here > 0)


RUN_SCRIPTS = [f for e in EXERCISES for f in sorted((REPOSITORY / e).glob("*.sh"))]
# A site whose Python says how it was called, on which GPUs, and who started it.
SHOW = """
import json, os, sys
if sys.argv[1] != "-c":  # as env.sh does, which asks for a package
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    sys.stdout.write(json.dumps([sys.argv[1:], gpus, os.getppid()]) + "\\n")
"""
WORDS = ["x.py", "a b", "*", "/c/d"]


def shows(exercise, folder):
    """Copy an exercise, and a common/ with the site "own" that shows its calls."""
    (folder / "show.py").write_text(SHOW)
    copy_common(folder, f"PYTHON=(python3 '{folder}/show.py')")
    copied = copy_exercise(exercise, folder)
    (copied / "x.py").write_text("# for small.txt")
    return copied


def launch(script, folder, **env):
    """Run a run script from elsewhere; return [arguments, GPUs, parent] of each."""
    folder = folder / "a folder"
    folder.mkdir()
    exercise = shows(script.parent.name, folder)
    env |= {"SITE": "own", "SMALL": "", "PATH": PATH, "CDPATH": "."}
    done = run(["bash", f"{exercise}/{script.name}", *WORDS], "/", **env)
    assert done.returncode == 0, done.stderr
    calls = [json.loads(li) for li in done.stdout.splitlines() if li[0] == "["]
    launches = [call for call in calls if call[0][-3:] == WORDS[1:]]
    return sorted(launches, key=lambda call: call[1] or "")


@pytest.mark.parametrize("gpus", ["", "5,6,7,8"])
@pytest.mark.parametrize(
    "script", RUN_SCRIPTS, ids=lambda file: f"{file.parent.name}/{file.name}"
)
def test_each_run_script_starts_the_right_processes(
    script, gpus, tmp_path, monkeypatch
):
    """The typed script, once per node, on the right GPUs, with small options."""
    if gpus:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    else:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    launches = launch(script, tmp_path)
    arguments, _, parent = launches[0]
    seen = [visible for _, visible, _ in launches]
    small = "".join(file.read_text() for file in script.parent.glob("small.txt"))
    if script.parent.name in ("mnist_multigpu", "cifar100_demo"):
        last = [*small.split(), *WORDS]  # they name the Python script
    else:
        last = ["x.py", *small.split(), *WORDS[1:]]
    assert arguments[-len(last) :] == last
    text = script.read_text()
    asked = re.search(r"=(?:gpu:)?(\d)\n#SBATCH --time", text)[1]
    if "--nodes=2" in text:  # nvidia-smi counts GPUs for TensorFlow
        one_each = (gpus or "0,1").split(",")[:2]
        assert seen == (["-1"] * 2 if "tensorflow" in script.name else one_each)
        return
    assert parent == os.getpid()  # exec, so what ends the run script ends it
    if "common.torchrun" in arguments:
        assert {f"--nproc-per-node={asked}", "--standalone"} <= {*arguments}
        assert "--local-addr=127.0.0.1" in arguments  # nobody may know its name
        assert seen == [gpus or None]  # get_device() takes one of them for each rank
    else:
        assert seen == [gpus or ("0,1" if asked == "2" else None)]


def test_every_node_gets_gpus_of_its_own(tmp_path):
    script, gpus = REPOSITORY / "exercise8/run-2nodes.sh", "5,6,7,8"
    first, second = launch(script, tmp_path, GPUS="2", CUDA_VISIBLE_DEVICES=gpus)
    assert (first[1], second[1]) == ("5,6", "7,8")
    assert {"--nnodes=2", "--nproc-per-node=2"} <= {*first[0]}


@pytest.mark.parametrize(
    "asked", [{"SLURM_CPUS_PER_TASK": "14"}, {"SLURM_CPUS_PER_GPU": "7"}], ids=str
)
def test_every_node_gets_all_the_cpus_of_the_job(asked, tmp_path):
    """Otherwise srun binds a node's processes to one CPU."""
    exercise = shows("exercise8", tmp_path)
    (tmp_path / "bin").mkdir()
    srun = 'echo "$@" ${SLURM_MEM_PER_GPU-} ${SLURM_MEM_PER_NODE-}'
    for name, text in (("srun", srun), ("scontrol", "echo n1")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "n[1-3]"}
    # Both are set where a job starts a job; srun takes only one of them.
    job |= {"SLURM_MEM_PER_GPU": "16G", "SLURM_MEM_PER_NODE": "60G"}
    job |= {"SLURM_GPUS_ON_NODE": "2", "PATH": f"{tmp_path}/bin:{PATH}"}
    env = job | asked | {"SITE": "own"}
    done = run(["bash", "run-2nodes.sh", *WORDS], exercise, **env)
    assert " --nodes=3 --ntasks=3 " in done.stdout, done.stderr
    assert " --cpus-per-task=14 " in done.stdout
    assert done.stdout.endswith("/c/d\n")


def test_a_missing_script_is_an_error():
    for script in RUN_SCRIPTS:
        if script.parent.name not in ("mnist_multigpu", "cifar100_demo"):
            done = run(["bash", script], "/")
            assert done.returncode != 0 and "name a Python script" in done.stderr
