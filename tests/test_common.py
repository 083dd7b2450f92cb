"""common/: sizes, imports, devices, env.sh, sites and run scripts."""

import json
import os
import re
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from conftest import (
    EXERCISES,
    QUICK,
    REPOSITORY,
    call,
    copy_exercise,
    fails,
    load,
    make_data,
    on_terminal,
    path_without_sbatch,
    raises_user_error,
    run,
)
from torch._subclasses import FakeTensor, FakeTensorMode

from common import data
from common.device import get_device, get_ranks, pick_dtype
from common.log import RunLog

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NAME = "pytorch_dvc_cnn_pretrained"
MODULES = sorted(file.stem for file in REPOSITORY.glob("common/[a-z]*.py"))
TRAINING = "errors", "device", "data", "metrics", "log"  # what its scripts import

# --- A student reads all of it, and what they copy works elsewhere


def test_common_stays_small():
    for files, most in (
        ([f"{name}.py" for name in MODULES], 500),
        ([f"{name}.py" for name in TRAINING], 330),
        (["env.sh", "launch_nodes.sh", "sbatch.sh"], 120),
    ):
        texts = [(REPOSITORY / "common" / file).read_text() for file in files]
        assert sum(text.count("\n") for text in texts) <= most
    imports = r"^from common\.(\w+) import"
    for exercise in EXERCISES:
        for file in (REPOSITORY / exercise).rglob("*.py"):
            if "# DDP: " in file.read_text():
                names = re.findall(imports, file.read_text(), re.M)
                assert {*names} <= {*TRAINING}, file


IMPORTS = f"""
import atexit, importlib, os, sys, warnings
import torch, torch.distributed.run, torch.utils.tensorboard, torchvision, tqdm
from torch.optim import optimizer as opt

def state():
    hooks = opt._global_optimizer_pre_hooks, opt._global_optimizer_post_hooks
    settings = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    streams = sys.stdout, sys.stderr, sys.excepthook
    calls = torch.load, torch.Tensor.backward, [len(h) for h in hooks]
    process = [*warnings.filters], atexit._ncallbacks(), dict(os.environ)
    return *process, sys.argv[:], settings, streams, calls

before = state()
for name in {MODULES}:
    importlib.import_module(f"common.{{name}}")
for was, now in zip(before, state(), strict=True):
    assert was == now, f"{{was}} {{now}}"
"""


def test_an_import_changes_nothing():
    done = run([sys.executable, "-c", IMPORTS], REPOSITORY)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


OWN = """
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset, default_collate

from common.data import make_loader
from common.device import get_device, get_ranks
from common.errors import run


def collate(samples):
    inputs, labels = default_collate(samples)
    return {"inputs": inputs, "labels": labels}


def main():
    rank, local_rank, world_size = get_ranks()
    device = get_device(local_rank)
    dist.init_process_group()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 20), torch.randint(0, 2, (64,)))
    sampler = DistributedSampler(data)
    loader = make_loader(data, 8, device, sampler=sampler, collate_fn=collate)
    model = torch.nn.Linear(20, 2).to(device)
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            time.sleep(0.8)
            logits = ddp_model(batch["inputs"].to(device))
            loss = cross_entropy(logits, batch["labels"].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"rank {rank} of {world_size} is done\\n", end="")  # one write
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
"""


