"""common/: options, devices, watchdog, env.sh, sites and run scripts."""

import json
import os
import re
import shutil
import sys
from argparse import ArgumentTypeError, Namespace
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import (
    EXERCISES,
    QUICK,
    REPOSITORY,
    WITH_DATA,
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

from common import data, watchdog
from common.cli import OptionParser, at_least, split_evenly
from common.device import get_device, get_ranks, pick_dtype
from common.log import RunLog

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NAME = "pytorch_dvc_cnn_pretrained"
PREPARE = "sample_data.py", "download_data.py"

# --- Options and mistakes


@pytest.mark.parametrize(
    "exercise, name",
    [
        ("exercise8", NAME),
        ("mnist_multigpu", "mnist_ddp"),
        ("cifar100_demo", "train_cifar100"),
        ("cinic_lab", "cinic_requeue"),
        ("dp_ddp_intro", "single"),
        ("dp_ddp_intro/beyond_ddp", "pipeline"),
        ("clinic", "patient1"),
    ],
)
def test_each_option_has_a_help_text_a_default_and_a_range(exercise, name, capsys):
    """For one script per exercise; its counterparts have the same options."""
    script = load(exercise, name)
    with pytest.raises(SystemExit):
        call(script, "--help")
    text = capsys.readouterr().out
    assert text.count(script.__doc__.strip()) == 1 and "None" not in text
    options = text.split("\n  -")[2:]  # the first one is --help itself
    assert options
    for option in options:
        option, _, meaning = re.sub(r"\s+", " ", f"-{option}").partition(" ")
        if not re.match(r"[A-Z{]", meaning):  # it takes no value
            assert meaning
            continue
        _, _, meaning = meaning.partition(" ")
        assert meaning.count("default: ") == 1 and meaning[0] != "(", option
        if re.search(r"default: [\d.]+\)", meaning):
            for value in ["x"] if option == "--seed" else ["x", "-1"]:
                with raises_user_error(f"{option}.*--help"):
                    call(script, f"{option}={value}")


def test_numbers_below_the_minimum_are_refused():
    assert at_least(1)("1") == 1 and at_least(0.0)("0.5") == 0.5
    for least, values in {
        1: ["0", "-1", "0.5", "x", "", str(2**31)],
        0.0: ["-0.1", "nan", "inf", "-inf", "x", ""],
    }.items():
        for value in values:
            with pytest.raises((ArgumentTypeError, ValueError)):
                at_least(least)(value)


def test_the_help_names_the_default_once():
    parser = OptionParser("What it does.")
    parser.add_argument("--times", default=3, help="how often")
    assert parser.format_help() == parser.format_help()
    assert "how often (default: 3)" in parser.format_help()


def test_missing_data_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.setenv("DATADIR", str(tmp_path / "none"))
    words = "no data.*`python download_data.py`.*`python sample_data.py`"
    with raises_user_error(words):
        call(load("exercise8", NAME), *QUICK)


def test_a_ddp_script_refuses_python():
    with raises_user_error("torchrun.*--nproc-per-node=2"):
        get_ranks()


def test_a_script_for_one_process_refuses_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with raises_user_error(
        "is for one process, but .*WORLD_SIZE=2: start its multi"
    ):
        get_device()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("RANK", "1")  # left in a shell: it would print nothing
    with raises_user_error("is for one process, but RANK=1 .*run `unset RANK"):
        get_device()


def test_ranks_are_those_of_torchrun(monkeypatch):
    for name, number in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, number)
    assert get_ranks() == (5, 1, 8)


@pytest.mark.parametrize(
    "tool",
    [
        *(f"{exercise}/{name}" for exercise in WITH_DATA for name in PREPARE),
        "exercise8/download_weights.py",
        "cifar100_demo/get_parameters.py",
        "bench/check.py",
        "bench/mfu.py",
        "bench/predict/predict.py",
    ],
)
def test_a_tool_in_a_python_without_pytorch(tool):
    """As in a new terminal; -S leaves out what pip has installed."""
    folder, script = REPOSITORY / Path(tool).parent, Path(tool).name
    done = run([sys.executable, "-S", script], folder)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "run `source common/env.sh`" in done.stderr


def test_an_indivisible_batch_is_a_user_error():
    assert split_evenly(24, 2) == 12
    with raises_user_error("25 cannot be split over 2.*--batch-size 26"):
        split_evenly(25, 2)


# --- Devices that are not here


