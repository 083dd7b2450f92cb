"""Hardware that is not here: what the scripts do with it, and what they ask it."""

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace

import pytest
import torch
from conftest import REPOSITORY, call, copy_room, free_port, load, mistake, run
from test_steps import Watch
from torch._subclasses import FakeTensor, FakeTensorMode

from common import data
from common.device import DTYPES, find_gpus, get_device, has_code, pick_dtype
from common.log import RunLog

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def photos(*shape):
    return torch.zeros(*shape, dtype=torch.uint8)


def numbers(*shape):
    return torch.zeros(*shape, dtype=torch.long)


def on_gpu(make, *args):
    """Return a module with its parameters there; .to() fails with fake tensors."""
    with CUDA:
        return make(*args)


def of_exercise8(script):
    model = on_gpu(script.Classifier, "tinyvgg", "none")
    images = photos(4, 3, 150, 150)
    model(script.augment(script.normalise(images.to(CUDA), script.MEAN, script.STD)))
    script.evaluate(model, [(images, torch.zeros(4))], CUDA)


def of_mnist(script):
    script.test(
        on_gpu(script.make_model), CUDA, [(photos(4, 1, 28, 28), numbers(4))]
    )


def of_cifar(script):
    model = on_gpu(script.Classifier, "resnet18", 40, torch.bfloat16)
    script.evaluate(model, CUDA, [(photos(4, 3, 32, 32), numbers(4))])