def test_a_students_own_script_works_elsewhere(tmp_path):
    """By plain torchrun, without RunLog, and for longer than any DDP_TIMEOUT."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "common", tmp_path / "common", ignore=ignored)
    (tmp_path / "own.py").write_text(OWN)
    launch = [Path(sys.executable).with_name("torchrun"), "--standalone"]
    command = [*launch, "--nproc-per-node=2", "own.py"]
    done = run(command, tmp_path, DDP_TIMEOUT="2")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    ends = ["rank 0 of 2 is done", "rank 1 of 2 is done"]
    assert sorted(done.stdout.splitlines()) == ends
    assert {file.name for file in tmp_path.iterdir()} == {"common", "own.py"}


@pytest.mark.parametrize(
    "exercise, name",
    [
        ("exercise8", NAME),
        ("mnist_multigpu", "mnist_ddp"),
        ("cifar100_demo", "train_cifar100"),
        ("cinic_lab", "cinic_requeue"),
        ("dp_ddp_intro", "single"),
        ("beyond_ddp", "pipeline"),
        ("clinic", "patient1"),
    ],
)
def test_each_option_has_a_help_text(exercise, name, capsys):
    """For one script per exercise; its counterparts have the same options."""
    script = load(exercise, name)
    with pytest.raises(SystemExit) as ended:
        call(script, "--help")
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and shown.count(script.__doc__.strip()) == 1
    for option in shown.split("\n  -")[1:]:
        assert re.search(r"\s{2,}\w|{", option), option


# --- Ranks and devices, some of them not here


def test_ranks_are_those_of_torchrun(monkeypatch):
    with raises_user_error("torchrun.*--nproc-per-node=2"):
        get_ranks()
    for name, number in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, number)
    assert get_ranks() == (5, 1, 8)


def test_a_getter_only_picks_a_gpu(fake_gpus, monkeypatch):
    before = {**os.environ}, torch.get_float32_matmul_precision()
    module = fake_gpus(count=4)
    assert get_device() == CUDA and get_device(3) == torch.device("cuda", 3)
    assert module.chosen == [0, 3]
    assert before == ({**os.environ}, torch.get_float32_matmul_precision())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with raises_user_error(r"8 processes, but 4 GPU.*--nproc-per-node=4"):
        get_device(1)


def test_gpus_that_pytorch_cannot_use_are_a_user_error(monkeypatch):
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert get_device() == CPU
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    with raises_user_error("sees no GPU of this job.*tools/check.py"):
        get_device()
    for hidden in "", "-1":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert get_device() == CPU


@pytest.mark.parametrize(
    "device, native, wanted, chosen",
    [
        (CPU, {"avx512_bf16": True}, None, torch.bfloat16),
        (CPU, {"bf16": True}, None, torch.bfloat16),  # Arm
        (CPU, {"avx512_f": True}, None, None),
        (CPU, {}, "bf16", torch.bfloat16),
        (CUDA, True, None, torch.bfloat16),
        (CUDA, False, None, torch.float16),
        (CUDA, True, "fp32", None),
    ],
)
def test_the_16_bit_format_fits_the_device(
    device, native, wanted, chosen, fake_gpus, monkeypatch
):
    def is_bf16_supported(including_emulation=True):  # a T4 emulates it
        return including_emulation or native

    fake_gpus(is_bf16_supported=is_bf16_supported)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: native)
    assert pick_dtype(device, wanted) == chosen


def photos(*shape):
    return torch.zeros(*shape, dtype=torch.uint8)


def numbers(*shape):
    return torch.zeros(*shape, dtype=torch.long)


def on_gpu(make, *args):
    """Return a module made on the GPU; .to() fails with fake tensors."""
    with CUDA:
        return make(*args)


def of_exercise8(script):
    model = on_gpu(script.Classifier, "tinyvgg", "none")
    images = photos(4, 3, 150, 150)
    model(script.augment(script.normalise(images.to(CUDA), script.MEAN, script.STD)))
    script.evaluate(model, [(images, torch.zeros(4))], CUDA)


def of_mnist(script):
    model = on_gpu(script.Net)
    script.test(model, CUDA, [(photos(4, 1, 28, 28), numbers(4))])


def of_cifar(script):
    model = on_gpu(script.Classifier, "resnet18", 40, torch.bfloat16)
    script.evaluate(model, [(photos(4, 3, 32, 32), numbers(4))], CUDA)


def of_cinic(script):
    model = on_gpu(script.Classifier, "resnet18", torch.float16)
    images = photos(4, 3, 32, 32)
    model(script.crop_and_flip(images.to(CUDA)))
    script.evaluate(model, [(images, numbers(4))], CUDA)


def of_intro(script):
    model, tokens = on_gpu(script.Transformer, 2, 16, 2, 8), numbers(4, 8).to(CUDA)
    output = model(tokens).flatten(0, 1)
    loss = script.cross_entropy(output, tokens.flatten())
    script.batch_sums(loss, output.argmax(dim=1) == tokens.flatten())


@pytest.mark.parametrize(
    "forward, exercise, name",
    [
        (of_exercise8, "exercise8", NAME),
        (of_mnist, "mnist_multigpu", "mnist_singlegpu"),
        (of_cifar, "cifar100_demo", "train_cifar100"),
        (of_cinic, "cinic_lab", "cinic_amp"),
        (of_intro, "dp_ddp_intro", "single"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_forward_pass_stays_on_the_gpu(forward, exercise, name, monkeypatch):
    """A fake GPU: a tensor on another device raises, as on a real one."""
    script, read = load(exercise, name), []
    zeros = dict.fromkeys(["loss", "accuracy", "acc1", "acc5"], 0.0)
    metrics = lambda sums, *_, **__: read.append(sums) or zeros  # noqa: E731
    monkeypatch.setattr(script, "to_metrics", metrics)
    monkeypatch.setattr(FakeTensor, "tolist", lambda sums: [0.0] * len(sums))
    data.per_channel.cache_clear()  # it keeps tensors for the next call
    with FakeTensorMode():
        forward(script)
        with pytest.raises(RuntimeError, match="device"):
            torch.zeros(3, device=CUDA) + torch.zeros(3)
    data.per_channel.cache_clear()
    assert all(sums.device == CUDA for sums in read)


def test_a_run_works_on_other_kinds_of_gpu(tmp_path, fake_gpus, monkeypatch):
    """Name and memory come from its own module."""
    name, peak = lambda _: "Data Center GPU Max 1550", lambda _: 2e9
    fake_gpus(kind="xpu", get_device_name=name, max_memory_allocated=peak)
    monkeypatch.chdir(tmp_path)
    args = Namespace(batch_size=8, epochs=3)
    log = RunLog(args, torch.device("xpu", 0), scalars=False)
    log.epoch(1, 8, 1.0)
    log.write_result(accuracy=0)
    result = json.loads(Path("logs/results.jsonl").read_text())
    assert result["device"] == "Data Center GPU Max 1550"
    assert result["peak_memory_gb"] == 2


# --- What a terminal shows

TINY = ["--layers=1", "--width=16", "--heads=2", "--length=16", "--epochs=1"]


@pytest.mark.slow
def test_progress_is_shown_only_on_a_terminal(tmp_path):
    exercise = copy_exercise("dp_ddp_intro", tmp_path)
    command = ["bash", "jobscript.sh", "single.py", *TINY, "--sequences=8192"]
    status, shown = on_terminal(command, exercise)
    assert status == 0 and re.search(r"training: .*\| \d+/512 ", shown), shown
    for line in shown.split("\n"):  # a line that is printed wipes the bar
        last = line.rstrip("\r").split("\r")[-1]
        assert "Epoch" not in last or last.startswith("Epoch"), line
    done = run([*command[:-1], "--sequences=64"], exercise)
    assert (done.returncode, done.stderr) == (0, "") and "\r" not in done.stdout


# --- env.sh

SITES = sorted(path.stem for path in (REPOSITORY / "common/sites").glob("*.sh"))
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
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"PATH": path, "SIF": "image.sif", "USER": "me", **env}
    env.setdefault("SBATCH_ACCOUNT", "project_1")
    script = f"{STUBS}\n{before}\nsource '{common}/env.sh'\n{show}"
    return run(["bash", *shell, "-c", script], folder, **env)


@pytest.mark.parametrize("site", SITES)
def test_each_site_gives_a_python(site, tmp_path):
    """With the lines for a class uncommented as well: what you set counts."""
    common = copy_common(tmp_path)
    file = common / f"sites/{site}.sh"
    file.write_text(re.sub("(?m)^# (export )", r"\1", file.read_text()))
    show = '"${PYTHON[@]}" -c "import sys; print(sys.argv)" "a b"; '
    show += "echo ${DATADIR:-} ${SBATCH_RESERVATION-mine}"
    env = {"SITE": site, "SBATCH_RESERVATION": "mine"}
    done = source(common, show, **env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "['-c', 'a b']"
    assert done.stdout.endswith("mine\n")


@pytest.mark.parametrize(
    "env, words",
    [
        ({"SITE": "lumi"}, "module load singularity-AI-bindings"),
        ({"SITE": "lumi"}, "data=/scratch/project_1/me/data"),
        ({"SITE": "lumi", "DATADIR": "/mine"}, "data=/mine"),
        ({"SLURM_CLUSTER_NAME": "lumi"}, "MIOPEN=/tmp/me-miopen"),
        ({"SITE": "alvis"}, "module load PyTorch-bundle"),
        ({"SITE": "conda"}, "conda activate multigpu\n"),
        ({"SITE": "alvis", "FRAMEWORK": "tensorflow"}, "module load TensorFlow"),
        ({"SITE": "lumi", "SIF": "", "FRAMEWORK": "tensorflow"}, "lumi-tensorflow"),
        ({"SITE": "conda", "FRAMEWORK": "tensorflow"}, "multigpu-tensorflow"),
        ({"FRAMEWORK": "jax"}, "run `make venv`"),
        ({"SLURM_CLUSTER_NAME": "nobody-knows"}, "venv/bin/python"),
        ({}, "venv/bin/python"),
        ({"SITE": "nowhere"}, "nowhere.sh: set SITE to one of alvis class conda"),
        ({"SITE": "nowhere"}, "status=2"),
        ({"SITE": "conda", "CONDA": "none"}, "Error: no conda: load its module in"),
        ({"SITE": "lumi", "SBATCH_ACCOUNT": ""}, "run export SBATCH_ACCOUNT="),
    ],
)
def test_sites_set_variables(env, words, tmp_path):
    show = "command -v python; set +u\n"
    show += "echo status=$status data=$DATADIR MIOPEN=$MIOPEN_USER_DB_PATH"
    ls = "ls() { echo $* >&2; }; false() { status=$?; }; trap false ERR"
    done = source(tmp_path, show, before=ls, **env)
    assert words in done.stdout + done.stderr, done.stdout + done.stderr


def test_a_login_node_finds_its_site(tmp_path):
    conf = tmp_path / "slurm.conf"
    conf.write_text("# ClusterName=lumi\nclustername = Alvis # ours\nX=1\n")
    assert "load PyTorch" in source(tmp_path, SLURM_CONF=str(conf)).stderr
    job = {"SLURM_CONF": str(conf), "SLURM_CLUSTER_NAME": "lumi"}
    assert "singularity" in source(tmp_path, **job).stderr


@pytest.mark.parametrize("site", ["alvis", "lumi"])
def test_a_virtual_environment_adds_to_modules_and_containers(site, tmp_path):
    python = tmp_path / f".venv-{site}/bin/python"
    make = [f"{sys.base_prefix}/bin/python3", "-m", "venv", "--without-pip"]
    run([*make, "--system-site-packages", python.parent.parent], tmp_path)
    common = copy_common(tmp_path)
    show = '"${PYTHON[@]}" -c "import sys; print(sys.prefix)"'
    path = f"{sys.base_prefix}/bin:{os.environ['PATH']}"
    packages = str(Path(torch.__file__).parent.parent)  # as modules give theirs
    done = source(common, show, SITE=site, PATH=path, PYTHONPATH=packages)
    assert done.stdout == f"{python.parent.parent}\n", done.stderr


def test_a_python_without_pytorch_is_an_error(tmp_path):
    common = copy_common(tmp_path, f"PYTHON=({sys.executable} -S)")
    fails(source(common, SITE="own"), "no torch for", "make venv", "sites/own.sh")
    (common / "torch").mkdir()  # a folder is not the package
    fails(source(common, SITE="own", PYTHONPATH=str(common)), "no torch for")


def test_python_is_a_function_only_in_a_shell(tmp_path):
    """A script that starts a function would not get the process id."""
    common = copy_common(tmp_path, f"PYTHON=({sys.executable} -X dev)")
    show = 'python -c "import sys; print(sys.flags.dev_mode)"; type -t python'
    interactive = source(common, show, shell=["--norc", "-i"], SITE="own")
    assert interactive.stdout == "True\nfunction\n"
    assert source(common, show, SITE="own").stdout == "False\nfile\n"


JOB = """#!/bin/bash
printf '<%s>' "$GPUS" "$NODES" "$@"
exit 3
"""
TYPED = {  # and what the run script gets: GPUS, NODES, arguments
    "sbatch job.sh": "<><>",
    "GPUS=5 NODES=6 sbatch job.sh x.py -N2": "<5><6><x.py><-N2>",
    "sbatch --gpus-per-node=4 --nodes=3 --time=1 job.sh": "<4><3>",
    "sbatch --gpus-per-node a100:4 -N 3 --wait job.sh": "<4><3>",
    "sbatch -N2 --gres=gpu:4 --output log.txt --mem 1.5G job.sh": "<4><2>",
    "sbatch -W --gres gpu:a100:8 job.sh 'a  b' \"c'd\" '*' ''": (
        "<8><><a  b><c'd><*><>"
    ),
}


@pytest.mark.parametrize("hidden, small", [("-1", "--epochs 1"), ("0", "")])
def test_sbatch_in_a_shell_without_slurm(hidden, small, tmp_path):
    """A function runs the script, without a GPU with SMALL."""
    has_driver = "has_driver() { [[ $CUDA_VISIBLE_DEVICES != -1 ]]; }"
    common = copy_common(tmp_path, f"PYTHON=({sys.executable}); {has_driver}")
    (tmp_path / "job.sh").write_text(JOB)
    (tmp_path / "small.txt").write_text("--epochs 1\n")
    show = 'echo "$SMALL"; type -t sbatch\n'
    show += "".join(f"{typed}; echo ' '$?\n" for typed in TYPED)
    show += "sbatch none.sh; echo $?; sbatch x.py; echo $?"
    env = {"CUDA_VISIBLE_DEVICES": hidden, "SITE": "own"}
    env["PATH"] = path_without_sbatch(tmp_path / "bin")
    done = source(common, show, "cd ..", ["--norc", "-i"], **env)
    jobs = [f"{shown} 3" for shown in TYPED.values()]
    assert done.stdout.splitlines() == [small, "function", *jobs, "2", "2"]
    for name in ("none.sh", ""):
        assert f"\nError: no run script '{name}' in {tmp_path}: run" in done.stderr


def test_slurms_own_sbatch_is_kept(tmp_path):
    """Also where Slurm does not answer: nothing trains on a login node."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 1")
    (tmp_path / "sbatch").chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = source(tmp_path, "type -t sbatch", "", ["--norc", "-i"], PATH=path)
    assert done.stdout == "file\n"