@pytest.fixture
def settings():
    """Restore the settings that get_device() changes for the whole process."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.benchmark = before[1]


@pytest.mark.parametrize("hip", [None, "6.4"])
def test_get_device_sets_up_a_gpu(hip, settings, fake_gpus, monkeypatch):
    monkeypatch.delenv("PYTORCH_MIOPEN_SUGGEST_NHWC", raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    module = fake_gpus(count=4)
    assert get_device() == CUDA and get_device(3) == torch.device("cuda", 3)
    assert module.chosen == [0, 3]
    assert torch.backends.cudnn.benchmark == (hip is None)  # MIOpen's takes hours
    assert torch.get_float32_matmul_precision() == "high"
    assert os.environ["PYTORCH_MIOPEN_SUGGEST_NHWC"] == "1"


def test_more_processes_than_gpus_are_a_user_error(fake_gpus, monkeypatch):
    fake_gpus()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with raises_user_error(r"2 processes, but 1 GPU.*--nproc-per-node=1"):
        get_device(1)


def test_gpus_that_pytorch_cannot_use_are_a_user_error(fake_gpus, monkeypatch):
    fake_gpus(kind="mps")  # DDP has no backend for it
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert get_device() == CPU
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    with raises_user_error("sees none of this job's 2 GPUs.*check.py"):
        get_device()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert get_device() == CPU


@pytest.mark.parametrize(
    "device, native, wanted, chosen, words",
    [
        (CPU, True, None, torch.bfloat16, "bf16, as this CPU has instructions"),
        (CPU, False, None, None, "fp32, as this CPU has no instructions"),
        (CPU, False, "bf16", torch.bfloat16, "bf16, as --dtype says"),
        (CUDA, True, None, torch.bfloat16, "bf16, as this GPU has instructions"),
        (CUDA, False, None, torch.float16, "fp16, as this GPU has no instructions"),
        (CUDA, True, "fp32", None, "fp32, as --dtype says"),
    ],
)
def test_the_16_bit_format_fits_the_device(
    device, native, wanted, chosen, words, fake_gpus, monkeypatch, capsys
):
    def is_bf16_supported(including_emulation=True):  # a T4 emulates it
        return including_emulation or native

    fake_gpus(is_bf16_supported=is_bf16_supported)
    for owner, name in (
        (torch.ops.mkldnn, "_is_mkldnn_bf16_supported"),
        (torch.cpu, "_is_avx512_bf16_supported"),
    ):
        monkeypatch.setattr(owner, name, lambda: native, raising=False)
    assert pick_dtype(device, wanted) == chosen
    assert capsys.readouterr().out.startswith(f"Autocast: {words}")


def test_avx512_alone_has_no_bfloat16(monkeypatch):
    """oneDNN emulates it there."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(
        torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False
    )
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert pick_dtype(CPU) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "exercise, name, options",
    [
        ("cinic_lab", "cinic_amp", "--batch-size=30"),
        (
            "cifar100_demo",
            "train_cifar100",
            "--image-size=33 --batch-size=4 --steps=4",
        ),
    ],
)
def test_a_skipped_first_step_keeps_the_momentum(
    exercise, name, options, sample, tmp_path, monkeypatch
):
    """PyTorch's fused SGD starts with uninitialised momentum memory."""
    scaler = partial(torch.GradScaler, init_scale=2.0**40, backoff_factor=2.0**-30)
    monkeypatch.setattr(torch, "GradScaler", scaler)
    monkeypatch.setenv("DATADIR", str(sample))
    monkeypatch.chdir(tmp_path)
    common = "--arch=resnet18", "--dtype=fp16", "--epochs=1"
    torch.use_deterministic_algorithms(True)  # fills such memory with NaN
    try:
        call(load(exercise, name), *common, *options.split())
    finally:
        torch.use_deterministic_algorithms(False)


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
    script.evaluate(model, CUDA, [(photos(4, 3, 32, 32), numbers(4))])


def of_cinic(script):
    model = on_gpu(script.Classifier, "resnet18", torch.float16)
    images = photos(4, 3, 32, 32)
    model(script.crop_and_flip(images.to(CUDA)))
    log = RunLog(Namespace(batch_size=4), CUDA, enabled=False)
    script.evaluate(model, [(images, numbers(4))], CUDA, log)


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
    monkeypatch.setattr(
        script, "to_metrics", lambda sums, *_: read.append(sums) or zeros
    )
    monkeypatch.setattr(FakeTensor, "tolist", lambda sums: [0.0] * len(sums))
    data.per_channel.cache_clear()  # it keeps tensors for the next call
    with FakeTensorMode():
        forward(script)
        with pytest.raises(RuntimeError, match="device"):
            torch.zeros(3, device=CUDA) + torch.zeros(3)
    data.per_channel.cache_clear()
    assert all(sums.device == CUDA for sums in read)