def of_cinic(script):
    model, images = on_gpu(script.Classifier, "resnet18"), photos(4, 3, 32, 32)
    model.amp = "cuda", torch.float16, True
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
        (of_exercise8, "exercise8", "pytorch_dvc_cnn_pretrained"),
        (of_mnist, "mnist_multigpu", "mnist_singlegpu"),
        (of_cifar, "cifar100_demo", "train_cifar100"),
        (of_cinic, "cinic_lab", "cinic"),
        (of_cinic, "cinic_lab", "cinic_amp"),
        (of_intro, "dp_ddp_intro", "single"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_forward_pass_stays_on_the_gpu(forward, exercise, name, monkeypatch):
    """On a GPU, without one: a tensor on another device raises, as it does there."""
    script, read = load(exercise, name), []
    zeros = dict.fromkeys(["loss", "accuracy", "acc1", "acc5"], 0.0)
    monkeypatch.setattr(script, "means", lambda sums, *_: read.append(sums) or zeros)
    monkeypatch.setattr(FakeTensor, "tolist", lambda sums: [0.0] * len(sums))
    data.pixel_values.cache_clear()  # it keeps tensors for the next call
    with FakeTensorMode():
        forward(script)
    data.pixel_values.cache_clear()
    assert all(sums.device == CUDA for sums in read)


def test_a_tensor_on_another_device_is_found():
    with FakeTensorMode(), pytest.raises(RuntimeError, match="device"):
        torch.zeros(3, device=CUDA) + torch.zeros(3)


@pytest.fixture
def settings():
    """What get_device() sets for the whole process is put back."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.benchmark = before[1]


def has_bf16(monkeypatch, native):
    """A CPU with instructions for bfloat16, or without."""
    name = "_is_mkldnn_bf16_supported"
    monkeypatch.setattr(torch.ops.mkldnn, name, lambda: native, raising=False)


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
def test_16_bits(
    device, native, wanted, chosen, words, fake_gpus, monkeypatch, capsys
):
    emulates = {True: True, False: native}  # a T4 emulates it
    fake_gpus(
        is_bf16_supported=lambda including_emulation=True: emulates[
            including_emulation
        ],
    )
    has_bf16(monkeypatch, native)
    assert pick_dtype(device, wanted) == chosen
    said = capsys.readouterr().out
    assert said.startswith(f"Autocast: {words}") and said.count("\n") == 1


@pytest.mark.parametrize(
    "instructions", ["AVX2", pytest.param("DEFAULT", marks=pytest.mark.slow)]
)
def test_amp_on_a_cpu(instructions, sample, tmp_path):
    """If it has 32 bits alone, it computes the same to the last bit as without."""
    room, env = (
        copy_room("cinic_lab", tmp_path),
        {"ONEDNN_MAX_CPU_ISA": instructions},
    )
    few = "--epochs", 1, "--batch-size", 60
    code = "import torch; print(torch.ops.mkldnn._is_mkldnn_bf16_supported())"
    native = run([sys.executable, "-c", code], room, **env).stdout == "True\n"
    assert not (native and instructions == "AVX2")
    weights = {}
    for script in ("cinic.py", "cinic_amp.py"):
        done = run(["bash", "run.sh", script, *few], room, sample, **env)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        saved = torch.load(room / "checkpoint.pth.tar", weights_only=True)
        weights[script] = saved["model"]["resnet.fc.weight"]
    assert (
        f"Autocast: {'bf16' if native else 'fp32'}, as this CPU has" in done.stdout
    )
    assert torch.equal(weights["cinic.py"], weights["cinic_amp.py"]) != native


def test_float16_does_not_wait_for_the_device():
    """The optimizer is fused, so it knows by itself when the scaler skips a step."""
    scripts = (
        *REPOSITORY.glob("cinic_lab/cinic*.py"),
        *REPOSITORY.glob("c*/train_*.py"),
    )
    assert len(scripts) == 11
    assert all("fused=True" in script.read_text() for script in scripts)
    parameter = torch.nn.Parameter(torch.ones(3))
    scaler = torch.GradScaler("cpu")
    for fused in (True, False):
        optimizer = torch.optim.SGD([parameter], 0.1, 0.9, fused=fused)
        with Watch() as watching:
            scaler.scale(parameter.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert bool(watching.waits) != fused


def test_a_first_step_that_is_skipped_leaves_no_momentum():
    """PyTorch's fused SGD takes memory for it that nobody has written to."""
    rows = 'optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)'
    for pattern in ("cinic_lab/cinic*.py", "c*/train_*.py"):
        for script in REPOSITORY.glob(pattern):
            text = script.read_text()
            assert text.count("fused=True") == text.count(rows) == 1, script
    ends = []
    for fused in (True, False):
        p = torch.nn.Parameter(torch.ones(5))
        options = {"weight_decay": 1e-4, "fused": fused}
        optimizer = torch.optim.SGD([p], 0.1, 0.9, **options)
        scaler = torch.GradScaler("cpu", init_scale=1024)
        if fused:
            exec(rows)
        for step in range(5):
            optimizer.zero_grad()
            factor = float("inf") if step in (0, 3) else 1.0
            scaler.scale((p * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append(p.detach().clone())
    assert torch.equal(*ends) and ends[0][0] == pytest.approx(0.43895, abs=1e-4)


@pytest.mark.parametrize("hip", [None, "6.4"])
def test_settings_of_a_gpu(hip, settings, fake_gpus, monkeypatch):
    monkeypatch.delenv("PYTORCH_MIOPEN_SUGGEST_NHWC", raising=False)
    fake_gpus()
    monkeypatch.setattr(torch.version, "hip", hip)
    assert get_device(0) == CUDA
    assert torch.backends.cudnn.benchmark == (hip is None)  # MIOpen's takes hours
    assert os.environ["PYTORCH_MIOPEN_SUGGEST_NHWC"] == "1"


def test_a_run_on_another_kind_of_gpu(tmp_path, fake_gpus, monkeypatch):
    """It is asked itself, not CUDA; the search of the first epoch is not counted."""
    peaks = [9e9, 0]

    def reset(device):
        peaks[0], peaks[1] = 2e9, peaks[1] + 1

    fake_gpus(
        kind="xpu",
        get_device_name=lambda device: "Data Center GPU Max 1550",
        max_memory_allocated=lambda device: peaks[0],
        reset_peak_memory_stats=reset,
    )
    monkeypatch.chdir(tmp_path)
    args = Namespace(batch_size=8, epochs=3)
    log = RunLog(args, torch.device("xpu", 0), scalars=False)
    for epoch in (1, 2, 3):
        log.epoch(epoch, 8, 1.0)
    log.finish()
    result = json.loads((tmp_path / "logs/results.jsonl").read_text())
    assert result["device"] == "Data Center GPU Max 1550"
    assert result["peak_memory_gb"] == 2 and peaks[1] == 1


def test_data_parallels_copies_compute_in_the_same_layout():
    """They lose channels_last of the weights, so the images must have it."""
    cinic_dp = load("cinic_lab", "cinic_dp")
    model, seen = cinic_dp.Classifier("resnet18").eval(), []
    model.amp = "cpu", None, False  # weights are contiguous, as those of a copy
    model.resnet.layer1.register_forward_hook(lambda *args: seen.append(args[2]))
    model(photos(2, 3, 32, 32))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


DRIVER = "int cuInit(unsigned f) { return 0; } int cuDriverGetVersion(int *v)"


@pytest.fixture
def old_driver(tmp_path):
    """A libcuda for CUDA 11.4, as of a driver that is too old for this PyTorch."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    source = tmp_path / "driver.c"
    missing = "return 500;"  # CUDA_ERROR_NOT_FOUND, for all other functions
    source.write_text(
        f"{DRIVER} {{ *v = 11040; return 0; }}\n"
        f"int cuGetProcAddress(char *s, void **p) {{ *p = 0; {missing} }}\n"
        f"int cuGetProcAddress_v2(char *s, void **p) {{ *p = 0; {missing} }}\n"
    )
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return tmp_path


@pytest.mark.skipif(torch.version.cuda is None, reason="not a PyTorch for CUDA")
@pytest.mark.parametrize("given, hidden", [("2", None), ("2", "-1"), ("", None)])
def test_a_driver_that_is_too_old(given, hidden, old_driver, monkeypatch):
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    code = "from common.device import get_device; print(get_device())"
    env = {"LD_LIBRARY_PATH": str(old_driver), "SLURM_GPUS_ON_NODE": given}
    env["CUDA_VISIBLE_DEVICES"] = "0,1" if hidden is None else hidden
    done = run([sys.executable, "-c", code], REPOSITORY, **env)
    said = [line for line in done.stderr.splitlines() if "CUDA" in line]
    if hidden:
        assert (done.stdout, done.stderr, done.returncode) == ("cpu\n", "", 0)
    elif torch.version.cuda >= "13":  # an older one does not take our word for it
        assert len(said) == 1 and "too old (found version 11040)" in said[0]
        assert said[0].startswith("Error: " if given else "Warning: ")
        assert (
            f"PyTorch {torch.__version__}: type `TORCH=cu126 make venv`" in said[0]
        )
        assert done.stdout == ("" if given else "cpu\n")
        assert done.returncode == (2 if given else 0)
    code = "from check import built_for, driver; print(built_for(), driver())"
    says = run([sys.executable, "-c", code], REPOSITORY / "bench", **env).stdout
    assert says == f"CUDA {torch.version.cuda} CUDA 11.4\n"


def test_a_gpu_that_pytorch_has_no_code_for(fake_gpus, monkeypatch, capsys):
    capabilities = [(7, 0)]  # of a V100
    fake_gpus(
        get_device_capability=lambda index: capabilities[index],
        get_device_name=lambda index: "Tesla V100",
    )
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    assert get_device() == CPU
    (line,) = capsys.readouterr().err.splitlines()
    assert "no code for Tesla V100 (sm_70): type `TORCH=cu126 make venv`" in line
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    with mistake("no code for Tesla V100"):
        get_device()
    capabilities[0] = (8, 9)
    find_gpus.cache_clear()
    assert get_device(0) == CUDA


@pytest.mark.parametrize(
    "built, chip, runs",
    [
        (["sm_75", "sm_80"], (7, 0), False),
        (["sm_75", "sm_80"], (8, 9), True),
        (["sm_86"], (8, 0), False),
        (["sm_90a", "sm_100"], (10, 3), True),
        (["sm_90"], (10, 0), False),
        (["sm_80", "compute_80"], (12, 0), True),
    ],
)
def test_which_code_runs_on_which_gpu(built, chip, runs):
    assert has_code(built, chip) == runs


SHOW = "import os, sys; show = map(str, map(os.environ.get, names))"
SHOW = f"names = ['RANK', 'CUDA_VISIBLE_DEVICES']; {SHOW}"
SHOW += "; sys.stdout.write(' '.join(show) + '\\n')"  # in one piece


def in_bash(script, folder=REPOSITORY, **env):
    """Run these lines of bash after env.sh, and return what they print."""
    script = f"set -euo pipefail\nsource common/env.sh\n{script}"
    done = run(["bash", "-c", script], folder, **env)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "places, env, picked",
    [
        ("1", {}, "0"),
        ("2", {}, "1"),
        ("1-2", {}, "0,1"),
        ("1", {"CUDA_VISIBLE_DEVICES": "2,3"}, "2"),
        ("2", {"CUDA_VISIBLE_DEVICES": "2,3"}, "3"),
        ("1-2", {"CUDA_VISIBLE_DEVICES": "4,5,6"}, "4,5"),
        ("2", {"CUDA_VISIBLE_DEVICES": "-1"}, "-1"),
        ("2", {"CUDA_VISIBLE_DEVICES": ""}, ""),
        ("2", {"HIP_VISIBLE_DEVICES": "6,7"}, "7"),
        ("2", {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_ID": "7"}, "0,1"),
    ],
)
def test_pick_gpus(places, env, picked, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    show = 'echo "$CUDA_VISIBLE_DEVICES"; echo "${HIP_VISIBLE_DEVICES-}"'
    for_cuda, for_hip = in_bash(f"pick_gpus {places}; {show}", **env)
    assert for_cuda == picked
    assert for_hip == (picked if "HIP_VISIBLE_DEVICES" in env else "")


@pytest.mark.parametrize(
    "driver, env, named",
    [
        ("true", {}, "all"),
        ("false", {"CUDA_VISIBLE_DEVICES": "0,1"}, "none"),
        ("true", {"CUDA_VISIBLE_DEVICES": "0,1"}, "0,1"),
        ("true", {"CUDA_VISIBLE_DEVICES": "-1"}, "none"),
        ("true", {"CUDA_VISIBLE_DEVICES": ""}, "none"),
        ("true", {"HIP_VISIBLE_DEVICES": "2"}, "2"),
        ("true", {"ROCR_VISIBLE_DEVICES": "0,3"}, "0,3"),
    ],
)
def test_the_log_names_the_gpus_that_are_visible(driver, env, named, monkeypatch):
    for name in ("CUDA", "HIP", "ROCR"):
        monkeypatch.delenv(f"{name}_VISIBLE_DEVICES", raising=False)
    assert in_bash(f"compgen() {{ {driver}; }}; visible_gpus", **env) == [named]


ONE_OF_SLURM = {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1", "GPUS": "4"}


@pytest.mark.parametrize(
    "wanted, here, said",
    [
        ("gpus 2", 0, "GPUs here: 0, wanted: 2. "),
        ("gpus 2", 1, "or put GPUS=1 in front to use the GPU"),
        ("gpus 1 2", 1, "add these\n"),
        ("gpus 2", 2, ""),
        ("GPUS=1; gpus 2", 1, ""),
    ],
)
def test_too_few_gpus_are_hidden(wanted, here, said, tmp_path):
    count = f"count() {{ echo {here}; }}; PYTHON=(count); has_driver() {{ true; }}"
    show = "CUDA_VISIBLE_DEVICES=0; unset HIP_VISIBLE_DEVICES"
    # '' hides none of AMD's: https://github.com/ROCm/hip/issues/3001
    hidden = 'echo "$CUDA_VISIBLE_DEVICES ${HIP_VISIBLE_DEVICES-}"'
    *lines, last = in_bash(f"{count}; {show}; {wanted} 2>&1; {hidden}")
    assert last == ("-1 -1" if said else "0 ")
    assert said in "".join(f"{line}\n" for line in lines) and len(lines) == bool(
        said
    )


def test_how_many_processes_a_run_script_starts():
    for env, number in (({}, "2"), ({"GPUS": "4"}, "4"), (ONE_OF_SLURM, "1")):
        assert in_bash("gpus 2; echo $GPUS", **env) == [number]
    done = run(["bash", "-c", "source common/env.sh"], REPOSITORY, GPUS="0")
    assert done.returncode == 2 and done.stdout == ""
    assert "type a number" in done.stderr


def test_memory_is_kept_on_cpus_alone(monkeypatch):
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    for driver, hidden, kept in (
        ("false", "0", "0"),
        ("true", "0", "no"),
        ("true", "-1", "0"),
    ):
        script = f"compgen() {{ {driver}; }}; source common/env.sh"
        script += '; echo "${MALLOC_MMAP_MAX_-no}"'
        env = {"CUDA_VISIBLE_DEVICES": hidden}
        assert run(["bash", "-c", script], REPOSITORY, **env).stdout == f"{kept}\n"


@pytest.mark.parametrize(
    "chosen, seen",
    [
        ("2,3", ["2", "3"]),
        pytest.param("-1", ["-1", "-1"], marks=pytest.mark.slow),
    ],
)
def test_each_of_two_launchers_has_its_gpu(chosen, seen, tmp_path):
    room = copy_room("exercise8", tmp_path)
    (room / "show.py").write_text(SHOW)
    env = {"CUDA_VISIBLE_DEVICES": chosen}
    done = run(["bash", "run-2nodes.sh", "show.py"], room, **env)
    assert done.returncode == 0, done.stderr
    shown = sorted(line.split()[1] for line in done.stdout.splitlines())
    assert shown == seen


@pytest.mark.parametrize(
    "exercise, run_script, script",
    [
        ("mnist_multigpu", "slurm_multigpu.sh", "mnist_multigpu.py"),
        ("cifar100_demo", "run_data_parallel_cifar100.sh", "train_data_parallel.py"),
        ("cinic_lab", "run-2gpus.sh", "cinic_dp.py"),
        ("dp_ddp_intro", "jobscript_dp.sh", "dp.py"),
    ],
)
def test_data_parallel_takes_two_gpus(exercise, run_script, script, tmp_path):
    room = copy_room(exercise, tmp_path)
    (room / script).write_text(
        f"{SHOW}\nimport line_profiler as l; l.profile(print)"
    )
    for chosen, seen in ((None, "0,1"), ("5,6,7", "5,6")):
        env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        env |= {"CUDA_VISIBLE_DEVICES": chosen} if chosen else {}
        command = [
            "bash",
            run_script,
            *[script] * ("2gpus" in run_script or "job" in run_script),
        ]
        done = subprocess.run(
            command, cwd=room, env=env, capture_output=True, text=True
        )
        assert f"None {seen}\n" in done.stdout, done.stderr


def test_processes_of_one_node_meet_there(tmp_path):
    """Not by the name that the host calls itself, which may lead elsewhere."""
    room = copy_room("exercise8", tmp_path)
    show = "import os, sys; sys.stdout.write(os.environ['MASTER_ADDR'] + '\\n')"
    (room / "show.py").write_text(show)
    done = run(["bash", "run-2gpus.sh", "show.py"], room)
    assert done.stdout == "localhost\n" * 2, done.stderr


LAUNCH = """
import runpy, sys, time
sleep = time.sleep
time.sleep = lambda seconds: sleep(1 if seconds in (2, 8) else seconds)
sys.argv = ["torchrun", "--nnodes=2", "--rdzv-id=1", "--rdzv-backend=c10d",
    "--rdzv-endpoint=localhost:0", "--rdzv-conf=join_timeout=4", "none.py"]
sys.argv[4] = f"--rdzv-endpoint=localhost:{port}"
runpy.run_module("common.torchrun", run_name="__main__")
"""


@pytest.mark.slow
def test_a_node_that_does_not_come_is_named(tmp_path):
    env = {"JOB_NODES": "localhost n2", "SLURMD_NODENAME": "localhost"}
    code = f"port = {free_port()}\n{LAUNCH}"
    done = run([sys.executable, "-c", code], REPOSITORY, timeout=60, **env)
    first, last = done.stderr.splitlines()
    assert (
        first.startswith("still waiting for n2 after 10 s")
        and "nodelist=n2" in first
    )
    assert last == "Error: not all nodes have come" and done.returncode == 1


FOLDER_GOES = """
import runpy, shutil, sys
from pathlib import Path
exists = Path.exists
def goes(path):
    if path.name != "steps" or not exists(Path("runs")):
        return exists(path)
    print("watched")
    shutil.rmtree(path.parent)  # as when the job ends just now
    return True
Path.exists = goes
sys.argv = ["torchrun", "--standalone", "show.py"]
runpy.run_module("common.torchrun", run_name="__main__")
"""


def test_the_watch_ends_with_the_job(tmp_path):
    wait = "while os.path.exists(os.environ['RANKS_TELL']): time.sleep(0.1)"
    (tmp_path / "show.py").write_text(f"import os, time; open('runs', 'w')\n{wait}")
    (tmp_path / "common").symlink_to(REPOSITORY / "common")
    done = run([sys.executable, "-c", FOLDER_GOES], tmp_path, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("watched\n", "", 0)


def test_no_site_gives_all_scripts_the_same_number_of_gpus():
    for file in (REPOSITORY / "common/sites").glob("*.sh"):
        code = [li for li in file.read_text().splitlines() if li[:1] != "#"]
        assert not any("GPUS_PER_NODE" in line for line in code), file


def test_dtypes_are_those_of_the_option():
    for name in ("cinic_amp", "cinic_ddp"):
        with mistake("invalid choice"):
            call(load("cinic_lab", name), "--dtype", "int8")
    assert list(DTYPES) == ["bf16", "fp16", "fp32"]