def in_bash(show, **env):
    """Run these lines after env.sh; return their output."""
    done = source(REPOSITORY, show, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_env_sh_sets_the_environment_of_processes(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    show = "echo $OMP_NUM_THREADS $PYTHONUNBUFFERED"
    assert in_bash(show) == ["1 1"]
    assert in_bash(show, OMP_NUM_THREADS="4") == ["4 1"]


@pytest.mark.parametrize(
    "driver, hidden, kept",
    [
        ("null", "0", "0"),
        ("nvidia0", "0", "no"),
        ("kfd", "0", "no"),
        ("nvidia0", "-1", "0"),
        ("nvidia0", "", "0"),
    ],
)
def test_malloc_is_tuned_only_without_a_gpu(
    driver, hidden, kept, monkeypatch, tmp_path
):
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    before = f"compgen() {{ echo /dev/{driver}; }}"
    show = 'echo "${MALLOC_MMAP_MAX_-no}"'
    done = source(tmp_path, show, before, CUDA_VISIBLE_DEVICES=hidden)
    assert done.stdout == f"{kept}\n"


@pytest.mark.parametrize(
    "places, env, picked",
    [
        ("1", {}, "0"),
        ("2", {"CUDA_VISIBLE_DEVICES": "2,3"}, "3"),
        ("1-2", {"CUDA_VISIBLE_DEVICES": "4,5,6"}, "4,5"),
        ("2", {"CUDA_VISIBLE_DEVICES": "-1"}, "-1"),
        ("2", {"HIP_VISIBLE_DEVICES": "6,7"}, "7"),
        ("2", {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_ID": "7"}, "0,1"),
    ],
)
def test_pick_gpus(places, env, picked, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    show = (
        f"pick_gpus {places}; echo $CUDA_VISIBLE_DEVICES ${{HIP_VISIBLE_DEVICES-}}"
    )
    both = picked if "SLURM_JOB_ID" in env else f"{picked} {picked}"
    assert in_bash(show, **env) == [both]


@pytest.mark.parametrize(
    "call, here, gpus, hidden, env",
    [
        ("set_gpus 2", 0, 2, True, {}),
        ("set_gpus 1 2", 1, 1, True, {}),
        ("set_gpus 2", 2, 2, False, {}),
        ("set_gpus 2", 4, 4, False, {"GPUS": "4"}),
        ("set_gpus 2", 1, 1, False, {"GPUS": "1"}),
        (
            "set_gpus 2",
            0,
            3,
            False,
            {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "3"},
        ),
    ],
)
def test_gpus_are_hidden_if_too_few(call, here, gpus, hidden, env):
    """AMD's as well: https://github.com/ROCm/hip/issues/3001

    GPUS=0 would be bad advice, for a driver that PyTorch cannot use.
    """
    count = f"count() {{ echo {here}; }}; PYTHON=(count); has_driver() {{ true; }}"
    show = f"{count}; CUDA_VISIBLE_DEVICES=0; unset HIP_VISIBLE_DEVICES; {call} 2>&1"
    show += "; echo $GPUS $CUDA_VISIBLE_DEVICES ${HIP_VISIBLE_DEVICES-}"
    *lines, last = in_bash(show, **env)
    assert last == (f"{gpus} -1 -1" if hidden else f"{gpus} 0")
    shown = [f"GPUs here: {here}, wanted: 2.", "put GPUS=1 NODES=1 in front"][
        : here + 1
    ]
    assert len(lines) == (len(shown) if hidden else 0)
    assert all(words in line for words, line in zip(shown, lines, strict=False))


# --- Run scripts

RUN_SCRIPTS = [f for e in EXERCISES for f in sorted((REPOSITORY / e).glob("*.sh"))]
# A site whose Python says how it was called, and on which GPUs.
SHOW = """
import json, os, sys
if sys.argv[1] != "-c":  # as env.sh does, which asks for a package
    gpus = os.environ["CUDA_VISIBLE_DEVICES"]
    sys.stdout.write(json.dumps([sys.argv[1:], gpus]) + "\\n")
"""
WORDS = ["x.py", "a b", "*", "/c/d"]


def shows(exercise, folder):
    """Copy an exercise, and a common/ with the site "own" that shows its calls."""
    (folder / "show.py").write_text(SHOW)
    copy_common(folder, f"PYTHON=(python3 '{folder}/show.py')")
    copied = copy_exercise(exercise, folder)
    (copied / "x.py").touch()
    return copied


@pytest.mark.parametrize(
    "script", RUN_SCRIPTS, ids=lambda file: f"{file.parent.name}/{file.name}"
)
def test_each_run_script_starts_the_right_processes(script, tmp_path):
    """From any folder: the typed script, once per node, on the right GPUs."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    exercise = shows(script.parent.name, folder)
    nodes = int(re.search(r"--nodes=(\d)", script.read_text())[1])
    gpus = int(re.search(r"=(?:gpu:)?(\d)\n#SBATCH --time", script.read_text())[1])
    done = run(
        ["bash", f"{exercise}/{script.name}", *WORDS],
        "/",
        SITE="own",
        CUDA_VISIBLE_DEVICES="5,6,7,8",
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    assert done.returncode == 0, done.stderr
    calls = [json.loads(li) for li in done.stdout.splitlines() if li[0] == "["]
    launches = [call for call in calls if call[0][-3:] == WORDS[1:]]
    assert len(launches) == nodes
    seen = sorted(visible for _, visible in launches)
    if nodes == 2:  # nvidia-smi counts GPUs for TensorFlow
        assert seen == ["-1", "-1"] if "tensorflow" in script.name else ["5", "6"]
    elif "common.torchrun" in launches[0][0]:
        assert f"--nproc-per-node={gpus}" in launches[0][0]
        assert seen == ["5,6,7,8"]  # get_device() takes one of them for each rank
    else:
        assert seen == ["5,6,7,8" if gpus == 1 else "5,6"]


@pytest.mark.parametrize(
    "asked", [{"SLURM_CPUS_PER_TASK": "14"}, {"SLURM_CPUS_PER_GPU": "7"}]
)
def test_each_node_gets_all_the_cpus_of_the_job(asked, tmp_path):
    """Otherwise srun binds a node's processes to one CPU."""
    exercise = shows("exercise8", tmp_path)
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", 'echo "$@"'), ("scontrol", "echo n1")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    job |= {"SLURM_GPUS_ON_NODE": "2", "SITE": "own", **asked}
    path = f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = run(["bash", "run-2nodes.sh", *WORDS], exercise, PATH=path, **job)
    assert " --cpus-per-task=14 " in done.stdout, done.stderr


def test_a_missing_script_is_an_error(tmp_path):
    exercise = shows("exercise8", tmp_path)
    fails(run(["bash", "run.sh", "none.py"], exercise), "no script none.py in")
    for script in RUN_SCRIPTS:
        if script.parent.name not in ("mnist_multigpu", "cifar100_demo"):
            for words in ([], ["--epochs", "2"]):
                done = run(["bash", script, *words], "/")
                fails(done, f"name a script: sbatch {script.name} SCRIPT.py")


def results(exercise):
    return [json.loads(line) for line in (exercise / "logs/results.jsonl").open()]


@pytest.mark.parametrize(
    "launch, script, processes",
    [
        ("run.sh", NAME, 1),
        ("run-2gpus.sh", f"{NAME}_multigpu", 2),
    ],
)
def test_each_script_runs_and_writes_a_result(
    launch, script, processes, tmp_path, sample
):
    """Batches of 13 leave a last batch of one image."""
    exercise = copy_exercise("exercise8", tmp_path)
    command = ["bash", launch, f"{script}.py", *QUICK, "--batch-size=13"]
    done = run(command, exercise, sample)
    assert (done.returncode, done.stderr) == (0, "")
    core = "CPU core" if processes == 1 else "CPU cores"
    for line in (
        rf"Batch size: 13 per .*{processes} {core} = {13 * processes}",
        "Images found to train on: 40",
        r"Epoch 2: [\d.]+ s, .*train loss [\d.]+ accuracy [\d.]+ %; validation loss",
        r"Total training time: [\d.]+ s",
        r"Testing \(pretrained, before fine-tuning\): accuracy [\d.]+ %",
        r"Total fine-tuning time: [\d.]+ s",
        r"Testing \(pretrained, after fine-tuning\): accuracy [\d.]+ %",
    ):
        assert len(re.findall(f"^{line}", done.stdout, re.M)) == 1, line
    (result,) = results(exercise)  # written by one process alone
    assert result["gpus"] == processes and result["options"]["batch_size"] == 13
    events = list((exercise / "logs").glob("*/events*"))
    assert len(events) == 1 and len(list((exercise / "logs").iterdir())) == 2


@pytest.mark.slow
def test_training_learns_on_synthetic_cats_and_dogs(tmp_path):
    exercise = copy_exercise("exercise8", tmp_path)
    photos = make_data(tmp_path / "data", 0.8, ["exercise8"])
    options = ["--backbone=tinyvgg", "--epochs=3", "--finetune-epochs=0"]
    command = ["bash", "run-2gpus.sh", f"{NAME}_multigpu.py", *options]
    done = run(command, exercise, photos)
    assert done.returncode == 0, done.stderr
    assert results(exercise)[0]["accuracy"] > 90
