"""What a student sees on a terminal: a bar that moves, and one line after Ctrl-C."""

import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios

import pytest
from conftest import QUICK, REPOSITORY, copy_room, run
from tqdm import tqdm

from common import prepare

CIFAR = "--arch resnet18 --image-size 33 --epochs 1 --batch-size 8 --no-profile"
INTRO = "--layers 1 --width 16 --heads 2 --length 16 --sequences 8192"
PLAIN = {
    "exercise8": ["run.sh", "pytorch_dvc_cnn_pretrained.py", *QUICK],
    "mnist_multigpu": ["slurm_singlegpu.sh", "--epochs", "1"],
    "cifar100_demo": ["run_single_cifar.sh", *CIFAR.split()],
    "cinic_lab": ["run.sh", "cinic.py", "--epochs", "1", "--batch-size", "8"],
    "dp_ddp_intro": ["jobscript.sh", "single.py", *INTRO.split()],
}
MANY = {
    "exercise8": ["run-2gpus.sh", "pytorch_dvc_cnn_pretrained_multigpu.py", *QUICK],
    "mnist_multigpu": ["slurm_multigpu.sh"],
    "cifar100_demo": ["run_ddp_cifar100.sh", *CIFAR.split()],
    "cinic_lab": ["run-2nodes.sh", "cinic_ddp.py"],
}
FOREVER = ["--epochs", "100000"]


def on_terminal(command, room, sample, stop_at=None):
    """Return its exit status and all that a terminal shows; Ctrl-C after stop_at."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(room)
        os.environ["DATADIR"] = str(sample)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # "&" may have had it ignored
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    shown = ""
    while True:
        try:
            shown += os.read(terminal, 4096).decode(errors="replace")
        except OSError:  # Linux's way to say that the other side is closed
            break
        if stop_at and stop_at in shown:
            os.write(terminal, b"\x03")
            stop_at = None
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown


@pytest.mark.slow
@pytest.mark.parametrize("exercise", PLAIN)
def test_a_bar_on_a_terminal_and_none_in_a_file(exercise, tmp_path, sample):
    room = copy_room(exercise, tmp_path)
    status, shown = on_terminal(["bash", *PLAIN[exercise]], room, sample)
    assert status == 0, shown
    counts = "tokens" if exercise == "dp_ddp_intro" else "images"
    lines = shown.split("\n")
    assert any(re.search(rf"\| .*\d+/.* {counts}/s\]", line) for line in lines), (
        shown
    )
    for line in lines:  # a line that is printed wipes the bar and stands alone
        last = line.rstrip("\r").split("\r")[-1]
        assert "Epoch" not in last or re.match(r"(Train )?Epoch", last), line
    done = run(["bash", *PLAIN[exercise]], room, sample)
    assert done.returncode == 0 and "\r" not in done.stdout + done.stderr


def test_drawing_has_a_bar_on_a_terminal_and_lines_in_a_file(
    tmp_path, monkeypatch, capsys
):
    draw = [
        sys.executable,
        "sample_data.py",
        "--to",
        str(tmp_path),
        "--scale",
        "0.1",
    ]
    status, shown = on_terminal(draw, REPOSITORY / "exercise8", tmp_path)
    assert status == 0 and re.search(r"train cats: .*\| \d+/20 ", shown), shown
    often = {"delay": 0, "mininterval": 0}
    monkeypatch.setattr(prepare, "tqdm", lambda *a, **o: tqdm(*a, **{**o, **often}))
    for _ in prepare.bar(range(2), "drawing", unit=" photos"):
        pass
    said = [f"drawing: {n} of 2 photos\n" for n in range(3)]
    assert capsys.readouterr() == ("".join(said), "")
    assert [
        *prepare.bar("ab", "cats")
    ] and "cats: 2 of 2\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("exercise", MANY)
def test_ctrl_c_ends_with_a_line(exercise, tmp_path, sample):
    room = copy_room(exercise, tmp_path)
    command = ["bash", *MANY[exercise], *FOREVER]
    status, shown = on_terminal(command, room, sample, stop_at="Epoch 2: ")
    assert status in (130, -2), shown  # -2: bash ends as its script did
    assert shown.count("Stopped by Ctrl-C") == 1, shown
    assert "Traceback" not in shown and "Error" not in shown, shown