def test_a_run_works_on_other_kinds_of_gpu(tmp_path, fake_gpus, monkeypatch):
    """Memory comes from its own module, and without the first epoch's search."""
    peaks = [9e9]
    fake_gpus(
        kind="xpu",
        get_device_name=lambda device: "Data Center GPU Max 1550",
        max_memory_allocated=lambda device: peaks[-1],
        reset_peak_memory_stats=lambda device: peaks.append(2e9),
    )
    monkeypatch.chdir(tmp_path)
    args = Namespace(batch_size=8, epochs=3)
    log = RunLog(args, torch.device("xpu", 0), scalars=False)
    for epoch in (1, 2, 3):
        log.epoch(epoch, 8, 1.0)
    log.write_result()
    result = json.loads(Path("logs/results.jsonl").read_text())
    assert result["device"] == "Data Center GPU Max 1550"
    assert result["peak_memory_gb"] == 2 and len(peaks) == 2


# --- The watchdog

WAIT = "import threading; threading.Event().wait(5)"  # in a library, say


def watched(folder, lines, limit=20, **env):
    """Run a script that starts with a heartbeat; return the finished process."""
    (folder / "common").symlink_to(REPOSITORY / "common")
    library = folder / "lib/site-packages"
    library.mkdir(parents=True)
    (library / "slow.py").write_text(WAIT)
    script = "import time\nfrom common import watchdog\nwatchdog.heartbeat(2)\n"
    (folder / "script.py").write_text(script + lines)
    env |= {"DDP_TIMEOUT": str(limit), "PYTHONPATH": str(library)}
    return run([sys.executable, "script.py"], folder, **env)


def test_a_hang_is_reported_with_the_line_of_the_script(tmp_path):
    """Not a line of a library, where the thread really waits."""
    done = watched(tmp_path, "def train():\n    import slow\ntrain()", RANK="1")
    assert (done.returncode, done.stdout) == (0, "")
    says = r"rank 1: no step for [234] s, at script\.py:5 import slow\n"
    assert re.fullmatch(says, done.stderr)


def test_a_hang_that_holds_the_gil_ends(tmp_path):
    """Later ranks wait some seconds longer, and only one prints its stack."""
    hang = "import ctypes\nctypes.PyDLL(None).sleep(30)\n"
    done = watched(tmp_path, hang, limit=2, RANK="1")
    assert done.returncode == 1 and done.stderr.startswith("Timeout (0:00:03)!")
    assert 'script.py", line 5 in <module>' in done.stderr


def test_progress_and_the_end_are_not_hangs(tmp_path):
    steps = "for _ in range(12):\n    time.sleep(0.3)\n    watchdog.heartbeat(2)\n"
    end = "watchdog.stop()\nwatchdog.heartbeat(2)\ntime.sleep(6)\n"
    done = watched(tmp_path, steps + end, limit=4)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_idle_notebook_is_not_a_hang(tmp_path):
    code = "import time; from common import watchdog; watchdog.heartbeat(1)"
    command = [sys.executable, "-c", f"{code}; time.sleep(4)"]
    done = run(command, REPOSITORY, DDP_TIMEOUT="2")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_is_watched_until_its_result_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []
    monkeypatch.setattr(watchdog, "heartbeat", lambda *args: calls.append(args))
    monkeypatch.setattr(watchdog, "stop", lambda: calls.append("stop"))
    monkeypatch.setenv("RANK", "1")  # a rank that writes nothing is watched, too
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    get_ranks()
    get_device(0)
    log = RunLog(Namespace(batch_size=8, epochs=1), CPU)
    list(log.progress([0, 1, 2]))
    log.epoch(1, 24, 1.0)
    log.write_result()
    assert [type(call) for call in calls] == [tuple] * 6 + [str]


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


def test_lumi_prefers_newer_containers(tmp_path):
    common = copy_common(tmp_path)
    lumi = common / "sites/lumi.sh"
    lumi.write_text(lumi.read_text().replace("/appl/local", str(tmp_path)))
    (tmp_path / "laifs/containers").mkdir(parents=True)
    done = source(common, 'echo "${PYTHON[2]}"', SITE="lumi", SIF="")
    assert done.stdout.endswith("/laifs/containers/lumi-multitorch-latest.sif\n")
    assert "module load lumi-aif" in done.stderr


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


def test_an_old_pytorch_is_an_error():
    """As in a cluster's module: the launcher and a script refuse it."""
    older = "import torch; torch.__version__ = type(torch.__version__)('2.9.1')"
    for module in ("torchrun", "device"):
        code = f"{older}; import common.{module}"
        done = run([sys.executable, "-c", code], REPOSITORY)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert "PyTorch 2.9.1 is too old: this needs 2.10" in done.stderr


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
    assert result["gpus"] == processes and result["batch_per_gpu"] == 13
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
