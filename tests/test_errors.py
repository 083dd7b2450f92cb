"""A user's mistake: a line of what to type next, status 2, nothing written."""

import os
import shutil
import sys

import pytest
from conftest import QUICK, call, load, mistake, run, torchrun

NAME = "pytorch_dvc_cnn_pretrained"
ONE, TWO = f"{NAME}.py", f"{NAME}_multigpu.py"


def fails(done, *words):
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("Error: ")
    for word in words:
        assert word in done.stderr, done.stderr
    assert done.stdout == ""


@pytest.fixture
def broken(sample, tmp_path):
    """A copy of the sample data, to be broken."""
    return shutil.copytree(sample, tmp_path / "broken")


@pytest.mark.parametrize("launch, script", [("run.sh", ONE), ("run-2gpus.sh", TWO)])
def test_no_data(launch, script, room, tmp_path):
    done = run(["bash", launch, script, *QUICK], room, tmp_path / "none")
    fails(
        done,
        "no data",
        "python download_data.py",
        "python sample_data.py",
    )
    assert not (room / "logs").exists()


def test_images_that_are_not_prepared(room, broken):
    file = broken / "dogs-vs-cats/test-150.pt"
    file.unlink()
    done = run(["bash", "run-2gpus.sh", TWO, *QUICK], room, broken)
    fails(done, "not prepared", file.name, "python download_data.py")
    file.write_bytes(b"half a file")
    done = run(["bash", "run-2gpus.sh", TWO, *QUICK], room, broken)
    fails(done, str(file), "damaged", "delete it", "python download_data.py")
    assert not (room / "logs").exists()


def test_no_weights_and_no_network(room, sample, tmp_path):
    done = run(
        ["bash", "run-2gpus.sh", TWO],
        room,
        sample,
        TORCH_HOME=str(tmp_path / "none"),
    )
    fails(done, "no weights", "python download_weights.py", "--backbone tinyvgg")
    assert not (room / "logs").exists()


def test_damaged_weights(room, sample, tmp_path):
    file = tmp_path / "hub/checkpoints/vgg16-397923af.pth"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"half a file")
    done = run(["bash", "run.sh", ONE], room, sample, TORCH_HOME=str(tmp_path))
    fails(done, str(file), "damaged", "delete it")


def test_ddp_script_started_with_python(room, sample):
    done = run([sys.executable, TWO], room, sample)
    fails(done, "torchrun", f"--nproc-per-node=2 {TWO}")


def test_plain_script_started_as_two_processes(room, sample):
    done = run(["bash", "run-2gpus.sh", ONE], room, sample)
    fails(done, "one process", f"python {ONE}")


def test_more_processes_than_gpus(fake_gpus, monkeypatch):
    from common.device import get_device

    fake_gpus()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with mistake(r"2 processes, but 1 GPU.*--nproc-per-node=1"):
        get_device(1)


def test_batch_that_cannot_be_split(room, sample):
    command = [
        "bash",
        "run-2gpus.sh",
        "solutions/strong_scaling.py",
        "--batch-size",
        "25",
    ]
    fails(run(command, room, sample), "25 cannot be split over 2", "--batch-size 26")


@pytest.mark.parametrize(
    "option",
    [
        ("--epochs", "0"),
        ("--batch-size", "-1"),
        ("--backbone", "vgg19"),
        ("--lr", "x"),
    ],
)
def test_bad_option(option):
    with mistake(f"{option[0]}.*--help"):
        call(load("exercise8", NAME), *option)


def test_bad_option_of_two_processes_is_told_once(room, sample):
    fails(
        run(["bash", "run-2gpus.sh", TWO, "--epochs", "0"], room, sample), "--epochs"
    )


@pytest.mark.parametrize(
    "launch", ["run.sh", "run-2gpus.sh", "run-8gpus.sh", "run-2nodes.sh"]
)
@pytest.mark.parametrize("script", [[], ["none.py"]])
def test_no_script(launch, script, room):
    fails(run(["bash", launch, *script], room), "no script", f"sbatch {launch}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_logs(room, sample):
    room.chmod(0o500)
    fails(run(["bash", "run.sh", ONE, *QUICK], room, sample), "cannot write logs")


def test_logs_is_a_file(room, sample):
    (room / "logs").write_text("")
    fails(run(["bash", "run.sh", ONE, *QUICK], room, sample), "cannot write logs")


def test_unknown_site(room):
    done = run(["bash", "run.sh", ONE], room, SITE="nowhere")
    fails(done, "nowhere.sh", "set SITE to one of alvis class conda lumi ")


def test_no_pytorch(room, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin/python").chmod(0o755)
    sites = tmp_path / "common"
    sites.unlink()
    repository = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    shutil.copytree(f"{repository}/common", sites)  # no .venv beside this copy
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    fails(run(["bash", "run.sh", ONE], room, PATH=path), "no PyTorch", "make venv")


@pytest.mark.parametrize("package", ["tensorboard", "matplotlib"])
def test_a_package_that_is_missed_late(package, room, sample):
    (room / "runs.py").write_text(
        "import runpy, sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, *more):\n"
        f"        if name == '{package}':\n"
        "            raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "sys.argv[:] = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    if package == "tensorboard":
        done = torchrun(2, ["runs.py", TWO, *QUICK], room, sample)
    else:
        done = run([sys.executable, ONE, *QUICK], room, sample)
        assert done.returncode == 0, done.stderr
        compare = ["runs.py", "../bench/compare.py", "logs/results.jsonl"]
        done = run([sys.executable, *compare], room, sample, PYTHONPATH=".:../bench")
        assert "images/s" in done.stdout  # the table comes first
    done.stdout = ""
    fails(done, f"no {package}: `source common/env.sh` tells more")
